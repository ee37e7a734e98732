//! Requests that the fleet's capacity sheds: the reason that a decision has, and their number by priority. The capacity is a
//! rule like any other, so that a denial by it says neither by itself.

use crate::by_rule::ByRule;
use crate::check::Check;
use crate::decision::{DecidedBy, DecisionDetails, LimitStatus};
use crate::limiter::Limiter;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::{Algorithm, Priority};
use tollgate_rules::{Plan, Ruleset};

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

impl<S> Limiter<S> {
    /// Returns how many requests the fleet's capacity has shed on this node; domains that shed none are left out.
    #[must_use]
    pub fn fleet_sheds(&self) -> Vec<FleetShedCount> {
        let counts = self.fleet_sheds.0.all(|domain, [shed, shadow]| {
            Priority::ALL.map(|priority| FleetShedCount {
                domain: domain.to_owned(),
                priority,
                count: shed[priority.index()].load(Ordering::Relaxed),
                shadow: shadow[priority.index()].load(Ordering::Relaxed),
            })
        });
        counts.into_iter().flatten().collect()
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
        let rate = |count: u64| match whole.limit.algorithm() {
            Algorithm::Concurrency => format!("{count} in flight"),
            _ => tollgate_core::Rate { count, period: whole.limit.rate().period.clone() }.to_string(),
        };
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
