//! Emergency measures in the API: requests, records, and validation.

use crate::db::time::format_millis;
use crate::error::{ControlError, ValidationError, check_text, invalid};
use serde::{Deserialize, Serialize};
use tollgate_engine::Network;
use tollgate_replica::{KeyHasher, prefix};
use tollgate_rules::{ADAPT_RULE, CALLER_KEY, Domain, Ruleset, may_be_secret};
use utoipa::ToSchema;
use utoipa::openapi::Ref;
use utoipa::openapi::schema::{AdditionalProperties, Object, ObjectBuilder, Type};

/// Default time to live of a measure, in seconds.
const DEFAULT_TTL: u64 = 3_600;
/// Maximum time to live without renewal, in seconds: a day.
const MAX_TTL: u64 = 86_400;
/// Maximum length of the name of an attribute, in bytes.
const MAX_KEY: usize = 128;

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
    /// Keeps an `exempt` in force until it is ended.
    #[serde(default)]
    pub permanent: bool,
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
    /// The attribute, for the kind `attribute`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The value to match; for an API key or another secret, responses contain only its first characters.
    #[serde(default)]
    pub value: String,
}

impl EmergencyTarget {
    /// Returns the target of all traffic.
    const fn all() -> Self {
        Self { kind: TargetKind::All, key: None, value: String::new() }
    }

    /// Replaces the kind `attribute` by the kind that is about the same attribute, if there is one.
    #[must_use]
    pub fn resolved(self) -> Self {
        let kind = match self.key.as_deref().filter(|_| self.kind == TargetKind::Attribute) {
            Some(CALLER_KEY) => TargetKind::ApiKey,
            Some("tenant") => TargetKind::Tenant,
            Some("remote_address") => TargetKind::Address,
            Some("endpoint") => TargetKind::Endpoint,
            _ => return self,
        };
        Self { kind, key: None, ..self }
    }

    /// Returns the stored kind, which contains the attribute.
    pub(crate) fn stored_kind(&self) -> String {
        match &self.key {
            Some(key) if may_be_secret(key) => format!("secret:{key}"),
            Some(key) => format!("attribute:{key}"),
            None => serialized_name(&self.kind),
        }
    }

    /// Returns the target with this stored kind.
    pub(crate) fn from_stored(kind: &str, shown: &str) -> Result<Self, ControlError> {
        let value = shown.to_owned();
        match kind.split_once(':') {
            Some((_, key)) => Ok(Self { kind: TargetKind::Attribute, key: Some(key.to_owned()), value }),
            None => Ok(Self { kind: from_serialized_name(kind)?, key: None, value }),
        }
    }
}

/// Returns the serialized name of an action or target kind, which is also its stored form.
pub(crate) fn serialized_name<T: Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

pub(crate) fn from_serialized_name<T: for<'a> Deserialize<'a>>(name: &str) -> Result<T, ControlError> {
    serde_json::from_value(name.into()).map_err(|_| {
        ControlError::Corrupt(format!("unknown action or target kind `{name}` of an emergency measure"))
    })
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
    /// Another attribute, which `key` names.
    Attribute,
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
    /// Expiry; `null` if it stays in force until it is ended.
    #[schema(required = true)]
    pub expires_at: Option<String>,
    /// Control revision of the last change.
    pub revision: i64,
}

/// The stored expiry of what does not expire, in milliseconds: the end of the year 9999, which every version can read.
const NEVER: i64 = 253_402_300_799_000;

/// Returns a stored expiry as the API shows it.
pub(crate) fn shown_expiry(millis: i64) -> Option<String> {
    (millis < NEVER).then(|| format_millis(millis))
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
        .property("key", Object::with_type(Type::String))
        .property("value", value)
        .required("value")
        .additional_properties(Some(AdditionalProperties::FreeForm(false)))
        .build()
}

/// A validated measure.
pub(crate) struct ValidEmergency {
    pub(crate) action: EmergencyAction,
    /// The stored target: for an API key or another secret, its hash.
    pub(crate) target: String,
    pub(crate) target_display: EmergencyTarget,
    pub(crate) thousandths: Option<i64>,
    pub(crate) reason: String,
    /// Time to live, in milliseconds; `None` if it does not expire.
    pub(crate) ttl: Option<i64>,
}

impl ValidEmergency {
    /// Returns the stored expiry.
    pub(crate) fn expires_at(&self, now: i64) -> i64 {
        self.ttl.map_or(NEVER, |ttl| now + ttl)
    }
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
        let target = self.target.unwrap_or(EmergencyTarget::all()).resolved();
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
                    Tighten => "must be api_key, tenant, address, endpoint, attribute or all",
                    Block | Exempt => "must be api_key, tenant, address, endpoint or attribute",
                },
            ));
        }
        match (&target.key, kind) {
            (Some(key), TargetKind::Attribute) => check_text("target.key", key, 1, MAX_KEY)?,
            (None, TargetKind::Attribute) => {
                return Err(invalid("target.key", "must be the attribute that is compared, such as user_id"));
            }
            (Some(_), _) => {
                return Err(invalid("target.key", "only valid for the kind `attribute`; omit it"));
            }
            (None, _) => {}
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
        let EmergencyTarget { key, value, .. } = target;
        let min_length = usize::from(kind != TargetKind::All);
        check_text("target.value", &value, min_length, if kind == TargetKind::All { 0 } else { 512 })?;
        let (target, shown) = match kind {
            TargetKind::ApiKey => (hasher.hash(&value).to_string(), format!("{}…", prefix(&value))),
            TargetKind::Attribute if key.as_deref().is_some_and(may_be_secret) => {
                (hasher.hash(&value).to_string(), format!("{}…", prefix(&value)))
            }
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
        let ttl = match (self.permanent, self.action, self.ttl_seconds) {
            (false, _, ttl_seconds) => Some(parse_ttl(ttl_seconds)?),
            (true, Exempt, None) => None,
            (true, Exempt, Some(_)) => {
                return Err(invalid("ttl_seconds", "it is permanent, so it has no time to live; omit one"));
            }
            (true, ..) => {
                return Err(invalid("permanent", "only valid for `exempt`; every other measure expires"));
            }
        };
        Ok(ValidEmergency {
            action: self.action,
            target,
            target_display: EmergencyTarget { kind, key, value: shown },
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
