//! Compiles the `overload` section: the fleet's capacity becomes a rule.

use super::Compiler;
use crate::decode::overload::{Capacity, FleetDraft, MAX_IN_FLIGHT, OverloadDraft};
use crate::metadata::Metadata;
use crate::overload::{Adapt, FLEET_RULE, Fairness, Fleet, FleetShares, Overload, WORKERS_RULE};
use crate::reader::Spanned;
use crate::rule::{Action, Class, CostFrom, FailPolicy, LimitSet, OnError, Role, Rule, RuleLimit};
use crate::ruleset::PermitRelease;
use crate::scope::{Kind, ScopePath};
use crate::tree::{Element, ValueTest};
use crate::unit::Unit;
use crate::yaml::Position;
use tollgate_core::{Algorithm, Limit, LimitSpec, Mode, Period, Priority, Rate};

/// Part of the capacity, as a divisor, that requests beyond their tenant's fair share leave to those within it. Of a rate it is some requests
/// at least, up to half its burst: requests within their shares come at random, and nothing of the rate itself is lost.
const FAIR_HEADROOM: u64 = 20;
const LEAST_HEADROOM: u64 = 16;
/// Part of the capacity, as a divisor, by which requests within a guarantee may exceed it: others have borrowed what they take
/// back.
const TAKE_BACK: u64 = 2;

impl Compiler<'_, '_> {
    pub(super) fn overload(&mut self, draft: Spanned<OverloadDraft>, scope: &ScopePath) -> Overload {
        self.reject_under_envoy(draft.at, "`overload`");
        let OverloadDraft { mut section, fleet, workers_at, adapt_at } = draft.value;
        if let Some(workers) = &mut section.workers {
            let at = workers_at.unwrap_or(draft.at);
            if self.options.permits == PermitRelease::Expire {
                self.reader.warning(
                    at,
                    "`workers` has no effect: no protocol that is served forwards requests",
                    "serve through the gateway or the Rust layer, or use `fleet`",
                );
            }
            workers.rule = self.shedding_rule(WORKERS_RULE, Vec::new(), Mode::Adaptive, at);
        }
        if self.options.permits == PermitRelease::Expire
            && section.adapt.as_ref().is_some_and(Adapt::is_measured)
        {
            self.reader.warning(
                adapt_at.unwrap_or(draft.at),
                "signals with `measure` have no effect: no protocol that is served forwards requests",
                "serve through the gateway or the Rust layer, push the signals, or ask a Prometheus (`query`)",
            );
        }
        section.fleet = fleet.and_then(|fleet| self.fleet(&fleet, &section, scope));
        section
    }

    fn fleet(&mut self, fleet: &Spanned<FleetDraft>, section: &Overload, scope: &ScopePath) -> Option<Fleet> {
        let FleetDraft { capacity, reserve } = &fleet.value;
        let (algorithm, whole) = match capacity {
            Capacity::InFlight(limit, ttl) => (Algorithm::Concurrency, Rate::per(*limit, *ttl)),
            Capacity::Rate(count, period) => {
                let rate = Rate { count: *count, period: period.clone() };
                // What a guarantee takes back, others must have less of afterwards: a window would forget it at its end.
                let stated = self.shape.algorithm.unwrap_or(Algorithm::Gcra);
                let is_bucket = section.fairness.is_none() || stated.has_burst();
                (if is_bucket { stated } else { Algorithm::Gcra }, rate)
            }
        };
        if self.options.permits == PermitRelease::Expire && algorithm == Algorithm::Concurrency {
            self.reader.warning(
                fleet.at,
                "no protocol that is served reports the end of a request, so each counts as in flight until its `ttl` ends",
                "write the capacity as a rate, as in `20000/second`, or serve through the gateway",
            );
        }
        // Of a limit in flight the period is only how long a request counts whose end is not reported.
        let unit = match (&whole.period, algorithm) {
            (_, Algorithm::Concurrency) | (Period::Calendar(_), _) => None,
            (Period::Rolling(length), _) => Unit::from_length(*length),
        };
        let role = if section.shadow { Role::Shadow } else { Role::Live };
        let scope = scope.in_store(self.store.as_deref());
        let (mut limits, mut charged, mut left) = (Vec::new(), [1; 4], 1000);
        // The whole capacity first, then what is left of it below each priority that has a part reserved.
        for (above, name) in std::iter::once((None, "fleet"))
            .chain(Priority::ALL.map(|priority| (Some(priority), priority.name())))
        {
            if let Some(above) = above {
                let reserved = reserve[above.index()];
                if reserved == 0 {
                    continue;
                }
                left -= reserved.min(left);
                charged[above.index() + 1..].iter_mut().for_each(|count| *count += 1);
            }
            let count = whole.count * left / 1000;
            if count == 0 {
                self.reader.error_help(
                    fleet.at,
                    format!(
                        "of a capacity of {} the reserves leave less than one request to the others",
                        whole.count
                    ),
                    "reserve less, or write a larger capacity",
                );
                return None;
            }
            let rate = Rate { count, period: whole.period.clone() };
            let limit = match LimitSpec::new(algorithm, rate).build() {
                Ok(limit) => limit,
                Err(error) => {
                    self.reader.error(fleet.at, error.to_string());
                    return None;
                }
            };
            let element = Element { key: FLEET_RULE.into(), test: ValueTest::Exact(name.into()) };
            let scope = scope.child(&element).limit(Kind::Role(role), &limit, None, None);
            limits.push(RuleLimit::new(limit, scope, unit, role, None));
        }
        let fairness = section.fairness.as_ref();
        let shares = fairness.map(|fairness| self.fleet_shares(fairness, reserve, &limits, &scope, fleet.at));
        let id = self.shedding_rule(FLEET_RULE, limits, Mode::Adaptive, fleet.at);
        Some(Fleet { rule: id, charged, shares })
    }

    /// Adds the limits by which tenants share the fleet's capacity, whose own limits are `levels`.
    fn fleet_shares(
        &mut self,
        fairness: &Fairness,
        reserve: &[u64; 4],
        levels: &[RuleLimit],
        scope: &ScopePath,
        at: Position,
    ) -> FleetShares {
        let whole = levels.first().map_or(0, |level| level.limit.rate().count);
        let is_rate = levels.first().is_some_and(|level| level.limit.algorithm() != Algorithm::Concurrency);
        let least = |count: u64| if is_rate { LEAST_HEADROOM.min(count / 2) } else { 1 };
        let beyond = |count: u64| match count - (count / FAIR_HEADROOM).max(least(count)).max(1) {
            0 => count,
            left => left,
        };
        let within = |count: u64| count + (whole / TAKE_BACK).max(1);
        let variant = |level: &RuleLimit, bound: u64| {
            let mut other = level.clone();
            other.limit = bounded(&level.limit, bound);
            other
        };
        if !is_rate && within(whole) > MAX_IN_FLIGHT {
            let most = MAX_IN_FLIGHT * TAKE_BACK / (TAKE_BACK + 1);
            self.reader.warning(
                at,
                format!(
                    "more than {MAX_IN_FLIGHT} requests in flight are not counted, so guarantees take back only {} of {whole} that others have borrowed",
                    MAX_IN_FLIGHT.saturating_sub(whole)
                ),
                format!("write a capacity of at most {most} in flight, or a rate"),
            );
        }
        let mut limits: Vec<RuleLimit> =
            levels.iter().map(|level| variant(level, beyond(level.limit.rate().count))).collect();
        limits.extend(levels.iter().map(|level| variant(level, within(level.limit.rate().count))));
        // Where guarantees have taken back all that they may, what is reserved is still there: its own counters bound it.
        let reserved: u64 = reserve.iter().map(|thousandths| part_of(whole, *thousandths)).sum();
        let above = |count: u64| within(count) + reserved;
        limits.extend(levels.iter().map(|level| variant(level, above(level.limit.rate().count))));
        let mut guarantees = Vec::with_capacity(fairness.tiers.len());
        // A part of the capacity in thousandths.
        let part = |thousandths: u64| {
            let first = levels.first().filter(|_| thousandths > 0)?;
            let count = Some(part_of(whole, thousandths)).filter(|count| *count > 0)?;
            let rate = Rate { count, period: first.limit.rate().period.clone() };
            Some((LimitSpec::new(first.limit.algorithm(), rate).build().ok()?, first.role))
        };
        let element = |key: &str, test| Element { key: key.into(), test };
        for tier in &fairness.tiers {
            let guaranteed = part(tier.guarantee);
            if guaranteed.is_none() && tier.guarantee > 0 {
                self.reader.warning(
                    at,
                    format!(
                        "`{}: {}` of the fleet's capacity is less than one request, so nothing of it is guaranteed",
                        tier.tier,
                        tier.guarantee_text()
                    ),
                    "guarantee more, write a larger capacity, or one per minute",
                );
            }
            guarantees.push(guaranteed.map(|(limit, role)| {
                let path = scope.child(&element(FLEET_RULE, ValueTest::Exact("guarantee".into())));
                let path = match tier.is_each {
                    true => path.child(&element(&fairness.by, ValueTest::Any)),
                    false => path.child(&element("tier", ValueTest::Exact(tier.tier.as_str().into()))),
                };
                let scope = path.limit(Kind::Role(role), &limit, None, None);
                limits.push(RuleLimit::new(limit, scope, None, role, None));
                limits.len() - 1
            }));
        }
        let reserves = Priority::ALL.map(|priority| {
            let (limit, role) = part(reserve[priority.index()])?;
            let path = scope.child(&element(FLEET_RULE, ValueTest::Exact("reserved".into())));
            let path = path.child(&element("priority", ValueTest::Exact(priority.name().into())));
            let scope = path.limit(Kind::Role(role), &limit, None, None);
            let fair = RuleLimit::new(limit, scope, None, role, None);
            limits.push(variant(&fair, beyond(fair.limit.rate().count)));
            limits.push(fair);
            Some((limits.len() - 1, limits.len() - 2))
        });
        // Decided by the store each time: what a node has leased by one number must not be spent by another.
        FleetShares { rule: self.shedding_rule(FLEET_RULE, limits, Mode::Central, at), guarantees, reserves }
    }

    /// Adds a rule that sheds.
    fn shedding_rule(&mut self, name: &str, limits: Vec<RuleLimit>, mode: Mode, at: Position) -> u32 {
        let id = u32::try_from(self.rules.len()).unwrap_or(u32::MAX);
        let rule = Rule {
            id,
            is_plain: false,
            enforcement: Default::default(),
            is_shedding: true,
            has_explicit_name: true,
            has_algorithm_of_class: false,
            unnamed_tiers: Vec::new(),
            keys: Vec::new(),
            name: name.to_owned(),
            limits: LimitSet { limits, unlimited: false },
            tiers: Vec::new(),
            class: Class::Comfort,
            on_error: OnError::Always(FailPolicy::Local),
            action: Action::Reject,
            mode,
            store: self.store.clone(),
            tier_stores: Vec::new(),
            region: None,
            homes: None,
            has_empty_part: false,
            shared_by_callers: true,
            shard_by: None,
            fallback: None,
            split: None,
            // Named after limits of callers that deny too: the denial of a caller over its own limit names that limit.
            priority: i32::MIN,
            enforce: None,
            cost: CostFrom::Fixed(1),
            billing: None,
            durable: Some(false),
            replaces: Vec::new(),
            detailed_metric: false,
            value_to_metric: false,
            metadata: Metadata::default(),
            response: None,
            location: (self.reader.source.name.clone(), at.line),
        };
        self.rules.push(rule.prepared(super::coupling(self.profile, self.options)));
        id
    }
}

/// Returns so many thousandths of a count.
fn part_of(whole: u64, thousandths: u64) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(thousandths) / 1000).unwrap_or(u64::MAX)
}

/// Returns the limit that finds its counter in use at another number of units: the same rate with another burst, or other permits.
fn bounded(limit: &Limit, bound: u64) -> Limit {
    let (rate, bound) = (limit.rate(), bound.min(Rate::MAX_COUNT));
    let spec = match limit.algorithm() {
        Algorithm::Concurrency => {
            let count = bound.min(MAX_IN_FLIGHT);
            LimitSpec::new(Algorithm::Concurrency, Rate { count, period: rate.period.clone() })
        }
        algorithm => LimitSpec::new(algorithm, rate.clone()).burst(bound),
    };
    spec.build().unwrap_or_else(|_| limit.clone())
}
