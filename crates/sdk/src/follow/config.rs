//! Settings, errors and status of a follower.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use tollgate_core::Timestamp;
use tollgate_rules::{Options, PermitRelease};

/// How to follow a server.
#[derive(Clone)]
pub struct FollowConfig {
    /// Admin URL of the server, `http://` or `https://`.
    pub address: String,
    /// Admin URLs of further servers of the same database, each followed while those before it do not respond.
    pub other_addresses: Vec<String>,
    /// A token with the role `replica`. Without tokens, a server on loopback needs none.
    pub token: Option<String>,
    /// CA bundle for `https://`, in PEM; the system's authorities if absent.
    pub ca: Option<PathBuf>,
    /// File for the snapshot, and with `.quotas` appended for the quotas in it. It contains the secret that API keys are
    /// hashed with, and only its owner may read it. Without it, a start needs the server.
    pub snapshot: Option<PathBuf>,
    /// Time between two requests for changes: 2 s.
    pub poll: Duration,
    /// Time between two comparisons of everything: 5 minutes.
    pub reconcile: Duration,
    /// Time limit of connecting, of a response, and of each piece of the quotas: 5 s.
    pub timeout: Duration,
    /// Maximum size of the state (rules, measures, grants) and of a page of changes, in bytes: 64 MiB.
    pub max_state_bytes: u64,
    /// Maximum size of all quotas, in bytes: 1 GiB, for some 50 million callers.
    pub max_quota_bytes: u64,
    /// How rules are compiled here. What the server sets for all (its profile, quota mode) goes before.
    pub options: Options,
}

impl FollowConfig {
    /// Returns the usual settings for a server.
    #[must_use]
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            other_addresses: Vec::new(),
            token: None,
            ca: None,
            snapshot: None,
            poll: Duration::from_secs(2),
            reconcile: Duration::from_secs(300),
            timeout: Duration::from_secs(5),
            max_state_bytes: 64 << 20,
            max_quota_bytes: 1 << 30,
            options: Options { permits: PermitRelease::Released, ..Options::default() },
        }
    }

    /// Returns the address, unless it may contain credentials.
    fn shown_address(&self) -> &str {
        if self.address.contains(['@', '?']) { "(not shown)" } else { &self.address }
    }

    pub(super) fn validate(&self) -> Result<(), FollowError> {
        let wrong = |text: &str| Err(FollowError::Config(text.to_owned()));
        if self.poll < Duration::from_millis(50) {
            return wrong("`poll` must be at least 50 ms");
        }
        if self.reconcile < self.poll {
            return wrong("`reconcile` must not be shorter than `poll`");
        }
        if self.timeout.is_zero() {
            return wrong("`timeout` must not be 0");
        }
        Ok(())
    }
}

/// The token is left out, and so is an address with credentials.
impl fmt::Debug for FollowConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FollowConfig")
            .field("address", &self.shown_address())
            .field("snapshot", &self.snapshot)
            .field("poll", &self.poll)
            .field("reconcile", &self.reconcile)
            .finish_non_exhaustive()
    }
}

/// Why a server cannot be followed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FollowError {
    /// A setting is wrong.
    #[error("{0}")]
    Config(String),
    /// The server cannot be reached, or does not respond in time.
    #[error("the server is unavailable: {0}")]
    Unavailable(String),
    /// The server refuses the request: wrong token, wrong role, no database.
    #[error("the server refuses the request ({status}): {detail}")]
    Refused {
        /// Status of the response.
        status: u16,
        /// What the server says about it.
        detail: String,
    },
    /// The server's response, or the snapshot, cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// There is neither a server nor a usable snapshot.
    #[error("{server}; and there is no usable snapshot: {snapshot}")]
    NoState {
        /// What is wrong with the server.
        server: Box<FollowError>,
        /// What is wrong with the snapshot.
        snapshot: String,
    },
    /// The rules have no such domain.
    #[error("the server's rules have no domain `{0}`")]
    UnknownDomain(String),
}

/// What a follower knows, and how well it follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FollowStatus {
    /// Control revision up to which quotas are known.
    pub revision: i64,
    /// Hash of the active rules, as in decisions.
    pub rules: String,
    /// Number of the published rule revision, if the server's rules are published ones.
    pub rev: Option<i64>,
    /// Number of quotas.
    pub quotas: usize,
    /// Number of emergency measures, including expired ones.
    pub measures: usize,
    /// Number of grants, including expired ones.
    pub grants: usize,
    /// Number of counters that are hot somewhere in the fleet; 0 without limits by leases.
    pub hot: usize,
    /// Time at which the server last confirmed all of this.
    pub confirmed_at: Option<Timestamp>,
    /// Whether this is the state of the snapshot, because the server has been unavailable since the start.
    pub is_from_snapshot: bool,
    /// Whether the quotas are known. Otherwise the rules apply without them.
    pub has_quotas: bool,
    /// Number of times that the whole state (rules, measures, grants) was read from the server: at the start, when
    /// something had changed, and for comparisons.
    pub states: u64,
    /// Number of times that all quotas were read from the server.
    pub full_reads: u64,
    /// Number of comparisons of everything.
    pub reconciliations: u64,
    /// What went wrong at the last attempt; the last good state is active.
    pub error: Option<String>,
    /// Why the server's rules cannot be used here; the last good ones are active.
    pub rules_error: Option<String>,
    /// Why the snapshot could not be written.
    pub snapshot_error: Option<String>,
}
