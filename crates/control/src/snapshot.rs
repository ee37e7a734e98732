//! What this node knows from the database, kept in a file beside: a node whose database is away at start begins with it.
//!
//! The file is replaced as a whole, by a rename, and is for its owner alone: it holds the secret that API keys are hashed
//! with. It knows up to which revision it goes, so that what is newer is asked for when the database is back. Rules are
//! written within a second, quotas within a minute; where there are very many quotas, rules alone.

use crate::book::Book;
use crate::control::Control;
use crate::db::{ControlError, Db, on};
use crate::key::KeyHash;
use crate::migrate::migrate;
use crate::quota::QuotaOverride;
use crate::quotas::KeptTerms;
use crate::revision::PublishedRules;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tollgate_core::Clock;

/// The most quotas that are kept in a file.
const MOST_QUOTAS: usize = 1_000_000;
const LOOK: Duration = Duration::from_millis(250);
/// Looks between two writings for quotas alone.
const LOOKS: u32 = 240;

#[derive(Serialize, Deserialize)]
struct Snapshot {
    version: u32,
    key_secret: String,
    /// Up to which revision of the database it goes, and when that was the last.
    revision: i64,
    current_at: i64,
    published: Option<PublishedRules>,
    /// `None`: there are too many.
    quotas: Option<Quotas>,
}

/// Agreements as the book has them: who has the same terms shares them.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Quotas {
    pub(crate) terms: Vec<(Option<String>, Vec<QuotaOverride>)>,
    /// The word of the key's hash, from when, until when, which terms.
    pub(crate) callers: Vec<(u64, Option<i64>, Option<i64>, usize)>,
}

impl Quotas {
    fn restore(self, book: &Book) {
        for (word, effective_at, expires_at, terms) in self.callers {
            let Some((tier, overrides)) = self.terms.get(terms).cloned() else { continue };
            book.set(&KeyHash::of_word(word), Some(KeptTerms { tier, overrides, effective_at, expires_at }));
        }
    }
}

impl Control {
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
            (Err(ControlError::Away(error)), Some(_)) => error,
            (other, _) => return other.map(|control| (control, false)),
        };
        let Some((path, text)) = file.and_then(|path| Some((path, std::fs::read_to_string(path).ok()?)))
        else {
            return Err(ControlError::Away(error));
        };
        let broken = |why: String| ControlError::Broken(format!("{}: {why}", path.display()));
        let kept: Snapshot = serde_json::from_str(&text).map_err(|error| broken(error.to_string()))?;
        if kept.version != 1 {
            return Err(broken(format!("version {} is not known to this program", kept.version)));
        }
        let secret = STANDARD.decode(&kept.key_secret).map_err(|error| broken(error.to_string()))?;
        let control = Self::new(Db::later(address)?, &secret, clock);
        control.prepared.store(false, Ordering::Relaxed);
        let all = kept.quotas.is_some();
        kept.quotas.unwrap_or_default().restore(&control.book);
        if all {
            control.seen.store(kept.revision, Ordering::Relaxed);
            control.loaded.store(true, Ordering::Relaxed);
        }
        control.current_at.store(kept.current_at, Ordering::Relaxed);
        let rev = kept.published.as_ref().map(|published| published.revision.rev);
        control.published.send_replace(kept.published.map(Arc::new));
        tracing::warn!(
            %error, file = %path.display(), rev, quotas = control.book.len(), age_ms = control.age_millis(),
            "the database does not answer: starting with what was last known"
        );
        Ok((control, true))
    }

    /// What was left out at a start without the database.
    pub(crate) async fn prepare(&self) -> Result<(), ControlError> {
        if self.prepared.load(Ordering::Relaxed) {
            return Ok(());
        }
        migrate(&self.db).await?;
        let (secret,): (Vec<u8>,) = on!(&self.db, pool => {
            sqlx::query_as("SELECT key_secret FROM head WHERE id = 1").fetch_one(pool).await?
        });
        if secret != self.secret {
            let why =
                "this is another database than the one of the snapshot: start again, and it is read afresh";
            return Err(ControlError::Broken(why.to_owned()));
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

    /// Keeps the file up to date for as long as it is asked to.
    pub async fn keep_snapshot(self: Arc<Self>, file: PathBuf) {
        let (mut written, mut looks, mut told) = ((None, -1), 0_u32, false);
        loop {
            tokio::time::sleep(LOOK).await;
            looks = looks.saturating_add(1);
            let known = (self.published().map(|published| published.revision.rev), self.revision());
            let due = known.0 != written.0 || written.1 < 0 || looks >= LOOKS;
            if known == written || !due || self.is_restored() || !self.is_loaded() {
                continue;
            }
            let (own, path) = (Arc::clone(&self), file.clone());
            let done = tokio::task::spawn_blocking(move || own.write_snapshot(&path)).await;
            let failed = match done {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            (written, looks) = (known, 0);
            if let Some(error) = failed.filter(|_| !told) {
                told = true;
                tracing::warn!(
                    error, file = %file.display(),
                    "what is known from the database cannot be kept beside: a start without it will fail; set --snapshot"
                );
            }
        }
    }

    fn write_snapshot(&self, path: &Path) -> std::io::Result<()> {
        let kept = Snapshot {
            version: 1,
            key_secret: STANDARD.encode(&self.secret),
            revision: self.revision(),
            current_at: self.current_at.load(Ordering::Relaxed),
            published: self.published().map(|published| (*published).clone()),
            quotas: (self.book.len() <= MOST_QUOTAS).then(|| self.book.dump()),
        };
        let text = serde_json::to_vec(&kept)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder)?;
        }
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&fresh, path)
    }
}
