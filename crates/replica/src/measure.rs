//! An emergency measure as it is replicated: what it does, to whom, and until when. Its reason and author stay in the
//! database.

use crate::key_hash::KeyHash;
use serde::{Deserialize, Serialize};
use tollgate_core::Timestamp;
use tollgate_engine::{Measure, MeasureAction, MeasureTarget};

/// A replicated measure, in the words of the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedMeasure {
    /// Id of the measure.
    pub id: String,
    /// Action, such as `block`.
    pub action: String,
    /// Kind of the target, such as `api_key`; of an attribute without a kind of its own, `attribute:` and its name, or
    /// `secret:` if the target is a hash.
    pub kind: String,
    /// The target; of an API key, its hash.
    pub target: String,
    /// Thousandths of each limit, for `tighten`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factor: Option<i64>,
    /// Expiry, in milliseconds.
    pub expires_at: i64,
}

impl ReplicatedMeasure {
    /// Returns the measure for the limiter.
    ///
    /// # Errors
    /// What this version cannot read, perhaps because a newer one has written it.
    pub fn to_measure(&self) -> Result<Measure, String> {
        let corrupt = |detail: &str| format!("emergency {}: {detail}", self.id);
        let action = match self.action.as_str() {
            "block" => MeasureAction::Block,
            "exempt" => MeasureAction::Exempt,
            "disable_rule" => MeasureAction::DisableRule,
            "allow_all" => MeasureAction::AllowAll,
            "shadow_all" => MeasureAction::ShadowAll,
            "tighten" => {
                let factor = self.factor.and_then(|factor| u32::try_from(factor).ok());
                MeasureAction::Tighten(factor.ok_or_else(|| corrupt("missing factor"))?)
            }
            other => return Err(corrupt(&format!("unknown action `{other}`"))),
        };
        let target = match self.kind.as_str() {
            "all" => MeasureTarget::All,
            "api_key" => {
                let hash = KeyHash::parse(&self.target).ok_or_else(|| corrupt("invalid key hash"))?;
                MeasureTarget::ApiKey(hash.table_hash())
            }
            "tenant" => MeasureTarget::Tenant(self.target.as_str().into()),
            "address" => {
                MeasureTarget::Address(self.target.parse().map_err(|reason: String| corrupt(&reason))?)
            }
            "endpoint" => MeasureTarget::Endpoint(self.target.as_str().into()),
            "rule" => MeasureTarget::Rule(self.target.as_str().into()),
            other => match other.split_once(':') {
                Some(("attribute", key)) => {
                    MeasureTarget::Attribute { key: key.into(), value: self.target.as_str().into() }
                }
                Some(("secret", key)) => {
                    let hash = KeyHash::parse(&self.target).ok_or_else(|| corrupt("invalid hash"))?;
                    MeasureTarget::Secret { key: key.into(), hash: hash.table_hash() }
                }
                _ => return Err(corrupt(&format!("unknown target kind `{other}`"))),
            },
        };
        let expires_at = timestamp(self.expires_at);
        Ok(Measure { name: format!("emergency:{}", self.id).into(), action, target, expires_at })
    }
}

/// Converts milliseconds to the limiter's timestamp.
pub(crate) fn timestamp(millis: i64) -> Timestamp {
    Timestamp::from_micros(u64::try_from(millis).unwrap_or(0).saturating_mul(1_000))
}
