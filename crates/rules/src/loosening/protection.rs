//! Protection by one rule: what it lets through at most, and under which circumstances; and how another protects less.
//!
//! Limits are compared by what they let through in a time, for the times of their periods: so a shorter period, a
//! larger burst, a limit less and another algorithm are one comparison.

use crate::plan::{MatchedLimit, Plan};
use crate::rule::{Action, Class, CostFrom, Enforce, FailPolicy, OnError, Role, Rule, RuleLimit};
use std::collections::BTreeSet;
use std::fmt;
use tollgate_core::{Algorithm, Mode};

/// Factor that numbers do not explain, from which another algorithm counts as weaker: window edges double.
const DOUBLED: f64 = 1.9;
const DAY: f64 = 24.0 * 3_600.0 * 1e6;

/// Settings that are compared here by what they do, and those that change no protection. Others are a reason to ask.
const JUDGED: [&str; 18] = [
    "action",
    "billing",
    "class",
    "cost",
    "detailed_metric",
    "enforce",
    "fallback",
    "metadata",
    "mode",
    "on_error",
    "priority",
    "quota_mode",
    "replaces",
    "response",
    "shadow",
    "shard_by",
    "split",
    "value_to_metric",
];

/// How a rule protects less than another.
pub(super) enum Weakness {
    DeniesNothing,
    /// It does not match such requests.
    Unmatched(String),
    /// It lets this many times as much through.
    Raised(f64),
    Other(String),
}

impl fmt::Display for Weakness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeniesNothing => f.write_str("no longer denies anything"),
            Self::Unmatched(probe) => write!(f, "no longer matches requests with {probe}"),
            Self::Raised(factor) => write!(f, "allows {factor:.0} times as much"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// The limits of one rule that deny requests like the planned one.
pub(super) struct Protection<'p> {
    pub(super) rule: &'p Rule,
    limits: Vec<&'p RuleLimit>,
    /// Number of values that name its counters.
    values: usize,
}

/// Returns the protections in a plan.
pub(super) fn protections<'p>(plan: &'p Plan<'_>) -> Vec<Protection<'p>> {
    let mut all: Vec<Protection<'p>> = Vec::new();
    for matched in &plan.limits {
        let Some(rule) = matched.rule.filter(|rule| matched.limit.role.is_enforced(rule.action)) else {
            continue;
        };
        // A limit that charges nothing denies nothing; that of a whole rule has its own words.
        if matched.cost.is_peek() && rule.cost != CostFrom::Fixed(0) {
            continue;
        }
        let limit: &RuleLimit = &matched.limit;
        match all.iter_mut().find(|one| one.rule.id == rule.id) {
            Some(one) => one.limits.push(limit),
            None => all.push(Protection { rule, limits: vec![limit], values: values(matched) }),
        }
    }
    all
}

fn values(matched: &MatchedLimit<'_>) -> usize {
    // The shard's name is no value of the request.
    let shard = usize::from(matched.limit.shards.is_some());
    usize::from(matched.parts.1 - matched.parts.0).saturating_sub(shard)
}

impl Protection<'_> {
    /// Returns how `new` protects less than this. A limit counts as raised from the factor `raised` on.
    pub(super) fn weaknesses(&self, new: &Protection<'_>, raised: f64) -> Vec<Weakness> {
        let mut all = Vec::new();
        let mut add = |what: &str| all.push(Weakness::Other(what.to_owned()));
        let (before, after) = (self.rule, new.rule);
        if after.class != Class::Security {
            add("is no longer of class security");
        }
        let enforced =
            |rule: &Rule| rule.enforce.as_ref().map_or(Enforce::ALL, |enforce| enforce.thousandths);
        if enforced(after) < enforced(before) {
            let share = Enforce::percent(enforced(after));
            add(&format!("is enforced for {share} of the callers only"));
        }
        match looser_failure(&before.on_error, &after.on_error) {
            Some(FailPolicy::Closed) => add("no longer fails closed while the store is unavailable"),
            Some(_) => add("no longer limits anything while the store is unavailable"),
            None => {}
        }
        if after.action == Action::Delay && before.action != Action::Delay {
            add("delays requests instead of denying them (action: delay)");
        }
        let is_local = |one: &Protection<'_>| one.limits.iter().any(|limit| limit.mode == Mode::Local);
        if is_local(new) && !is_local(self) {
            add("counts on each node alone (mode: local), so that each allows the whole limit");
        }
        let is_quota = |one: &Protection<'_>| one.limits.iter().any(|limit| limit.role == Role::Quota);
        if is_quota(new) && !is_quota(self) {
            add("denies only when all quota limits of a request are used up (quota_mode)");
        }
        if new.values > self.values {
            add("counts separately for each value of a further key");
        }
        match (&before.cost, &after.cost) {
            (old, CostFrom::Fixed(0)) if *old != CostFrom::Fixed(0) => {
                add("no longer counts anything (cost 0)");
            }
            (CostFrom::Fixed(old), CostFrom::Fixed(new)) if new >= old => {}
            (old, new) if old == new => {}
            (_, CostFrom::Fixed(units)) => add(&format!("counts only {units} for each request (cost)")),
            (_, CostFrom::Attribute(name)) => {
                add(&format!("counts what the attribute `{name}` holds (cost)"));
            }
            (_, CostFrom::Request) => add("counts the cost that the request states (cost)"),
        }
        let (old_settings, new_settings) = (before.settings(), after.settings());
        let names: BTreeSet<&str> = old_settings.iter().chain(&new_settings).map(|(name, _)| *name).collect();
        for name in names.into_iter().filter(|name| !JUDGED.contains(name)) {
            let value = |settings: &[(&'static str, String)]| {
                settings.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone())
            };
            match (value(&old_settings), value(&new_settings)) {
                (old, new) if old == new => {}
                (_, Some(new)) => add(&format!("has another `{name}`: {new}")),
                (_, None) => add(&format!("no longer has `{name}`")),
            }
        }
        for (cost, is_own) in self.costs() {
            let (old_limits, new_limits) =
                (self.counting(|other| other == cost), new.counting(|other| counts_no_less(cost, other)));
            all.extend(match new_limits.limits.is_empty() {
                true if is_own => {
                    Some(Weakness::Other(format!("no longer limits what `cost: {cost}` counts")))
                }
                // The rule's cost is compared above.
                true => old_limits.looser_limits(new, raised),
                false => old_limits.looser_limits(&new_limits, raised),
            });
        }
        all
    }

    /// Returns the costs of the limits, and whether they are of their own or the rule's.
    fn costs(&self) -> Vec<(&CostFrom, bool)> {
        let mut all: Vec<(&CostFrom, bool)> = Vec::new();
        for limit in &self.limits {
            let cost = limit.cost_from(self.rule);
            if all.iter().all(|(known, _)| *known != cost) {
                all.push((cost, limit.cost.is_some()));
            }
        }
        all
    }

    /// Returns the limits with such costs: requests and tokens have no common measure.
    fn counting(&self, cost: impl Fn(&CostFrom) -> bool) -> Protection<'_> {
        let limits = self.limits.iter().filter(|limit| cost(limit.cost_from(self.rule))).copied();
        Protection { rule: self.rule, limits: limits.collect(), values: self.values }
    }

    fn looser_limits(&self, new: &Protection<'_>, raised: f64) -> Option<Weakness> {
        let kind = |one: &Protection<'_>, concurrent: bool| -> Vec<Bound> {
            let limits = one.limits.iter().map(|limit| Bound::new(limit));
            limits.filter(|bound| (bound.algorithm == Algorithm::Concurrency) == concurrent).collect()
        };
        let (old_rates, new_rates) = (kind(self, false), kind(new, false));
        let (old_permits, new_permits) = (kind(self, true), kind(new, true));
        if !old_rates.is_empty() && new_rates.is_empty() {
            return Some(Weakness::DeniesNothing);
        }
        if !old_permits.is_empty() && new_permits.is_empty() {
            return Some(Weakness::Other("no longer limits concurrency".to_owned()));
        }
        let permits = |all: &[Bound]| all.iter().map(|bound| bound.capacity).reduce(f64::min);
        let times: Vec<f64> =
            old_rates.iter().chain(&new_rates).map(|bound| bound.period).chain([0.0, DAY]).collect();
        let through = |all: &[Bound], time: f64| all.iter().map(|bound| bound.within(time)).reduce(f64::min);
        let ratios = times
            .iter()
            .filter_map(|time| Some(factor(through(&old_rates, *time)?, through(&new_rates, *time)?)));
        let ratio = ratios.fold(0.0, f64::max);
        let tightest = |all: &[Bound], number: fn(&Bound) -> f64| all.iter().map(number).reduce(f64::min);
        let numbers = [|bound: &Bound| bound.capacity, |bound: &Bound| bound.count / bound.period];
        let numbers = numbers
            .into_iter()
            .filter_map(|number| Some(factor(tightest(&old_rates, number)?, tightest(&new_rates, number)?)));
        let explained = numbers.fold(1.0, f64::max);
        let permits = permits(&old_permits).zip(permits(&new_permits));
        let permits = permits.map_or(0.0, |(old, new)| factor(old, new));
        let algorithms =
            |all: &[Bound]| all.iter().map(|bound| bound.algorithm.name()).collect::<BTreeSet<_>>();
        let (old, new) = (algorithms(&old_rates), algorithms(&new_rates));
        if explained.max(permits) >= raised {
            return Some(Weakness::Raised(explained.max(permits)));
        }
        if old != new && ratio / explained >= DOUBLED {
            let algorithm = new.difference(&old).copied().collect::<Vec<_>>().join(", ");
            let what = format!(
                "lets up to {ratio:.0} times as much through in a short time (algorithm: {algorithm})"
            );
            return Some(Weakness::Other(what));
        }
        (ratio >= raised && old == new).then_some(Weakness::Raised(ratio))
    }
}

/// Returns whether a cost counts the same as another, or more.
fn counts_no_less(before: &CostFrom, after: &CostFrom) -> bool {
    match (before, after) {
        // A request costs one unit at least.
        (CostFrom::Fixed(0 | 1), CostFrom::Request) => true,
        (CostFrom::Fixed(old), CostFrom::Fixed(new)) => new >= old,
        (old, new) => old == new,
    }
}

/// What a limit lets through, in units and microseconds.
pub(crate) struct Bound {
    algorithm: Algorithm,
    pub(crate) capacity: f64,
    pub(crate) count: f64,
    pub(crate) period: f64,
    /// Zero for a bucket that is refilled continuously.
    refill_interval: f64,
}

impl Bound {
    pub(crate) fn new(limit: &RuleLimit) -> Self {
        let rate = limit.limit.rate();
        Self {
            algorithm: limit.limit.algorithm(),
            capacity: limit.limit.capacity() as f64,
            count: rate.count as f64,
            period: rate.period.length().as_micros().max(1) as f64,
            refill_interval: limit.limit.refill_interval().map_or(0.0, |span| span.as_micros() as f64),
        }
    }

    /// Returns the same for requests that cost this many units each.
    pub(crate) fn divided(self, units: f64) -> Self {
        Self { capacity: self.capacity / units, count: self.count / units, ..self }
    }

    /// Returns the most that passes in any interval of this length.
    fn within(&self, time: f64) -> f64 {
        let periods = time / self.period;
        match self.algorithm {
            // An interval around the edge of a window is in both.
            Algorithm::FixedWindow => self.capacity * (periods.floor() + 2.0),
            Algorithm::StrictWindow | Algorithm::SlidingLog => self.capacity * (periods.ceil().max(1.0)),
            // A refill at intervals may come at the start of any span.
            _ => {
                self.capacity
                    + (self.count * self.refill_interval / self.period).min(self.capacity)
                    + self.count * periods
            }
        }
    }
}

fn factor(before: f64, after: f64) -> f64 {
    if before > 0.0 { after / before } else { f64::from(after > 0.0) * super::ENORMOUS }
}

/// Returns the policy that a looser one replaces, for some tier.
fn looser_failure(old: &OnError, new: &OnError) -> Option<FailPolicy> {
    let tiers = |policy: &OnError| match policy {
        OnError::Always(_) => Vec::new(),
        OnError::ByTier { tiers, .. } => tiers.keys().cloned().collect::<Vec<_>>(),
    };
    let strictness = |policy: FailPolicy| match policy {
        FailPolicy::Closed => 2,
        FailPolicy::Local => 1,
        FailPolicy::Open => 0,
    };
    let named = tiers(old).into_iter().chain(tiers(new)).map(Some).chain([None]);
    let looser = named.into_iter().filter_map(|tier| {
        let (old, new) = (old.policy(tier.as_deref()), new.policy(tier.as_deref()));
        (strictness(new) < strictness(old)).then_some(old)
    });
    looser.max_by_key(|policy| strictness(*policy))
}
