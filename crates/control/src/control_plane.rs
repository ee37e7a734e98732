//! What operators decide, opened: the database, the book, and what this node has seen of the one in the other.

use crate::auth::key_hash::KeyHasher;
use crate::auth::offline::OfflineAccess;
use crate::auth::secret::generate_id;
use crate::auth::verified::VerifiedTokens;
use crate::db::migrate::{is_current, is_initialized, migrate};
use crate::db::{Db, on, redact_password};
use crate::error::ControlError;
use crate::quota::table::QuotaTable;
use crate::replication::lag::PropagationLag;
use crate::replication::node_record::NodeRecord;
use crate::rules::revision::PublishedRules;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::{Mutex, Notify, watch};
use tollgate_core::Clock;
use tollgate_engine::ActiveMeasures;

/// The database of operators' decisions, and the book that this node decides by.
pub struct ControlPlane {
    pub(crate) db: Db,
    pub(crate) hasher: KeyHasher,
    pub(crate) quota_table: Arc<QuotaTable>,
    pub(crate) measures: Arc<ActiveMeasures>,
    /// What they were made of, for the snapshot, and to tell when they are others.
    pub(crate) measure_rows: std::sync::Mutex<Vec<crate::emergency::record::EmergencyRow>>,
    /// Goes up when the snapshot's emergencies or grants are no longer all there are.
    pub(crate) snapshot_generation: AtomicU64,
    pub(crate) clock: Arc<dyn Clock>,
    /// One reader at a time takes changes in, so that they are taken in order.
    pub(crate) sync_lock: Mutex<()>,
    /// The last revision that is in the book.
    pub(crate) quota_revision: AtomicI64,
    /// The last revision up to which emergencies, rules and grants are known; they are read apart from the book.
    pub(crate) measures_revision: AtomicI64,
    /// When the book was last known to hold all there is, in milliseconds.
    pub(crate) current_at: AtomicI64,
    pub(crate) verified_tokens: VerifiedTokens,
    /// Who was let in while the database was there.
    pub(crate) offline_access: OfflineAccess,
    /// Whether the database did not answer when it was last asked for what is new.
    pub(crate) unavailable: AtomicBool,
    /// The nodes, as they were last read, and when that was.
    pub(crate) node_cache: std::sync::Mutex<Option<(i64, Vec<NodeRecord>)>>,
    /// One import at a time.
    pub(crate) import_lock: Arc<Mutex<()>>,
    /// Whether the book has ever held all there is.
    pub(crate) loaded: AtomicBool,
    pub(crate) lag: PropagationLag,
    /// What API keys are hashed with.
    pub(crate) secret: Vec<u8>,
    /// Whether the database has been there since the start.
    pub(crate) prepared: AtomicBool,
    /// The revision of the rules that acts.
    pub(crate) published: watch::Sender<Option<Arc<PublishedRules>>>,
    /// This process among those that share the database.
    pub(crate) instance: String,
    /// What of the rules was last heard of, to tell when it is another.
    pub(crate) notified_rules: AtomicI64,
    pub(crate) change_listener: OnceLock<ChangeListener>,
    /// Another node may have asked what this one remembers.
    pub(crate) sample_requested: Notify,
}

/// What has changed, by whomever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeEvent {
    /// Agreements with callers, or grants.
    Quotas,
    /// What operators decided in an emergency.
    Emergencies,
    /// Published rules: those that act, or those that wait.
    Rules,
}

type ChangeListener = Box<dyn Fn(ChangeEvent) + Send + Sync>;

impl ControlPlane {
    /// Opens the database, makes its tables if they are not there, and reads all agreements.
    ///
    /// # Errors
    /// [`ControlError`] if the database cannot be used.
    pub async fn open(address: &str, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        let control = Self::connect(address, clock).await?;
        control.catch_up().await?;
        Ok(control)
    }

    /// The same without reading: for those who decide nothing, or who read later, by [`ControlPlane::catch_up`].
    ///
    /// # Errors
    /// [`ControlError`] if the database cannot be used.
    pub async fn connect(address: &str, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        Self::with_db(Db::open(address).await?, clock).await
    }

    /// The same with a database that is there and is one of ours: nothing is made of an address that was mistyped.
    ///
    /// # Errors
    /// [`ControlError`] if there is none, too.
    pub async fn connect_existing(address: &str, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        let db = Db::open_existing(address).await?;
        if !is_initialized(&db).await? {
            let place = redact_password(address)?;
            let why = "nothing of Tollgate's is in it";
            return Err(ControlError::Address(format!("there is no such database: {place}: {why}")));
        }
        Self::with_db(db, clock).await
    }

    async fn with_db(db: Db, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        if !is_current(&db).await? {
            migrate(&db).await?;
        }
        let (secret,): (Vec<u8>,) = on!(&db, pool => {
            sqlx::query_as("SELECT key_secret FROM head WHERE id = 1").fetch_one(pool).await?
        });
        let control = Self::new(db, &secret, clock);
        // These decide from the first request on.
        control.catch_up_rules().await?;
        Ok(control)
    }

    pub(crate) fn new(db: Db, secret: &[u8], clock: Arc<dyn Clock>) -> Arc<Self> {
        let hasher = KeyHasher::new(secret);
        let begun = clock.now().as_micros();
        let words = {
            let hasher = hasher.clone();
            move |api_key: &str| hasher.hash(api_key).table_hash()
        };
        Arc::new(Self {
            db,
            quota_table: Arc::new(QuotaTable::new(hasher.clone())),
            measures: Arc::new(ActiveMeasures::new(words)),
            measure_rows: std::sync::Mutex::default(),
            snapshot_generation: AtomicU64::new(0),
            hasher,
            clock,
            sync_lock: Mutex::new(()),
            quota_revision: AtomicI64::new(0),
            measures_revision: AtomicI64::new(-1),
            current_at: AtomicI64::new(0),
            verified_tokens: VerifiedTokens::default(),
            offline_access: OfflineAccess::default(),
            unavailable: AtomicBool::new(false),
            node_cache: std::sync::Mutex::default(),
            import_lock: Arc::default(),
            loaded: AtomicBool::new(false),
            lag: PropagationLag::default(),
            published: watch::Sender::new(None),
            secret: secret.to_vec(),
            prepared: AtomicBool::new(true),
            // Without randomness nodes are told apart by when they began.
            instance: generate_id().unwrap_or_else(|_| begun.to_string()),
            notified_rules: AtomicI64::new(0),
            change_listener: OnceLock::new(),
            sample_requested: Notify::new(),
        })
    }

    /// What the limiter asks.
    #[must_use]
    pub fn quota_table(&self) -> Arc<QuotaTable> {
        Arc::clone(&self.quota_table)
    }

    /// What the limiter looks at in an emergency.
    #[must_use]
    pub fn active_measures(&self) -> Arc<ActiveMeasures> {
        Arc::clone(&self.measures)
    }

    /// A keyed hash of an API key: the first 64 bits of what quotas call its `id`.
    #[must_use]
    pub fn key_id(&self, api_key: &str) -> u64 {
        self.hasher.hash(api_key).short_id()
    }

    /// Which database it is.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        self.db.kind()
    }

    /// The last revision that acts on this node.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.quota_revision.load(Ordering::Relaxed)
    }

    /// Whether this node has read all there is, at least once.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Relaxed)
    }

    /// Whether the database did not answer when it was last asked for what is new.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.unavailable.load(Ordering::Relaxed)
    }

    /// How long changes took to act on this node.
    #[must_use]
    pub const fn lag(&self) -> &PropagationLag {
        &self.lag
    }

    /// For how long this node has not been sure to know everything, in milliseconds.
    #[must_use]
    pub fn staleness_millis(&self) -> i64 {
        (self.now_millis() - self.current_at.load(Ordering::Relaxed)).max(0)
    }

    /// A word that tells this installation's ids from another's.
    #[must_use]
    pub fn installation_id(&self) -> String {
        self.hasher.installation_id()
    }

    /// Tells somebody of all changes that this node hears of from now on, its own and others'.
    pub fn on_change(&self, told: impl Fn(ChangeEvent) + Send + Sync + 'static) {
        let _ = self.change_listener.set(Box::new(told));
    }

    pub(crate) fn notify(&self, heard: ChangeEvent) {
        if let Some(told) = self.change_listener.get() {
            told(heard);
        }
    }

    /// Lets the database go.
    pub async fn close(&self) {
        self.db.close().await;
    }

    pub(crate) fn now_seconds(&self) -> i64 {
        self.now_millis() / 1_000
    }

    pub(crate) fn now_millis(&self) -> i64 {
        i64::try_from(self.clock.now().as_micros() / 1_000).unwrap_or(i64::MAX)
    }
}

impl std::fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlPlane").field("db", &self.kind()).field("revision", &self.revision()).finish()
    }
}
