//! Lease of one key: available units, the last known state of the authority's counter, and the next refill. No I/O.

use super::config::LeaseConfig;
use super::hot_list::HotNames;
use super::spare::{SpareTime, at_most, scale};
use super::units::{LeasedUnits, SpendMark};
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Charge, CounterKey, KeyPart, Limit, LimitParams, LossPolicy, Outcome, Outcomes, OwnedKeyPart,
    PermitId, Scope, TimeDelta, Timestamp, Verdict,
};

/// The full key of a counter, owned, to charge it when no request is at hand.
#[derive(Debug)]
pub(super) struct LeaseKey {
    pub(super) scope: Scope,
    parts: Vec<OwnedKeyPart>,
    pub(super) limit: Limit,
    /// Counter of the outstanding units, next to the main counter.
    pub(super) escrow: (Scope, Limit),
    /// Mark that leases may be outstanding.
    pub(super) mark: (Scope, Limit),
    /// State assumed for the counter after a possible data loss.
    pub(super) loss_policy: LossPolicy,
    /// Shift of the key's windows.
    phase: TimeDelta,
    /// Longest time between two charges at which a lease pays off.
    max_gap: TimeDelta,
    /// Name of the counter in the fleet's hot list, if there is one.
    pub(super) fleet_name: Option<u64>,
}

impl LeaseKey {
    /// Builds the key of a charge. Returns `None` if the limit is too small to be leased.
    pub(super) fn from_charge(
        charge: &Charge<'_>,
        config: &LeaseConfig,
        fleet_name: Option<u64>,
    ) -> Option<Self> {
        let escrow = config.escrow(config.max_outstanding(charge.limit)?)?;
        Some(Self {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedKeyPart::from).collect(),
            limit: charge.limit.clone(),
            escrow: (charge.key.scope.sibling("|escrow"), escrow),
            mark: (charge.key.scope.sibling(crate::MARK_SUFFIX), config.mark(true)?),
            loss_policy: charge.loss_policy,
            phase: charge.limit.phase(charge.key.stable_hash()),
            max_gap: config.max_gap(charge.limit),
            fleet_name,
        })
    }

    /// Returns whether the hot list has the counter.
    pub(super) fn is_named_in(&self, names: &HotNames) -> bool {
        self.fleet_name.is_some_and(|name| names.contains(&name))
    }

    /// Returns the values of the counter key.
    pub(super) fn parts(&self) -> SmallVec<[KeyPart<'_>; 4]> {
        self.parts.iter().map(OwnedKeyPart::as_part).collect()
    }

    pub(super) fn key<'a>(&'a self, parts: &'a [KeyPart<'a>]) -> CounterKey<'a> {
        CounterKey { scope: &self.scope, parts }
    }

    /// Returns whether `limit` has the same numbers. Its other properties are part of the counter key.
    fn is_for(&self, limit: &Limit) -> bool {
        self.limit.capacity() == limit.capacity() && self.limit.rate().count == limit.rate().count
    }

    /// Returns the units that a refill brought.
    pub(super) fn leased_units(
        &self,
        ask: &RefillRequest,
        outcomes: &Outcomes,
        ttl: TimeDelta,
    ) -> Option<LeasedUnits> {
        let outcome = outcomes.per_charge.first()?;
        let escrow = self.limit.escrow(ask.units, outcomes.at + self.phase, outcome)?;
        let times = (outcomes.at, outcomes.at + outcome.reset_after);
        Some(LeasedUnits::new(escrow, ask.sent_at, times, ask.id, ttl))
    }

    /// Returns the units that refill within `time`.
    fn refill(&self, time: TimeDelta) -> u64 {
        match self.limit.params() {
            LimitParams::Bucket { k, interval, .. } => {
                let units = u128::from(time.as_micros()) * u128::from(k) / u128::from(interval.max(1));
                u64::try_from(units).unwrap_or(u64::MAX)
            }
            _ => 0,
        }
    }
}

/// Last known state of the authority's counter.
#[derive(Clone, Copy, Debug)]
struct AuthorityState {
    asked_at: Timestamp,
    remaining: u64,
    next: Timestamp,
    reset: Timestamp,
}

impl AuthorityState {
    fn new(outcome: &Outcome, asked_at: Timestamp) -> Self {
        let (next, reset) = (asked_at + outcome.next_after, asked_at + outcome.reset_after);
        Self { asked_at, remaining: outcome.remaining, next, reset }
    }

    /// Returns the outcome of a charge after which so many units are left, here and at the authority.
    fn outcome(&self, verdict: Verdict, remaining: u64, now: Timestamp) -> Outcome {
        let next_after = if remaining == 0 { self.next.since(now) } else { TimeDelta::ZERO };
        Outcome { verdict, remaining, next_after, reset_after: self.reset.since(now) }
    }
}

/// A denial received from the authority.
#[derive(Clone, Copy, Debug)]
struct CachedDenial {
    /// When the authority must be consulted again.
    valid_until: Timestamp,
    denied_until: Timestamp,
    units: u64,
}

/// Result of spending from a lease.
#[derive(Clone, Copy, Debug)]
pub(super) enum SpendResult {
    /// Allowed, spent from leased units.
    Spent(Outcome, SpendReceipt),
    /// Denied by a recent denial of the authority.
    Denied(Outcome),
    /// No units available: the authority must decide.
    Empty,
}

/// Units spent, for undoing the spend.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpendReceipt {
    /// The refill that they are from; `None` if spare slots paid.
    grant: Option<PermitId>,
    mark: SpendMark,
    pub(super) units: u64,
    /// When they were spent, by this node's clock.
    spent_at: Timestamp,
    /// The same by the authority's clock, or a little earlier.
    pub(super) taken_at: Timestamp,
}

/// A refill request that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefillRequest {
    pub(super) units: u64,
    pub(super) spent: u64,
    pub(super) marks: bool,
    pub(super) sent_at: Timestamp,
    pub(super) id: PermitId,
}

/// Background work for a key.
#[derive(Debug)]
pub(super) enum LeaseAction {
    /// Request more units.
    Refill,
    /// Return this many of these units.
    Return(LeasedUnits, u64),
}

/// The lease of one key.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) key: Arc<LeaseKey>,
    /// The key is leased because it is hot, not because its rule requires it.
    pub(super) promoted: bool,
    /// At most two batches: the one that is nearly spent, and the next.
    pub(super) units: SmallVec<[LeasedUnits; 2]>,
    /// Slots of refunded units.
    pub(super) spare: SpareTime,
    /// The authority's clock at the last refill, and this node's when its reply had come.
    clocks: Option<(Timestamp, Timestamp)>,
    authority: AuthorityState,
    denial: Option<CachedDenial>,
    /// A refill is in flight or queued.
    pub(super) is_refilling: bool,
    /// The counter was reset while a refill was in flight.
    pub(super) is_reset: bool,
    /// Earliest time of the next refill.
    not_before: Timestamp,
    /// The last refill was denied because other nodes held all units that may be outstanding.
    crowded: bool,
    /// Units no longer outstanding and not yet reported, from discarded batches or denied refills.
    pub(super) spent: u64,
    last_used: Timestamp,
    /// Time between the last two charges.
    gap: TimeDelta,
    demand: Demand,
    /// When the authority was last marked as having outstanding leases.
    marked: Option<Timestamp>,
    /// Units in the last refill; the lease is low when half of them are gone.
    last_refill: u64,
    /// Time that a refill takes.
    round_trip: TimeDelta,
    /// Units that are used in that time, and a quarter more: the lease is low when no more are left. A long way off,
    /// half of a refill does not last until the next one comes.
    ahead: u64,
    /// The authority is far away, and had fewer units at the last reply than are used here in a round trip.
    is_short: bool,
    /// A request found no units since the last refill.
    has_run_out: bool,
    /// How many units may be outstanding at this node.
    part: u64,
    /// Since when the rate has been below the threshold for a hot key.
    cool_since: Option<Timestamp>,
}

/// Units requested from this node per second.
#[derive(Clone, Copy, Debug)]
struct Demand {
    since: Timestamp,
    units: u64,
    rate: u64,
}

impl Demand {
    const MIN_INTERVAL: TimeDelta = TimeDelta::from_millis(100);

    /// Returns whether the rate was computed anew.
    fn record(&mut self, units: u64, now: Timestamp) -> bool {
        self.units = self.units.saturating_add(units);
        let is_due = now.since(self.since) >= Self::MIN_INTERVAL;
        if is_due {
            self.update_rate(now);
        }
        is_due
    }

    fn update_rate(&mut self, now: Timestamp) {
        let passed = now.since(self.since).as_micros().max(1);
        let rate = u64::try_from(u128::from(self.units) * 1_000_000 / u128::from(passed)).unwrap_or(u64::MAX);
        // Rises immediately, falls by at most half per interval.
        self.rate = rate.max(self.rate / 2);
        (self.since, self.units) = (now, 0);
    }

    fn rate(&self, now: Timestamp) -> u64 {
        let mut now_on = *self;
        if now.since(self.since) >= Self::MIN_INTERVAL {
            now_on.update_rate(now);
        }
        now_on.rate
    }
}

impl Lease {
    /// Longest time that a denial is repeated without consulting the authority.
    const MAX_DENIAL_AGE: TimeDelta = TimeDelta::from_millis(900);
    /// Minimum pause before the next refill of a key whose budget is used up, whatever its rate. An authority that takes
    /// longer to answer is far away.
    const MIN_PAUSE: TimeDelta = TimeDelta::from_millis(5);
    /// Pause while other nodes hold all units that may be outstanding, or while the authority is unavailable.
    const CROWDED_PAUSE: TimeDelta = TimeDelta::from_millis(100);
    /// Minimum number of units that are worth a lease.
    const MIN_UNITS: u64 = 8;

    pub(super) fn new(named: Arc<LeaseKey>, promoted: bool, now: Timestamp) -> Self {
        let (remaining, part) = (named.limit.capacity(), 0);
        Self {
            key: named,
            part,
            is_short: false,
            has_run_out: false,
            promoted,
            units: SmallVec::new(),
            spare: SpareTime::default(),
            clocks: None,
            authority: AuthorityState { asked_at: now, remaining, next: now, reset: now },
            denial: None,
            is_refilling: false,
            is_reset: false,
            not_before: now,
            crowded: false,
            spent: 0,
            last_used: now,
            gap: TimeDelta::ZERO,
            demand: Demand { since: now, units: 0, rate: 0 },
            marked: None,
            last_refill: 0,
            round_trip: TimeDelta::ZERO,
            ahead: 0,
            cool_since: None,
        }
    }

    /// Discards the cached denial, because a refund may have changed the authority's verdict.
    pub(super) fn forget_denial(&mut self) {
        self.denial = None;
    }

    /// Spends leased units on a charge. Returns the result and whether a refill is due.
    #[inline]
    pub(super) fn spend(&mut self, units: u64, now: Timestamp) -> (SpendResult, bool) {
        self.gap = now.since(self.last_used);
        self.last_used = now;
        if self.demand.record(units, now) {
            self.update_ahead();
        }
        // Available units are computed once, because each computation is a division.
        let (mut paid, mut good) = (None, 0);
        for leased in &mut self.units {
            if paid.is_some() {
                good += leased.available(now);
                continue;
            }
            let (mark, left) = leased.spend(units, now);
            paid = mark.map(|mark| (Some(leased.id), mark));
            good += left;
        }
        if paid.is_none() && !self.spare.is_empty() {
            paid = self.spend_spare(units, now);
            good = self.available(now);
        }
        if let Some((grant, mark)) = paid {
            let taken_at = self.authority_time(now);
            let receipt = SpendReceipt { grant, mark, units, spent_at: now, taken_at };
            let remaining = good.saturating_add(self.authority.remaining).min(self.key.limit.capacity());
            let outcome = self.authority.outcome(Verdict::ALLOWED, remaining, now);
            return (SpendResult::Spent(outcome, receipt), self.is_low_with(good, now));
        }
        let result = match self.denial {
            Some(dry) if now < dry.valid_until && units >= dry.units => {
                let verdict = Verdict::Denied { retry_after: Some(dry.denied_until.since(now)) };
                let remaining = good.saturating_add(self.authority.remaining).min(units.saturating_sub(1));
                SpendResult::Denied(self.authority.outcome(verdict, remaining, now))
            }
            _ => {
                self.has_run_out = true;
                SpendResult::Empty
            }
        };
        // The next answer of an authority that is far away is on its way before the denial ends.
        let asks = matches!(result, SpendResult::Denied(_)) && self.is_far() && self.is_low_with(0, now);
        (result, asks)
    }

    /// Undoes the spend of a request that was then denied.
    pub(super) fn unspend(&mut self, receipt: SpendReceipt, now: Timestamp) {
        let Some(grant) = receipt.grant else {
            if let Some((k, interval)) = scale(&self.key.limit) {
                let time = u128::from(receipt.units) * u128::from(interval);
                self.spare.add(time, k, receipt.spent_at, now);
            }
            return;
        };
        if let Some(leased) = self.units.iter_mut().find(|leased| leased.id == grant) {
            leased.unspend(receipt.units, receipt.mark);
        }
    }

    /// Returns the time by the authority's clock, or a little earlier; by this node's clock if that is not known.
    #[inline]
    fn authority_time(&self, now: Timestamp) -> Timestamp {
        self.clocks.map_or(now, |(at, received_at)| {
            let passed = now.since(received_at);
            let margin = at_most(passed) - passed.as_micros();
            at + TimeDelta::from_micros(passed.as_micros().saturating_sub(margin))
        })
    }

    /// Returns whether the lease is for a limit with these numbers; otherwise its rule has changed.
    pub(super) fn is_for(&self, limit: &Limit) -> bool {
        self.key.is_for(limit)
    }

    /// Returns the available units.
    pub(super) fn available(&self, now: Timestamp) -> u64 {
        self.units.iter().map(|leased| leased.available(now)).sum::<u64>() + self.spare_units(now)
    }

    /// Records the authority's outcome for a charge that was not decided locally.
    pub(super) fn record_outcome(&mut self, units: u64, outcome: &Outcome, asked: Timestamp, now: Timestamp) {
        self.authority = AuthorityState::new(outcome, asked);
        self.denial = match outcome.verdict {
            Verdict::Denied { retry_after: Some(wait) } => {
                let until = asked + wait.max(self.pause());
                Some(CachedDenial {
                    valid_until: until.min(asked + Self::MAX_DENIAL_AGE),
                    denied_until: until,
                    units,
                })
            }
            _ => None,
        };
        self.deny_until_next(outcome, now);
    }

    fn is_far(&self) -> bool {
        self.round_trip > Self::MIN_PAUSE
    }

    /// Denies what this node has no units for until the next refill comes, if the authority has fewer units than are used
    /// here meanwhile: a request to it would be answered no sooner.
    fn deny_until_next(&mut self, outcome: &Outcome, now: Timestamp) {
        let carries = self.key.escrow.1.capacity() >= self.key.refill(self.round_trip);
        let is_used_up = outcome.remaining == 0 && outcome.verdict.is_denied();
        self.is_short = self.is_far() && (is_used_up || carries && outcome.remaining < self.ahead);
        if self.is_short {
            self.deny_for_trip(now);
        }
    }

    /// Denies what this node has no units for until a reply to what is sent now.
    fn deny_for_trip(&mut self, now: Timestamp) {
        let trip = TimeDelta::from_micros(self.round_trip.as_micros() / 4 * 5);
        let until = now + self.at_most_eighth(trip).min(Self::MAX_DENIAL_AGE);
        // What the authority has said of itself holds for longer.
        if self.denial.is_some_and(|known| known.valid_until >= until) {
            return;
        }
        self.denial = Some(CachedDenial { valid_until: until, denied_until: until, units: 1 });
    }

    /// Returns the minimum pause between refills. A bucket that refills every few microseconds is refilled now and
    /// then, not for each unit, but often enough that the bucket never overflows.
    fn pause(&self) -> TimeDelta {
        self.at_most_eighth(Self::MIN_PAUSE)
    }

    /// Returns a time, but no more than an eighth of the time in which the bucket fills.
    fn at_most_eighth(&self, time: TimeDelta) -> TimeDelta {
        match self.key.limit.params() {
            LimitParams::Bucket { k, interval, .. } => {
                let full = u128::from(self.key.limit.capacity()) * u128::from(interval) / u128::from(k);
                time.min(TimeDelta::from_micros(u64::try_from(full / 8).unwrap_or(u64::MAX)))
            }
            _ => TimeDelta::ZERO,
        }
    }

    /// Returns how many units to hold at the current demand. If units become void faster than they are used, it is
    /// enough that some will still be used.
    fn target(&self, horizon: TimeDelta, now: Timestamp) -> u64 {
        let rate = self.demand.rate(now).max(self.demand.units);
        let voids = self.key.refill(TimeDelta::from_secs(1)).saturating_mul(Self::MIN_UNITS) / rate.max(1);
        self.scaled(rate, horizon).max(voids).max(Self::MIN_UNITS)
    }

    /// Returns whether a refill is due: the units will not last, no refill is in flight, and the units would be used.
    #[inline]
    pub(super) fn is_low(&self, now: Timestamp) -> bool {
        self.is_low_with(self.available(now), now)
    }

    #[inline]
    fn is_low_with(&self, good: u64, now: Timestamp) -> bool {
        // Two batches are enough; the second is requested when half of the first is gone, or what is left lasts no longer
        // than a refill takes.
        good <= (self.last_refill / 2).max(self.ahead.min(self.part / 2))
            && !self.is_refilling
            && now >= self.not_before
            && self.gap <= self.key.max_gap
    }

    /// Marks a refill as in flight.
    pub(super) fn start_refill(&mut self) -> Arc<LeaseKey> {
        self.is_refilling = true;
        Arc::clone(&self.key)
    }

    /// Returns what to request now: units, units no longer outstanding, and whether to set the mark. Returns `None` if
    /// a refill is not worthwhile.
    pub(super) fn next_refill(&mut self, config: &LeaseConfig, now: Timestamp) -> Option<(u64, u64, bool)> {
        self.is_reset = false;
        self.spent += self.units.iter_mut().map(|leased| leased.report(now)).sum::<u64>();
        self.units.retain(|leased| leased.available(now) > 0);
        let (good, most) = (self.available(now), self.key.escrow.1.capacity());
        let refilled = self.key.refill(now.since(self.authority.asked_at));
        let budget = self.authority.remaining.saturating_add(refilled).min(self.key.limit.capacity());
        let wanted = self.target(config.horizon, now).saturating_sub(good);
        // Two batches per node fit into the outstanding limit; where refills take long, one is larger, if the other leaves
        // room for it. If other nodes hold all of it, no more is requested than what is no longer outstanding.
        let part = most / u64::from(config.nodes.max(1));
        // A node that is far away and runs out of units takes more, until a refill is refused because the others hold the rest:
        // what is used while two refills are on their way, and a fifth of all is left.
        let more = if self.is_far() && self.has_run_out && !self.is_short { part / 2 } else { 0 };
        self.part = (self.part + more).min(self.ahead / 4 * 7).min(most / 5 * 4).max(part);
        self.has_run_out = false;
        let batch = (part / 2).max(2 * self.ahead.min(self.part)).min(self.part.saturating_sub(good));
        // From far away a node takes what it needs until it can ask again, also if that is more than its share.
        let share = config.share_of(budget);
        let share = if self.is_far() { share.max(self.ahead.min(budget)) } else { share };
        let mut units = wanted.min(share).min(batch.max(2));
        if self.crowded {
            units = units.min(self.spent);
            self.crowded = false;
        }
        if units < 2 || self.units.len() > 1 {
            self.is_refilling = false;
            self.not_before = now + self.pause().max(TimeDelta::from_millis(1));
            return None;
        }
        let quarter = TimeDelta::from_micros(config.ttl.as_micros() / 4);
        let marks = self.marked.is_none_or(|marked| now.since(marked) >= quarter);
        // Not if time has restored much more since the last reply.
        if self.is_short && budget < 4 * self.ahead {
            self.deny_for_trip(now);
        }
        Some((units, std::mem::take(&mut self.spent), marks))
    }

    fn update_ahead(&mut self) {
        let time = TimeDelta::from_micros(self.round_trip.as_micros() / 4 * 5);
        self.ahead = self.scaled(self.demand.rate, time);
    }

    fn scaled(&self, per_second: u64, time: TimeDelta) -> u64 {
        u64::try_from(u128::from(per_second) * u128::from(time.as_micros()) / 1_000_000).unwrap_or(u64::MAX)
    }

    /// Records the result of a refill: the outcomes of the counter and of the escrow.
    pub(super) fn refilled(
        &mut self,
        ask: &RefillRequest,
        outcomes: &Outcomes,
        ttl: TimeDelta,
        now: Timestamp,
    ) {
        self.is_refilling = false;
        let RefillRequest { units, spent, sent_at: asked, .. } = *ask;
        // Rises immediately, falls by at most half per refill.
        self.round_trip = now.since(asked).max(TimeDelta::from_micros(self.round_trip.as_micros() / 2));
        self.update_ahead();
        let [outcome, ..] = outcomes.per_charge.as_slice() else { return };
        self.clocks = (outcomes.at > Timestamp::ZERO).then_some((outcomes.at, now)).or(self.clocks);
        let admitted = outcomes.admission == Admission::Admitted;
        if ask.marks && outcomes.per_charge.get(2).is_some_and(|mark| mark.verdict.is_allowed()) {
            self.marked = Some(asked);
        }
        self.authority = AuthorityState::new(outcome, asked);
        if !admitted {
            // If the budget is not used up, other nodes hold too many outstanding units.
            let out = outcome.verdict.is_allowed();
            self.spent += spent;
            self.crowded = out && self.spent > 1;
            if out {
                (self.part, self.is_short) = (0, false);
            }
            let waits = out && !self.crowded;
            if !out {
                self.deny_until_next(outcome, now);
            }
            self.not_before =
                now + if waits { Self::CROWDED_PAUSE } else { self.pause().max(TimeDelta::from_millis(1)) };
            return;
        }
        self.denial = None;
        if self.is_reset {
            // The reset may have given them back.
            self.spent += units;
        } else if let Some(leased) = self.key.leased_units(ask, outcomes, ttl) {
            self.units.push(leased);
            self.last_refill = units;
        }
        self.deny_until_next(outcome, now);
    }

    /// Records a failed refill. If it was charged anyway, those units recover with time.
    pub(super) fn refill_failed(&mut self, now: Timestamp) {
        (self.is_refilling, self.is_short) = (false, false);
        self.not_before = now + Self::CROWDED_PAUSE;
    }

    /// Removes all available units, to be returned.
    pub(super) fn drain(&mut self, now: Timestamp) -> SmallVec<[LeaseAction; 2]> {
        let pockets = std::mem::take(&mut self.units);
        let held = pockets.into_iter().map(|leased| (leased.available(now), leased));
        held.filter(|(good, _)| *good > 0).map(|(good, leased)| LeaseAction::Return(leased, good)).collect()
    }

    pub(super) fn idle_for(&self, now: Timestamp) -> TimeDelta {
        now.since(self.last_used)
    }

    /// Returns the units per second requested from this node.
    pub(super) fn rate(&self, now: Timestamp) -> u64 {
        self.demand.rate(now)
    }

    /// Returns whether a key that was leased because it was hot has cooled down for long enough.
    pub(super) fn has_cooled(&mut self, config: &LeaseConfig, now: Timestamp) -> bool {
        let Some(hot) = config.hot.filter(|_| self.promoted) else { return self.promoted };
        if self.rate(now) >= hot / 2 {
            self.cool_since = None;
            return false;
        }
        now.since(*self.cool_since.get_or_insert(now)) >= config.cool
    }
}
