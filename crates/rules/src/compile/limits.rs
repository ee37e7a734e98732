//! Compiles the limits of one rule: algorithm, role and counter scope.

use super::{Compiler, LimitSets};
use crate::diagnostic::Severity;
use crate::draft::{LimitDraft, RuleDraft, SoftThreshold};
use crate::reader::Spanned;
use crate::rule::{Action, Class, CostFrom, LimitSet, Profile, Role, RuleLimit, SoftAction, SoftLimit};
use crate::scope::{Kind, ScopePath};
use crate::unit::Unit;
use crate::yaml::Position;
use tollgate_core::{Algorithm, Limit, LimitSpec, Period, Rate, TimeDelta};

/// Options of the rule that apply to at least one of its limits.
#[derive(Default)]
struct UsedOptions {
    algorithm: bool,
    burst: bool,
    slots: bool,
    jitter: bool,
    refill_interval: bool,
}

impl UsedOptions {
    const ALL: Self = Self { algorithm: true, burst: true, slots: true, jitter: true, refill_interval: true };
}

impl Compiler<'_, '_> {
    /// Returns the limits of a rule and of its tiers; `of_tiers` has the paths of tiers whose counters another store keeps.
    pub(super) fn limit_sets(
        &mut self,
        draft: &RuleDraft,
        scope: &ScopePath,
        of_tiers: &[(&str, ScopePath)],
    ) -> LimitSets {
        let mut used = UsedOptions::default();
        if let Some(action) = draft.action.filter(|action| action.value == Action::Delay) {
            self.reject_under_envoy(action.at, "`action: delay`");
        }
        if let Some(soft) = draft.soft.filter(|soft| soft.value.action == SoftAction::Delay) {
            self.reject_under_envoy(soft.at, "`soft: {action: delay}`");
            let other = match draft.action.map(|action| action.value) {
                Some(Action::Delay) => {
                    Some("`action: delay` delays from the first request beyond the rate on")
                }
                Some(Action::Degrade) => Some("`action: degrade` never delays"),
                Some(Action::Reject) | None => None,
            };
            if let Some(other) = other {
                let message = format!("`soft: {{action: delay}}` has no effect: {other}");
                self.reader.error_help(soft.at, message, "write one of the two");
            }
        }
        let default = draft.limits.as_deref().unwrap_or_default();
        if let (Some(burst), true) = (
            draft.shape.burst,
            default.len() > 1
                || draft.candidate.len() > 1
                || draft.tiers.iter().any(|(_, set)| set.len() > 1),
        ) {
            self.reader.error_help(
                burst.at,
                "`burst` beside several limits: it is not clear whose it is",
                "write it with its limit: `{count: 100, period: minute, burst: 20}`",
            );
        }
        let live = role(draft, self.options.quota_mode);
        let mut common = Vec::new();
        for limit in &draft.candidate {
            common.extend(self.limit(draft, limit, Role::Candidate, scope, &mut used));
        }
        common.extend(self.concurrency(draft, live, scope));
        let path_of =
            |tier: &str| of_tiers.iter().find(|(name, _)| *name == tier).map_or(scope, |(_, path)| path);
        let mut set = |compiler: &mut Self,
                       limits: &[LimitDraft],
                       unlimited: bool,
                       path: &ScopePath,
                       places: &mut Vec<Position>| {
            let mut set = Vec::with_capacity(limits.len());
            for limit in limits {
                if let Some(compiled) = compiler.limit(draft, limit, live, path, &mut used) {
                    compiler.reject_duplicates(&set, &compiled, limit.at);
                    set.push(compiled);
                    places.push(limit.at);
                }
            }
            LimitSet { limits: set, unlimited }
        };
        let mut places = Vec::new();
        let mut limits = set(self, default, draft.unlimited, scope, &mut places);
        if let Some(place) = self.locations.last_mut() {
            place.limits = places;
        }
        let mut tiers: Vec<(String, LimitSet)> = draft
            .tiers
            .iter()
            .map(|(name, limits)| {
                (name.clone(), set(self, limits, limits.is_empty(), path_of(name), &mut Vec::new()))
            })
            .collect();
        tiers.sort_by(|(a, _), (b, _)| a.cmp(b));
        let protects = draft.class.unwrap_or(self.class) != Class::Comfort;
        let mut unnamed_tiers = Vec::new();
        if draft.limits.is_none() && !draft.unlimited && !tiers.is_empty() {
            if protects {
                (limits, unnamed_tiers) = strictest(&tiers);
            }
            self.report_unnamed(draft.at, &limits, &unnamed_tiers);
        }
        let of_tiers = tiers.iter_mut().map(|(name, set)| (path_of(name), set));
        for (path, set) in std::iter::once((scope, &mut limits)).chain(of_tiers) {
            set.limits.extend(common.iter().cloned().map(|mut limit| {
                limit.scope = scope.moved(limit.scope, path);
                limit
            }));
        }
        let candidates: Vec<&RuleLimit> =
            common.iter().filter(|limit| limit.role == Role::Candidate).collect();
        for (i, limit) in candidates.iter().enumerate() {
            if candidates[..i].iter().any(|earlier| earlier.scope == limit.scope) {
                self.are_duplicates(draft.candidate[i].at);
            }
        }
        self.reject_unused(draft, &used);
        if let (Some(soft), true, true) = (draft.soft, limits.limits.is_empty(), tiers.is_empty()) {
            self.reader.error_help(soft.at, "`soft` without a limit", "write `limit: 100/minute` beside it");
        }
        (limits, tiers, unnamed_tiers)
    }

    /// Reports which limit callers have whose tier is missing or unknown, if the rule states none.
    fn report_unnamed(&mut self, at: Position, limits: &LimitSet, tiers: &[String]) {
        const WHOM: &str = "a request without a tier, or with one that `tiers` does not name,";
        const HELP: &str = "state it: `limit: 60/minute` beside `tiers`";
        if limits.limits.is_empty() {
            let help = format!("{HELP}, or `limit: unlimited` if that is meant");
            self.reader.warning(at, format!("{WHOM} has no limit"), help);
            return;
        }
        let rates: Vec<String> =
            limits.limits.iter().map(|limit| format!("`{}`", limit.limit.rate())).collect();
        let tiers: Vec<String> = tiers.iter().map(|tier| format!("`{tier}`")).collect();
        let message = format!(
            "{WHOM} has the strictest limit: {}, that of {}",
            rates.join(" and "),
            tiers.join(" and ")
        );
        self.reader.warn(Severity::Note, at, message, format!("{HELP}, if it is another"));
    }

    fn limit(
        &mut self,
        draft: &RuleDraft,
        limit: &LimitDraft,
        role: Role,
        scope: &ScopePath,
        used: &mut UsedOptions,
    ) -> Option<RuleLimit> {
        self.native_only(&limit.shape);
        let calendar = matches!(limit.period, Period::Calendar(_));
        let quota = Rate { count: limit.count, period: limit.period.clone() };
        let unit = match &limit.period {
            Period::Rolling(length) => Unit::from_length(*length),
            Period::Calendar(_) => None,
        };
        let mut slots = None;
        let spec = if self.profile == Profile::Envoy {
            if calendar {
                self.reject_under_envoy(limit.at, "a calendar period");
            }
            // A rejected option has already been reported: no second error for it.
            *used = UsedOptions::ALL;
            LimitSpec::new(Algorithm::FixedWindow, quota).count_denied()
        } else {
            let delays = !calendar && draft.action.is_some_and(|action| action.value == Action::Delay);
            let algorithm = self.resolve_algorithm(draft, limit, calendar, delays, used);
            let mut spec = LimitSpec::new(algorithm, quota);
            spec.delay = delays;
            spec.burst = limit.shape.burst.map(|burst| burst.value);
            if let (None, Some(burst), true) = (spec.burst, draft.shape.burst, algorithm.has_burst()) {
                spec.burst = Some(burst.value);
                used.burst = true;
            }
            if let (Some(0), Some(at)) =
                (spec.burst.filter(|_| limit.count > 0), limit.shape.burst.or(draft.shape.burst))
            {
                self.reader.warning(
                    at.at,
                    format!("`burst: 0` denies every request, whatever the limit of `{}`", spec.rate),
                    "write how many may come at once, as in `burst: 1`, or leave it out; to deny all, write a limit of 0",
                );
            }
            spec.slots = limit.shape.slots.map(|slots| slots.value);
            if let (None, Some(slots), Algorithm::StrictWindow) = (spec.slots, draft.shape.slots, algorithm) {
                spec.slots = Some(slots.value);
                used.slots = true;
            }
            if let (Some(given), true) = (limit.shape.slots, algorithm != Algorithm::StrictWindow) {
                let message = format!("`slots` has no meaning for {algorithm}");
                self.reader.error_help(
                    given.at,
                    message,
                    "write `algorithm: strict_window` or leave `slots` out",
                );
                return None;
            }
            let interval = limit.shape.refill_interval.or_else(|| {
                let of_rule = draft.shape.refill_interval.filter(|_| algorithm.has_refill_interval());
                used.refill_interval |= of_rule.is_some();
                of_rule
            });
            if !self.has_refill_interval(interval, algorithm) {
                return None;
            }
            spec.refill_interval = interval.map(|interval| interval.value);
            // What begins at the same instant for all keys: a window, or a refill.
            let windows = (algorithm.has_windows() || interval.is_some()) && !calendar;
            spec.jitter = match (limit.shape.jitter, draft.shape.jitter) {
                (Some(jitter), _) => jitter.value,
                (None, Some(jitter)) => {
                    used.jitter |= windows;
                    jitter.value && windows
                }
                (None, None) => self.shape.jitter && windows,
            };
            slots = spec.slots;
            spec
        };
        let built = match spec.build() {
            Ok(built) => built,
            Err(error) => {
                self.reader.error(limit.at, error.to_string());
                return None;
            }
        };
        self.lint_refills(&built, limit.shape.refill_interval.or(draft.shape.refill_interval));
        let cost = own_cost(draft, limit);
        let of_rule = draft.cost.clone().map_or(CostFrom::Request, Into::into);
        let kind = Kind::of(role, self.profile);
        let scope = scope.limit(kind, &built, slots, cost.as_deref().map(|own| (own, &of_rule)));
        let soft = if role == Role::Candidate { None } else { soft_mark(draft, &built) };
        Some(RuleLimit { cost, ..RuleLimit::new(built, scope, unit, role, soft) })
    }

    /// Returns the limit's algorithm, else the rule's, else the one that the action or an option needs, else the
    /// domain's, else the one of the class.
    fn resolve_algorithm(
        &self,
        draft: &RuleDraft,
        limit: &LimitDraft,
        calendar: bool,
        delays: bool,
        used: &mut UsedOptions,
    ) -> Algorithm {
        if let Some(algorithm) = limit.shape.algorithm {
            return algorithm.value;
        }
        // Only fixed windows can follow the calendar, so the rule's algorithm is for its other limits.
        if calendar {
            return Algorithm::FixedWindow;
        }
        if let Some(algorithm) = draft.shape.algorithm {
            used.algorithm = true;
            return algorithm.value;
        }
        if delays {
            Algorithm::LeakyBucket
        } else if limit.shape.refill_interval.or(draft.shape.refill_interval).is_some() {
            Algorithm::TokenBucket
        } else {
            let has_burst = limit.shape.burst.or(draft.shape.burst).is_some();
            let class = draft.class.unwrap_or(self.class);
            let default = if has_burst { Algorithm::Gcra } else { class.algorithm() };
            self.shape.algorithm.unwrap_or(default)
        }
    }

    /// Returns whether this algorithm can be refilled at this interval; reports it if not.
    fn has_refill_interval(&mut self, interval: Option<Spanned<TimeDelta>>, algorithm: Algorithm) -> bool {
        let Some(Spanned { at, value }) = interval else { return true };
        if !algorithm.has_refill_interval() {
            self.reader.error_help(
                at,
                format!("`refill_interval` has no meaning for {algorithm}"),
                "write `algorithm: token_bucket` or leave `refill_interval` out",
            );
            return false;
        }
        if value < Period::MIN_LENGTH || value > Period::MAX_LENGTH {
            self.reader.error_help(
                at,
                format!("a refill interval of {value} is out of range"),
                "write one from 1ms to 10 years",
            );
            return false;
        }
        true
    }

    /// Warns about a bucket whose refills add nothing most of the time, or more than it holds.
    fn lint_refills(&mut self, limit: &Limit, interval: Option<Spanned<TimeDelta>>) {
        let Some((at, interval)) = interval.map(|given| given.at).zip(limit.refill_interval()) else {
            return;
        };
        let rate = limit.rate();
        let refill = u128::from(rate.count) * u128::from(interval.as_micros());
        let unit = u128::from(rate.period.length().as_micros());
        if refill > 0 && refill < unit {
            let message = format!("{rate} is less than one unit every {interval}: most refills add none");
            self.reader.warning(at, message, "write an interval in which a unit arrives, or leave it out");
        } else if refill > u128::from(limit.capacity()) * unit {
            let message = format!(
                "each refill adds {}, and the bucket holds {}: the rest is lost",
                refill.div_ceil(unit),
                limit.capacity()
            );
            self.reader.warning(at, message, "raise `burst`, or shorten `refill_interval`");
        }
    }

    fn concurrency(&mut self, draft: &RuleDraft, role: Role, scope: &ScopePath) -> Option<RuleLimit> {
        let concurrency = draft.concurrency?;
        self.reject_under_envoy(concurrency.at, "`concurrency`");
        let quota = Rate::per(concurrency.value.limit, concurrency.value.ttl);
        match LimitSpec::new(Algorithm::Concurrency, quota).build() {
            Ok(limit) => {
                let scope = scope.limit(Kind::of(role, self.profile), &limit, None, None);
                let soft = soft_mark(draft, &limit);
                Some(RuleLimit::new(limit, scope, None, role, soft))
            }
            Err(error) => {
                self.reader.error(concurrency.at, error.to_string());
                None
            }
        }
    }

    fn reject_duplicates(&mut self, set: &[RuleLimit], limit: &RuleLimit, at: Position) {
        if set.iter().any(|other| other.scope == limit.scope) {
            self.are_duplicates(at);
        }
    }

    fn are_duplicates(&mut self, at: Position) {
        self.reader.error_help(
            at,
            "two limits of one rule with the same algorithm, period and cost would share a counter",
            "keep the stricter one, or give one of them another period, algorithm or cost",
        );
    }

    /// Rejects options of the rule that apply to none of its limits.
    fn reject_unused(&mut self, draft: &RuleDraft, used: &UsedOptions) {
        if self.profile == Profile::Envoy {
            return;
        }
        let shape = &draft.shape;
        let words = [
            (
                "algorithm",
                shape.algorithm.map(|word| word.at),
                used.algorithm,
                "it is for limits over a period",
            ),
            (
                "burst",
                shape.burst.map(|word| word.at),
                used.burst,
                "it is for gcra, token_bucket and leaky_bucket",
            ),
            ("slots", shape.slots.map(|word| word.at), used.slots, "it is for strict_window"),
            (
                "jitter",
                shape.jitter.filter(|word| word.value).map(|word| word.at),
                used.jitter,
                "it is for fixed_window, sliding_window, strict_window and refill intervals, not for calendar periods",
            ),
            (
                "refill_interval",
                shape.refill_interval.map(|word| word.at),
                used.refill_interval,
                "it is for token_bucket",
            ),
        ];
        for (name, at, used, what_for) in words {
            if let (Some(at), false) = (at, used) {
                let message = format!("`{name}` has no meaning for any limit of this rule");
                self.reader.error_help(at, message, format!("{what_for}; leave it out"));
            }
        }
    }
}

/// Returns the limits for callers of no tier, where a rule has limits of tiers alone, and the tiers that they are of: for
/// each cost, those of the tier with the lowest sustained rate of it, then with the smallest burst. Tiers that admit
/// nothing are for callers that are shut out, so they count only if there are no others.
fn strictest(tiers: &[(String, LimitSet)]) -> (LimitSet, Vec<String>) {
    let blocks = |set: &LimitSet| set.limits.iter().any(|limit| limit.limit.capacity() == 0);
    let all_block = tiers.iter().all(|(_, set)| blocks(set));
    let open = || tiers.iter().filter(|(_, set)| all_block || !blocks(set));
    let mut costs: Vec<_> = open().flat_map(|(_, set)| &set.limits).map(|limit| &limit.cost).collect();
    let mut seen = Vec::new();
    costs.retain(|cost| !seen.contains(cost) && (seen.push(*cost), true).1);
    let (mut strictest, mut names) = (LimitSet::default(), Vec::new());
    for cost in costs {
        let own = |set: &'_ LimitSet| {
            let own = set.limits.iter().filter(|limit| limit.cost == *cost);
            own.map(|limit| sustained(&limit.limit)).min()
        };
        let lowest =
            open().filter_map(|(name, set)| Some((own(set)?, name, set))).min_by_key(|(rate, ..)| *rate);
        let Some((_, name, set)) = lowest else { continue };
        strictest.limits.extend(set.limits.iter().filter(|limit| limit.cost == *cost).cloned());
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    (strictest, names)
}

/// Returns what orders limits by strictness: units per ten years, then the most that may pass at once.
fn sustained(limit: &Limit) -> (u128, u64) {
    let period = u128::from(limit.rate().period.length().as_micros()).max(1);
    let long = u128::from(Period::MAX_LENGTH.as_micros());
    (u128::from(limit.rate().count) * long / period, limit.capacity())
}

fn role(draft: &RuleDraft, all_quota: bool) -> Role {
    let is_on = |flag: Option<Spanned<bool>>| flag.is_some_and(|on| on.value);
    match (is_on(draft.shadow), all_quota || is_on(draft.quota)) {
        (true, _) => Role::Shadow,
        (false, true) => Role::Quota,
        (false, false) => Role::Live,
    }
}

/// Returns the cost of one limit, if it is another than the rule's. Beside limits with a cost of their own, one without
/// counts requests, so that the cost of the others never counts for it.
fn own_cost(draft: &RuleDraft, limit: &LimitDraft) -> Option<Box<CostFrom>> {
    match &limit.cost {
        Some(cost) if draft.cost.as_ref() != Some(cost) => Some(Box::new(cost.clone().into())),
        Some(_) => None,
        None => {
            let all = draft.limits.iter().flatten().chain(draft.tiers.iter().flat_map(|(_, set)| set));
            let is_mixed =
                draft.cost.is_none() && all.chain(&draft.candidate).any(|other| other.cost.is_some());
            is_mixed.then(|| Box::new(CostFrom::Fixed(1)))
        }
    }
}

/// Returns the soft limit. A percentage is rounded up, so that it is at least one unit.
fn soft_mark(draft: &RuleDraft, limit: &Limit) -> Option<SoftLimit> {
    let soft = draft.soft?.value;
    let at = match soft.threshold {
        SoftThreshold::Units(units) => units,
        SoftThreshold::Percent(percent) => (limit.capacity() * percent).div_ceil(100),
    };
    Some(SoftLimit { threshold: at, action: soft.action })
}
