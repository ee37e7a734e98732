//! What is agreed with one caller: a tier, limits of its own, and from when to when. As operators write it and read it.

use crate::until::QuotaUntil;
use serde::{Deserialize, Serialize};
use tollgate_core::Timestamp;
use tollgate_rules::{Override, Ruleset};
use utoipa::ToSchema;

/// Tiers that need no rule to name them.
const USUAL_TIERS: [&str; 4] = ["free", "pro", "enterprise", "custom"];

/// Declares something that is sent about an agreement: what it always says, behind fields of its own. (A flattened struct would
/// do as well, but mistakes in it have no place.)
macro_rules! agreement {
    ($(#[$about:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
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
pub(crate) use agreement;

agreement! {
    /// An agreement as it is sent.
    pub struct QuotaDraft {}
}

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
    pub(crate) fn of_rule(rule: &Override) -> Self {
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
    #[schema(value_type = QuotaUntil)]
    pub until_effective: Option<QuotaUntil>,
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

/// What is wrong with an agreement, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaProblem {
    /// The field.
    pub place: String,
    /// What is wrong with it, and what to write.
    pub detail: String,
}

/// An agreement that can act.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: Vec<QuotaOverride>,
    pub(crate) effective_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) reason: String,
    pub(crate) author: Option<String>,
}

/// The most limits of one caller's own.
const MOST_OVERRIDES: usize = 32;

impl QuotaDraft {
    /// Checks it against the rules that act now.
    pub(crate) fn check(self, rules: &Ruleset, now: Timestamp) -> Result<Checked, QuotaProblem> {
        let problem = |place: &str, detail: String| Err(QuotaProblem { place: place.to_owned(), detail });
        if self.tier.is_none() && self.overrides.is_empty() {
            return problem("tier", "it says nothing: write a `tier`, `overrides`, or both".to_owned());
        }
        if let Some(tier) = &self.tier {
            text("tier", tier, 1, 64)?;
            if !USUAL_TIERS.contains(&tier.as_str()) && !rules.names_tier(tier) {
                let usual = USUAL_TIERS.join(", ");
                return problem(
                    "tier",
                    format!("no rule has limits for `{tier}`; write one that has, or {usual}"),
                );
            }
        }
        if self.overrides.len() > MOST_OVERRIDES {
            return problem("overrides", format!("there are at most {MOST_OVERRIDES}"));
        }
        for (i, own) in self.overrides.iter().enumerate() {
            text(&format!("overrides[{i}].descriptor"), &own.descriptor, 1, 512)?;
            text(&format!("overrides[{i}].unit"), &own.unit, 1, 64)?;
        }
        let overrides: Vec<Override> = self.overrides.iter().map(QuotaOverride::to_rule).collect();
        if let Some(unfit) = rules.tenant(self.tier.as_deref(), &overrides).1.into_iter().next() {
            let field = if unfit.field == "period" { "unit" } else { unfit.field };
            return problem(&format!("overrides[{}].{field}", unfit.at), unfit.why);
        }
        let effective_at = self.effective_at.as_deref().map(|at| time("effective_at", at)).transpose()?;
        let expires_at = self.expires_at.as_deref().map(|at| time("expires_at", at)).transpose()?;
        let starts = effective_at.unwrap_or(0).max(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        if expires_at.is_some_and(|end| end <= starts) {
            return problem(
                "expires_at",
                "it would never act: write a later time than now and `effective_at`".to_owned(),
            );
        }
        text("reason", &self.reason, 0, 512)?;
        if let Some(author) = &self.author {
            text("author", author, 1, 128)?;
        }
        let Self { tier, overrides, reason, author, .. } = self;
        Ok(Checked { tier, overrides, effective_at, expires_at, reason, author })
    }
}

/// A text of so many bytes, without control characters.
pub(crate) fn text(place: &str, text: &str, least: usize, most: usize) -> Result<(), QuotaProblem> {
    let problem = |detail: String| Err(QuotaProblem { place: place.to_owned(), detail });
    if text.len() < least {
        return problem("it is empty".to_owned());
    }
    if text.len() > most {
        return problem(format!("it has at most {most} bytes, not {}", text.len()));
    }
    if text.chars().any(char::is_control) {
        return problem("it has no control characters".to_owned());
    }
    Ok(())
}

/// Seconds since the epoch, rounded down; memory holds those up to the year 2106.
pub(crate) fn time(place: &str, text: &str) -> Result<i64, QuotaProblem> {
    let problem = |detail: &str| QuotaProblem { place: place.to_owned(), detail: detail.to_owned() };
    let time: jiff::Timestamp =
        text.parse().map_err(|_| problem("it is no time; write one such as 2026-02-01T00:00:00Z"))?;
    match time.as_second() {
        at @ 0..4_294_967_295 => Ok(at),
        _ => Err(problem("write a time from 1970 to 2105")),
    }
}

/// A time as it is told.
pub(crate) fn tell(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).map(|at| at.to_string()).unwrap_or_default()
}

/// The same, of milliseconds.
pub(crate) fn tell_millis(millis: i64) -> String {
    jiff::Timestamp::from_millisecond(millis).map(|at| at.to_string()).unwrap_or_default()
}

/// A time as it is told, in RFC 3339.
#[must_use]
pub fn rfc3339(at: Timestamp) -> String {
    tell_millis(i64::try_from(at.as_micros() / 1_000).unwrap_or(i64::MAX))
}
