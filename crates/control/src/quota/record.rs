//! A caller's quota: tier, overrides and validity, as sent and returned by the API, and its validation.

use crate::error::{ValidationError, check_text, parse_time};
use crate::quota::pending::CurrentTerms;
use serde::{Deserialize, Serialize};
use tollgate_core::Timestamp;
use tollgate_replica::QuotaOverride;
use tollgate_replica::network;
use tollgate_rules::{CALLER_KEY, CallerOverrides, Domain, Override, Rule, Ruleset};
use utoipa::ToSchema;

/// Tiers that are valid in rules that depend on tiers, even if none names them: they mean the rules' own limits.
const BUILT_IN_TIERS: [&str; 4] = ["free", "pro", "enterprise", "custom"];

/// Declares a message about a quota: its own fields, followed by the common ones. Rejected: a flattened struct,
/// because errors in it carry no position.
macro_rules! quota_message {
    ($(#[$about:meta])* pub struct $name:ident { $($own:tt)* }) => {
        #[derive(Clone, Debug, Default, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
        $(#[$about])*
        pub struct $name {
            $($own)*
            /// The caller's tier, regardless of its requests' attributes.
            #[schema(max_length = 64)]
            pub tier: Option<String>,
            /// Limits that replace the rules'.
            #[serde(default)]
            #[schema(max_items = 32)]
            pub overrides: Vec<QuotaOverride>,
            /// Time at which the quota takes effect, in RFC 3339; immediately if absent.
            #[schema(format = DateTime)]
            pub effective_at: Option<String>,
            /// Expiry, in RFC 3339; never if absent.
            #[schema(format = DateTime)]
            pub expires_at: Option<String>,
            /// Reason, recorded in the audit log.
            #[serde(default)]
            #[schema(max_length = 512)]
            pub reason: String,
            /// Author of the quota; the sender's name if absent.
            #[schema(max_length = 128)]
            pub author: Option<String>,
            /// Sets the quota even if it allows nothing or less than the caller uses.
            #[serde(default)]
            pub confirm: bool,
        }
    };
}
pub(crate) use quota_message;

quota_message! {
    /// A request to set a quota.
    pub struct QuotaSpec {}
}

/// A stored quota.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Quota {
    /// Keyed hash of what identifies the caller.
    pub id: String,
    /// The attribute that identifies the caller: `api_key`, or another one that rules count by.
    pub key: String,
    /// First characters of its value; an address or network is shown whole.
    pub key_prefix: String,
    /// The caller's tier.
    #[schema(required = true)]
    pub tier: Option<String>,
    /// Limits that replace the rules'.
    pub overrides: Vec<QuotaOverride>,
    /// Time at which the quota takes effect.
    #[schema(required = true, format = DateTime)]
    pub effective_at: Option<String>,
    /// Expiry.
    #[schema(required = true, format = DateTime)]
    pub expires_at: Option<String>,
    /// The terms in effect until a pending `effective_at`, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = CurrentTerms)]
    pub until_effective: Option<CurrentTerms>,
    /// Reason for the quota.
    pub reason: String,
    /// Author of the quota.
    pub author: String,
    /// Time of the last change.
    #[schema(format = DateTime)]
    pub updated_at: String,
    /// Control revision of the last change.
    pub revision: i64,
}

impl Quota {
    /// Returns the request that sets this quota, without its times: those have been validated.
    #[must_use]
    pub fn spec(&self) -> QuotaSpec {
        QuotaSpec { tier: self.tier.clone(), overrides: self.overrides.clone(), ..QuotaSpec::default() }
    }
}

/// A validated quota.
#[derive(Clone, Debug)]
pub(crate) struct ValidQuota {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: Vec<QuotaOverride>,
    pub(crate) effective_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) reason: String,
    pub(crate) author: Option<String>,
    /// The terms, compiled for the active rules.
    pub(crate) compiled: CallerOverrides,
    /// What the sender may not have expected.
    pub(crate) warnings: Vec<String>,
}

/// Maximum number of overrides per caller.
const MAX_OVERRIDES: usize = 32;

impl QuotaSpec {
    /// Validates the quota of a caller against the active rules. `value` is the value of the attribute `key` that
    /// identifies the caller, if it is known.
    pub(crate) fn validate(
        self,
        rules: &Ruleset,
        now: Timestamp,
        key: &str,
        value: Option<&str>,
    ) -> Result<ValidQuota, ValidationError> {
        let mut warnings = Vec::new();
        let problem = |place: &str, detail: String| Err(ValidationError { place: place.to_owned(), detail });
        if self.tier.is_none() && self.overrides.is_empty() {
            return problem("tier", "quota is empty; set `tier`, `overrides`, or both".to_owned());
        }
        if let Some(tier) = &self.tier {
            check_text("tier", tier, 1, 64)?;
            warnings.extend(inert_tier(rules, key, tier));
        }
        if self.overrides.len() > MAX_OVERRIDES {
            return problem("overrides", format!("must have at most {MAX_OVERRIDES} entries"));
        }
        for (i, own) in self.overrides.iter().enumerate() {
            check_text(&format!("overrides[{i}].descriptor"), &own.0.descriptor, 1, 512)?;
            if let Some(rate) = &own.0.limit {
                check_text(&format!("overrides[{i}].unit"), &rate.period, 1, 64)?;
            }
        }
        let overrides: Vec<Override> = self.overrides.iter().map(|own| own.0.clone()).collect();
        let (compiled, unfit) = rules.compile_overrides(key, self.tier.as_deref(), &overrides);
        if let Some(unfit) = unfit.into_iter().next() {
            let field = if unfit.field == "period" { "unit" } else { unfit.field };
            return problem(&format!("overrides[{}].{field}", unfit.index), unfit.reason);
        }
        for (i, own) in overrides.iter().enumerate() {
            if let Some(reason) = inert_override(rules, &compiled, own, key, value) {
                return problem(&format!("overrides[{i}].descriptor"), reason);
            }
        }
        let effective_at =
            self.effective_at.as_deref().map(|at| parse_time("effective_at", at)).transpose()?;
        let expires_at = self.expires_at.as_deref().map(|at| parse_time("expires_at", at)).transpose()?;
        let starts = effective_at.unwrap_or(0).max(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        if expires_at.is_some_and(|end| end <= starts) {
            return problem(
                "expires_at",
                "quota would never take effect; must be later than now and `effective_at`".to_owned(),
            );
        }
        check_text("reason", &self.reason, 0, 512)?;
        if let Some(author) = &self.author {
            check_text("author", author, 1, 128)?;
        }
        let Self { tier, overrides, reason, author, .. } = self;
        Ok(ValidQuota { tier, overrides, effective_at, expires_at, reason, author, compiled, warnings })
    }
}

/// Returns why a tier changes nothing until a rule has limits for it. The tier of an API key is for all rules, that of another attribute for those
/// that count by it.
fn inert_tier(rules: &Ruleset, key: &str, tier: &str) -> Option<String> {
    let own = || rules.rules().iter().filter(|rule| key == CALLER_KEY || rules.rule_counts_by(rule.id, key));
    if own().any(|rule| rule.tiers.iter().any(|(name, _)| name == tier)) {
        return None;
    }
    if !own().any(Rule::depends_on_tier) {
        let which = if key == CALLER_KEY { String::new() } else { format!(" that counts by `{key}`") };
        return Some(format!(
            "no rule{which} depends on the caller's tier: tier `{tier}` has no effect until one has `tiers`"
        ));
    }
    (!BUILT_IN_TIERS.contains(&tier))
        .then(|| format!("no rule has limits for tier `{tier}`: the rules' own limits apply until one has"))
}

/// Returns why an override would change nothing: this caller never matches its rules, or they deny nothing.
fn inert_override(
    rules: &Ruleset,
    compiled: &CallerOverrides,
    own: &Override,
    key: &str,
    value: Option<&str>,
) -> Option<String> {
    let ids = rules.find_per_caller_rules(key, &own.descriptor);
    if let Some(value) = value.filter(|value| !value.contains('/') || network(key, value).is_none()) {
        let request = [(key, value)];
        let reached = |domain: &Domain| {
            domain.per_caller_rules(key, &request).iter().any(|own| ids.contains(&own.rule.id))
        };
        if !rules.domains().any(reached) {
            return Some(format!(
                "the rule is for another `{key}` and never matches this caller; use `default`, or the path of a rule that does"
            ));
        }
    }
    let enforced = |id: &u32| {
        let Some(rule) = rules.rule(*id) else { return false };
        own.limit.is_none()
            || compiled.set_for(rule, None).limits.iter().any(|limit| limit.role.is_enforced(rule.action))
    };
    (!ids.iter().any(enforced)).then(|| {
        "the rule denies nothing (`shadow`, or `action: degrade`), so its override would not either; enforce the rule first"
            .to_owned()
    })
}
