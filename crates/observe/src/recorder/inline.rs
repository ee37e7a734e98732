//! Recorder for inline limits without rules (`CL.THROTTLE`), all counted under one label.
//!
//! It records a batch at a time. A batch without denials and without samples costs one pass over its outcomes and a few
//! additions each; everything else is done once per batch, so that a flood of denials takes one lock and one clock reading
//! per batch.

use crate::metrics::labels::{INLINE_SLOT, NO_TIER, part};
use crate::recorder::capture::{CallerUtilization, DecisionMeta, LoggedVerdict};
use crate::recorder::stripe::{ThreadState, add};
use crate::recorder::{ORIGINS, RULE_ALLOW, RULE_DENY, RULE_SHADOW, SHADOW_DENY};
use crate::telemetry::Telemetry;
use std::sync::TryLockError;
use tollgate_core::{Charge, Clock, Outcome, Verdict};
use tollgate_engine::{Enforced, LimitStatus};

/// Cells of decisions with origin `store`.
const ALLOW: usize = 1;
const DENY: usize = ORIGINS.len() + 1;

impl Telemetry {
    pub(crate) fn record_inline(&self, charges: &[Charge<'_>], outcomes: &[Outcome], enforced: Enforced) {
        let count = outcomes.len();
        self.stripes.with(|local| {
            let mut denied = 0;
            for (charge, outcome) in charges.iter().zip(outcomes) {
                denied += usize::from(outcome.verdict.is_denied());
                // A caller with an inline limit has no tier.
                let share = outcome.remaining as i64 as f32 * part(charge.limit.capacity());
                local.stripe.remains(NO_TIER, share.min(1.0));
            }
            let cells = local.stripe.cells(INLINE_SLOT);
            let (allowed, refused) = match enforced {
                Enforced::Yes => (count - denied, denied),
                Enforced::No => (count, 0),
            };
            add(&cells[ALLOW], allowed as u64);
            add(&cells[RULE_ALLOW], (count - denied) as u64);
            if denied > 0 {
                add(&cells[DENY], refused as u64);
                add(&cells[SHADOW_DENY], (denied - refused) as u64);
                add(&cells[RULE_DENY], refused as u64);
                add(&cells[RULE_SHADOW], (denied - refused) as u64);
                add(&local.stripe.shadowed, (denied - refused) as u64);
            }
            let few = u32::try_from(count).unwrap_or(u32::MAX);
            let quiet = denied == 0 && (self.allows == 0 || local.until_log > few);
            if quiet && local.sampling.pass(few, &local.stripe.sample_rate) {
                // If allowed decisions are not logged, the counter stays at 0.
                local.until_log = local.until_log.saturating_sub(few);
            } else {
                self.capture_inline(local, charges, outcomes, enforced);
            }
        });
    }

    /// Captures the decisions to be logged or sampled.
    #[cold]
    fn capture_inline(
        &self,
        local: &mut ThreadState,
        charges: &[Charge<'_>],
        outcomes: &[Outcome],
        enforced: Enforced,
    ) {
        let now = self.clock.now();
        let mut dropped = 0;
        let stripe = std::sync::Arc::clone(&local.stripe);
        let mut buffers = stripe.buffers.iter().filter_map(|buffer| match buffer.try_lock() {
            Ok(buffer) => Some(buffer),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            // The worker is draining this one.
            Err(TryLockError::WouldBlock) => None,
        });
        let mut buffer = buffers.next();
        for (charge, outcome) in charges.iter().zip(outcomes) {
            let (log, weight) = self.is_wanted(local, outcome);
            if !log && weight == 0 {
                continue;
            }
            let ruled = match (outcome.verdict, enforced) {
                (Verdict::Denied { .. }, Enforced::Yes) => LoggedVerdict::Deny,
                (Verdict::Denied { .. }, Enforced::No) => LoggedVerdict::ShadowDeny,
                _ => LoggedVerdict::Allow,
            };
            let status = Some(LimitStatus::inline(*outcome));
            let own =
                Some(CallerUtilization::from_outcome(INLINE_SLOT, NO_TIER, outcome, charge.limit.capacity()));
            let noted = DecisionMeta {
                slot: INLINE_SLOT,
                verdict: ruled,
                by: None,
                status,
                caller_utilization: own,
                log,
                weight,
            };
            let mut stored = false;
            while let Some(room) = &mut buffer {
                stored = room.push_inline(charge, noted, now);
                if stored {
                    break;
                }
                buffer = buffers.next();
            }
            dropped += u64::from(log && !stored);
        }
        add(&stripe.dropped, dropped);
    }

    /// Returns whether to log the decision, and its weight in the sketches.
    fn is_wanted(&self, local: &mut ThreadState, outcome: &Outcome) -> (bool, u32) {
        let weight = local.sampling.count(&local.stripe.sample_rate, &mut local.rng);
        if outcome.verdict.is_denied() {
            return (true, weight);
        }
        (self.is_logged_allow(local), weight)
    }
}
