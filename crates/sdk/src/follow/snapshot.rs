//! Snapshot files of a follower: the state, and the quotas beside it. The state is written with each change. The quotas,
//! which may be many, rest after each write for sixty times as long as it took, and are written again every hour, so that
//! their age can be told.

use super::config::FollowError;
use super::replica::Replica;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_replica::snapshot_file::{
    open_private, quotas_path, read_dump, read_sealed, replace, replace_sealed,
};
use tollgate_replica::{DumpHeader, DumpReader, DumpWriter, ReplicaState};
use tollgate_rules::Options;

/// Rest of the quotas, as a multiple of the duration of their write.
const REST_FACTOR: u32 = 60;
/// The least duration that counts.
const MIN_WRITE: Duration = Duration::from_millis(17);
/// Age at which unchanged quotas are written again, in milliseconds.
const REFRESH_MS: i64 = 3_600_000;

/// The files, and what was last written to them.
pub(super) struct Snapshot {
    path: PathBuf,
    state: Option<Arc<ReplicaState>>,
    /// Revision and age of the quotas last written.
    quotas: Option<(i64, i64)>,
    /// Time before which quotas are not written again.
    rests_until: Option<Instant>,
    /// Why the last write of quotas failed.
    quota_error: Option<String>,
}

impl Snapshot {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, state: None, quotas: None, rests_until: None, quota_error: None }
    }

    /// Reads the files. Quotas that are missing or damaged are reported, and the rules apply without them.
    pub(super) fn restore(
        path: &Path,
        options: &Options,
        max_state_bytes: u64,
        max_quota_bytes: u64,
    ) -> Result<Arc<Replica>, FollowError> {
        let shown = path.display();
        let invalid = |reason: &dyn std::fmt::Display| FollowError::Invalid(format!("{shown}: {reason}"));
        let bytes = read_sealed(path, max_state_bytes).map_err(|error| invalid(&error))?;
        let state = ReplicaState::parse(&bytes).map_err(|error| invalid(&error))?;
        let replica = Replica::new(state, options).map_err(|error| invalid(&error))?;
        let quotas = quotas_path(path);
        match restore_quotas(&replica, &quotas, max_quota_bytes) {
            Ok(()) => {}
            Err(error) => {
                tracing::error!(%error, file = %quotas.display(), "reading quotas failed; rules apply without them");
                replica.report(|status| status.error = Some(format!("{}: {error}", quotas.display())));
            }
        }
        Ok(replica)
    }

    /// Writes what has changed. A failure is reported, and repeated at the next call.
    pub(super) async fn write(&mut self, replica: &Arc<Replica>) {
        let failed = self.try_write(replica).await.err();
        if replica.status.borrow().snapshot_error != failed {
            if let Some(error) = &failed {
                tracing::warn!(error, file = %self.path.display(), "writing the snapshot failed; a start without the server may fail");
            }
            replica.report(|status| status.snapshot_error = failed);
        }
    }

    /// An error is what is wrong with the files now, also if it is too early to write them again.
    async fn try_write(&mut self, replica: &Arc<Replica>) -> Result<(), String> {
        let state = replica.state();
        let is_same = |written: &Arc<ReplicaState>| {
            Arc::ptr_eq(written, &state)
                || (written.rules == state.rules
                    && written.measures == state.measures
                    && written.grants == state.grants)
        };
        if !self.state.as_ref().is_some_and(is_same) {
            let (path, written) = (self.path.clone(), Arc::clone(&state));
            blocking(move || replace_sealed(&path, &serde_json::to_vec(&*written)?)).await?;
            self.state = Some(state);
        }
        let table = replica.quotas();
        let known = (replica.revision(), replica.current_at());
        let is_due =
            self.quotas.is_none_or(|(revision, at)| revision != known.0 || known.1 - at >= REFRESH_MS);
        let began = Instant::now();
        // A table that was replaced just now may not be the one that the revision is of.
        if !is_due
            || !replica.status.borrow().has_quotas
            || self.rests_until.is_some_and(|until| began < until)
            || !Arc::ptr_eq(&table, &replica.quotas())
        {
            return self.quota_error.clone().map_or(Ok(()), Err);
        }
        let header = DumpHeader::new(replica.installation.clone(), known.0, known.1);
        let dump = DumpWriter::new(table, header);
        let path = quotas_path(&self.path);
        let written = blocking(move || {
            replace(&path, |file| dump.into_iter().try_for_each(|piece| file.write_all(&piece)))
        });
        let written = written.await;
        self.rests_until = Some(Instant::now() + began.elapsed().max(MIN_WRITE) * REST_FACTOR);
        self.quota_error = written.err();
        if let Some(error) = &self.quota_error {
            return Err(error.clone());
        }
        self.quotas = Some(known);
        Ok(())
    }
}

async fn blocking(doing: impl FnOnce() -> std::io::Result<()> + Send + 'static) -> Result<(), String> {
    let done = tokio::task::spawn_blocking(doing).await.map_err(std::io::Error::other);
    done.flatten().map_err(|error| error.to_string())
}

fn restore_quotas(replica: &Arc<Replica>, path: &Path, max: u64) -> std::io::Result<()> {
    let file = open_private(path)?;
    if file.metadata()?.len() > max {
        return Err(std::io::Error::other(format!("more than {max} bytes")));
    }
    let table = replica.empty_table();
    let reader = DumpReader::new(Arc::clone(&table));
    let header = read_dump(file.take(max), reader, &replica.installation)?;
    replica.set_current_at(header.current_at);
    replica.replace_quotas(table, header.revision);
    replica.report(|status| status.has_quotas = true);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_replica::{KeyHasher, ReplicatedRules, STATE_VERSION, TableDigest};

    /// An operator must see that a start without the server would lack quotas, also between two attempts to write them.
    #[tokio::test]
    async fn a_failed_write_is_reported_until_one_succeeds() {
        let folder = std::env::temp_dir().join(format!("tollgate-follow-{}", std::process::id()));
        let state = ReplicaState {
            version: STATE_VERSION,
            installation: KeyHasher::new(b"secret").installation_id(),
            key_secret: ReplicaState::encode_secret(b"secret"),
            revision: 3,
            quotas: TableDigest::default(),
            rules: ReplicatedRules::new("r", None, &Options::default(), &[]),
            measures: Vec::new(),
            grants: Vec::new(),
        };
        let replica = Replica::new(state, &Options::default()).expect("a state");
        replica.report(|status| status.has_quotas = true);
        // A folder that is not empty cannot be replaced by a file.
        let path = folder.join("state.json");
        std::fs::create_dir_all(quotas_path(&path).join("in-the-way")).expect("a folder");
        let mut snapshot = Snapshot::new(path.clone());
        for _ in 0..3 {
            snapshot.write(&replica).await;
            assert!(replica.status.borrow().snapshot_error.is_some());
        }
        std::fs::remove_dir_all(quotas_path(&path)).expect("removed");
        snapshot.rests_until = None;
        snapshot.write(&replica).await;
        assert_eq!(replica.status.borrow().snapshot_error, None);
        let restored = Snapshot::restore(&path, &Options::default(), 1 << 20, 1 << 20).expect("a snapshot");
        assert!(restored.status.borrow().has_quotas);
        let _ = std::fs::remove_dir_all(folder);
    }
}
