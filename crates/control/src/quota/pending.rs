//! What goes on acting until an agreement does that is to come: a caller on one plan who is to get another next month keeps the
//! one until then. It is kept in the row of what is to come, so that there is one agreement with a caller, one revision of it,
//! and nothing that would have to be written when the time has come. Two rows were rejected: each reader would have to choose.

use crate::db::time::format_time;
use crate::error::ControlError;
use crate::quota::overrides::QuotaOverride;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What acts until then, as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = QuotaUntil)]
pub struct CurrentTerms {
    /// The caller's tier.
    #[schema(required = true)]
    pub tier: Option<String>,
    /// Limits in place of rules' own.
    #[serde(default)]
    #[schema(required = true)]
    pub overrides: Vec<QuotaOverride>,
    /// When it would have ended by itself.
    #[schema(required = true, format = DateTime)]
    pub expires_at: Option<String>,
}

/// The same with its time in seconds; with its limits as they are kept, in JSON, or as they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PriorTerms<O> {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: O,
    pub(crate) expires_at: Option<i64>,
}

/// As rows have it: the limits are there if anything is.
pub(crate) type PriorTermsColumns = (Option<String>, Option<String>, Option<i64>);

impl PriorTerms<String> {
    pub(crate) fn from_columns((tier, overrides, expires_at): PriorTermsColumns) -> Option<Self> {
        overrides.map(|overrides| Self { tier, overrides, expires_at })
    }

    pub(crate) fn columns(this: Option<Self>) -> PriorTermsColumns {
        this.map_or((None, None, None), |this| (this.tier, Some(this.overrides), this.expires_at))
    }

    /// What of an agreement acts now: itself, or what acts until it does.
    pub(crate) fn active(self, effective_at: Option<i64>, until: Option<Self>, now: i64) -> Option<Self> {
        let acts = if is_pending(effective_at, now) { until } else { Some(self) };
        acts.filter(|acts| acts.expires_at.is_none_or(|end| end > now))
    }

    pub(crate) fn parse(self) -> Result<PriorTerms<Vec<QuotaOverride>>, ControlError> {
        let Self { tier, overrides, expires_at } = self;
        Ok(PriorTerms { tier, overrides: parse_overrides(&overrides)?, expires_at })
    }
}

impl PriorTerms<Vec<QuotaOverride>> {
    pub(crate) fn to_current(self) -> CurrentTerms {
        let Self { tier, overrides, expires_at } = self;
        CurrentTerms { tier, overrides, expires_at: expires_at.map(format_time) }
    }
}

pub(crate) fn is_pending(effective_at: Option<i64>, now: i64) -> bool {
    effective_at.is_some_and(|from| from > now)
}

/// Limits as they are kept.
pub(crate) fn parse_overrides(text: &str) -> Result<Vec<QuotaOverride>, ControlError> {
    if text == "[]" {
        return Ok(Vec::new());
    }
    serde_json::from_str(text)
        .map_err(|error| ControlError::Corrupt(format!("the overrides of a quota: {error}")))
}
