//! Control plane of a node: the database connection, and the in-memory state replicated from it.

use crate::auth::offline::OfflineAccess;
use crate::auth::secret::generate_id;
use crate::auth::verified::VerifiedTokens;
use crate::db::migrate::{is_current, is_initialized, migrate};
use crate::db::{Db, on, redact_password};
use crate::error::ControlError;
use crate::replication::hot_counters::HotCounters;
use crate::replication::lag::PropagationLag;
use crate::replication::node_record::NodeRecord;
use crate::rules::revision::PublishedRules;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::{Mutex, Notify, watch};
use tollgate_core::{Clock, Timestamp};
use tollgate_engine::ActiveMeasures;
use tollgate_replica::QuotaTable;
use tollgate_replica::{KeyHash, KeyHasher};

/// The control-plane database, and the state that this node has replicated from it.
pub struct ControlPlane {
    pub(crate) db: Db,
    pub(crate) hasher: KeyHasher,
    pub(crate) quota_table: Arc<QuotaTable>,
    pub(crate) measures: Arc<ActiveMeasures>,
    /// The rows of the active measures, for the snapshot and to detect changes.
    pub(crate) measure_rows: std::sync::Mutex<Vec<crate::emergency::record::EmergencyRow>>,
    /// Increases whenever the snapshot's measures or grants are out of date.
    pub(crate) snapshot_generation: AtomicU64,
    pub(crate) clock: Arc<dyn Clock>,
    /// Serializes readers of changes, so that changes are applied in order.
    pub(crate) sync_lock: Mutex<()>,
    /// Last control revision in the quota table.
    pub(crate) quota_revision: AtomicI64,
    /// Last control revision up to which measures, rules and grants are known; they are read separately from quotas.
    pub(crate) measures_revision: AtomicI64,
    /// Time at which the quota table was last known to be current, in milliseconds.
    pub(crate) current_at: AtomicI64,
    pub(crate) verified_tokens: VerifiedTokens,
    /// Principals authenticated while the database was available.
    pub(crate) offline_access: OfflineAccess,
    /// Whether the last read of changes failed.
    pub(crate) unavailable: AtomicBool,
    /// The nodes as last read, and the time of that read.
    pub(crate) node_cache: std::sync::Mutex<Option<(i64, Vec<NodeRecord>)>>,
    /// Allows one import at a time.
    pub(crate) import_lock: Arc<Mutex<()>>,
    /// Whether the quota table was ever current.
    pub(crate) loaded: AtomicBool,
    /// Counts when the quota table is read again from nothing: odd while it is incomplete because of that.
    pub(crate) reloads: AtomicU64,
    pub(crate) lag: PropagationLag,
    /// The secret that API keys are hashed with.
    pub(crate) secret: Vec<u8>,
    /// Whether the database was available at startup or has been since.
    pub(crate) prepared: AtomicBool,
    /// The active rule revision.
    pub(crate) published: watch::Sender<Option<Arc<PublishedRules>>>,
    /// Id of this process among those that share the database.
    pub(crate) instance: String,
    /// The last rules change that listeners were notified of.
    pub(crate) notified_rules: AtomicI64,
    pub(crate) change_listener: OnceLock<ChangeListener>,
    /// Signals that another node may have requested this node's traffic sample.
    pub(crate) sample_requested: Notify,
    /// Counters that are hot in the fleet.
    pub(crate) hot: HotCounters,
}

/// A change, made on any node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeEvent {
    /// Quotas or grants.
    Quotas,
    /// Emergency measures.
    Emergencies,
    /// Published rules, active or pending.
    Rules,
}

type ChangeListener = Box<dyn Fn(ChangeEvent) + Send + Sync>;

impl ControlPlane {
    /// Opens the database, creates missing tables, and reads all quotas.
    ///
    /// # Errors
    /// [`ControlError`] if the database cannot be used.
    pub async fn open(address: &str, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        let control = Self::connect(address, clock).await?;
        control.catch_up().await?;
        Ok(control)
    }

    /// Opens the database without reading quotas: for processes that decide nothing or call
    /// [`ControlPlane::catch_up`] later.
    ///
    /// # Errors
    /// [`ControlError`] if the database cannot be used.
    pub async fn connect(address: &str, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        Self::with_db(Db::open(address).await?, clock).await
    }

    /// Opens an existing control-plane database. A mistyped address creates nothing.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not exist or cannot be used.
    pub async fn connect_existing(address: &str, clock: Arc<dyn Clock>) -> Result<Arc<Self>, ControlError> {
        let db = Db::open_existing(address).await?;
        if !is_initialized(&db).await? {
            let shown = redact_password(address)?;
            let reason = "it has no Tollgate tables; check the address";
            return Err(ControlError::Address(format!("no such database: {shown}: {reason}")));
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
        // Rules and measures must be in place before the first request.
        control.catch_up_rules().await?;
        Ok(control)
    }

    pub(crate) fn new(db: Db, secret: &[u8], clock: Arc<dyn Clock>) -> Arc<Self> {
        let hasher = KeyHasher::new(secret);
        let started = clock.now().as_micros();
        let table_hash = {
            let hasher = hasher.clone();
            move |api_key: &str| hasher.hash(api_key).table_hash()
        };
        Arc::new(Self {
            db,
            quota_table: Arc::new(QuotaTable::new(hasher.clone())),
            measures: Arc::new(ActiveMeasures::new(table_hash)),
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
            reloads: AtomicU64::new(0),
            lag: PropagationLag::default(),
            published: watch::Sender::new(None),
            secret: secret.to_vec(),
            prepared: AtomicBool::new(true),
            // Without randomness, the start time identifies the node.
            instance: generate_id().unwrap_or_else(|_| started.to_string()),
            notified_rules: AtomicI64::new(0),
            change_listener: OnceLock::new(),
            sample_requested: Notify::new(),
            hot: HotCounters::default(),
        })
    }

    /// Returns the quota table, for the limiter.
    #[must_use]
    pub fn quota_table(&self) -> Arc<QuotaTable> {
        Arc::clone(&self.quota_table)
    }

    /// Returns the emergency measures, for the limiter.
    #[must_use]
    pub fn active_measures(&self) -> Arc<ActiveMeasures> {
        Arc::clone(&self.measures)
    }

    /// Returns a keyed hash of an API key: the first 64 bits of its quota's `id`.
    #[must_use]
    pub fn key_id(&self, api_key: &str) -> u64 {
        self.hasher.hash(api_key).short_id()
    }

    /// Returns the keyed hash of an API key: its quota's `id`.
    #[must_use]
    pub fn key_hash(&self, api_key: &str) -> KeyHash {
        self.hasher.hash(api_key)
    }

    /// Returns the kind of database.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        self.db.kind()
    }

    /// Returns the last control revision that is active on this node.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.quota_revision.load(Ordering::Relaxed)
    }

    /// Returns whether this node has read all quotas at least once.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Relaxed)
    }

    /// Returns a number that changes whenever the quota table is read again from nothing; `None` while it is incomplete,
    /// because of that or because it was never complete.
    #[must_use]
    pub fn table_generation(&self) -> Option<u64> {
        let reloads = self.reloads.load(Ordering::Acquire);
        (self.is_loaded() && reloads.is_multiple_of(2)).then_some(reloads)
    }

    /// Returns whether the last read of changes failed.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.unavailable.load(Ordering::Relaxed)
    }

    /// Returns the propagation lag of changes to this node.
    #[must_use]
    pub const fn lag(&self) -> &PropagationLag {
        &self.lag
    }

    /// Returns the staleness of this node's state, in milliseconds.
    #[must_use]
    pub fn staleness_millis(&self) -> i64 {
        (self.now_millis() - self.current_at.load(Ordering::Relaxed)).max(0)
    }

    /// Returns an identifier that distinguishes this installation's ids from another's.
    #[must_use]
    pub fn installation_id(&self) -> String {
        self.hasher.installation_id()
    }

    /// Sets the listener for all changes that this node applies from now on, its own and those of other nodes.
    pub fn on_change(&self, listener: impl Fn(ChangeEvent) + Send + Sync + 'static) {
        let _ = self.change_listener.set(Box::new(listener));
    }

    pub(crate) fn notify(&self, event: ChangeEvent) {
        if let Some(listener) = self.change_listener.get() {
            listener(event);
        }
    }

    /// Closes the database connections.
    pub async fn close(&self) {
        self.db.close().await;
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
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
