//! A caller's quota as it is replicated: by the table hash of what identifies the caller, never by its value.

use crate::key_hash::Subject;
use crate::overrides::QuotaOverride;
use serde::{Deserialize, Serialize};

/// A changed quota.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedQuota {
    /// Table hash of the caller ([`crate::KeyHash::table_hash`]).
    pub hash: u64,
    /// What identifies the caller.
    #[serde(default, skip_serializing_if = "Subject::is_api_key")]
    pub subject: Subject,
    /// Control revision of the change.
    pub revision: i64,
    /// Time of the change, in milliseconds.
    pub updated_at: i64,
    /// `None` if the quota was deleted.
    pub terms: Option<ReplicatedTerms>,
}

/// The terms of a quota; times in seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedTerms {
    /// The caller's tier.
    pub tier: Option<String>,
    /// Limits that replace the rules'.
    pub overrides: Vec<QuotaOverride>,
    /// Start; `None` if they are in effect.
    pub effective_at: Option<i64>,
    /// Expiry.
    pub expires_at: Option<i64>,
    /// The terms in effect until these start.
    pub until: Option<PriorReplicatedTerms>,
}

/// The terms in effect until others start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorReplicatedTerms {
    /// The caller's tier.
    pub tier: Option<String>,
    /// Limits that replace the rules'.
    pub overrides: Vec<QuotaOverride>,
    /// Expiry of these terms, had they not been replaced.
    pub expires_at: Option<i64>,
}
