//! What is agreed with one caller: a tier, limits of its own, and from when to when. As operators write it and read it.

use crate::error::{ValidationError, check_text, parse_time};
use crate::quota::overrides::QuotaOverride;
use crate::quota::pending::CurrentTerms;
use serde::{Deserialize, Serialize};
use tollgate_core::Timestamp;
use tollgate_rules::{Override, Ruleset};
use utoipa::ToSchema;

/// Tiers that need no rule to name them.
const BUILT_IN_TIERS: [&str; 4] = ["free", "pro", "enterprise", "custom"];

/// Declares something that is sent about an agreement: what it always says, behind fields of its own. (A flattened struct would
/// do as well, but mistakes in it have no place.)
macro_rules! quota_message {
    ($(#[$about:meta])* pub struct $name:ident { $($own:tt)* }) => {
        #[derive(Clone, Debug, Default, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
        $(#[$about])*
        pub struct $name {
            $($own)*
            /// The caller's tier, whatever its requests say.
            #[schema(max_length = 64)]
            pub tier: Option<String>,
            /// Limits in place of rules' own.
            #[serde(default)]
            #[schema(max_items = 32)]
            pub overrides: Vec<QuotaOverride>,
            /// From when it acts, in RFC 3339; at once, if it does not say.
            #[schema(format = DateTime)]
            pub effective_at: Option<String>,
            /// Until when, in RFC 3339; for ever, if it does not say.
            #[schema(format = DateTime)]
            pub expires_at: Option<String>,
            /// Why.
            #[serde(default)]
            #[schema(max_length = 512)]
            pub reason: String,
            /// Who wants it; who sends it, if it does not say.
            #[schema(max_length = 128)]
            pub author: Option<String>,
        }
    };
}
pub(crate) use quota_message;

quota_message! {
    /// An agreement as it is sent.
    #[schema(as = QuotaDraft)]
    pub struct QuotaSpec {}
}

/// An agreement as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Quota {
    /// What stands for the API key.
    pub id: String,
    /// The key's first characters.
    pub key_prefix: String,
    /// The caller's tier.
    #[schema(required = true)]
    pub tier: Option<String>,
    /// Limits in place of rules' own.
    pub overrides: Vec<QuotaOverride>,
    /// From when it acts.
    #[schema(required = true, format = DateTime)]
    pub effective_at: Option<String>,
    /// Until when.
    #[schema(required = true, format = DateTime)]
    pub expires_at: Option<String>,
    /// What acts until `effective_at`, where that is to come and something does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = CurrentTerms)]
    pub until_effective: Option<CurrentTerms>,
    /// Why.
    pub reason: String,
    /// Who wanted it.
    pub author: String,
    /// When it was last changed.
    #[schema(format = DateTime)]
    pub updated_at: String,
    /// The revision of that change.
    pub revision: i64,
}

/// An agreement that can act.
#[derive(Clone, Debug)]
pub(crate) struct ValidQuota {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: Vec<QuotaOverride>,
    pub(crate) effective_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) reason: String,
    pub(crate) author: Option<String>,
}

/// The most limits of one caller's own.
const MAX_OVERRIDES: usize = 32;

impl QuotaSpec {
    /// Checks it against the rules that act now.
    pub(crate) fn validate(self, rules: &Ruleset, now: Timestamp) -> Result<ValidQuota, ValidationError> {
        let problem = |place: &str, detail: String| Err(ValidationError { place: place.to_owned(), detail });
        if self.tier.is_none() && self.overrides.is_empty() {
            return problem("tier", "it says nothing: write a `tier`, `overrides`, or both".to_owned());
        }
        if let Some(tier) = &self.tier {
            check_text("tier", tier, 1, 64)?;
            if !BUILT_IN_TIERS.contains(&tier.as_str()) && !rules.has_tier(tier) {
                let usual = BUILT_IN_TIERS.join(", ");
                return problem(
                    "tier",
                    format!("no rule has limits for `{tier}`; write one that has, or {usual}"),
                );
            }
        }
        if self.overrides.len() > MAX_OVERRIDES {
            return problem("overrides", format!("there are at most {MAX_OVERRIDES}"));
        }
        for (i, own) in self.overrides.iter().enumerate() {
            check_text(&format!("overrides[{i}].descriptor"), &own.descriptor, 1, 512)?;
            check_text(&format!("overrides[{i}].unit"), &own.unit, 1, 64)?;
        }
        let overrides: Vec<Override> = self.overrides.iter().map(QuotaOverride::to_rule).collect();
        if let Some(unfit) = rules.compile_overrides(self.tier.as_deref(), &overrides).1.into_iter().next() {
            let field = if unfit.field == "period" { "unit" } else { unfit.field };
            return problem(&format!("overrides[{}].{field}", unfit.index), unfit.reason);
        }
        let effective_at =
            self.effective_at.as_deref().map(|at| parse_time("effective_at", at)).transpose()?;
        let expires_at = self.expires_at.as_deref().map(|at| parse_time("expires_at", at)).transpose()?;
        let starts = effective_at.unwrap_or(0).max(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        if expires_at.is_some_and(|end| end <= starts) {
            return problem(
                "expires_at",
                "it would never act: write a later time than now and `effective_at`".to_owned(),
            );
        }
        check_text("reason", &self.reason, 0, 512)?;
        if let Some(author) = &self.author {
            check_text("author", author, 1, 128)?;
        }
        let Self { tier, overrides, reason, author, .. } = self;
        Ok(ValidQuota { tier, overrides, effective_at, expires_at, reason, author })
    }
}
