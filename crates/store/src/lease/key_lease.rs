//! One key's lease: what is in hand, what is known of the authority's counter, and what to ask for next. No I/O.

use super::config::LeaseConfig;
use super::units::LeasedUnits;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, AfterLoss, Charge, CounterKey, Limit, Measures, Outcome, Outcomes, OwnedPart, Part, PermitId,
    Scope, Span, Timestamp, Verdict,
};

/// Everything that names a counter, to ask about it when no request is at hand.
#[derive(Debug)]
pub(super) struct LeaseKey {
    pub(super) scope: Scope,
    parts: Vec<OwnedPart>,
    pub(super) limit: Limit,
    /// Counts the units that are out, beside the counter.
    pub(super) escrow: (Scope, Limit),
    /// Marks that leases may be out.
    pub(super) mark: (Scope, Limit),
    /// What is assumed where its state may have been lost.
    pub(super) after_loss: AfterLoss,
    /// The shift of the key's windows.
    phase: Span,
    /// The longest time between two charges for which a lease is worth its price.
    worth: Span,
}

impl LeaseKey {
    /// `None` for a limit that is too small to be leased.
    pub(super) fn new(charge: &Charge<'_>, config: &LeaseConfig) -> Option<Self> {
        let escrow = config.escrow(config.max_outstanding(charge.limit)?)?;
        Some(Self {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedPart::from).collect(),
            limit: charge.limit.clone(),
            escrow: (charge.key.scope.beside("|escrow"), escrow),
            mark: (charge.key.scope.beside(crate::MARK_SUFFIX), config.mark(true)?),
            after_loss: charge.after_loss,
            phase: charge.limit.phase(charge.key.stable_hash()),
            worth: config.worth(charge.limit),
        })
    }

    /// The values of the name.
    pub(super) fn parts(&self) -> SmallVec<[Part<'_>; 4]> {
        self.parts.iter().map(OwnedPart::borrowed).collect()
    }

    pub(super) fn key<'a>(&'a self, parts: &'a [Part<'a>]) -> CounterKey<'a> {
        CounterKey { scope: &self.scope, parts }
    }

    /// Whether a charge is by the same numbers. What else there is to a limit is part of its counter's name.
    fn is_for(&self, limit: &Limit) -> bool {
        self.limit.capacity() == limit.capacity() && self.limit.quota().count == limit.quota().count
    }

    /// What an ask brought.
    pub(super) fn new_units(
        &self,
        ask: &RefillRequest,
        outcomes: &Outcomes,
        ttl: Span,
    ) -> Option<LeasedUnits> {
        let outcome = outcomes.each.first()?;
        let escrow = self.limit.escrow(ask.units, outcomes.at + self.phase, outcome)?;
        let times = (outcomes.at, outcomes.at + outcome.reset_after);
        Some(LeasedUnits::new(escrow, ask.at, times, ask.id, ttl))
    }

    /// Units that come back in so long.
    fn refill(&self, time: Span) -> u64 {
        match self.limit.measures() {
            Measures::Bucket { k, interval, .. } => {
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
    at: Timestamp,
    remaining: u64,
    reset: Timestamp,
}

/// A denial that the authority has told.
#[derive(Clone, Copy, Debug)]
struct CachedDenial {
    /// Asked again from then on.
    valid_until: Timestamp,
    until: Timestamp,
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
    pub(super) at: Timestamp,
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
pub(super) struct KeyLease {
    pub(super) key: Arc<LeaseKey>,
    /// It is leased because it is hot, not because its rule says so.
    pub(super) promoted: bool,
    /// At most two: what is nearly spent, and what comes after it.
    units: SmallVec<[LeasedUnits; 2]>,
    authority: AuthorityState,
    denial: Option<CachedDenial>,
    /// An ask is under way, or waits to be sent.
    refilling: bool,
    /// Nothing is asked for before.
    not_before: Timestamp,
    /// The last ask was refused because others had all that may be out.
    contended: bool,
    /// Out no longer, and not yet reported, of pockets that are no more or asks that were refused.
    spent: u64,
    used: Timestamp,
    /// The time between the last two charges.
    gap: Span,
    demand: Demand,
    /// When the authority was last told that leases are out.
    marked: Option<Timestamp>,
    /// What the last grant brought: what is in hand is low when half of that is gone.
    last: u64,
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
    const MIN_WINDOW: Span = Span::from_millis(100);

    fn record(&mut self, units: u64, now: Timestamp) {
        self.units = self.units.saturating_add(units);
        if now.since(self.since) >= Self::MIN_WINDOW {
            self.rotate(now);
        }
    }

    fn rotate(&mut self, now: Timestamp) {
        let passed = now.since(self.since).as_micros().max(1);
        let rate = u64::try_from(u128::from(self.units) * 1_000_000 / u128::from(passed)).unwrap_or(u64::MAX);
        // Up at once, down by halves.
        self.rate = rate.max(self.rate / 2);
        (self.since, self.units) = (now, 0);
    }

    fn rate(&self, now: Timestamp) -> u64 {
        let mut now_on = *self;
        if now.since(self.since) >= Self::MIN_WINDOW {
            now_on.rotate(now);
        }
        now_on.rate
    }
}

impl KeyLease {
    /// The longest that a denial is believed without asking.
    const MAX_DENIAL_AGE: Span = Span::from_millis(900);
    /// How long a node waits before it asks again for a key whose budget is used up, whatever the rate.
    const PAUSE: Span = Span::from_millis(5);
    /// How long a node waits where others have all that may be out, or nobody answers.
    const CONTENDED_FOR: Span = Span::from_millis(100);
    /// Fewer are not worth a lease.
    const MIN_UNITS: u64 = 8;

    pub(super) fn new(named: Arc<LeaseKey>, promoted: bool, now: Timestamp) -> Self {
        let remaining = named.limit.capacity();
        Self {
            key: named,
            promoted,
            units: SmallVec::new(),
            authority: AuthorityState { at: now, remaining, reset: now },
            denial: None,
            refilling: false,
            not_before: now,
            contended: false,
            spent: 0,
            used: now,
            gap: Span::ZERO,
            demand: Demand { since: now, units: 0, rate: 0 },
            marked: None,
            last: 0,
            cool_since: None,
        }
    }

    /// A refund may have changed what the authority would say.
    pub(super) fn clear_denial(&mut self) {
        self.denial = None;
    }

    /// Pays for a charge out of what is in hand; whether it is then time to ask for more.
    #[inline]
    pub(super) fn spend(&mut self, units: u64, now: Timestamp) -> (SpendResult, bool) {
        self.gap = now.since(self.used);
        self.used = now;
        self.demand.record(units, now);
        // What is good is worked out once: each time is a division.
        let (mut paid, mut good) = (None, 0);
        for pocket in &mut self.units {
            if paid.is_some() {
                good += pocket.available(now);
                continue;
            }
            let (voids, left) = pocket.spend(units, now);
            paid = voids.map(|voids| SpendReceipt { grant: pocket.id, voids, units });
            good += left;
        }
        if let Some(receipt) = paid {
            let remaining = good.saturating_add(self.authority.remaining).min(self.key.limit.capacity());
            let reset_after = self.authority.reset.since(now);
            let outcome = Outcome { verdict: Verdict::PASS, remaining, reset_after };
            return (SpendResult::Spent(outcome, receipt), self.is_low_with(good, now));
        }
        let said = match self.denial {
            Some(dry) if now < dry.valid_until && units >= dry.units => {
                let verdict = Verdict::Denied { retry_after: Some(dry.until.since(now)) };
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
        if let Some(pocket) = self.units.iter_mut().find(|pocket| pocket.id == receipt.grant) {
            pocket.unspend(receipt.units, receipt.voids);
        }
    }

    /// Whether it is for a limit with these numbers; else its rule has changed.
    pub(super) fn is_for(&self, limit: &Limit) -> bool {
        self.key.is_for(limit)
    }

    /// Units in hand.
    pub(super) fn available(&self, now: Timestamp) -> u64 {
        self.units.iter().map(|pocket| pocket.available(now)).sum()
    }

    /// What the authority said to a charge that this node had to ask about.
    pub(super) fn record_outcome(&mut self, units: u64, outcome: &Outcome, asked: Timestamp) {
        self.authority =
            AuthorityState { at: asked, remaining: outcome.remaining, reset: asked + outcome.reset_after };
        self.denial = match outcome.verdict {
            Verdict::Denied { retry_after: Some(wait) } => {
                let until = asked + wait.max(self.pause());
                Some(CachedDenial { valid_until: until.min(asked + Self::MAX_DENIAL_AGE), until, units })
            }
            _ => None,
        };
    }

    /// A bucket whose units come back by the microsecond is asked about now and then, not for each. Never so seldom that
    /// it would run over.
    fn pause(&self) -> Span {
        match self.key.limit.measures() {
            Measures::Bucket { k, interval, .. } => {
                let full = u128::from(self.key.limit.capacity()) * u128::from(interval) / u128::from(k);
                Self::PAUSE.min(Span::from_micros(u64::try_from(full / 8).unwrap_or(u64::MAX)))
            }
            _ => Span::ZERO,
        }
    }

    /// What is wanted in hand, at the present demand. Where units become void faster than they are asked for, enough that
    /// some will be used.
    fn target_units(&self, horizon: Span, now: Timestamp) -> u64 {
        let rate = self.demand.rate(now).max(self.demand.units);
        let voids = self.key.refill(Span::from_secs(1)).saturating_mul(Self::MIN_UNITS) / rate.max(1);
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
        good <= self.last / 2 && !self.refilling && now >= self.not_before && self.gap <= self.key.worth
    }

    /// An ask is about to be sent.
    pub(super) fn begin_refill(&mut self) -> Arc<LeaseKey> {
        self.refilling = true;
        Arc::clone(&self.key)
    }

    /// What is to be asked for now: units, how many are out no longer, and whether to mark it. None where it is not worth
    /// it.
    pub(super) fn next_refill(&mut self, config: &LeaseConfig, now: Timestamp) -> Option<(u64, u64, bool)> {
        self.spent += self.units.iter_mut().map(|pocket| pocket.report(now)).sum::<u64>();
        self.units.retain(|pocket| pocket.available(now) > 0);
        let (good, most) = (self.available(now), self.key.escrow.1.capacity());
        let refilled = self.key.refill(now.since(self.authority.at));
        let budget = self.authority.remaining.saturating_add(refilled).min(self.key.limit.capacity());
        let wanted = self.target_units(config.horizon, now).saturating_sub(good);
        // Two pockets for each node fit into what may be out. Where others have that, no more than what is out no longer.
        let mut units =
            wanted.min(config.share_of(budget)).min((most / (2 * u64::from(config.nodes.max(1)))).max(2));
        if self.contended {
            units = units.min(self.spent);
            self.contended = false;
        }
        if units < 2 || self.units.len() > 1 {
            self.refilling = false;
            self.not_before = now + self.pause().max(Span::from_millis(1));
            return None;
        }
        let quarter = Span::from_micros(config.ttl.as_micros() / 4);
        let marks = self.marked.is_none_or(|marked| now.since(marked) >= quarter);
        Some((units, std::mem::take(&mut self.spent), marks))
    }

    fn scaled(&self, per_second: u64, time: Span) -> u64 {
        u64::try_from(u128::from(per_second) * u128::from(time.as_micros()) / 1_000_000).unwrap_or(u64::MAX)
    }

    /// What came of an ask: the outcomes of the counter and of the escrow.
    pub(super) fn refilled(&mut self, ask: &RefillRequest, outcomes: &Outcomes, ttl: Span, now: Timestamp) {
        self.refilling = false;
        let RefillRequest { units, spent, at: asked, .. } = *ask;
        let [outcome, ..] = outcomes.each.as_slice() else { return };
        let admitted = outcomes.admission == Admission::Admitted;
        if ask.marks && outcomes.each.get(2).is_some_and(|mark| mark.verdict.is_allowed()) {
            self.marked = Some(asked);
        }
        self.authority =
            AuthorityState { at: asked, remaining: outcome.remaining, reset: asked + outcome.reset_after };
        if !admitted {
            // Where it is not the budget that is used up, others have too much of it in hand.
            let out = outcome.verdict.is_allowed();
            self.spent += spent;
            self.contended = out && self.spent > 1;
            let waits = out && !self.contended;
            self.not_before =
                now + if waits { Self::CONTENDED_FOR } else { self.pause().max(Span::from_millis(1)) };
            return;
        }
        self.denial = None;
        if let Some(pocket) = self.key.new_units(ask, outcomes, ttl) {
            self.units.push(pocket);
            self.last = units;
        }
    }

    /// An ask that nobody answered. What it took, if it did, comes back with time.
    pub(super) fn refill_failed(&mut self, now: Timestamp) {
        self.refilling = false;
        self.not_before = now + Self::CONTENDED_FOR;
    }

    /// Everything in hand, to be given back.
    pub(super) fn empty(&mut self, now: Timestamp) -> SmallVec<[LeaseAction; 2]> {
        let pockets = std::mem::take(&mut self.units);
        let held = pockets.into_iter().map(|pocket| (pocket.available(now), pocket));
        held.filter(|(good, _)| *good > 0).map(|(good, pocket)| LeaseAction::Return(pocket, good)).collect()
    }

    pub(super) fn idle_for(&self, now: Timestamp) -> Span {
        now.since(self.used)
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
