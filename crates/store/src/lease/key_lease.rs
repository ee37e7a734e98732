//! Lease of one key: available units, the last known state of the authority's counter, and the next refill. No I/O.

use super::config::LeaseConfig;
use super::units::LeasedUnits;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Charge, CounterKey, KeyPart, Limit, LimitParams, LossPolicy, Outcome, Outcomes, OwnedKeyPart,
    PermitId, Scope, TimeDelta, Timestamp, Verdict,
};

/// Everything that names a counter, to ask about it when no request is at hand.
#[derive(Debug)]
pub(super) struct LeaseKey {
    pub(super) scope: Scope,
    parts: Vec<OwnedKeyPart>,
    pub(super) limit: Limit,
    /// Counts the units that are out, beside the counter.
    pub(super) escrow: (Scope, Limit),
    /// Marks that leases may be out.
    pub(super) mark: (Scope, Limit),
    /// What is assumed where its state may have been lost.
    pub(super) loss_policy: LossPolicy,
    /// The shift of the key's windows.
    phase: TimeDelta,
    /// The longest time between two charges for which a lease is worth its price.
    max_gap: TimeDelta,
}

impl LeaseKey {
    /// `None` for a limit that is too small to be leased.
    pub(super) fn from_charge(charge: &Charge<'_>, config: &LeaseConfig) -> Option<Self> {
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
        })
    }

    /// The values of the name.
    pub(super) fn parts(&self) -> SmallVec<[KeyPart<'_>; 4]> {
        self.parts.iter().map(OwnedKeyPart::as_part).collect()
    }

    pub(super) fn key<'a>(&'a self, parts: &'a [KeyPart<'a>]) -> CounterKey<'a> {
        CounterKey { scope: &self.scope, parts }
    }

    /// Whether a charge is by the same numbers. What else there is to a limit is part of its counter's name.
    fn is_for(&self, limit: &Limit) -> bool {
        self.limit.capacity() == limit.capacity() && self.limit.rate().count == limit.rate().count
    }

    /// What an ask brought.
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

    /// Units that come back in so long.
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

/// What is known of the authority's counter, since an answer.
#[derive(Clone, Copy, Debug)]
struct AuthorityState {
    asked_at: Timestamp,
    remaining: u64,
    reset: Timestamp,
}

/// A denial that the authority has told.
#[derive(Clone, Copy, Debug)]
struct CachedDenial {
    /// Asked again from then on.
    valid_until: Timestamp,
    denied_until: Timestamp,
    units: u64,
}

/// What a lease says to a charge.
#[derive(Clone, Copy, Debug)]
pub(super) enum SpendResult {
    /// Paid, out of this grant.
    Spent(Outcome, SpendReceipt),
    /// The authority has said so a moment ago.
    Denied(Outcome),
    /// Nothing in hand: the authority is to be asked.
    Empty,
}

/// What was spent, for taking it back.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpendReceipt {
    grant: PermitId,
    voids: u32,
    pub(super) units: u64,
}

/// An ask that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefillRequest {
    pub(super) units: u64,
    pub(super) spent: u64,
    pub(super) marks: bool,
    pub(super) sent_at: Timestamp,
    pub(super) id: PermitId,
}

/// What is to be done for a key.
#[derive(Debug)]
pub(super) enum LeaseAction {
    /// Ask for units.
    Refill,
    /// Give back so many of this.
    Return(LeasedUnits, u64),
}

/// One key's lease.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) key: Arc<LeaseKey>,
    /// It is leased because it is hot, not because its rule says so.
    pub(super) promoted: bool,
    /// At most two: what is nearly spent, and what comes after it.
    units: SmallVec<[LeasedUnits; 2]>,
    authority: AuthorityState,
    denial: Option<CachedDenial>,
    /// An ask is under way, or waits to be sent.
    is_refilling: bool,
    /// Nothing is asked for before.
    not_before: Timestamp,
    /// The last ask was refused because others had all that may be out.
    crowded: bool,
    /// Out no longer, and not yet reported, of pockets that are no more or asks that were refused.
    spent: u64,
    last_used: Timestamp,
    /// The time between the last two charges.
    gap: TimeDelta,
    demand: Demand,
    /// When the authority was last told that leases are out.
    marked: Option<Timestamp>,
    /// What the last grant brought: what is in hand is low when half of that is gone.
    last_refill: u64,
    /// Since when it has been cooler than it should be.
    cool_since: Option<Timestamp>,
}

/// Units asked of this node, a second.
#[derive(Clone, Copy, Debug)]
struct Demand {
    since: Timestamp,
    units: u64,
    rate: u64,
}

impl Demand {
    const MIN_INTERVAL: TimeDelta = TimeDelta::from_millis(100);

    fn record(&mut self, units: u64, now: Timestamp) {
        self.units = self.units.saturating_add(units);
        if now.since(self.since) >= Self::MIN_INTERVAL {
            self.update_rate(now);
        }
    }

    fn update_rate(&mut self, now: Timestamp) {
        let passed = now.since(self.since).as_micros().max(1);
        let rate = u64::try_from(u128::from(self.units) * 1_000_000 / u128::from(passed)).unwrap_or(u64::MAX);
        // Up at once, down by halves.
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
    /// The longest that a denial is believed without asking.
    const MAX_DENIAL_AGE: TimeDelta = TimeDelta::from_millis(900);
    /// How long a node waits before it asks again for a key whose budget is used up, whatever the rate.
    const MIN_PAUSE: TimeDelta = TimeDelta::from_millis(5);
    /// How long a node waits where others have all that may be out, or nobody answers.
    const CROWDED_PAUSE: TimeDelta = TimeDelta::from_millis(100);
    /// Fewer are not worth a lease.
    const MIN_UNITS: u64 = 8;

    pub(super) fn new(named: Arc<LeaseKey>, promoted: bool, now: Timestamp) -> Self {
        let remaining = named.limit.capacity();
        Self {
            key: named,
            promoted,
            units: SmallVec::new(),
            authority: AuthorityState { asked_at: now, remaining, reset: now },
            denial: None,
            is_refilling: false,
            not_before: now,
            crowded: false,
            spent: 0,
            last_used: now,
            gap: TimeDelta::ZERO,
            demand: Demand { since: now, units: 0, rate: 0 },
            marked: None,
            last_refill: 0,
            cool_since: None,
        }
    }

    /// A refund may have changed what the authority would say.
    pub(super) fn forget_denial(&mut self) {
        self.denial = None;
    }

    /// Pays for a charge out of what is in hand; whether it is then time to ask for more.
    #[inline]
    pub(super) fn spend(&mut self, units: u64, now: Timestamp) -> (SpendResult, bool) {
        self.gap = now.since(self.last_used);
        self.last_used = now;
        self.demand.record(units, now);
        // What is good is worked out once: each time is a division.
        let (mut paid, mut good) = (None, 0);
        for leased in &mut self.units {
            if paid.is_some() {
                good += leased.available(now);
                continue;
            }
            let (voids, left) = leased.spend(units, now);
            paid = voids.map(|voids| SpendReceipt { grant: leased.id, voids, units });
            good += left;
        }
        if let Some(receipt) = paid {
            let remaining = good.saturating_add(self.authority.remaining).min(self.key.limit.capacity());
            let reset_after = self.authority.reset.since(now);
            let outcome = Outcome { verdict: Verdict::ALLOWED, remaining, reset_after };
            return (SpendResult::Spent(outcome, receipt), self.is_low_with(good, now));
        }
        let said = match self.denial {
            Some(dry) if now < dry.valid_until && units >= dry.units => {
                let verdict = Verdict::Denied { retry_after: Some(dry.denied_until.since(now)) };
                SpendResult::Denied(Outcome {
                    verdict,
                    remaining: 0,
                    reset_after: self.authority.reset.since(now),
                })
            }
            _ => SpendResult::Empty,
        };
        (said, false)
    }

    /// Takes back what a request spent that was then refused.
    pub(super) fn unspend(&mut self, receipt: SpendReceipt) {
        if let Some(leased) = self.units.iter_mut().find(|leased| leased.id == receipt.grant) {
            leased.unspend(receipt.units, receipt.voids);
        }
    }

    /// Whether it is for a limit with these numbers; else its rule has changed.
    pub(super) fn is_for(&self, limit: &Limit) -> bool {
        self.key.is_for(limit)
    }

    /// Units in hand.
    pub(super) fn available(&self, now: Timestamp) -> u64 {
        self.units.iter().map(|leased| leased.available(now)).sum()
    }

    /// What the authority said to a charge that this node had to ask about.
    pub(super) fn record_outcome(&mut self, units: u64, outcome: &Outcome, asked: Timestamp) {
        self.authority = AuthorityState {
            asked_at: asked,
            remaining: outcome.remaining,
            reset: asked + outcome.reset_after,
        };
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
    }

    /// A bucket whose units come back by the microsecond is asked about now and then, not for each. Never so seldom that
    /// it would run over.
    fn pause(&self) -> TimeDelta {
        match self.key.limit.params() {
            LimitParams::Bucket { k, interval, .. } => {
                let full = u128::from(self.key.limit.capacity()) * u128::from(interval) / u128::from(k);
                Self::MIN_PAUSE.min(TimeDelta::from_micros(u64::try_from(full / 8).unwrap_or(u64::MAX)))
            }
            _ => TimeDelta::ZERO,
        }
    }

    /// What is wanted in hand, at the present demand. Where units become void faster than they are asked for, enough that
    /// some will be used.
    fn target(&self, horizon: TimeDelta, now: Timestamp) -> u64 {
        let rate = self.demand.rate(now).max(self.demand.units);
        let voids = self.key.refill(TimeDelta::from_secs(1)).saturating_mul(Self::MIN_UNITS) / rate.max(1);
        self.scaled(rate, horizon).max(voids).max(Self::MIN_UNITS)
    }

    /// Whether it is time to ask for more: what is in hand will not last, nothing is under way, and it would be used.
    #[inline]
    pub(super) fn is_low(&self, now: Timestamp) -> bool {
        self.is_low_with(self.available(now), now)
    }

    #[inline]
    fn is_low_with(&self, good: u64, now: Timestamp) -> bool {
        // Two pockets are enough; the younger is fetched when half of the elder is gone.
        good <= self.last_refill / 2
            && !self.is_refilling
            && now >= self.not_before
            && self.gap <= self.key.max_gap
    }

    /// An ask is about to be sent.
    pub(super) fn start_refill(&mut self) -> Arc<LeaseKey> {
        self.is_refilling = true;
        Arc::clone(&self.key)
    }

    /// What is to be asked for now: units, how many are out no longer, and whether to mark it. None where it is not worth
    /// it.
    pub(super) fn next_refill(&mut self, config: &LeaseConfig, now: Timestamp) -> Option<(u64, u64, bool)> {
        self.spent += self.units.iter_mut().map(|leased| leased.report(now)).sum::<u64>();
        self.units.retain(|leased| leased.available(now) > 0);
        let (good, most) = (self.available(now), self.key.escrow.1.capacity());
        let refilled = self.key.refill(now.since(self.authority.asked_at));
        let budget = self.authority.remaining.saturating_add(refilled).min(self.key.limit.capacity());
        let wanted = self.target(config.horizon, now).saturating_sub(good);
        // Two pockets for each node fit into what may be out. Where others have that, no more than what is out no longer.
        let mut units =
            wanted.min(config.share_of(budget)).min((most / (2 * u64::from(config.nodes.max(1)))).max(2));
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
        Some((units, std::mem::take(&mut self.spent), marks))
    }

    fn scaled(&self, per_second: u64, time: TimeDelta) -> u64 {
        u64::try_from(u128::from(per_second) * u128::from(time.as_micros()) / 1_000_000).unwrap_or(u64::MAX)
    }

    /// What came of an ask: the outcomes of the counter and of the escrow.
    pub(super) fn refilled(
        &mut self,
        ask: &RefillRequest,
        outcomes: &Outcomes,
        ttl: TimeDelta,
        now: Timestamp,
    ) {
        self.is_refilling = false;
        let RefillRequest { units, spent, sent_at: asked, .. } = *ask;
        let [outcome, ..] = outcomes.per_charge.as_slice() else { return };
        let admitted = outcomes.admission == Admission::Admitted;
        if ask.marks && outcomes.per_charge.get(2).is_some_and(|mark| mark.verdict.is_allowed()) {
            self.marked = Some(asked);
        }
        self.authority = AuthorityState {
            asked_at: asked,
            remaining: outcome.remaining,
            reset: asked + outcome.reset_after,
        };
        if !admitted {
            // Where it is not the budget that is used up, others have too much of it in hand.
            let out = outcome.verdict.is_allowed();
            self.spent += spent;
            self.crowded = out && self.spent > 1;
            let waits = out && !self.crowded;
            self.not_before =
                now + if waits { Self::CROWDED_PAUSE } else { self.pause().max(TimeDelta::from_millis(1)) };
            return;
        }
        self.denial = None;
        if let Some(leased) = self.key.leased_units(ask, outcomes, ttl) {
            self.units.push(leased);
            self.last_refill = units;
        }
    }

    /// An ask that nobody answered. What it took, if it did, comes back with time.
    pub(super) fn refill_failed(&mut self, now: Timestamp) {
        self.is_refilling = false;
        self.not_before = now + Self::CROWDED_PAUSE;
    }

    /// Everything in hand, to be given back.
    pub(super) fn drain(&mut self, now: Timestamp) -> SmallVec<[LeaseAction; 2]> {
        let pockets = std::mem::take(&mut self.units);
        let held = pockets.into_iter().map(|leased| (leased.available(now), leased));
        held.filter(|(good, _)| *good > 0).map(|(good, leased)| LeaseAction::Return(leased, good)).collect()
    }

    pub(super) fn idle_for(&self, now: Timestamp) -> TimeDelta {
        now.since(self.last_used)
    }

    /// Units a second asked of this node.
    pub(super) fn rate(&self, now: Timestamp) -> u64 {
        self.demand.rate(now)
    }

    /// Whether a key that was leased for its heat has cooled for long enough.
    pub(super) fn has_cooled(&mut self, config: &LeaseConfig, now: Timestamp) -> bool {
        let Some(hot) = config.hot.filter(|_| self.promoted) else { return self.promoted };
        if self.rate(now) >= hot / 2 {
            self.cool_since = None;
            return false;
        }
        now.since(*self.cool_since.get_or_insert(now)) >= config.cool
    }
}
