//! Requests that the fleet's capacity sheds: the reason that a decision has, and their number by priority. The capacity is a
//! rule like any other, so that a denial by it says neither by itself.
//!
//! The state of a fleet is what this node knows without a call of the store: how much is in use is in the rule's counters.

use crate::by_rule::ByRule;
use crate::check::Check;
use crate::decision::{DecidedBy, DecisionDetails, LimitStatus};
use crate::fleet_fairness::SharedFleet;
use crate::limiter::Limiter;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::{Algorithm, Limit, Priority, Rate};
use tollgate_overload::TierState;
use tollgate_rules::{Domain, Plan, Ruleset, TierFairness};

/// Numbers of requests that were shed, by domain and priority, and of those that would have been but for shadow mode.
#[derive(Debug, Default)]
pub(crate) struct FleetSheds(ByRule<[[AtomicU64; 4]; 2]>);

/// Number of requests of one priority that the fleet's capacity has shed on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetShedCount {
    /// Domain of the rules.
    pub domain: String,
    /// Priority of the requests.
    pub priority: Priority,
    /// Their number.
    pub count: u64,
    /// Number of those that would have been shed, but for shadow mode.
    pub shadow: u64,
}

/// State of the fleet's capacity of a domain, as this node sees it.
#[derive(Clone, Debug)]
pub struct FleetState {
    /// Domain of the rules.
    pub domain: String,
    /// The capacity as a text: `5000 in flight` or `20000/1s`.
    pub capacity: String,
    /// Whether nothing is shed, only counted.
    pub is_shadow: bool,
    /// What requests of each priority may use of it, and what became of them.
    pub priorities: [FleetPriorityState; 4],
    /// How tenants share it, if they do.
    pub shares: Option<FleetSharesState>,
}

/// A priority in the fleet's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FleetPriorityState {
    /// Requests in flight, or in the capacity's period, that its requests may use: what is reserved for higher priorities is not theirs.
    pub capacity: u64,
    /// Number of requests that the capacity has shed on this node.
    pub shed: u64,
    /// Number of those that it would have shed, but for shadow mode.
    pub would_be_shed: u64,
}

/// Tenants that share the fleet's capacity.
#[derive(Clone, Debug)]
pub struct FleetSharesState {
    /// Shares of tiers as the rules have them, in the order of `tiers`.
    pub shares: Vec<TierFairness>,
    /// Demand and fair shares of the tiers, the last of requests without one; empty while the capacity is not contended.
    pub tiers: Vec<TierState>,
    /// Number of requests that a guarantee admitted while the capacity was in use.
    pub taken_back: u64,
}

/// Numbers of requests by priority that were shed, and of those that would have been.
type Counts = [[u64; 4]; 2];

fn read(counts: &[[AtomicU64; 4]; 2]) -> Counts {
    counts.each_ref().map(|own| own.each_ref().map(|count| count.load(Ordering::Relaxed)))
}

/// Returns a number of requests as the capacity counts them.
fn capacity_text(limit: &Limit, count: u64) -> String {
    match limit.algorithm() {
        Algorithm::Concurrency => format!("{count} in flight"),
        _ => Rate { count, period: limit.rate().period.clone() }.to_string(),
    }
}

impl<S> Limiter<S> {
    /// Returns how many requests the fleet's capacity has shed on this node, of all domains that have one or had.
    #[must_use]
    pub fn fleet_sheds(&self) -> Vec<FleetShedCount> {
        let rules = self.rules.load();
        let has_fleet = |domain: &&Domain| domain.overload().is_some_and(|overload| overload.fleet.is_some());
        let with_fleet =
            rules.domains().filter(has_fleet).map(|domain| (domain.name().to_owned(), Counts::default()));
        let mut counts: BTreeMap<String, Counts> = with_fleet.collect();
        counts.extend(self.fleet_sheds.0.all(|domain, counts| (domain.to_owned(), read(counts))));
        let of_domain = |(domain, [shed, shadow]): (String, Counts)| {
            Priority::ALL.map(|priority| FleetShedCount {
                domain: domain.clone(),
                priority,
                count: shed[priority.index()],
                shadow: shadow[priority.index()],
            })
        };
        counts.into_iter().flat_map(of_domain).collect()
    }

    /// Returns the state of the fleet's capacity of all domains that have one.
    #[must_use]
    pub fn fleet_states(&self) -> Vec<FleetState> {
        let (rules, now) = (self.rules.load(), self.clock.now());
        let state = |domain: &Domain| {
            let (name, overload) = (domain.name(), domain.overload()?);
            let fleet = overload.fleet.as_ref()?;
            let levels = &rules.rule(fleet.rule)?.limits.limits;
            let whole = &levels.first()?.limit;
            let counted = self.fleet_sheds.0.find(name);
            let [shed, shadow] = counted.map_or_else(Counts::default, |counts| read(&counts));
            let priorities = Priority::ALL.map(|priority| {
                let at = priority.index();
                // Of those that it is charged to, the last leaves the least.
                let level = levels.get(fleet.charged[at].saturating_sub(1));
                let capacity = level.map_or(0, |level| level.limit.rate().count);
                FleetPriorityState { capacity, shed: shed[at], would_be_shed: shadow[at] }
            });
            let shares = overload.fairness.as_ref().zip(self.fleet_shares.state(name, now));
            let shares = shares.map(|(fairness, SharedFleet { tiers, taken_back })| FleetSharesState {
                shares: fairness.tiers.clone(),
                tiers,
                taken_back,
            });
            Some(FleetState {
                domain: name.to_owned(),
                capacity: capacity_text(whole, whole.rate().count),
                is_shadow: overload.shadow,
                priorities,
                shares,
            })
        };
        let mut states: Vec<FleetState> = rules.domains().filter_map(state).collect();
        states.sort_by(|a, b| a.domain.cmp(&b.domain));
        states
    }

    /// Counts a request that the fleet's capacity denies, or would but for shadow mode, and sets the reason. Does nothing for others.
    #[cold]
    pub(crate) fn record_fleet_shed(
        &self,
        check: &Check<'_>,
        rules: &Ruleset,
        plan: &Plan<'_>,
        details: &mut DecisionDetails,
    ) {
        let overload = rules.domain(check.domain).and_then(|domain| domain.overload());
        let Some((overload, fleet)) = overload.and_then(|own| Some((own, own.fleet.as_ref()?))) else {
            return;
        };
        let id = fleet.rule;
        let would_deny = |status: &LimitStatus| status.rule == Some(id) && status.outcome.verdict.is_denied();
        let is_shed = details.denied_by == Some(DecidedBy::Rule(id));
        let is_shadow = overload.shadow && details.is_allowed() && details.limits.iter().any(would_deny);
        let Some(rule) = rules.rule(id).filter(|_| is_shed || is_shadow) else { return };
        let priority = overload.priority_of(|key| check.value(key));
        let counters = &self.fleet_sheds.0.counter(check.domain)[usize::from(is_shadow)];
        counters[priority.index()].fetch_add(1, Ordering::Relaxed);
        let own = details.limits.iter().filter(|status| status.rule == Some(id));
        let pairs = own.zip(&rule.limits.limits);
        let denying = pairs.filter(|(status, _)| status.outcome.verdict.is_denied()).last();
        let Some(whole) = rule.limits.limits.first() else { return };
        let rate = |count: u64| capacity_text(&whole.limit, count);
        let all = whole.limit.rate().count;
        let left = denying.map_or(all, |(_, limit)| limit.limit.rate().count);
        let shed = if is_shadow { "would be shed" } else { "shed" };
        let mut reason = match left < all {
            true => format!(
                "{shed} at priority {priority}: of the fleet's capacity of {}, {left} are for it, and the rest is reserved for higher priorities",
                rate(all)
            ),
            false => {
                format!("{shed} at priority {priority}: the fleet's capacity of {} is in use", rate(all))
            }
        };
        if plan.fleet.as_ref().is_some_and(|fleet| fleet.is_excess) {
            reason.push_str(", beyond its tenant's fair share");
        }
        details.reason = Some(reason.into());
    }
}
