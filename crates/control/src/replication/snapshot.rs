//! Snapshot files with the state replicated from the database, for a start while it is unavailable.
//!
//! There are two files: the state (rules, emergency measures, grants), which is small and written within a second of
//! a change, and the quotas (`FILE.quotas`), which may be ten million: after each write they rest sixty times as long
//! as it took. Each file is replaced as a whole, by a rename, and readable by its owner only: the first contains the
//! secret that API keys are hashed with. The quotas file records its control revision, so that newer changes are read
//! when the database is back, and the time at which it was last known to be current, to tell whether those changes
//! can still be read.

use crate::control_plane::ControlPlane;
use crate::db::deadline::{with_read_timeout, with_timeout};
use crate::db::migrate::{is_current, migrate};
use crate::db::{Db, on};
use crate::emergency::record::EmergencyRow;
use crate::error::ControlError;
use crate::rules::revision::PublishedRules;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tollgate_core::Clock;
use tollgate_replica::snapshot_file::{quotas_path, read_dump, replace};
use tollgate_replica::{DumpReader, ReplicatedGrant};

const VERSION: u32 = 3;
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Quotas rest this many times as long as their write took, which counts as at least this many milliseconds.
const REST_FACTOR: i64 = 60;
const MIN_WRITE_MS: i64 = 17;
/// Delay after a failure, in milliseconds, and how many times it doubles with further failures.
const RETRY_MS: i64 = 1_000;
const MAX_DOUBLINGS: u32 = 6;
/// Unchanged quotas are written again when their `current_at` has advanced this far, in milliseconds: otherwise a
/// node would discard them as too old after a quiet week.
const REFRESH_MS: i64 = 3_600_000;
/// Timeout of a migration to a newer schema: indexes over ten million rows take minutes.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(3_600);

/// The state written within a second.
#[derive(Serialize, Deserialize)]
struct SnapshotState {
    version: u32,
    key_secret: String,
    published: Option<PublishedRules>,
    /// The active measures; each has its own expiry.
    emergencies: Vec<EmergencyRow>,
    /// Grants, by the table hash of the caller's key.
    grants: Vec<(u64, ReplicatedGrant)>,
}

/// One of the snapshot files.
struct SnapshotFile<K> {
    path: PathBuf,
    /// Version of the contents last written.
    written: Option<K>,
    /// Rest after a write, as a multiple of its duration.
    rest: i64,
    /// Time of the next write at the earliest, in milliseconds.
    next: i64,
    /// Number of consecutive failures, up to [`MAX_DOUBLINGS`].
    failures: u32,
}

impl<K> SnapshotFile<K> {
    fn new(path: PathBuf, rest: i64) -> Self {
        Self { path, written: None, rest, next: i64::MIN, failures: 0 }
    }
}

impl ControlPlane {
    /// Connects; if the database is unavailable, starts from the snapshot file. Returns whether it did.
    ///
    /// # Errors
    /// [`ControlError`] if the database cannot be used and the file cannot replace it.
    pub async fn connect_or_restore(
        address: &str,
        clock: Arc<dyn Clock>,
        file: Option<&Path>,
    ) -> Result<(Arc<Self>, bool), ControlError> {
        let error = match (Self::connect(address, Arc::clone(&clock)).await, file) {
            (Err(error @ (ControlError::Unavailable(_) | ControlError::Unreachable { .. })), Some(_)) => {
                error
            }
            (other, _) => return other.map(|control| (control, false)),
        };
        let Some((path, text)) = file.and_then(|path| Some((path, std::fs::read_to_string(path).ok()?)))
        else {
            return Err(error);
        };
        let corrupt = |reason: String| ControlError::Corrupt(format!("{}: {reason}", path.display()));
        let state: SnapshotState = serde_json::from_str(&text).map_err(|error| corrupt(error.to_string()))?;
        if state.version != VERSION {
            return Err(corrupt(format!("unsupported snapshot version {}", state.version)));
        }
        let secret = STANDARD.decode(&state.key_secret).map_err(|error| corrupt(error.to_string()))?;
        let control = Self::new(Db::open_lazily(address)?, &secret, clock);
        control.prepared.store(false, Ordering::Relaxed);
        control.apply_emergencies(state.emergencies);
        let now = control.now_millis();
        control.quota_table.replace_grants(state.grants, now);
        match control.restore_quotas(&quotas_path(path)) {
            Ok(()) => control.loaded.store(true, Ordering::Relaxed),
            // The rules apply without quotas, and the node is not ready.
            Err(error) => {
                control.quota_table.clear();
                tracing::warn!(%error, "reading the quota snapshot failed");
            }
        }
        let rev = state.published.as_ref().map(|published| published.revision.rev);
        control.published.send_replace(state.published.map(Arc::new));
        tracing::warn!(
            %error, file = %path.display(), rev, quotas = control.quota_table.len(), age_ms = control.staleness_millis(),
            "database unavailable; starting from the snapshot"
        );
        Ok((control, true))
    }

    /// Completes the preparation that a start without the database skipped.
    pub(crate) async fn prepare(&self) -> Result<(), ControlError> {
        if self.prepared.load(Ordering::Relaxed) {
            return Ok(());
        }
        // A server that does not respond is given up soon; a migration in progress is not, because it would restart
        // forever.
        if !with_read_timeout(is_current(&self.db)).await? {
            with_timeout(MIGRATION_TIMEOUT, migrate(&self.db)).await?;
        }
        let secret = with_read_timeout(async {
            let (secret,): (Vec<u8>,) = on!(&self.db, pool => {
                sqlx::query_as("SELECT key_secret FROM head WHERE id = 1").fetch_one(pool).await?
            });
            Ok(secret)
        })
        .await?;
        if secret != self.secret {
            let reason = "the snapshot is from another database; restart to load this one";
            return Err(ControlError::Corrupt(reason.to_owned()));
        }
        self.prepared.store(true, Ordering::Relaxed);
        tracing::info!("database available again");
        Ok(())
    }

    /// Returns whether the node still runs on its snapshot, because the database has been unavailable since startup.
    #[must_use]
    pub fn is_restored(&self) -> bool {
        !self.prepared.load(Ordering::Relaxed)
    }

    /// Keeps the snapshot files up to date; never returns.
    pub async fn run_snapshots(self: Arc<Self>, file: PathBuf) {
        let (mut state, mut quotas) =
            (SnapshotFile::new(file.clone(), 0), SnapshotFile::new(quotas_path(&file), REST_FACTOR));
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if self.is_restored() || self.table_generation().is_none() {
                continue;
            }
            let rev = self.published().map(|published| published.revision.rev);
            let known = (rev, self.snapshot_generation.load(Ordering::Relaxed));
            if state.written != Some(known) {
                self.write_if_due(&mut state, known, Self::write_state).await;
            }
            let known = (self.revision(), self.current_at.load(Ordering::Relaxed));
            if quotas.written.is_none_or(|(rev, at)| rev != known.0 || known.1 - at >= REFRESH_MS) {
                self.write_if_due(&mut quotas, known, Self::write_quotas).await;
            }
        }
    }

    /// Writes a file if it is due. Logs a failure once until a write succeeds.
    async fn write_if_due<K>(
        self: &Arc<Self>,
        file: &mut SnapshotFile<K>,
        known: K,
        write: fn(&Self, &Path) -> std::io::Result<()>,
    ) {
        let began = self.now_millis();
        if began < file.next {
            return;
        }
        let (own, path) = (Arc::clone(self), file.path.clone());
        let written = tokio::task::spawn_blocking(move || write(&own, &path)).await;
        let ended = self.now_millis();
        let took = (ended - began).max(MIN_WRITE_MS);
        let failed = match written {
            Ok(Ok(())) => {
                (file.written, file.failures) = (Some(known), 0);
                file.next = ended + file.rest * took;
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if file.failures == 0 {
            tracing::warn!(
                error = failed, file = %file.path.display(),
                "writing the snapshot failed; a start without the database will fail; set --snapshot to a writable file"
            );
        }
        file.next = ended + (RETRY_MS << file.failures).max(file.rest * took);
        file.failures = (file.failures + 1).min(MAX_DOUBLINGS);
    }

    pub(crate) fn write_quotas(&self, path: &Path) -> std::io::Result<()> {
        let before = self.table_generation();
        let mut dump = self.dump_quotas();
        replace(path, |file| {
            dump.try_for_each(|piece| file.write_all(&piece))?;
            if before.is_some() && self.table_generation() == before {
                return Ok(());
            }
            Err(std::io::Error::other("the quotas are being read again"))
        })
    }

    fn restore_quotas(&self, path: &Path) -> std::io::Result<()> {
        let reader = DumpReader::new(self.quota_table());
        let header = read_dump(std::fs::File::open(path)?, reader, &self.installation_id())?;
        self.quota_revision.store(header.revision, Ordering::Relaxed);
        self.current_at.store(header.current_at, Ordering::Relaxed);
        Ok(())
    }

    fn write_state(&self, path: &Path) -> std::io::Result<()> {
        let state = SnapshotState {
            version: VERSION,
            key_secret: STANDARD.encode(&self.secret),
            published: self.published().map(|published| (*published).clone()),
            emergencies: self.cached_emergencies(),
            grants: self.quota_table.grants().all(),
        };
        replace(path, |file| Ok(serde_json::to_writer(file, &state)?))
    }
}

/// See [`crate::properties::snapshot`].
pub(crate) fn properties(text: &str) {
    let Ok(state) = serde_json::from_str::<SnapshotState>(text) else { return };
    let written = serde_json::to_string(&state).expect("it was read");
    let again: SnapshotState = serde_json::from_str(&written).expect("what was written can be read");
    assert_eq!(serde_json::to_string(&again).expect("it was read"), written);
}
