//! Recorder: the part of telemetry on the request path. It counts every decision and captures some. It waits for no lock,
//! allocates nothing in the common case, and shares no cache line with other threads.

pub(crate) mod capture;
pub(crate) mod inline;
pub(crate) mod sampling;
pub(crate) mod stripe;

use crate::mask::caller_key;
use crate::metrics::labels::{LabelLayout, LimitFacts, NO_TIER, OTHER, part};
use crate::recorder::capture::{CallerUtilization, DecisionMeta, LoggedVerdict, pairs};
use crate::recorder::stripe::{PROTOCOLS, Stripe, ThreadState, add};
use crate::telemetry::Telemetry;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, TryLockError};
use tollgate_core::{Charge, Clock, Outcome, TimeDelta, Verdict};
use tollgate_engine::{
    Check, CheckInput, DecidedBy, Decision, Enforced, ForwardedRequest, LimitStatus, Observer, Origin,
};
use tollgate_rules::{MatchKind, Role, Ruleset, SoftAction};

/// Verdicts counted for each origin.
pub(crate) const VERDICTS: [&str; 4] = ["allow", "deny", "delay", "degrade"];
/// Origins of decisions, in the order of their cells.
pub(crate) const ORIGINS: [Origin; Origin::ALL.len()] = Origin::ALL;
/// Cell of requests that no limit applied to: verdict `allow`, first origin.
pub(crate) const UNMATCHED: usize = 0;
/// Cells after those of decisions.
pub(crate) const SHADOW_DENY: usize = VERDICTS.len() * ORIGINS.len();
/// Cells of a rule's checks, by what its limits did: each check counts in one of them.
pub(crate) const RULE_ALLOW: usize = SHADOW_DENY + 1;
pub(crate) const RULE_DENY: usize = SHADOW_DENY + 2;
/// Over a limit in shadow mode: the limit's, or everything's.
pub(crate) const RULE_SHADOW: usize = SHADOW_DENY + 3;
/// Over a limit that is not enforced for the caller yet.
pub(crate) const RULE_UNENFORCED: usize = SHADOW_DENY + 4;
/// Over a limit that degrades.
pub(crate) const RULE_OVER_DEGRADE: usize = SHADOW_DENY + 5;
/// Over a quota limit, while another had room.
pub(crate) const RULE_OVER_QUOTA: usize = SHADOW_DENY + 6;
/// Cell of checks that a candidate limit would have denied, whatever the live limits did.
pub(crate) const RULE_CANDIDATE: usize = SHADOW_DENY + 7;
/// Cells of requests that passed a soft limit of the rule, by what it does.
pub(crate) const RULE_WARNED: usize = SHADOW_DENY + 8;
pub(crate) const RULE_DEGRADED: usize = SHADOW_DENY + 9;
const _: () = assert!(RULE_DEGRADED < crate::recorder::stripe::CELLS);

impl Observer for Telemetry {
    #[inline]
    fn on_decision(&self, check: &Check<'_>, decision: &Decision) {
        self.stripes.with(|local| self.record(local, check, decision));
        if let (Some(trace), Some(traces)) = (check.trace, &self.spans) {
            traces.record_decision(trace, self.clock.now(), check, decision);
        }
    }

    fn on_rules_changed(&self, rules: &Arc<Ruleset>) {
        self.labels.on_rules_changed(rules, |slot| self.raw_counts(slot));
    }

    fn follows_traces(&self) -> bool {
        self.spans.is_some()
    }

    fn on_forwarded(&self, passed: &ForwardedRequest<'_>) {
        if let Some(traces) = &self.spans {
            traces.record_forwarded(passed, self.clock.now());
        }
    }

    #[inline]
    fn on_inline_limits(&self, charges: &[Charge<'_>], outcomes: &[Outcome], enforced: Enforced) {
        self.record_inline(charges, outcomes, enforced);
    }

    fn on_latency(&self, protocol: &'static str, requests: u64, each: TimeDelta) {
        let at = PROTOCOLS.iter().position(|known| *known == protocol).unwrap_or(PROTOCOLS.len() - 1);
        self.stripes.with(|local| local.stripe.latencies(at).record(each.as_micros(), requests));
    }
}

/// Counts a request that matched nothing but rules without a limit for it: what is unlimited is still measured. Returns the
/// slot of the first rule that says so.
#[cold]
fn unlimited(stripe: &Stripe, decision: &Decision, layout: &LabelLayout) -> Option<u32> {
    let lifted = decision.descriptors.iter().find(|one| one.matched == MatchKind::Unlimited)?;
    let slot = layout.slot(lifted.rule?);
    RuleResult { slot, ..RuleResult::default() }.count(stripe.cells(slot));
    Some(slot)
}

impl Telemetry {
    #[inline]
    fn record(&self, local: &mut ThreadState, check: &Check<'_>, decision: &Decision) {
        if !local.layout.as_ref().is_some_and(|layout| decision.uses_rules(&layout.rules)) {
            self.load_layout(local, decision);
        }
        let Some(layout) = &local.layout else { return };
        let stripe = &local.stripe;
        let allowed = decision.is_allowed();
        // The live limit closest to exhaustion; the rule whose limits are being scanned.
        let (mut least, mut nearest, mut tier) = (f32::INFINITY, None, NO_TIER);
        let (mut rule, mut met) = (None, RuleResult::default());
        let mut shadowed: Option<(u32, &LimitStatus)> = None;
        let mut unanswered = None;
        for status in &decision.limits {
            let facts = status.number().and_then(|number| layout.limits.get(number as usize).copied());
            let facts = facts.unwrap_or_else(|| self.limit_facts(status, check, decision, layout));
            let LimitFacts { slot, tier: own_tier, is_live, scale } = facts;
            if rule != Some(status.rule) {
                if rule.is_some() {
                    met.count(stripe.cells(met.slot));
                }
                (rule, met) = (Some(status.rule), RuleResult { slot, ..RuleResult::default() });
            }
            let denied = match status.outcome.verdict {
                Verdict::Unknown => {
                    unanswered = unanswered.or(Some(slot).filter(|_| is_live));
                    if status.rule.is_some_and(|own| decision.denied_by == Some(DecidedBy::Rule(own))) {
                        met.became = RULE_DENY;
                    }
                    continue;
                }
                Verdict::Denied { .. } => true,
                Verdict::Allowed { .. } => false,
            };
            if denied {
                met.add_denial(status.role, allowed, decision.is_enforced(status));
                if is_shadow(status.role, allowed, decision) {
                    met.shadowed = true;
                    shadowed.get_or_insert((slot, status));
                }
            }
            // Signed integers convert faster to floating point; no limit has enough units to overflow.
            let share = status.outcome.remaining as i64 as f32 * scale;
            if is_live && share < least {
                (least, nearest, tier) = (share, Some((slot, status)), own_tier);
            }
        }
        let met_cells = stripe.cells(met.slot);
        if rule.is_some() {
            met.count(met_cells);
        }
        if nearest.is_some() {
            stripe.remains(tier, least.min(1.0));
        }
        let ruled = LoggedVerdict::from_decision(decision);
        let verdict = match ruled {
            LoggedVerdict::Allow | LoggedVerdict::ShadowDeny | LoggedVerdict::Warn => 0,
            LoggedVerdict::Deny => 1,
            LoggedVerdict::Delay => 2,
            LoggedVerdict::Degrade => 3,
        };
        let attributed = match decision.denied_by {
            Some(DecidedBy::Rule(rule)) => Some(layout.slot(rule)),
            Some(by) => Some(self.slot_by(by, check, layout)),
            None if verdict > 1 => effective(decision, ruled)
                .map(|(by, _)| self.slot_by(by, check, layout))
                .or(nearest.map(|(slot, _)| slot)),
            None if decision.limits.is_empty() => unlimited(stripe, decision, layout),
            None => nearest.map(|(slot, _)| slot).or(unanswered),
        };
        let slot = attributed.unwrap_or_else(|| layout.unmatched(check.domain));
        let cells = if slot == met.slot { met_cells } else { stripe.cells(slot) };
        add(&cells[verdict * ORIGINS.len() + decision.origin.index()], 1);

        if shadowed.is_some() {
            add(&stripe.shadowed, 1);
        }
        let is_soft = allowed && (decision.warned_by.is_some() || decision.degraded_by.is_some());
        let log = is_soft && self.count_soft(stripe, check, decision, layout);
        // A request with a reason passes only because shedding is in shadow mode.
        let log = log || !allowed || shadowed.is_some() || check.reason.is_some();
        self.maybe_capture(
            local,
            check,
            decision,
            ScanResult { slot, verdict: ruled, nearest, shadowed, log },
        );
    }

    /// Counts a request that passed a soft limit. Returns whether it is logged: if it is degraded, or the first one over
    /// the threshold. Those after it are warned as well, but a log of all of them would leave no room for denials.
    #[cold]
    #[inline(never)]
    fn count_soft(
        &self,
        stripe: &Stripe,
        check: &Check<'_>,
        decision: &Decision,
        layout: &LabelLayout,
    ) -> bool {
        let count = |by: Option<DecidedBy>, cell: usize| {
            if let Some(by) = by {
                add(&stripe.cells(self.slot_by(by, check, layout))[cell], 1);
            }
        };
        count(decision.warned_by, RULE_WARNED);
        count(decision.degraded_by, RULE_DEGRADED);
        let crosses = |status: &LimitStatus| {
            let Some(limit) = decision.limit(status) else { return false };
            let used = limit.limit.capacity().saturating_sub(status.outcome.remaining);
            let cost = decision.cost(check, status);
            limit.soft.is_some_and(|soft| {
                !cost.is_refund()
                    && used > soft.threshold
                    && used.saturating_sub(cost.units()) <= soft.threshold
            })
        };
        decision.degraded_by.is_some()
            || decision.limits.iter().any(|status| status.role == Role::Live && crosses(status))
    }

    /// Captures a decision if it is to be logged or sampled.
    #[inline]
    fn maybe_capture(
        &self,
        local: &mut ThreadState,
        check: &Check<'_>,
        decision: &Decision,
        found: ScanResult<'_>,
    ) {
        let ThreadState { stripe, sampling, rng, .. } = local;
        let weight =
            if sampling.pass(1, &stripe.sample_rate) { 0 } else { sampling.count(&stripe.sample_rate, rng) };
        let log = found.log || self.is_logged_allow(local);
        if log || weight > 0 {
            self.capture(local, check, decision, found, log, weight);
        }
    }

    /// Returns whether an allowed decision is in the logged sample.
    #[inline]
    pub(crate) fn is_logged_allow(&self, local: &mut ThreadState) -> bool {
        if self.allows == 0 {
            return false;
        }
        if local.until_log == 0 {
            local.until_log = local.rng.jitter(self.allows);
        }
        local.until_log -= 1;
        local.until_log == 0
    }

    #[cold]
    fn capture(
        &self,
        local: &ThreadState,
        check: &Check<'_>,
        decision: &Decision,
        found: ScanResult<'_>,
        log: bool,
        weight: u32,
    ) {
        let denied = decision.denying_limit().filter(|status| status.outcome.verdict.is_denied());
        let Some(layout) = &local.layout else { return };
        let is_allowed = matches!(found.verdict, LoggedVerdict::Allow | LoggedVerdict::Warn);
        let (slot, status, ruled) = match (denied, found.shadowed, effective(decision, found.verdict)) {
            (Some(status), _, _) => (found.slot, Some(status), found.verdict),
            (None, Some((slot, status)), _) if is_allowed => (slot, Some(status), LoggedVerdict::ShadowDeny),
            (None, _, Some((by, status))) => (self.slot_by(by, check, layout), status, found.verdict),
            _ => (found.slot, found.nearest.map(|(_, status)| status), found.verdict),
        };
        // Otherwise the first live limit with an unknown outcome.
        let unanswered =
            |status: &&LimitStatus| status.role.is_live() && status.outcome.verdict == Verdict::Unknown;
        let about = status.or_else(|| decision.limits.iter().find(unanswered));
        let by = about.map(LimitStatus::decided_by);
        let by = decision.denied_by.or(by);
        let now = self.clock.now();
        for buffer in &local.stripe.buffers {
            let mut buffer = match buffer.try_lock() {
                Ok(buffer) => buffer,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The worker is draining this one.
                Err(TryLockError::WouldBlock) => continue,
            };
            // In a flood of denials most buffers are full; skip the work for captures that would be dropped.
            if buffer.has_room() {
                let own = self.nearest_caller_limit(check, decision, layout);
                let noted = DecisionMeta {
                    slot,
                    verdict: ruled,
                    by,
                    status: status.copied(),
                    caller_utilization: own,
                    log,
                    weight,
                };
                let region = about.filter(|_| log).and_then(|about| self.region_of(check, decision, about));
                buffer.push(check, decision, layout, (noted, region), &self.mask, now);
                return;
            }
        }
        if log {
            add(&local.stripe.dropped, 1);
        }
    }

    /// Loads the label layout after a rule change or on a thread's first decision. This and the functions below are out of
    /// line to keep the common case short.
    #[cold]
    #[inline(never)]
    fn load_layout(&self, local: &mut ThreadState, decision: &Decision) {
        local.layout = Some(self.labels.layout(decision.shared_rules()));
    }

    /// Returns the facts on a limit that is not in the rule set.
    #[cold]
    #[inline(never)]
    fn limit_facts(
        &self,
        status: &LimitStatus,
        check: &Check<'_>,
        decision: &Decision,
        layout: &LabelLayout,
    ) -> LimitFacts {
        let capacity = decision.limit(status).map_or(1, |limit| limit.limit.capacity());
        LimitFacts {
            slot: self.slot_of(status, check, layout),
            tier: layout.tier(decision.override_tier()),
            is_live: status.role.is_live(),
            scale: part(capacity),
        }
    }

    /// Returns the slot of whatever decided.
    #[cold]
    #[inline(never)]
    fn slot_by(&self, by: DecidedBy, check: &Check<'_>, layout: &LabelLayout) -> u32 {
        match by {
            DecidedBy::Rule(rule) => layout.slot(rule),
            DecidedBy::Inline => layout.inline(check.domain, &self.labels),
            // Not a rule; the origin label identifies emergency measures.
            _ => layout.unmatched(check.domain),
        }
    }

    /// Returns the slot of a limit that is not in the rule set.
    fn slot_of(&self, status: &LimitStatus, check: &Check<'_>, layout: &LabelLayout) -> u32 {
        status.rule.map_or_else(|| layout.inline(check.domain, &self.labels), |rule| layout.slot(rule))
    }

    /// Returns the utilization of the caller's own limits. Shared limits and shadow limits do not describe one caller.
    fn nearest_caller_limit(
        &self,
        check: &Check<'_>,
        decision: &Decision,
        layout: &LabelLayout,
    ) -> Option<CallerUtilization> {
        let key = caller_key(pairs(check))?;
        let is_own = |status: &LimitStatus| match (status.rule, check.input) {
            (Some(rule), _) => layout.is_per_value(rule, key),
            // An inline limit's counter key contains all entries of its descriptor.
            (None, CheckInput::Descriptors(all)) => {
                let own = all.get(usize::from(status.descriptor));
                own.is_some_and(|own| own.entries.iter().any(|(name, _)| *name == key))
            }
            (None, CheckInput::Attributes(_)) => false,
        };
        let used = |status: &LimitStatus| {
            let facts = status.number().and_then(|number| layout.limits.get(number as usize).copied());
            let facts = facts.unwrap_or_else(|| self.limit_facts(status, check, decision, layout));
            let LimitFacts { slot, tier, .. } = facts;
            let capacity = decision.limit(status)?.limit.capacity();
            let own = CallerUtilization::from_outcome(slot, tier, &status.outcome, capacity);
            // A caller that spends a grant has exhausted its limit.
            Some(if decision.is_granted(status) { CallerUtilization { used: 1.0, ..own } } else { own })
        };
        let deciding = decision
            .limits
            .iter()
            .filter(|status| status.role.is_live() && status.outcome.verdict != Verdict::Unknown);
        deciding.filter(|status| is_own(status)).filter_map(used).max_by(|a, b| a.used.total_cmp(&b.used))
    }
}

/// Result of one rule for a request, over all its limits: each matching rule counts once.
#[derive(Clone, Copy)]
struct RuleResult {
    slot: u32,
    /// Cell to count: within its limits, over them, or over them and denying the request.
    became: usize,
    /// Whether a limit that is not enforced would have denied the request.
    shadowed: bool,
    /// Whether a candidate would have denied it.
    candidate: bool,
}

impl Default for RuleResult {
    fn default() -> Self {
        Self { slot: OTHER, became: RULE_ALLOW, shadowed: false, candidate: false }
    }
}

impl RuleResult {
    /// Adds a denial by a limit in this role. The one that denied the request says what became of it, else the first.
    #[inline]
    fn add_denial(&mut self, role: Role, allowed: bool, is_enforced: bool) {
        let became = match role {
            Role::Candidate => {
                self.candidate = true;
                return;
            }
            Role::Shadow => RULE_SHADOW,
            Role::Unenforced => RULE_UNENFORCED,
            Role::Live | Role::Quota if !allowed && is_enforced => RULE_DENY,
            Role::Quota => RULE_OVER_QUOTA,
            Role::Live if is_enforced => RULE_SHADOW,
            Role::Live => RULE_OVER_DEGRADE,
        };
        if became == RULE_DENY || self.became == RULE_ALLOW {
            self.became = became;
        }
    }

    #[inline]
    fn count(self, cells: &[AtomicU64]) {
        add(&cells[self.became], 1);
        if self.shadowed {
            add(&cells[SHADOW_DENY], 1);
        }
        if self.candidate {
            add(&cells[RULE_CANDIDATE], 1);
        }
    }
}

/// What the recorder found while scanning a decision's limits.
#[derive(Clone, Copy)]
struct ScanResult<'d> {
    slot: u32,
    verdict: LoggedVerdict,
    nearest: Option<(u32, &'d LimitStatus)>,
    shadowed: Option<(u32, &'d LimitStatus)>,
    log: bool,
}

/// Returns what delayed, degraded or warned an allowed request: its rule, and the limit of that rule which did.
#[cold]
fn effective(decision: &Decision, verdict: LoggedVerdict) -> Option<(DecidedBy, Option<&LimitStatus>)> {
    let soft = |status: &LimitStatus| decision.limit(status)?.soft_action(status.outcome.remaining);
    let (by, action) = match verdict {
        LoggedVerdict::Delay => {
            let delayed = |status: &&LimitStatus| {
                status.outcome.verdict == Verdict::Allowed { delay: decision.delay() }
                    && decision.is_enforced(status)
            };
            return decision.limits.iter().find(delayed).map(|status| (status.decided_by(), Some(status)));
        }
        LoggedVerdict::Warn => (decision.warned_by?, SoftAction::Warn),
        LoggedVerdict::Degrade => (decision.degraded_by?, SoftAction::Degrade),
        LoggedVerdict::Allow | LoggedVerdict::Deny | LoggedVerdict::ShadowDeny => return None,
    };
    let did = |status: &&LimitStatus| {
        let degrades = action == SoftAction::Degrade && status.outcome.verdict.is_denied();
        status.role.is_live() && status.decided_by() == by && (degrades || soft(status) == Some(action))
    };
    Some((by, decision.limits.iter().filter(did).min_by_key(|status| status.outcome.remaining)))
}

/// Returns whether a denial by a limit was not enforced: the limit or everything is in shadow mode.
fn is_shadow(role: Role, allowed: bool, decision: &Decision) -> bool {
    match role {
        Role::Shadow | Role::Candidate | Role::Unenforced => true,
        Role::Live => allowed && decision.degraded_by.is_none(),
        Role::Quota => false,
    }
}
