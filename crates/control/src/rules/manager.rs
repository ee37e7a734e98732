//! Rule manager: owns the node's active rules and serializes updates from files and the database. The rules come from
//! files until some are published to the database; from then on, every node uses the published ones.

use crate::control_plane::ControlPlane;
use crate::preview::Preview;
use crate::preview::sample::TrafficSample;
use crate::rules::guardrails::Guardrails;
use crate::rules::revision::{RuleFile, RuleRevision};
use arc_swap::ArcSwap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tollgate_engine::CounterSharing;
use tollgate_rules::{Diagnostics, Options, Ruleset, Source};

/// Source of a node's rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RulesFrom {
    /// The database once rules were published there; until then the files.
    #[default]
    Database,
    /// The files, regardless of published rules.
    Files,
    /// A management server, over xDS, and the files; regardless of published rules.
    Xds,
}

/// The active rules of this node.
#[derive(Clone, Debug)]
pub struct ActiveRules {
    /// The compiled rules.
    pub rules: Arc<Ruleset>,
    /// The rule files.
    pub files: Vec<RuleFile>,
    /// The published revision; `None` if the rules come from elsewhere.
    pub published: Option<RuleRevision>,
    /// Source of rules that are not published.
    pub from: RulesFrom,
}

impl ActiveRules {
    /// Returns the name of the rules' source.
    #[must_use]
    pub const fn source(&self) -> &'static str {
        match self.from {
            _ if self.published.is_some() => "database",
            RulesFrom::Xds => "xds",
            RulesFrom::Database | RulesFrom::Files => "files",
        }
    }

    /// Returns the number of the published revision.
    #[must_use]
    pub fn rev(&self) -> Option<i64> {
        self.published.as_ref().map(|published| published.rev)
    }
}

/// Why a node cannot load its initial rules.
#[derive(Debug, thiserror::Error)]
pub enum RuleLoadError<E> {
    /// The files cannot be read.
    #[error("{0}")]
    Files(E),
    /// The files are invalid.
    #[error("invalid rules\n{0}")]
    Invalid(Diagnostics),
    /// This version cannot load the published rules.
    #[error(
        "cannot load published rule revision {rev}; run the Tollgate version \
         that published it, or use --rules-from files\n{errors}"
    )]
    Published {
        /// Number of the revision.
        rev: i64,
        /// Errors in its rules.
        errors: Diagnostics,
    },
}

/// Listener for new rules: receives the rules that became active, or why they could not.
type RulesListener = Box<dyn Fn(Result<Arc<Ruleset>, String>) + Send + Sync>;

/// The active rules of this node, and their updates.
pub struct RuleManager {
    pub(crate) control: Arc<ControlPlane>,
    pub(crate) options: Options,
    pub(crate) from: RulesFrom,
    active: ArcSwap<ActiveRules>,
    listener: OnceLock<RulesListener>,
    /// Serializes updates.
    update_lock: Mutex<()>,
    pub(crate) guardrails: Guardrails,
    pub(crate) preview: Arc<Preview>,
    /// Number of automatic rollbacks by this node.
    pub(crate) rollbacks: AtomicU64,
    pub(crate) guard: AtomicU8,
}

impl RuleManager {
    /// Loads the published rules, or the files if nothing is published. Files are read only if they are used.
    ///
    /// # Errors
    /// [`RuleLoadError`] if the rules cannot be loaded.
    pub fn open<E>(
        control: Arc<ControlPlane>,
        options: Options,
        from: RulesFrom,
        guardrails: Guardrails,
        counters: CounterSharing,
        files: impl FnOnce() -> Result<Vec<Source>, E>,
    ) -> Result<Arc<Self>, RuleLoadError<E>> {
        let published = control.published();
        let active = match published.filter(|_| from == RulesFrom::Database) {
            Some(published) => {
                let rev = published.revision.rev;
                let rules = Ruleset::load(&published.sources(), &options)
                    .map_err(|errors| RuleLoadError::Published { rev, errors })?;
                tracing::warn!(
                    rev,
                    revision = rules.revision(),
                    author = published.revision.author,
                    "using the rules published in the database; rule files are ignored (use --rules-from files to \
                     load them)"
                );
                let revision = Some(published.revision.clone());
                ActiveRules {
                    rules: Arc::new(rules),
                    files: published.files.clone(),
                    published: revision,
                    from,
                }
            }
            None => {
                let sources = files().map_err(RuleLoadError::Files)?;
                let rules = Ruleset::load(&sources, &options).map_err(RuleLoadError::Invalid)?;
                let files = sources.iter().map(RuleFile::from).collect();
                ActiveRules { rules: Arc::new(rules), files, published: None, from }
            }
        };
        let preview = Preview::new(Arc::clone(&control), options.clone(), counters);
        Ok(Arc::new(Self {
            control,
            options,
            from,
            active: ArcSwap::from_pointee(active),
            listener: OnceLock::new(),
            update_lock: Mutex::new(()),
            guardrails,
            preview,
            rollbacks: AtomicU64::new(0),
            guard: AtomicU8::new(0),
        }))
    }

    /// Returns the traffic sample, to be registered as an observer of decisions.
    #[must_use]
    pub fn sample(&self) -> Arc<TrafficSample> {
        self.preview.sample()
    }

    /// Returns the number of automatic rollbacks by this node.
    #[must_use]
    pub fn rollbacks(&self) -> u64 {
        self.rollbacks.load(Ordering::Relaxed)
    }

    /// Returns the active rules.
    #[must_use]
    pub fn active(&self) -> Arc<ActiveRules> {
        self.active.load_full()
    }

    /// Sets the listener for all rule updates from now on.
    pub fn on_change(&self, listener: impl Fn(Result<Arc<Ruleset>, String>) + Send + Sync + 'static) {
        let _ = self.listener.set(Box::new(listener));
    }

    /// Applies rules from files or from xDS, unless published rules are active. Returns whether it did.
    pub fn apply_files(&self, rules: Arc<Ruleset>) -> bool {
        let _one = self.update_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.active.load().published.is_some() {
            return false;
        }
        let files = rules.sources().iter().map(RuleFile::from).collect();
        self.replace(ActiveRules { rules, files, published: None, from: self.from });
        true
    }

    /// Applies the published rules if they differ from the active ones. Compiles rules, so it may take a while.
    pub fn apply_published(&self) {
        let _one = self.update_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.from != RulesFrom::Database {
            return;
        }
        let active = self.active.load_full();
        let Some(published) = self.control.published() else {
            if active.published.is_some() {
                tracing::warn!("the database no longer has published rules; keeping the last known ones");
            }
            return;
        };
        if active.rev() == Some(published.revision.rev) {
            return;
        }
        match Ruleset::load(&published.sources(), &self.options) {
            Ok(rules) => {
                for warning in rules.warnings() {
                    tracing::warn!("{warning}");
                }
                let RuleRevision { rev, author, reason, .. } = &published.revision;
                tracing::info!(rev, author, reason, revision = rules.revision(), "published rules active");
                if active.published.is_none() {
                    tracing::warn!("rule files are ignored from now on; use --rules-from files to load them");
                }
                let revision = Some(published.revision.clone());
                let files = published.files.clone();
                let rules = Arc::new(rules);
                self.replace(ActiveRules { rules, files, published: revision, from: self.from });
            }
            Err(errors) => {
                let rev = published.revision.rev;
                tracing::error!(rev, "loading published rules failed; keeping previous rules\n{errors}");
                self.notify(Err(format!("published rule revision {rev}: {errors}")));
            }
        }
    }

    fn replace(&self, active: ActiveRules) {
        let rules = Arc::clone(&active.rules);
        self.active.store(Arc::new(active));
        self.notify(Ok(rules));
    }

    fn notify(&self, update: Result<Arc<Ruleset>, String>) {
        if let Some(listener) = self.listener.get() {
            listener(update);
        }
    }

    /// Applies rules that other nodes publish and serves their sample requests; never returns.
    pub async fn run(self: Arc<Self>) {
        let sample = self.sample();
        let serving = self.control.serve_sample_requests(&sample, || Arc::clone(&self.active().rules));
        tokio::join!(self.run_published(), serving);
    }

    async fn run_published(self: &Arc<Self>) {
        let mut published = self.control.published.subscribe();
        loop {
            let own = Arc::clone(self);
            let _ = tokio::task::spawn_blocking(move || own.apply_published()).await;
            if published.changed().await.is_err() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for RuleManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let active = self.active.load();
        f.debug_struct("RuleManager").field("source", &active.source()).field("rev", &active.rev()).finish()
    }
}
