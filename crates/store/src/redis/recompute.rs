//! Recomputes the outcomes of a request by `Limit::step` on the states that the script saw.
//!
//! A script only decides and writes. It answers with what its bundles held before, and the same steps are made here, so
//! outcomes are bit-equal to memory's by construction; a decision that differs is a bug, is counted, and shows in tests.

use super::data_loss::DataLoss;
use super::shard_request::ShardCharge;
use smallvec::SmallVec;
use tollgate_core::{Admission, Cost, Enforcement, Outcome, Outcomes, State, TimeDelta, Timestamp, Verdict};

/// What one charge was told.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecomputedOutcome {
    pub(super) outcome: Outcome,
    /// The same counter without this request: what counts where the request is refused.
    pub(super) without: Outcome,
}

impl RecomputedOutcome {
    const NOTHING: Outcome =
        Outcome { verdict: Verdict::ALLOWED, remaining: 0, reset_after: TimeDelta::ZERO };

    /// What to say of a charge in a request that was admitted or refused.
    pub(super) fn resolve(&self, admission: Admission, enforcement: Enforcement) -> Outcome {
        let refused = admission == Admission::Denied && enforcement != Enforcement::Independent;
        if refused && self.outcome.verdict.is_allowed() {
            Outcome { verdict: self.outcome.verdict, ..self.without }
        } else {
            self.outcome
        }
    }
}

/// Steps a request's charges (independent ones first) over the states of its counters, which move on as the script moved
/// them. `alternatives_bind` is not so where others of them live elsewhere.
pub(super) fn recompute(
    states: &mut [State],
    counter_of: impl Fn(&ShardCharge) -> usize,
    wants: &[ShardCharge],
    now: Timestamp,
    alternatives_bind: bool,
    loss: DataLoss,
) -> (Admission, SmallVec<[RecomputedOutcome; 4]>) {
    let step = |state: &mut State, want: &ShardCharge, cost: Cost| {
        let Some(assumed) = loss.assume(want, state, now) else {
            return want.limit.step_with_permit(want.permit, state, now + want.phase, cost);
        };
        let mut next = assumed.clone();
        let outcome = want.limit.step_with_permit(want.permit, &mut next, now + want.phase, cost);
        // What is only assumed is not kept, unless something is taken on top.
        if next != assumed {
            *state = next;
        }
        outcome
    };
    let mut told: SmallVec<[RecomputedOutcome; 4]> = SmallVec::new();
    let mut tried: SmallVec<[(usize, State); 4]> = SmallVec::new();
    for want in wants {
        let counter = counter_of(want);
        let outcome = if want.enforcement == Enforcement::Independent {
            step(&mut states[counter], want, want.cost)
        } else {
            let known = tried.iter().position(|(known, _)| *known == counter).unwrap_or_else(|| {
                tried.push((counter, states[counter].clone()));
                tried.len() - 1
            });
            step(&mut tried[known].1, want, want.cost)
        };
        told.push(RecomputedOutcome { outcome, without: RecomputedOutcome::NOTHING });
    }
    let binding = wants
        .iter()
        .zip(&told)
        .filter(|(want, _)| alternatives_bind || want.enforcement != Enforcement::Alternative);
    let admission = Outcomes::admission(binding.map(|(want, told)| (want.enforcement, &told.outcome)));
    for (want, told) in wants.iter().zip(&mut told) {
        if want.enforcement != Enforcement::Independent {
            let counter = counter_of(want);
            if admission == Admission::Denied {
                told.without = step(&mut states[counter], want, Cost::PEEK);
            } else if !alternatives_bind {
                told.without = step(&mut states[counter].clone(), want, Cost::PEEK);
            }
        }
    }
    if admission == Admission::Admitted {
        for (counter, state) in tried {
            states[counter] = state;
        }
    }
    (admission, told)
}
