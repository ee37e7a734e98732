//! Recomputes the outcomes of a request by `Limit::step` on the states that the script saw.
//!
//! A script only decides and writes. It replies with the prior contents of its bundles, and the same steps are repeated
//! here, so outcomes are bit-equal to the memory store's by construction; a decision that differs is a bug, is counted,
//! and fails tests.

use super::data_loss::DataLoss;
use super::shard_request::ShardCharge;
use smallvec::SmallVec;
use tollgate_core::{Admission, Cost, Enforcement, Outcome, Outcomes, State, Timestamp, Verdict};

/// The recomputed outcome of one charge.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecomputedOutcome {
    pub(super) outcome: Outcome,
    /// Whether the state was not known, and assumed to be used up.
    pub(super) is_assumed: bool,
    /// Outcome of the same counter without this request, used if the request is denied.
    pub(super) without: Outcome,
}

impl RecomputedOutcome {
    const NOTHING: Outcome = Outcome { verdict: Verdict::ALLOWED, ..Outcome::UNKNOWN };

    /// Returns the outcome of a charge in a request that was admitted or denied.
    pub(super) fn resolve(&self, admission: Admission, enforcement: Enforcement) -> Outcome {
        let refused = admission == Admission::Denied && enforcement != Enforcement::Independent;
        if refused && self.outcome.verdict.is_allowed() {
            Outcome { verdict: self.outcome.verdict, ..self.without }
        } else {
            self.outcome
        }
    }
}

/// Steps a request's charges (independent ones first) over the states of its counters, and updates the states as the
/// script did. `alternatives_bind` is false if other alternatives of the request live in another slot.
pub(super) fn recompute(
    states: &mut [State],
    counter_of: impl Fn(&ShardCharge) -> usize,
    wants: &[ShardCharge],
    now: Timestamp,
    alternatives_bind: bool,
    (loss, reset_at): (DataLoss, impl Fn(usize) -> Option<Timestamp>),
) -> (Admission, SmallVec<[RecomputedOutcome; 4]>) {
    let step = |state: &mut State, want: &ShardCharge, cost: Cost| {
        let Some(assumed) = loss.assume(want, state, now, reset_at(counter_of(want))) else {
            // A peek changes nothing in the script, and must not truncate here what another limit has counted.
            if want.cost.is_peek() {
                let mut seen = state.clone();
                return want.limit.step_with_permit(want.permit, &mut seen, now + want.phase, cost);
            }
            return want.limit.step_with_permit(want.permit, state, now + want.phase, cost);
        };
        let mut next = assumed.clone();
        let outcome = want.limit.step_with_permit(want.permit, &mut next, now + want.phase, cost);
        // An assumed state is not stored, unless units are taken on top of it.
        if next != assumed {
            *state = next;
        }
        outcome
    };
    let mut recomputed: SmallVec<[RecomputedOutcome; 4]> = SmallVec::new();
    let mut tried: SmallVec<[(usize, State); 4]> = SmallVec::new();
    for want in wants {
        let counter = counter_of(want);
        let is_assumed = loss.assume(want, &states[counter], now, reset_at(counter)).is_some();
        let outcome = if want.enforcement == Enforcement::Independent {
            step(&mut states[counter], want, want.cost)
        } else {
            let known = tried.iter().position(|(known, _)| *known == counter).unwrap_or_else(|| {
                tried.push((counter, states[counter].clone()));
                tried.len() - 1
            });
            step(&mut tried[known].1, want, want.cost)
        };
        recomputed.push(RecomputedOutcome { outcome, is_assumed, without: RecomputedOutcome::NOTHING });
    }
    let binding = wants
        .iter()
        .zip(&recomputed)
        .filter(|(want, _)| alternatives_bind || want.enforcement != Enforcement::Alternative);
    let admission =
        Outcomes::admission(binding.map(|(want, recomputed)| (want.enforcement, &recomputed.outcome)));
    for (want, recomputed) in wants.iter().zip(&mut recomputed) {
        if want.enforcement != Enforcement::Independent {
            let counter = counter_of(want);
            if admission == Admission::Denied {
                recomputed.without = step(&mut states[counter], want, Cost::PEEK);
            } else if !alternatives_bind {
                recomputed.without = step(&mut states[counter].clone(), want, Cost::PEEK);
            }
        }
    }
    if admission == Admission::Admitted {
        for (counter, state) in tried {
            states[counter] = state;
        }
    }
    (admission, recomputed)
}
