//! Terms that stay in effect until a pending quota's `effective_at`: a caller that changes its plan next month keeps
//! the current one until then. They are stored in the row of the pending quota, so that a caller has one quota with
//! one revision, and nothing has to be written when the time comes. Rejected: two rows, because every reader would
//! have to choose.

use crate::db::time::format_time;
use crate::error::ControlError;
use serde::{Deserialize, Serialize};
use tollgate_replica::{PriorReplicatedTerms, QuotaOverride};
use utoipa::ToSchema;

/// The terms in effect until `effective_at`, in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CurrentTerms {
    /// The caller's tier.
    #[schema(required = true)]
    pub tier: Option<String>,
    /// Limits that replace the rules'.
    #[serde(default)]
    #[schema(required = true)]
    pub overrides: Vec<QuotaOverride>,
    /// Expiry of these terms, had they not been replaced.
    #[schema(required = true, format = DateTime)]
    pub expires_at: Option<String>,
}

/// The same terms with times in seconds, and with overrides either as stored (JSON) or parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PriorTerms<O> {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: O,
    pub(crate) expires_at: Option<i64>,
}

/// The terms as columns: `overrides` is set if there are any terms.
pub(crate) type PriorTermsColumns = (Option<String>, Option<String>, Option<i64>);

impl PriorTerms<String> {
    pub(crate) fn from_columns((tier, overrides, expires_at): PriorTermsColumns) -> Option<Self> {
        overrides.map(|overrides| Self { tier, overrides, expires_at })
    }

    pub(crate) fn columns(this: Option<Self>) -> PriorTermsColumns {
        this.map_or((None, None, None), |this| (this.tier, Some(this.overrides), this.expires_at))
    }

    /// Returns the terms in effect now: these, or those in effect until these start.
    pub(crate) fn active(self, effective_at: Option<i64>, until: Option<Self>, now: i64) -> Option<Self> {
        let active = if is_pending(effective_at, now) { until } else { Some(self) };
        active.filter(|terms| terms.expires_at.is_none_or(|end| end > now))
    }

    pub(crate) fn parse(self) -> Result<PriorTerms<Vec<QuotaOverride>>, ControlError> {
        let Self { tier, overrides, expires_at } = self;
        Ok(PriorTerms { tier, overrides: parse_overrides(&overrides)?, expires_at })
    }
}

impl PriorTerms<Vec<QuotaOverride>> {
    pub(crate) fn into_replicated(self) -> PriorReplicatedTerms {
        let Self { tier, overrides, expires_at } = self;
        PriorReplicatedTerms { tier, overrides, expires_at }
    }

    pub(crate) fn into_current(self) -> CurrentTerms {
        let Self { tier, overrides, expires_at } = self;
        CurrentTerms { tier, overrides, expires_at: expires_at.map(format_time) }
    }
}

pub(crate) fn is_pending(effective_at: Option<i64>, now: i64) -> bool {
    effective_at.is_some_and(|from| from > now)
}

/// Parses stored overrides.
pub(crate) fn parse_overrides(text: &str) -> Result<Vec<QuotaOverride>, ControlError> {
    if text == "[]" {
        return Ok(Vec::new());
    }
    serde_json::from_str(text)
        .map_err(|error| ControlError::Corrupt(format!("overrides of a quota: {error}")))
}
