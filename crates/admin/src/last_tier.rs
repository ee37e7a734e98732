//! Tier of a caller whose plan comes with its requests: that of its latest request which this node still has.
//!
//! Such a caller has no quota that names its tier, and its key alone does not say which limits are in force for it. The
//! traffic sample has its requests of the last minutes, and the decision log its latest denials, which may be older. Both are
//! bounded. Rejected: a table of every caller's last tier, which strangers would fill.

use crate::AdminState;
use tollgate_observe::DecisionQuery;
use tollgate_rules::Domain;

/// The tier that the latest request of a caller states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LastTier {
    /// This node has no recent request of the caller.
    Unknown,
    /// The request states none.
    Absent,
    Named(String),
}

impl LastTier {
    fn new(tier: Option<&str>) -> Self {
        match tier {
            // The log may mask all values.
            Some(tier) if tier.contains('…') => Self::Unknown,
            Some(tier) => Self::Named(tier.to_owned()),
            None => Self::Absent,
        }
    }
}

/// Returns the tier in the latest request to a domain with this value of an attribute.
pub(crate) async fn last_tier(admin: &AdminState, domain: &Domain, key: &str, value: &str) -> LastTier {
    let (name, tier_key) = (domain.name().to_owned(), domain.tier_key().to_owned());
    if let Ok(manager) = admin.rule_manager() {
        let (sample, caller) = (manager.sample(), (key.to_owned(), value.to_owned()));
        let (name, tier_key) = (name.clone(), tier_key.clone());
        let find = move || {
            sample.last_request(&name, (&caller.0, &caller.1), |one| LastTier::new(one.value(&tier_key)))
        };
        if let Ok(Some(tier)) = tokio::task::spawn_blocking(find).await {
            return tier;
        }
    }
    let (key, domain) = (Some(value.to_owned()), Some(name));
    let query = DecisionQuery { key, domain, limit: 1, ..DecisionQuery::default() };
    let latest = admin.status.telemetry().and_then(|telemetry| telemetry.search(&query).0.pop());
    latest.map_or(LastTier::Unknown, |latest| LastTier::new(latest.value_of(&tier_key)))
}
