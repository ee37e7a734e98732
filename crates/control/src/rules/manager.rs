//! The rules that act on this node: those of the files it was given, until some are published to the database; from then
//! on the published ones, on every node. Whoever brings other rules comes here, so that files and database cannot race.

use crate::control_plane::ControlPlane;
use crate::preview::Preview;
use crate::preview::sample::TrafficSample;
use crate::rules::guardrails::Guardrails;
use crate::rules::revision::{RuleFile, RuleRevision};
use arc_swap::ArcSwap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tollgate_engine::Counters;
use tollgate_rules::{Diagnostics, Options, Ruleset, Source};

/// Where a node takes its rules from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RulesFrom {
    /// From the database once something was published there; until then from the files.
    #[default]
    Database,
    /// From the files, whatever was published.
    Files,
}

/// What acts on this node.
#[derive(Clone, Debug)]
pub struct ActiveRules {
    /// Compiled.
    pub rules: Arc<Ruleset>,
    /// As written.
    pub files: Vec<RuleFile>,
    /// The published revision that it is; nothing, where the files act.
    pub published: Option<RuleRevision>,
}

impl ActiveRules {
    /// The word for where it comes from.
    #[must_use]
    pub const fn source(&self) -> &'static str {
        if self.published.is_some() { "database" } else { "files" }
    }

    /// The number of the published revision.
    #[must_use]
    pub fn rev(&self) -> Option<i64> {
        self.published.as_ref().map(|published| published.rev)
    }
}

/// Why a node has no rules to begin with.
#[derive(Debug, thiserror::Error)]
pub enum RuleLoadError<E> {
    /// The files cannot be read.
    #[error("{0}")]
    Files(E),
    /// The files say something wrong.
    #[error("the rules cannot be used\n{0}")]
    Invalid(Diagnostics),
    /// What was published cannot be read by this program.
    #[error(
        "revision {rev} of the rules, which is published in the database, cannot be used by this program: use the version \
         that published it, or --rules-from files\n{errors}"
    )]
    Published {
        /// Its number.
        rev: i64,
        /// What is wrong with it.
        errors: Diagnostics,
    },
}

/// Who is told of rules that come in: those that act from now on, or why they cannot.
type RulesListener = Box<dyn Fn(Result<Arc<Ruleset>, String>) + Send + Sync>;

/// The rules that act on this node, and how others come in their place.
pub struct RuleManager {
    pub(crate) control: Arc<ControlPlane>,
    options: Options,
    pub(crate) from: RulesFrom,
    active: ArcSwap<ActiveRules>,
    listener: OnceLock<RulesListener>,
    /// One at a time.
    update_lock: Mutex<()>,
    pub(crate) guardrails: Guardrails,
    pub(crate) preview: Arc<Preview>,
    /// How often this node has gone back by itself.
    pub(crate) rollbacks: AtomicU64,
    pub(crate) guard: AtomicU8,
}

impl RuleManager {
    /// Begins with what is published, or with the files where nothing is. Files are read only where they act.
    ///
    /// # Errors
    /// If these cannot be used.
    pub fn open<E>(
        control: Arc<ControlPlane>,
        options: Options,
        from: RulesFrom,
        guardrails: Guardrails,
        counters: Counters,
        files: impl FnOnce() -> Result<Vec<Source>, E>,
    ) -> Result<Arc<Self>, RuleLoadError<E>> {
        let published = control.published();
        let acting = match published.filter(|_| from == RulesFrom::Database) {
            Some(published) => {
                let rev = published.revision.rev;
                let rules = Ruleset::load(&published.sources(), &options)
                    .map_err(|errors| RuleLoadError::Published { rev, errors })?;
                tracing::warn!(
                    rev,
                    revision = rules.revision(),
                    author = published.revision.author,
                    "the rules that are published in the database act; rule files are not read (--rules-from files to \
                     decide by them)"
                );
                let revision = Some(published.revision.clone());
                ActiveRules { rules: Arc::new(rules), files: published.files.clone(), published: revision }
            }
            None => {
                let sources = files().map_err(RuleLoadError::Files)?;
                let rules = Ruleset::load(&sources, &options).map_err(RuleLoadError::Invalid)?;
                let files = sources.iter().map(RuleFile::from).collect();
                ActiveRules { rules: Arc::new(rules), files, published: None }
            }
        };
        let preview = Preview::new(Arc::clone(&control), options, counters);
        Ok(Arc::new(Self {
            control,
            options,
            from,
            active: ArcSwap::from_pointee(acting),
            listener: OnceLock::new(),
            update_lock: Mutex::new(()),
            guardrails,
            preview,
            rollbacks: AtomicU64::new(0),
            guard: AtomicU8::new(0),
        }))
    }

    /// Who remembers the last traffic; to be told of every decision.
    #[must_use]
    pub fn sample(&self) -> Arc<TrafficSample> {
        self.preview.sample()
    }

    /// How often this node has gone back to older rules by itself.
    #[must_use]
    pub fn rollbacks(&self) -> u64 {
        self.rollbacks.load(Ordering::Relaxed)
    }

    /// What acts.
    #[must_use]
    pub fn active(&self) -> Arc<ActiveRules> {
        self.active.load_full()
    }

    /// Tells somebody of all rules that come in from now on.
    pub fn on_change(&self, told: impl Fn(Result<Arc<Ruleset>, String>) + Send + Sync + 'static) {
        let _ = self.listener.set(Box::new(told));
    }

    /// Takes rules that stand in files now. Where published ones act, nothing is done.
    pub fn apply_files(&self, sources: &[Source], rules: Arc<Ruleset>) -> bool {
        let _one = self.update_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.active.load().published.is_some() {
            return false;
        }
        let files = sources.iter().map(RuleFile::from).collect();
        self.replace(ActiveRules { rules, files, published: None });
        true
    }

    /// Takes what is published, if it is something else than what acts. Compiles, so it may take a while.
    pub fn apply_published(&self) {
        let _one = self.update_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.from == RulesFrom::Files {
            return;
        }
        let acting = self.active.load_full();
        let Some(published) = self.control.published() else {
            if acting.published.is_some() {
                tracing::warn!(
                    "the database holds no published rules any more; the last known ones go on acting"
                );
            }
            return;
        };
        if acting.rev() == Some(published.revision.rev) {
            return;
        }
        match Ruleset::load(&published.sources(), &self.options) {
            Ok(rules) => {
                for warning in rules.warnings() {
                    tracing::warn!("{warning}");
                }
                let RuleRevision { rev, author, reason, .. } = &published.revision;
                tracing::info!(rev, author, reason, revision = rules.revision(), "published rules active");
                if acting.published.is_none() {
                    tracing::warn!(
                        "from now on rule files are not read; --rules-from files to decide by them"
                    );
                }
                let revision = Some(published.revision.clone());
                let files = published.files.clone();
                self.replace(ActiveRules { rules: Arc::new(rules), files, published: revision });
            }
            Err(errors) => {
                let rev = published.revision.rev;
                tracing::error!(
                    rev,
                    "published rules are invalid on this node; keeping previous rules\n{errors}"
                );
                self.notify(Err(format!("revision {rev} of the published rules: {errors}")));
            }
        }
    }

    fn replace(&self, acting: ActiveRules) {
        let rules = Arc::clone(&acting.rules);
        self.active.store(Arc::new(acting));
        self.notify(Ok(rules));
    }

    fn notify(&self, what: Result<Arc<Ruleset>, String>) {
        if let Some(told) = self.listener.get() {
            told(what);
        }
    }

    /// Takes what others publish, and tells them what this node remembers, for as long as it is asked to.
    pub async fn run(self: Arc<Self>) {
        let sample = self.sample();
        let answering = self.control.serve_sample_requests(&sample, || Arc::clone(&self.active().rules));
        tokio::join!(self.run_published(), answering);
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
        let acting = self.active.load();
        f.debug_struct("RuleManager").field("source", &acting.source()).field("rev", &acting.rev()).finish()
    }
}
