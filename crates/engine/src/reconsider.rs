//! Second attempt for a request that the store denied, if the denial is not final: one shard of a split counter denied
//! while others have room, or the caller has grants. A used-up guarantee of the fleet's capacity that denied it together with
//! them is left: the capacity may admit it.
//!
//! A rare, cold path: requests that pass and denials by ordinary limits never reach it. A flood beyond a split limit
//! must not read all shards for each denial either, so the limiter caches which counters had no room in any shard, for
//! as long as a deny cache would.

use crate::fold::{decides, is_denied};
use crate::grant::{GrantCharge, Grants};
use crate::limiter::Limiter;
use foldhash::quality::RandomState;
use smallvec::SmallVec;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, Mode, Outcome, Outcomes,
    PermitId, StoreError, TimeDelta, Timestamp, Verdict,
};
use tollgate_rules::{Charges, MatchedLimit, Plan};

/// Maximum number of attempts; a shard that had room may be full by the time it is charged.
const MAX_ROUNDS: usize = 3;

/// Maximum time for which a counter counts as full without reading its shards again.
const MAX_AGE: TimeDelta = TimeDelta::from_millis(900);
/// The same where what was read does not say when a shard has room again: units leave a log or a sliding window at any time.
const SHORT_AGE: TimeDelta = TimeDelta::from_millis(10);

/// By how many microseconds the time until a shard has room may be rounded up.
const ROUNDING: u64 = 2;

const SLOTS: usize = 1024;

/// Cache of split counters that had no room in any shard. The hash is seeded, so that clients cannot cause collisions.
#[derive(Default)]
pub(crate) struct FullCounters {
    slots: OnceLock<(RandomState, Box<[Mutex<FullCounter>]>)>,
    /// Incremented when units are refunded, which invalidates older entries.
    generation: AtomicU64,
}

#[derive(Clone, Copy, Default)]
struct FullCounter {
    counter: u64,
    generation: u64,
    /// Cost that was denied, in units; a smaller one might fit.
    units: u64,
    expires_at: Timestamp,
    /// Units remaining in all shards together.
    remaining: u64,
    /// When the first shard has room, if that is known.
    room_at: Option<Timestamp>,
}

impl FullCounters {
    fn slot(&self, key: &CounterKey<'_>) -> (u64, &Mutex<FullCounter>) {
        let (hasher, slots) = self
            .slots
            .get_or_init(|| (RandomState::default(), (0..SLOTS).map(|_| Mutex::default()).collect()));
        let counter = hasher.hash_one((key.scope.id(), key.stable_hash()));
        (counter, &slots[counter as usize % SLOTS])
    }

    /// Returns the entry of a counter that is cached as full for `units`.
    fn get(&self, key: &CounterKey<'_>, units: u64, now: Timestamp) -> Option<FullCounter> {
        let (counter, slot) = self.slot(key);
        let known = *slot.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = known.counter == counter && known.generation == self.generation();
        (is_same && units >= known.units && now < known.expires_at).then_some(known)
    }

    fn insert(&self, key: &CounterKey<'_>, full: FullCounter) {
        let (counter, slot) = self.slot(key);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) =
            FullCounter { counter, generation: self.generation(), ..full };
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Invalidates all entries after units of some counter were refunded.
    pub(crate) fn clear(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
    }
}

/// Result of the search for a shard with room.
enum Room {
    /// This shard has room. `remaining` is the sum over all shards before the charge.
    In { shard: u16, remaining: u64 },
    /// No shard has room. Contains the units remaining in all shards, if they were read, and when the first one has room.
    Nowhere { remaining: Option<u64>, room_at: RoomAt },
}

impl Room {
    const UNKNOWN: Self = Self::Nowhere { remaining: None, room_at: RoomAt::Unknown };
}

/// When the first shard has room.
#[derive(Clone, Copy)]
enum RoomAt {
    /// Then.
    At(Timestamp),
    /// Not before.
    After(Timestamp),
    Unknown,
}

impl<S: CounterStore> Limiter<S> {
    /// Tries other shards, then grants. Returns the grant charges, if any.
    #[cold]
    pub(crate) async fn reconsider(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        grants: Option<&Grants>,
        outcomes: &mut Outcomes,
    ) -> Option<Box<[GrantCharge]>> {
        let is_charged = plan.is_split && self.try_other_shards(plan, permit, outcomes).await;
        if is_charged && plan.fleet.is_some() && !plan.is_fleet_shadow() {
            // If the store fails now, the denial before stands.
            let _ = self.retry_fleet(plan, permit, outcomes, &[]).await;
        }
        if grants.is_some() {
            plan.leave_used_up_claim(outcomes);
        }
        let paid = {
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            self.charge_grants(plan, &charges, grants?, outcomes).await?
        };
        for one in &paid {
            plan.limits[one.limit].remaining = Some(outcomes.per_charge[one.limit].remaining);
        }
        Some(paid)
    }

    /// Moves charges that one shard denied to shards with room, and charges the request again. If a counter has no room
    /// in any shard, the denial stands and reports the units remaining in all of them. Denials by the fleet's capacity are left
    /// to another standing. Returns whether the request was charged again.
    async fn try_other_shards(&self, plan: &mut Plan<'_>, permit: PermitId, outcomes: &mut Outcomes) -> bool {
        let mut is_charged = false;
        for _ in 0..MAX_ROUNDS {
            if !is_denied(plan, outcomes) {
                return is_charged;
            }
            // Only one of several alternatives must fit, so a single denied alternative does not determine which one
            // moves.
            let is_denied = |at: &usize| {
                let matched = &plan.limits[*at];
                let moves = matched.enforcement != Enforcement::Alternative && decides(matched);
                let is_fleet = plan.fleet.as_ref().is_some_and(|own| own.is_fleet(matched));
                outcomes.per_charge[*at].verdict.is_denied() && moves && !is_fleet
            };
            let denied: SmallVec<[usize; 4]> = (0..plan.limits.len()).filter(is_denied).collect();
            if denied.is_empty() || denied.iter().any(|at| plan.limits[*at].limit.shards.is_none()) {
                return is_charged;
            }
            // A flood must not read all shards for each denial: beside a limit that is known to be full, only what is known of
            // the others is of use. Those that are full are read, and known, while it is not.
            let is_known = denied.iter().any(|at| self.known_room(plan, *at).is_some());
            let (mut has_room, mut is_full) = (SmallVec::<[usize; 4]>::new(), false);
            for at in &denied {
                let room = match is_known {
                    true => self.known_room(plan, *at),
                    false => Some(self.find_room(plan, *at).await),
                };
                match room {
                    Some(Room::Nowhere { remaining, room_at }) => {
                        plan.limits[*at].remaining = remaining;
                        wait_until(&mut outcomes.per_charge[*at], room_at, self.clock.now());
                        is_full = true;
                    }
                    Some(Room::In { shard, remaining }) => {
                        plan.move_to_shard(*at, shard);
                        plan.limits[*at].remaining =
                            Some(remaining.saturating_sub(plan.limits[*at].cost.units()));
                        has_room.push(*at);
                    }
                    None => has_room.push(*at),
                }
            }
            if is_full {
                let now = self.clock.now();
                let none = RoomAt::At(now);
                has_room.iter().for_each(|at| wait_until(&mut outcomes.per_charge[*at], none, now));
                return is_charged;
            }
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            // Independent charges have already been applied, except those that moved.
            let is_open =
                |at: &usize| charges[*at].enforcement != Enforcement::Independent || denied.contains(at);
            let again: SmallVec<[usize; 4]> = (0..charges.len()).filter(is_open).collect();
            let wanted: SmallVec<[Charge<'_>; 4]> = again.iter().map(|at| charges[*at]).collect();
            let Ok(charged) = self.store.charge(&wanted).await else { return is_charged };
            is_charged = true;
            outcomes.admission = charged.admission;
            for (at, outcome) in again.into_iter().zip(charged.per_charge) {
                outcomes.per_charge[at] = outcome;
            }
        }
        is_charged
    }

    /// Returns that no shard of a split counter has room, if that is known without reading them.
    fn known_room(&self, plan: &Plan<'_>, at: usize) -> Option<Room> {
        let matched = &plan.limits[at];
        let units = matched.cost.units();
        let largest = matched.limit.shards.iter().flatten().map(Limit::capacity).max();
        if largest.is_none_or(|largest| units > largest) {
            return Some(Room::UNKNOWN);
        }
        let parts = whole_counter(plan, matched);
        let counter = CounterKey { scope: &matched.limit.scope, parts: &parts };
        let full = self.full_counters.get(&counter, units, self.clock.now())?;
        // Units beyond those that were denied then take longer.
        let room_at = match full.room_at {
            Some(at) if units == full.units => RoomAt::At(at),
            at => at.map_or(RoomAt::Unknown, RoomAt::After),
        };
        Some(Room::Nowhere { remaining: Some(full.remaining), room_at })
    }

    /// Returns the shard of a split counter that has the most room, if that is enough.
    async fn find_room(&self, plan: &Plan<'_>, at: usize) -> Room {
        let matched = &plan.limits[at];
        let whole = whole_counter(plan, matched);
        let counter = CounterKey { scope: &matched.limit.scope, parts: &whole };
        let (units, now) = (matched.cost.units(), self.clock.now());
        let names: Vec<SmallVec<[KeyPart<'_>; 4]>> =
            matched.shard_names().iter().map(|name| plan.shard_parts(matched, name)).collect();
        let mode = if matched.limit.mode == Mode::Local { Mode::Local } else { Mode::Central };
        let mut peeks: Vec<(u16, Charge<'_>)> = Vec::with_capacity(names.len());
        for (shard, parts) in (0..).zip(&names) {
            let key = CounterKey { scope: &matched.limit.scope, parts };
            let charge = Charge::new(key, matched.limit.for_shard(shard), Cost::PEEK);
            peeks.push((shard, Charge { mode, enforcement: Enforcement::Independent, ..charge }));
        }
        let Some(rooms) = self.read_rooms(peeks).await else { return Room::UNKNOWN };
        let read_at = self.clock.now();
        let remaining = rooms.iter().map(|(_, room)| room.remaining).sum();
        let Some((shard, most)) = rooms.iter().max_by_key(|(_, room)| room.remaining) else {
            return Room::UNKNOWN;
        };
        if most.remaining >= units {
            return Room::In { shard: *shard, remaining };
        }
        let mut room_at = None;
        // Not cached for permits, which may be released at any time.
        if matched.limit.limit.algorithm() != Algorithm::Concurrency {
            let waits = rooms.iter().map(|(shard, room)| {
                let limit = matched.limit.for_shard(*shard);
                if units > limit.capacity() { Some(TimeDelta::MAX) } else { full_for(limit, room, units) }
            });
            // Not known if one is not.
            let wait = waits.reduce(|one, other| Some(one?.min(other?))).flatten();
            room_at = wait.map(|wait| read_at + wait);
            let less = |wait: TimeDelta| TimeDelta::from_micros(wait.as_micros().saturating_sub(ROUNDING));
            let age = wait.map_or(SHORT_AGE, less);
            let expires_at = now + age.min(MAX_AGE);
            let full = FullCounter { units, expires_at, remaining, room_at, ..FullCounter::default() };
            self.full_counters.insert(&counter, full);
        }
        let room_at = room_at.map_or(RoomAt::Unknown, RoomAt::At);
        Room::Nowhere { remaining: Some(remaining), room_at }
    }

    /// Returns what a peek at each shard finds. Shards that the store cannot read are left out.
    async fn read_rooms(&self, mut peeks: Vec<(u16, Charge<'_>)>) -> Option<Vec<(u16, Outcome)>> {
        for _ in 0..2 {
            let charges: Vec<Charge<'_>> = peeks.iter().map(|(_, charge)| *charge).collect();
            match self.store.charge(&charges).await {
                Ok(outcomes) => {
                    let known = |outcome: &Outcome| outcome.verdict != Verdict::Unknown;
                    let rooms = peeks.iter().zip(outcomes.per_charge).filter(|(_, outcome)| known(outcome));
                    return Some(rooms.map(|((shard, _), outcome)| (*shard, outcome)).collect());
                }
                Err(StoreError::Partial { failed, .. }) => {
                    let mut at = 0;
                    peeks.retain(|_| {
                        at += 1;
                        !failed.contains(&(at - 1))
                    });
                }
                Err(_) => return None,
            }
        }
        None
    }
}

/// Returns the values of the counter of all shards: the shard at index 0 stands for it.
fn whole_counter<'p>(plan: &Plan<'p>, matched: &MatchedLimit<'p>) -> SmallVec<[KeyPart<'p>; 4]> {
    plan.shard_parts(matched, matched.shard_names().first().copied().unwrap_or_default())
}

/// Lets a denial by one shard say when the first of all has room: that is not later. One that is too small for the units has
/// said that it never has.
fn wait_until(outcome: &mut Outcome, room_at: RoomAt, now: Timestamp) {
    let Verdict::Denied { retry_after } = &mut outcome.verdict else { return };
    match (room_at, *retry_after) {
        (RoomAt::At(at), Some(wait)) => *retry_after = Some(at.since(now).min(wait)),
        (RoomAt::At(at) | RoomAt::After(at), None) => *retry_after = Some(at.since(now)),
        (RoomAt::After(_), Some(_)) | (RoomAt::Unknown, _) => {}
    }
}

/// Returns for how long a shard that was just read has no room for so many units; `None` if that is not known. Another shard's
/// wait says nothing about it.
fn full_for(limit: &Limit, room: &Outcome, units: u64) -> Option<TimeDelta> {
    match limit.algorithm() {
        Algorithm::FixedWindow => Some(room.reset_after),
        Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket
            if limit.refill_interval().is_none() =>
        {
            // It is full again after `reset_after`, which is rounded up, and all but these units fit in the time before.
            let rate = limit.rate();
            let others = u128::from(limit.capacity() - units) * u128::from(rate.period.length().as_micros());
            let before = u64::try_from(others / u128::from(rate.count.max(1))).unwrap_or(u64::MAX);
            Some(TimeDelta::from_micros(room.reset_after.as_micros().saturating_sub(before)))
        }
        _ => None,
    }
}
