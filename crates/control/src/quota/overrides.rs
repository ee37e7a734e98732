//! One limit of a quota, in place of a rule's.

use serde::{Deserialize, Serialize};
use tollgate_rules::Override;
use utoipa::ToSchema;

/// One limit in place of a rule's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Override)]
pub struct QuotaOverride {
    /// Which rule.
    #[schema(min_length = 1, max_length = 512)]
    pub descriptor: String,
    /// Units in a period.
    pub requests_per_unit: u64,
    /// The period: `minute`, or any other such as `30s`.
    #[serde(alias = "period")]
    #[schema(min_length = 1, max_length = 64)]
    pub unit: String,
    /// The most at one instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

impl QuotaOverride {
    pub(crate) fn from_rule(rule: &Override) -> Self {
        let Override { descriptor, count, period, burst } = rule.clone();
        Self { descriptor, requests_per_unit: count, unit: period, burst }
    }

    pub(crate) fn to_rule(&self) -> Override {
        Override {
            descriptor: self.descriptor.clone(),
            count: self.requests_per_unit,
            period: self.unit.clone(),
            burst: self.burst,
        }
    }
}
