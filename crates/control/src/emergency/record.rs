//! What operators decide in an emergency, as they write it and read it.

use crate::auth::key_hash::{KeyHasher, prefix};
use crate::error::{ValidationError, check_text, invalid};
use serde::{Deserialize, Serialize};
use tollgate_engine::Network;
use tollgate_rules::Ruleset;
use utoipa::ToSchema;
use utoipa::openapi::Ref;
use utoipa::openapi::schema::{AdditionalProperties, Object, ObjectBuilder, Type};

/// How long a measure lasts unless somebody says otherwise, in seconds.
const DEFAULT_TTL: u64 = 3_600;
/// The longest that it may last without being renewed: a day.
const MAX_TTL: u64 = 86_400;

/// A measure as it is sent.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = EmergencyDraft)]
pub struct EmergencySpec {
    /// What to do.
    pub action: EmergencyAction,
    /// To whom; to everybody, if it does not say.
    pub target: Option<EmergencyTarget>,
    /// By what limits are multiplied, to tighten.
    pub factor: Option<f64>,
    /// Why.
    pub reason: String,
    /// For how long, in seconds; an hour, if it does not say.
    pub ttl_seconds: Option<u64>,
}

/// What a measure does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmergencyAction {
    /// Turns away.
    Block,
    /// Decides by a part of each limit.
    Tighten,
    /// Lets pass, uncounted.
    Exempt,
    /// Leaves a rule out.
    DisableRule,
    /// Lets everything pass.
    AllowAll,
    /// Counts and tells, but denies nothing.
    ShadowAll,
}

/// Whom it is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmergencyTarget {
    /// What is looked at.
    pub kind: TargetKind,
    /// What it must be; of an API key only the first characters are ever told.
    #[serde(default)]
    pub value: String,
}

/// What of a request is looked at.
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
    /// The rules it meets.
    Rule,
    /// Nothing: everybody is meant.
    All,
}

/// A measure as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = Emergency)]
pub struct EmergencyRecord {
    /// Its name; decisions call it `emergency:` and this.
    pub id: String,
    /// What it does.
    pub action: EmergencyAction,
    /// To whom.
    #[schema(schema_with = target_schema)]
    pub target: EmergencyTarget,
    /// By what limits are multiplied.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = f64)]
    pub factor: Option<f64>,
    /// Why.
    pub reason: String,
    /// Who decided it.
    pub author: String,
    /// When it was decided.
    pub created_at: String,
    /// When it ends.
    pub expires_at: String,
    /// The revision of the last change.
    pub revision: i64,
}

/// One of them, as it is kept here and in the snapshot.
pub(crate) type EmergencyRow =
    (String, String, String, String, String, Option<i64>, String, String, i64, i64, i64);

/// A target as it is told: a measure against everybody has an empty `value`, which a draft may leave out.
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

/// A measure that can act.
pub(crate) struct ValidEmergency {
    pub(crate) action: EmergencyAction,
    pub(crate) kind: TargetKind,
    /// What is kept: of an API key its hash.
    pub(crate) target: String,
    pub(crate) target_display: String,
    pub(crate) thousandths: Option<i64>,
    pub(crate) reason: String,
    /// In milliseconds.
    pub(crate) ttl: i64,
}

/// How long it lasts, in milliseconds.
pub(crate) fn parse_ttl(ttl_seconds: Option<u64>) -> Result<i64, ValidationError> {
    match ttl_seconds.unwrap_or(DEFAULT_TTL) {
        seconds @ 1..=MAX_TTL => Ok(i64::try_from(seconds * 1_000).unwrap_or(i64::MAX)),
        _ => Err(invalid("ttl_seconds", format!("write 1 to {MAX_TTL}; renew it if it must last longer"))),
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
                    AllowAll | ShadowAll => "this is about everybody: leave `target` out",
                    DisableRule => "write `rule`, and its name as `value`",
                    Tighten => "write api_key, tenant, address, endpoint or all",
                    Block | Exempt => "write api_key, tenant, address or endpoint",
                },
            ));
        }
        let thousandths = match (self.action, self.factor) {
            (Tighten, Some(factor)) if (0.001..1.0).contains(&factor) => {
                Some((factor * 1_000.0).round().clamp(1.0, 999.0) as i64)
            }
            (Tighten, _) => {
                return Err(invalid("factor", "write what limits are multiplied by, from 0.001 to 0.999"));
            }
            (_, Some(_)) => return Err(invalid("factor", "only `tighten` has one")),
            (_, None) => None,
        };
        let value = target.value;
        let least = usize::from(kind != TargetKind::All);
        check_text("target.value", &value, least, if kind == TargetKind::All { 0 } else { 512 })?;
        let (target, shown) = match kind {
            TargetKind::ApiKey => (hasher.hash(&value).to_string(), format!("{}…", prefix(&value))),
            TargetKind::Address => {
                let _: Network = value.parse().map_err(|why: String| invalid("target.value", why))?;
                (value.clone(), value)
            }
            TargetKind::Rule => {
                if !rules.rules().iter().any(|rule| rule.name == value) {
                    let why =
                        "no rule that acts now has this name; GET /v1/rules or `tollgate explain` tell names";
                    return Err(invalid("target.value", why));
                }
                (value.clone(), value)
            }
            TargetKind::Endpoint if value.trim_end_matches('*').contains('*') => {
                return Err(invalid("target.value", "a `*` can only stand at the end"));
            }
            _ => (value.clone(), value),
        };
        check_text("reason", &self.reason, 1, 512)?;
        let lasts = parse_ttl(self.ttl_seconds)?;
        Ok(ValidEmergency {
            action: self.action,
            kind,
            target,
            target_display: shown,
            thousandths,
            reason: self.reason,
            ttl: lasts,
        })
    }
}
