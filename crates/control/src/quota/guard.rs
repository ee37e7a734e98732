//! Guard of quota changes: what a change takes away from a caller that uses it.
//!
//! A typing error in a quota (`0`, a missing digit, the wrong tier) denies a customer at once. So a change is compared
//! with what the caller has and uses before it is written: limits that would allow nothing, limits below what its
//! counters hold, and recent requests that would have been denied (`RecentRequests`). Pure: terms, rules and
//! usage in, reasons out; the writer decides what a reason means. Rejected: comparing numbers alone, because a
//! smaller plan is no accident as long as it covers what is used.

use crate::control_plane::ControlPlane;
use crate::error::ValidationError;
use crate::quota::record::QuotaSpec;
use std::sync::Arc;
use tollgate_core::{Algorithm, Limit};
use tollgate_engine::Usage;
use tollgate_replica::CallerRef;
use tollgate_replica::QuotaOverride;
use tollgate_rules::{
    Attributes, CALLER_KEY, CallerOverrides, Domain, Override, PerCallerRule, Rule, RuleLimit, Ruleset,
};

/// A change of a caller's quota, compiled: the terms in effect now, and those that would be.
#[derive(Clone, Debug)]
pub struct QuotaChange {
    /// The attribute that identifies the caller.
    pub key: String,
    /// Its value, if it is known.
    pub value: Option<String>,
    /// The terms in effect now; `None` if the rules apply.
    pub before: Option<Arc<CallerOverrides>>,
    /// The terms after the change; `None` if the rules would apply.
    pub after: Option<Arc<CallerOverrides>>,
}

impl ControlPlane {
    /// Returns what a change would do: setting a quota, or deleting it without `draft`.
    ///
    /// # Errors
    /// [`ValidationError`] if the quota is invalid.
    pub fn quota_change<'c>(
        &self,
        caller: impl Into<CallerRef<'c>>,
        draft: Option<&QuotaSpec>,
        rules: &Ruleset,
    ) -> Result<QuotaChange, ValidationError> {
        let caller = caller.into();
        let hash = self.hasher.hash_caller(caller).table_hash();
        let (key, value) = match caller.attribute() {
            Some((key, value)) => (key.to_owned(), Some(value)),
            None => (self.quota_table.key_of(hash).unwrap_or_else(|| CALLER_KEY.to_owned()), None),
        };
        let after = draft.map(|draft| {
            let valid = self.validate_quota(draft.clone(), rules, &key, value)?;
            let overrides: Vec<Override> = valid.overrides.iter().map(QuotaOverride::to_rule).collect();
            Ok(Arc::new(rules.compile_overrides(&key, valid.tier.as_deref(), &overrides).0))
        });
        let before = self.quota_table.compile_hash(hash, rules, &*self.clock);
        Ok(QuotaChange { value: value.map(str::to_owned), before, after: after.transpose()?, key })
    }
}

impl QuotaChange {
    /// Returns the rules that would allow the caller nothing, and allow it something now.
    #[must_use]
    pub fn zeroed(&self, rules: &Ruleset) -> Vec<String> {
        let attributes = self.value.as_deref().map(|value| [(self.key.as_str(), value)]);
        let attributes: &Attributes<'_> = attributes.as_ref().map_or(&[], |attributes| attributes);
        let of = |domain: &Domain| -> Vec<String> {
            let allows_nothing = |rule: &Rule, terms: Option<&CallerOverrides>| {
                limits(rule, terms).iter().any(|limit| decides(rule, limit) && limit.limit.capacity() == 0)
            };
            let own = domain.per_caller_rules(&self.key, attributes).into_iter().filter(|own| {
                allows_nothing(own.rule, self.after.as_deref())
                    && !allows_nothing(own.rule, self.before.as_deref())
            });
            let name = |own: &PerCallerRule<'_>| rule_name(domain.name(), &own.rule.name, &own.path);
            own.map(|own| format!("{} would allow this caller nothing", name(&own))).collect()
        };
        rules.domains().flat_map(of).collect()
    }

    /// Returns whether any limit of the caller gets tighter: only then can it be below what the caller uses.
    #[must_use]
    pub fn tightens(&self, rules: &Ruleset) -> bool {
        let tightest = |rule: &Rule, terms: Option<&CallerOverrides>, concurrent: bool| {
            let own = limits(rule, terms).iter().filter(|limit| {
                decides(rule, limit) && (limit.limit.algorithm() == Algorithm::Concurrency) == concurrent
            });
            own.map(|limit| (limit.limit.rate().count as f64 / length(&limit.limit), limit.limit.capacity()))
                .reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)))
        };
        let tightens = |rule: &Rule, concurrent: bool| {
            let [before, after] =
                [&self.before, &self.after].map(|terms| tightest(rule, terms.as_deref(), concurrent));
            match (before, after) {
                (Some(before), Some(after)) => after.0 < before.0 || after.1 < before.1,
                (None, Some(_)) => true,
                (_, None) => false,
            }
        };
        rules.rules().iter().any(|rule| tightens(rule, false) || tightens(rule, true))
    }

    /// Returns the limits that would be below what the caller uses by its counters.
    #[must_use]
    pub fn below_use(&self, rules: &Ruleset, usage: &Usage) -> Vec<String> {
        let mut reasons = Vec::new();
        for used in usage.limits.iter().filter(|used| !used.is_shared) {
            let Some(rule) = rules.rule(used.rule_id) else { continue };
            let Some(units) = used.used().filter(|units| *units > 0 && used.role.is_enforced(rule.action))
            else {
                continue;
            };
            let concurrent = used.limit.algorithm() == Algorithm::Concurrency;
            let tighter = limits(rule, self.after.as_deref()).iter().find(|limit| {
                let same = (limit.limit.algorithm() == Algorithm::Concurrency) == concurrent;
                // In a shorter period the caller uses less; in a longer one at least as much.
                let scale = (length(&limit.limit) / length(&used.limit)).min(1.0);
                let expected = if concurrent { units as f64 } else { units as f64 * scale };
                decides(rule, limit) && same && (limit.limit.capacity() as f64) < expected.floor()
            });
            reasons.extend(tighter.filter(|limit| limit.limit.capacity() > 0).map(|limit| {
                format!(
                    "{} would allow {}, and the caller has used {units} of {}",
                    rule_name(&usage.domain, &used.rule, &used.descriptor),
                    limit.limit,
                    used.limit
                )
            }));
        }
        reasons
    }
}

/// Returns a rule as usage and overrides name it: by its name, its path where that differs, and its domain.
fn rule_name(domain: &str, name: &str, path: &str) -> String {
    let path = if name == path { String::new() } else { format!(" (`{path}`)") };
    format!("rule `{name}`{path} of domain `{domain}`")
}

/// Returns a caller's limits of a rule.
fn limits<'a>(rule: &'a Rule, terms: Option<&'a CallerOverrides>) -> &'a [RuleLimit] {
    let own = terms.and_then(|terms| terms.limits(rule.id));
    match own {
        Some(own) => own,
        None if rule.unlimited => &[],
        None => rule.limits_for(terms.and_then(|terms| terms.tier_for(rule.id))),
    }
}

/// Returns the length of a limit's period, in microseconds.
fn length(limit: &Limit) -> f64 {
    limit.rate().period.length().as_micros().max(1) as f64
}

fn decides(rule: &Rule, limit: &RuleLimit) -> bool {
    limit.role.is_enforced(rule.action)
}
