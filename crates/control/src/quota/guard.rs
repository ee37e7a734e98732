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
use tollgate_engine::{LimitSource, Usage};
use tollgate_replica::CallerRef;
use tollgate_rules::{
    Attributes, CALLER_KEY, CallerOverrides, Domain, LimitSet, PerCallerRule, Role, Rule, RuleLimit, Ruleset,
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
    /// The tier of the caller's requests, which applies where a quota gives none.
    pub tier: Option<String>,
    /// What the sender of the quota may not have expected.
    pub warnings: Vec<String>,
}

/// The limits of one rule that are in force for a caller before and after a change of its quota.
#[derive(Clone, Debug)]
pub struct RuleInForce<'r> {
    /// The domain.
    pub domain: &'r str,
    /// The rule.
    pub rule: &'r Rule,
    /// Its path in the tree.
    pub descriptor: String,
    /// How an override refers to it.
    pub reference: String,
    /// The limits in force now.
    pub before: LimitsInForce<'r>,
    /// The limits in force after the change.
    pub after: LimitsInForce<'r>,
}

/// The limits of one rule that are in force for a caller.
#[derive(Clone, Copy, Debug)]
pub struct LimitsInForce<'r> {
    /// The limits.
    pub set: &'r LimitSet,
    /// The tier that they are for, if the rule has limits for it.
    pub tier: Option<&'r str>,
}

impl<'r> LimitsInForce<'r> {
    fn new(rule: &'r Rule, terms: Option<&'r CallerOverrides>, tier: Option<&'r str>) -> Self {
        let set = terms.map_or_else(|| rule.set_for(tier), |terms| terms.set_for(rule, tier));
        let tier = terms.and_then(|terms| terms.tier_for(rule.id)).or(tier);
        Self { set, tier: tier.filter(|tier| rule.tiers.iter().any(|(name, _)| name == tier)) }
    }

    /// Returns where the number of one of the limits comes from.
    #[must_use]
    pub fn source(&self, limit: &RuleLimit) -> LimitSource {
        match (limit.id, self.tier) {
            (RuleLimit::NO_ID, _) => LimitSource::Override,
            (_, Some(_)) => LimitSource::Tier,
            (_, None) => LimitSource::Rule,
        }
    }
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
        let before = self.quota_table.compile_hash(hash, rules, &*self.clock);
        let value = value.map(str::to_owned);
        let mut change = QuotaChange { value, before, after: None, key, tier: None, warnings: Vec::new() };
        if let Some(draft) = draft {
            let valid = self.validate_quota(draft.clone(), rules, &change.key, change.value.as_deref())?;
            change.after = Some(Arc::new(valid.compiled));
            change.warnings = valid.warnings;
            change.warnings.extend(change.added(rules));
        }
        Ok(change)
    }
}

impl QuotaChange {
    /// Returns the limits in force before and after the change, of each rule with counters of the caller's own.
    #[must_use]
    pub fn limits_in_force<'s>(&'s self, rules: &'s Ruleset) -> Vec<RuleInForce<'s>> {
        let attributes = self.value.as_deref().map(|value| [(self.key.as_str(), value)]);
        let attributes: &Attributes<'_> = attributes.as_ref().map_or(&[], |attributes| attributes);
        let in_force = |rule, terms: &'s Option<Arc<CallerOverrides>>| {
            LimitsInForce::new(rule, terms.as_deref(), self.tier.as_deref())
        };
        let of = |domain: &'s Domain| {
            let own = domain.per_caller_rules(&self.key, attributes).into_iter();
            own.map(|PerCallerRule { rule, path, reference, .. }| RuleInForce {
                domain: domain.name(),
                rule,
                descriptor: path,
                reference,
                before: in_force(rule, &self.before),
                after: in_force(rule, &self.after),
            })
        };
        rules.domains().flat_map(of).collect()
    }

    /// Returns the rules of which overrides would remove limits of other periods than their own.
    #[must_use]
    pub fn removed(&self, rules: &Ruleset) -> Vec<String> {
        let mut reasons = Vec::new();
        for one in self.limits_in_force(rules) {
            let removed: Vec<String> = missing(one.rule, &one.after)
                .filter(|limit| !missing(one.rule, &one.before).any(|other| other.scope == limit.scope))
                .map(|limit| limit.limit.to_string())
                .collect();
            if !removed.is_empty() {
                let name = rule_name(one.domain, &one.rule.name, &one.descriptor);
                reasons
                    .push(format!("{name} would no longer have {} for this caller", removed.join(" and ")));
            }
        }
        reasons
    }

    /// Returns the overrides that replace no limit, because the rule has none with their period: they hold beside its others.
    fn added(&self, rules: &Ruleset) -> Vec<String> {
        let mut notes = Vec::new();
        for one in self.limits_in_force(rules) {
            let own = one.rule.set_for(one.after.tier);
            let added = one.after.set.limits.iter().filter(|limit| {
                limit.id == RuleLimit::NO_ID && !own.limits.iter().any(|other| is_same(limit, other))
            });
            let kept: Vec<String> = one
                .after
                .set
                .limits
                .iter()
                .filter(|limit| limit.id != RuleLimit::NO_ID && is_rate(limit))
                .map(|limit| limit.limit.rate().to_string())
                .collect();
            notes.extend(added.filter(|_| !kept.is_empty()).map(|limit| {
                format!(
                    "{} has no limit of the same period as {}, which therefore holds beside {}; `\"replace\": \"all\"` \
                     replaces all",
                    rule_name(one.domain, &one.rule.name, &one.descriptor),
                    limit.limit.rate(),
                    kept.join(" and ")
                )
            }));
        }
        notes
    }

    /// Returns the rules that would allow the caller nothing, and allow it something now.
    #[must_use]
    pub fn zeroed(&self, rules: &Ruleset) -> Vec<String> {
        let attributes = self.value.as_deref().map(|value| [(self.key.as_str(), value)]);
        let attributes: &Attributes<'_> = attributes.as_ref().map_or(&[], |attributes| attributes);
        let of = |domain: &Domain| -> Vec<String> {
            let allows_nothing = |rule: &Rule, terms: Option<&CallerOverrides>| {
                self.limits(rule, terms)
                    .iter()
                    .any(|limit| decides(rule, limit) && limit.limit.capacity() == 0)
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
            let own = self.limits(rule, terms).iter().filter(|limit| {
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
            let tighter = self.limits(rule, self.after.as_deref()).iter().find(|limit| {
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

    /// Returns a caller's limits of a rule.
    fn limits<'s>(&'s self, rule: &'s Rule, terms: Option<&'s CallerOverrides>) -> &'s [RuleLimit] {
        &LimitsInForce::new(rule, terms, self.tier.as_deref()).set.limits
    }
}

fn is_rate(limit: &RuleLimit) -> bool {
    limit.role != Role::Candidate && limit.limit.algorithm() != Algorithm::Concurrency
}

/// Returns whether two limits count the same over the same period.
fn is_same(one: &RuleLimit, other: &RuleLimit) -> bool {
    is_rate(other) && one.cost == other.cost && one.limit.rate().period == other.limit.rate().period
}

/// Returns the rates of a rule that overrides have removed without replacing them.
fn missing<'r>(rule: &'r Rule, now: &LimitsInForce<'r>) -> impl Iterator<Item = &'r RuleLimit> {
    let set = now.set;
    let own = rule.set_for(now.tier).limits.iter().filter(|limit| is_rate(limit) && decides(rule, limit));
    own.filter(move |limit| !set.unlimited && !set.limits.iter().any(|other| is_same(limit, other)))
}

/// Returns a rule as usage and overrides name it: by its name, its path where that differs, and its domain.
fn rule_name(domain: &str, name: &str, path: &str) -> String {
    let path = if name == path { String::new() } else { format!(" (`{path}`)") };
    format!("rule `{name}`{path} of domain `{domain}`")
}

/// Returns the length of a limit's period, in microseconds.
fn length(limit: &Limit) -> f64 {
    limit.rate().period.length().as_micros().max(1) as f64
}

fn decides(rule: &Rule, limit: &RuleLimit) -> bool {
    limit.role.is_enforced(rule.action)
}
