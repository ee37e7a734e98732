//! What this node knows from the database, kept in files beside: a node whose database is away at start begins with them.
//!
//! There are two: the acts (rules, emergencies, grants), which are few and are written within a second, and the quotas
//! (`FILE.quotas`), which may be ten million: they rest sixty times as long as their writing took. Each is replaced as a whole, by a rename, and is for its owner alone: the first holds the secret that API keys are hashed with.
//! The quotas know up to which revision they go, so that what is newer is asked for when the database is back, and when they
//! were last known to be all, so that it is known whether what is newer is still there.

mod quotas;

use crate::control_plane::ControlPlane;
use crate::db::deadline::{with_read_timeout, with_timeout};
use crate::db::migrate::{is_current, migrate};
use crate::db::{Db, on};
use crate::emergency::record::EmergencyRow;
use crate::error::ControlError;
use crate::grant::table::ReplicatedGrant;
use crate::rules::revision::PublishedRules;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tollgate_core::Clock;

const VERSION: u32 = 3;
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Quotas rest so many times as long as their writing took, which counts as so many milliseconds at least.
const REST_FACTOR: i64 = 60;
const MIN_WRITE_MS: i64 = 17;
/// After a failure it rests so long, and twice as long after each further one, up to so many times.
const RETRY_MS: i64 = 1_000;
const MAX_DOUBLINGS: u32 = 6;
/// Quotas that have not changed are written again when they have been known to be all for so much longer, in milliseconds:
/// otherwise a node would trust them too little after a quiet week.
const REFRESH_MS: i64 = 3_600_000;
/// The longest that the tables of a newer program may take to come about: indexes over ten million rows take minutes.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(3_600);

/// What is written within a second.
#[derive(Serialize, Deserialize)]
struct SnapshotState {
    version: u32,
    key_secret: String,
    published: Option<PublishedRules>,
    /// What is on; each ends by itself.
    emergencies: Vec<EmergencyRow>,
    /// Extra quota, by the word of the key's hash.
    grants: Vec<(u64, ReplicatedGrant)>,
}

/// One of the files.
struct SnapshotFile<K> {
    path: PathBuf,
    /// What it holds.
    written: Option<K>,
    /// How many times as long as its writing took it rests.
    rest: i64,
    /// It is not written before, in milliseconds.
    next: i64,
    /// How often in a row it could not be written, as far as that counts.
    failures: u32,
}

impl<K> SnapshotFile<K> {
    fn new(path: PathBuf, rest: i64) -> Self {
        Self { path, written: None, rest, next: i64::MIN, failures: 0 }
    }
}

impl ControlPlane {
    /// Connects; where nobody answers, begins with what a file knows. Says whether it had to.
    ///
    /// # Errors
    /// [`ControlError`] if the database cannot be used and the file does not help.
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
        let broken = |why: String| ControlError::Corrupt(format!("{}: {why}", path.display()));
        let kept: SnapshotState = serde_json::from_str(&text).map_err(|error| broken(error.to_string()))?;
        if kept.version != VERSION {
            return Err(broken(format!("version {} is not known to this program", kept.version)));
        }
        let secret = STANDARD.decode(&kept.key_secret).map_err(|error| broken(error.to_string()))?;
        let control = Self::new(Db::open_lazily(address)?, &secret, clock);
        control.prepared.store(false, Ordering::Relaxed);
        control.apply_emergencies(kept.emergencies);
        let now = control.now_millis();
        control.quota_table.grants().replace(kept.grants, now);
        match control.restore_quotas(&quotas_path(path)) {
            Ok(()) => control.loaded.store(true, Ordering::Relaxed),
            // The rules act alone, and the node is not ready.
            Err(error) => {
                control.quota_table.clear();
                tracing::warn!(%error, "the quotas that were last known cannot be read");
            }
        }
        let rev = kept.published.as_ref().map(|published| published.revision.rev);
        control.published.send_replace(kept.published.map(Arc::new));
        tracing::warn!(
            %error, file = %path.display(), rev, quotas = control.quota_table.len(), age_ms = control.staleness_millis(),
            "the database does not answer: starting with what was last known"
        );
        Ok((control, true))
    }

    /// What was left out at a start without the database.
    pub(crate) async fn prepare(&self) -> Result<(), ControlError> {
        if self.prepared.load(Ordering::Relaxed) {
            return Ok(());
        }
        // A server that does not answer is given up soon; one that is at work is not: it would begin anew without end.
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
            let why =
                "this is another database than the one of the snapshot: start again, and it is read afresh";
            return Err(ControlError::Corrupt(why.to_owned()));
        }
        self.prepared.store(true, Ordering::Relaxed);
        tracing::info!("the database is back");
        Ok(())
    }

    /// Whether it still goes by a file, since the database has not answered yet.
    #[must_use]
    pub fn is_restored(&self) -> bool {
        !self.prepared.load(Ordering::Relaxed)
    }

    /// Keeps the files up to date for as long as it is asked to.
    pub async fn run_snapshots(self: Arc<Self>, file: PathBuf) {
        let (mut acts, mut quotas) =
            (SnapshotFile::new(file.clone(), 0), SnapshotFile::new(quotas_path(&file), REST_FACTOR));
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if self.is_restored() || !self.is_loaded() {
                continue;
            }
            let rev = self.published().map(|published| published.revision.rev);
            let known = (rev, self.snapshot_generation.load(Ordering::Relaxed));
            if acts.written != Some(known) {
                self.write_if_due(&mut acts, known, Self::write_state).await;
            }
            let known = (self.revision(), self.current_at.load(Ordering::Relaxed));
            if quotas.written.is_none_or(|(rev, at)| rev != known.0 || known.1 - at >= REFRESH_MS) {
                self.write_if_due(&mut quotas, known, Self::write_quotas).await;
            }
        }
    }

    /// Writes a file if its time has come, and says so if that fails, once until it succeeds.
    async fn write_if_due<K>(
        self: &Arc<Self>,
        beside: &mut SnapshotFile<K>,
        known: K,
        write: fn(&Self, &Path) -> std::io::Result<()>,
    ) {
        let began = self.now_millis();
        if began < beside.next {
            return;
        }
        let (own, path) = (Arc::clone(self), beside.path.clone());
        let written = tokio::task::spawn_blocking(move || write(&own, &path)).await;
        let ended = self.now_millis();
        let took = (ended - began).max(MIN_WRITE_MS);
        let failed = match written {
            Ok(Ok(())) => {
                (beside.written, beside.failures) = (Some(known), 0);
                beside.next = ended + beside.rest * took;
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if beside.failures == 0 {
            tracing::warn!(
                error = failed, file = %beside.path.display(),
                "what is known from the database cannot be kept beside: a start without it will fail; set --snapshot"
            );
        }
        beside.next = ended + (RETRY_MS << beside.failures).max(beside.rest * took);
        beside.failures = (beside.failures + 1).min(MAX_DOUBLINGS);
    }

    fn write_state(&self, path: &Path) -> std::io::Result<()> {
        let kept = SnapshotState {
            version: VERSION,
            key_secret: STANDARD.encode(&self.secret),
            published: self.published().map(|published| (*published).clone()),
            emergencies: self.cached_emergencies(),
            grants: self.quota_table.grants().all(),
        };
        replace(path, |file| Ok(serde_json::to_writer(file, &kept)?))
    }
}

/// Where the quotas are kept.
fn quotas_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".quotas");
    name.into()
}

/// Writes a new file and puts it in the place of the old one: whoever reads finds the one or the other, whole.
fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<std::fs::File>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder)?;
    }
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{}.new", std::process::id()));
    let fresh = PathBuf::from(fresh);
    let _ = std::fs::remove_file(&fresh);
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    let mut file = BufWriter::with_capacity(1 << 16, file);
    let written = write(&mut file).and_then(|()| file.flush()).and_then(|()| file.get_ref().sync_all());
    if let Err(error) = written {
        let _ = std::fs::remove_file(&fresh);
        return Err(error);
    }
    std::fs::rename(&fresh, path).inspect_err(|_| {
        let _ = std::fs::remove_file(&fresh);
    })
}
