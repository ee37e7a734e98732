//! Whom a quota or grant is for: an attribute of requests and its value, validated against the rules. Any attribute that
//! rules count by identifies callers; one that they do not count by would do nothing, and is rejected.

use crate::control_plane::ControlPlane;
use crate::error::{ValidationError, check_text, invalid};
use crate::quota::record::{QuotaSpec, ValidQuota};
use tollgate_engine::Network;
use tollgate_replica::MAX_LENGTHS;
use tollgate_replica::{MAX_KEY_BYTES, network};
use tollgate_rules::{CALLER_KEY, Ruleset};

/// Maximum length of the name of an attribute that identifies callers, in bytes.
const MAX_KEY: usize = 128;

impl ControlPlane {
    /// Validates the quota of a caller: its key and its terms.
    pub(crate) fn validate_quota(
        &self,
        draft: QuotaSpec,
        rules: &Ruleset,
        key: &str,
        value: Option<&str>,
    ) -> Result<ValidQuota, ValidationError> {
        self.validate_caller(rules, key, value)?;
        draft.validate(rules, self.clock.now(), key, value)
    }

    /// Validates what identifies a caller: quotas and grants of an attribute that no rule counts by would do nothing.
    pub(crate) fn validate_caller(
        &self,
        rules: &Ruleset,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), ValidationError> {
        if key == CALLER_KEY {
            return Ok(());
        }
        check_text("key", key, 1, MAX_KEY)?;
        if !rules.is_quota_key(key) {
            let known = rules.quota_key_names().join(", ");
            return Err(invalid(
                "key",
                format!("no rule has a counter for each `{key}`; the rules count by {known}"),
            ));
        }
        let Some(value) = value else { return Ok(()) };
        check_text("value", value, 1, MAX_KEY_BYTES)?;
        let Some(network) = network(key, value) else {
            let is_address = |text: &str| text.parse::<std::net::IpAddr>().is_ok();
            // What looks like a network and is none would be an attribute that no request has.
            return match value.split_once('/').filter(|(address, _)| is_address(address)) {
                Some(_) => value.parse::<Network>().map(drop).map_err(|reason| invalid("value", reason)),
                None => Ok(()),
            };
        };
        check_length(&self.quota_table.lengths(key), network.bits())
    }
}

/// Checks that a network of this length may have a quota, beside networks of the lengths in use.
pub(crate) fn check_length(in_use: &[u8], bits: u8) -> Result<(), ValidationError> {
    if in_use.len() < MAX_LENGTHS || in_use.contains(&bits) {
        return Ok(());
    }
    Err(invalid(
        "value",
        format!("networks of {MAX_LENGTHS} lengths have quotas already; use one of these lengths"),
    ))
}
