//! A second look at a request that the store denied, where a denial need not be the last word: one shard of a split counter
//! denied while others have room, or the caller has extra quota.
//!
//! Rare and cold: no request that passes, and no denial by ordinary limits, comes here. A flood beyond a split limit must not
//! cost a round trip for each denial either: a thread remembers, for as long as the deny cache of a store would, which
//! counters had no room in any shard.

use crate::fold::{decides, is_refused};
use crate::grant::{Grants, Paid};
use crate::limiter::Limiter;
use smallvec::SmallVec;
use std::cell::Cell;
use tollgate_core::{
    Admission, Charge, Cost, CounterKey, CounterStore, Enforcement, Mode, Outcome, Outcomes, Part, PermitId,
    Span, Timestamp, Verdict,
};
use tollgate_rules::{Charges, Plan};

/// A shard that had room may be full by the time that it is charged.
const ROUNDS: usize = 3;

/// The longest that a counter is taken for full without reading its shards again.
const MAX_AGE: Span = Span::from_millis(900);

/// A split counter that had no room for so many units in any shard.
#[derive(Clone, Copy)]
struct FullCounter {
    counter: u64,
    units: u64,
    until: Timestamp,
}

const NONE: FullCounter = FullCounter { counter: 0, units: 0, until: Timestamp::ZERO };
const FULL_COUNTERS: usize = 256;

thread_local! {
    static FULL: [Cell<FullCounter>; FULL_COUNTERS] = const { [const { Cell::new(NONE) }; FULL_COUNTERS] };
}

impl<S: CounterStore> Limiter<S> {
    /// Tries the other shards, then grants. What a grant has paid for is returned.
    #[cold]
    pub(crate) async fn reconsider(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        grants: Option<&Grants>,
        outcomes: &mut Outcomes,
    ) -> Option<Box<[Paid]>> {
        if plan.is_split {
            self.try_other_shards(plan, permit, outcomes).await;
        }
        let grants = grants?;
        let mut charges = Charges::new();
        plan.charges(permit, &mut charges);
        self.pay(plan, &charges, grants, outcomes).await
    }

    /// Moves charges that one shard denied to shards that have room, and charges the request again. Where a counter has no
    /// room in any shard, the denial stands, and says what remains in all of them.
    async fn try_other_shards(&self, plan: &mut Plan<'_>, permit: PermitId, outcomes: &mut Outcomes) {
        for _ in 0..ROUNDS {
            if !is_refused(plan, outcomes) {
                return;
            }
            let denied: SmallVec<[usize; 4]> = (0..plan.hits.len())
                .filter(|at| {
                    let hit = &plan.hits[*at];
                    outcomes.each[*at].verdict.is_denied()
                        && hit.enforcement == Enforcement::Required
                        && decides(hit)
                })
                .collect();
            if denied.is_empty() || denied.iter().any(|at| plan.hits[*at].limit.shards.is_none()) {
                return;
            }
            for at in denied {
                let Some(found) = self.shard_with_room(plan, at, &mut outcomes.each[at]).await else {
                    return;
                };
                plan.move_to_shard(at, found);
            }
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            // What only counts has counted already.
            let again: SmallVec<[usize; 4]> = (0..charges.len())
                .filter(|at| charges[*at].enforcement != Enforcement::Independent)
                .collect();
            let wanted: SmallVec<[Charge<'_>; 4]> = again.iter().map(|at| charges[*at]).collect();
            let Ok(told) = self.store.charge(&wanted).await else { return };
            outcomes.admission = told.admission;
            for (at, outcome) in again.into_iter().zip(told.each) {
                outcomes.each[at] = outcome;
            }
        }
    }

    /// The shard of a split counter that has the most room, if that is enough. Else the outcome becomes that of the whole.
    async fn shard_with_room(&self, plan: &Plan<'_>, at: usize, outcome: &mut Outcome) -> Option<u16> {
        let hit = &plan.hits[at];
        let values = &plan.parts[usize::from(hit.parts.0) + 1..usize::from(hit.parts.1)];
        let counter =
            CounterKey { scope: &hit.limit.scope, parts: values }.stable_hash() ^ hit.limit.scope.id();
        let (slot, units, now) = (counter as usize % FULL_COUNTERS, hit.cost.units(), self.clock.now());
        let known = FULL.with(|full| full[slot].get());
        if known.counter == counter && units >= known.units && now < known.until {
            return None;
        }
        let names: Vec<SmallVec<[Part<'_>; 4]>> = hit
            .shard_names()
            .iter()
            .map(|name| std::iter::once(Part::Text(name)).chain(values.iter().copied()).collect())
            .collect();
        let mode = if hit.limit.mode == Mode::Local { Mode::Local } else { Mode::Central };
        let peeks: Vec<Charge<'_>> = (0..)
            .zip(&names)
            .map(|(shard, parts)| {
                let key = CounterKey { scope: &hit.limit.scope, parts };
                let charge = Charge::new(key, hit.limit.of_shard(shard), Cost::LOOK);
                Charge { mode, enforcement: Enforcement::Independent, ..charge }
            })
            .collect();
        let told = self.store.charge(&peeks).await.ok()?;
        let room = |outcome: &Outcome| {
            if outcome.verdict == Verdict::Unanswered { 0 } else { outcome.remaining }
        };
        let (best, most) = (0..).zip(told.each.iter().map(room)).max_by_key(|(_, room)| *room)?;
        if most >= hit.cost.units() && told.admission == Admission::Admitted {
            return Some(best);
        }
        outcome.remaining = told.each.iter().map(room).sum();
        if let Verdict::Denied { retry_after: Some(wait) } = outcome.verdict {
            let until = now + wait.min(MAX_AGE);
            FULL.with(|full| full[slot].set(FullCounter { counter, units, until }));
        }
        None
    }
}
