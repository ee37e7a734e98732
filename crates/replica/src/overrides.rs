//! Limit override of a quota, which replaces a rule's limit.

use serde::{Deserialize, Serialize};
use tollgate_rules::Override;

/// A limit that replaces a rule's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = Override))]
#[serde(deny_unknown_fields)]
pub struct QuotaOverride {
    /// The rule whose limit is replaced; `default` is the rule on `api_key` alone.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 512))]
    pub descriptor: String,
    /// Units allowed per period; 0 blocks all.
    pub requests_per_unit: u64,
    /// The period: `minute`, or any other such as `30s`.
    #[serde(alias = "period")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 64))]
    pub unit: String,
    /// Maximum number of units at one instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

impl QuotaOverride {
    /// Returns the override in this form.
    #[must_use]
    pub fn from_rule(rule: &Override) -> Self {
        let Override { descriptor, count, period, burst } = rule.clone();
        Self { descriptor, requests_per_unit: count, unit: period, burst }
    }

    /// Returns the override for the rules.
    #[must_use]
    pub fn to_rule(&self) -> Override {
        Override {
            descriptor: self.descriptor.clone(),
            count: self.requests_per_unit,
            period: self.unit.clone(),
            burst: self.burst,
        }
    }
}
