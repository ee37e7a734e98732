//! Emergency measures in the API: requests, records, and validation.

use crate::error::{ValidationError, check_text, invalid};
use serde::{Deserialize, Serialize};
use tollgate_engine::Network;
use tollgate_replica::{KeyHasher, prefix};
use tollgate_rules::{ADAPT_RULE, Domain, Ruleset};
use utoipa::ToSchema;
use utoipa::openapi::Ref;
use utoipa::openapi::schema::{AdditionalProperties, Object, ObjectBuilder, Type};

/// Default time to live of a measure, in seconds.
const DEFAULT_TTL: u64 = 3_600;
/// Maximum time to live without renewal, in seconds: a day.
const MAX_TTL: u64 = 86_400;

/// A request to create a measure.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmergencySpec {
    /// What the measure does.
    pub action: EmergencyAction,
    /// Affected requests; all traffic if absent.
    pub target: Option<EmergencyTarget>,
    /// Factor that limits are multiplied by, for `tighten`.
    pub factor: Option<f64>,
    /// Reason, recorded in the audit log.
    pub reason: String,
    /// Time to live in seconds; an hour if absent.
    pub ttl_seconds: Option<u64>,
}

/// The effect of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmergencyAction {
    /// Denies every matching request.
    Block,
    /// Multiplies limits by a factor below 1.
    Tighten,
    /// Allows matching requests without counting.
    Exempt,
    /// Disables one rule.
    DisableRule,
    /// Allows every request without counting.
    AllowAll,
    /// Counts and logs; denies nothing.
    ShadowAll,
}

/// The requests that a measure affects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmergencyTarget {
    /// The attribute that is compared.
    pub kind: TargetKind,
    /// The value to match; for an API key, responses contain only its first characters.
    #[serde(default)]
    pub value: String,
}

/// Kind of a measure's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TargetKind {
    /// The attribute `api_key`.
    ApiKey,
    /// The attribute `tenant`.
    Tenant,
    /// The network of the attribute `remote_address`.
    Address,
    /// The attribute `endpoint`.
    Endpoint,
    /// A rule, by name.
    Rule,
    /// All traffic.
    All,
}

/// A stored measure.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = Emergency)]
pub struct EmergencyRecord {
    /// Id of the measure; decisions refer to it as `emergency:` and this id.
    pub id: String,
    /// What the measure does.
    pub action: EmergencyAction,
    /// Affected requests.
    #[schema(schema_with = target_schema)]
    pub target: EmergencyTarget,
    /// Factor that limits are multiplied by.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = f64)]
    pub factor: Option<f64>,
    /// Reason for the measure.
    pub reason: String,
    /// Principal that created it.
    pub author: String,
    /// Creation time.
    pub created_at: String,
    /// Expiry.
    pub expires_at: String,
    /// Control revision of the last change.
    pub revision: i64,
}

/// A measure as a database row, also used in the snapshot.
pub(crate) type EmergencyRow =
    (String, String, String, String, String, Option<i64>, String, String, i64, i64, i64);

/// Schema of a target in responses: a measure for all traffic has an empty `value`, which a request may omit.
fn target_schema() -> Object {
    let value = Object::with_type(Type::String);
    ObjectBuilder::new()
        .property("kind", Ref::from_schema_name("TargetKind"))
        .required("kind")
        .property("value", value)
        .required("value")
        .additional_properties(Some(AdditionalProperties::FreeForm(false)))
        .build()
}

/// A validated measure.
pub(crate) struct ValidEmergency {
    pub(crate) action: EmergencyAction,
    pub(crate) kind: TargetKind,
    /// The stored target: for an API key, its hash.
    pub(crate) target: String,
    pub(crate) target_display: String,
    pub(crate) thousandths: Option<i64>,
    pub(crate) reason: String,
    /// Time to live, in milliseconds.
    pub(crate) ttl: i64,
}

/// Returns the time to live, in milliseconds.
pub(crate) fn parse_ttl(ttl_seconds: Option<u64>) -> Result<i64, ValidationError> {
    match ttl_seconds.unwrap_or(DEFAULT_TTL) {
        seconds @ 1..=MAX_TTL => Ok(i64::try_from(seconds * 1_000).unwrap_or(i64::MAX)),
        _ => Err(invalid(
            "ttl_seconds",
            format!("must be between 1 and {MAX_TTL}; renew the measure if it must last longer"),
        )),
    }
}

impl EmergencySpec {
    pub(crate) fn validate(
        self,
        hasher: &KeyHasher,
        rules: &Ruleset,
    ) -> Result<ValidEmergency, ValidationError> {
        use EmergencyAction::{AllowAll, Block, DisableRule, Exempt, ShadowAll, Tighten};
        let target = self.target.unwrap_or(EmergencyTarget { kind: TargetKind::All, value: String::new() });
        let kind = target.kind;
        let fits = match self.action {
            AllowAll | ShadowAll => kind == TargetKind::All,
            DisableRule => kind == TargetKind::Rule,
            Tighten => kind != TargetKind::Rule,
            Block | Exempt => !matches!(kind, TargetKind::Rule | TargetKind::All),
        };
        if !fits {
            return Err(invalid(
                "target.kind",
                match self.action {
                    AllowAll | ShadowAll => "this action affects all traffic; omit `target`",
                    DisableRule => "must be `rule`, with its name as `value`",
                    Tighten => "must be api_key, tenant, address, endpoint or all",
                    Block | Exempt => "must be api_key, tenant, address or endpoint",
                },
            ));
        }
        let thousandths = match (self.action, self.factor) {
            (Tighten, Some(factor)) if (0.001..1.0).contains(&factor) => {
                Some((factor * 1_000.0).round().clamp(1.0, 999.0) as i64)
            }
            (Tighten, _) => {
                return Err(invalid("factor", "must be between 0.001 and 0.999"));
            }
            (_, Some(_)) => return Err(invalid("factor", "only valid for `tighten`; omit it")),
            (_, None) => None,
        };
        let value = target.value;
        let min_length = usize::from(kind != TargetKind::All);
        check_text("target.value", &value, min_length, if kind == TargetKind::All { 0 } else { 512 })?;
        let (target, shown) = match kind {
            TargetKind::ApiKey => (hasher.hash(&value).to_string(), format!("{}…", prefix(&value))),
            TargetKind::Address => {
                let _: Network = value.parse().map_err(|reason: String| invalid("target.value", reason))?;
                (value.clone(), value)
            }
            TargetKind::Rule => {
                if !has_rule(rules, &value) {
                    let reason = "no active rule has this name; `tollgate rules show current` and GET /admin/v1/rules/current show the rules";
                    return Err(invalid("target.value", reason));
                }
                (value.clone(), value)
            }
            TargetKind::Endpoint if value.trim_end_matches('*').contains('*') => {
                return Err(invalid("target.value", "`*` is only allowed at the end"));
            }
            _ => (value.clone(), value),
        };
        check_text("reason", &self.reason, 1, 512)?;
        let ttl = parse_ttl(self.ttl_seconds)?;
        Ok(ValidEmergency {
            action: self.action,
            kind,
            target,
            target_display: shown,
            thousandths,
            reason: self.reason,
            ttl,
        })
    }
}

/// Returns whether a measure can be for a rule of this name: one of the rules, or the limits that follow signals, which the names of
/// `overload` stand for without being a rule.
fn has_rule(rules: &Ruleset, name: &str) -> bool {
    let adapts = |domain: &Domain| domain.overload().is_some_and(|overload| overload.adapt.is_some());
    rules.rules().iter().any(|rule| rule.name == name) || (name == ADAPT_RULE && rules.domains().any(adapts))
}
