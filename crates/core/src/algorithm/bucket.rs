//! GCRA, also known as token bucket and leaky bucket.
//!
//! The state is one number: the theoretical arrival time (TAT), the instant at which the bucket would be full again. A
//! unit advances it by `period / count`; a charge fits while the TAT stays within `burst` such intervals of now. Over
//! any time t at most `burst + rate * t` units pass.
//!
//! The interval is seldom a whole number of microseconds (7 per second), and rounding it drifts. So the TAT is stored
//! in units of 1/k of a microsecond, where k = count / gcd(count, period): every interval is then a whole number and no
//! step ever rounds. For k up to 2048 that fits a 64-bit word until the year 2112; odd large counts (99 991 per day)
//! use 128 bits. Rejected: floating point, because it drifts, and a carried remainder, because it needs two words.
//!
//! A state also names the [scale](crate::Scale) of the limit that wrote it; a limit with another one is stepped by
//! `other_scale`.

mod other_scale;

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::packed::Tag;
use crate::scale::{Coded, Scale, ScaleCode};
use crate::time::{TimeDelta, Timestamp};
use std::ops::{Add, Div, Mul, Sub};

#[cfg(test)]
mod tests;

/// The two integer widths of a TAT; the arithmetic is the same.
pub(crate) trait Width:
    Copy + Ord + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + From<u64>
{
    /// Narrows to 64 bits; the value is known to fit.
    fn narrow(self) -> u64;
}

impl Width for u64 {
    fn narrow(self) -> u64 {
        self
    }
}

impl Width for u128 {
    fn narrow(self) -> u64 {
        u64::try_from(self).unwrap_or(u64::MAX)
    }
}

/// A theoretical arrival time as stored: whole microseconds, a fraction in 1/k of one, and the reach and the scale of its
/// writer.
///
/// The first two are separate so that a reader with another k finds the same instant, to within a microsecond. Rejected:
/// the product alone, because read with another k it is a time decades away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tat {
    /// Microseconds since the epoch.
    pub micros: u64,
    /// Remaining fraction, in 1/k of a microsecond.
    pub fraction: u64,
    /// Log2 of how far ahead the limit that wrote it may be; 0 if no further than every limit of its period. A limit
    /// that may not be as far ahead leaves the TAT alone up to there: it was counted, and not before a clock moved
    /// backward.
    pub reach: u8,
    /// The scale of the limit that wrote it; `None` if unknown, and then the reader's scale applies.
    pub scale: Option<Scale>,
}

impl Tat {
    pub(crate) fn units<W: Width>(self, k: u64) -> W {
        W::from(self.micros) * W::from(k) + W::from(self.fraction.min(k - 1))
    }

    pub(crate) fn from_units<W: Width>(units: W, k: u64) -> Self {
        let micros = units / W::from(k);
        Self {
            micros: micros.narrow(),
            fraction: (units - micros * W::from(k)).narrow(),
            reach: 0,
            scale: None,
        }
    }
}

/// Shaping: whether a charge above the steady rate passes immediately or carries a delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shaping {
    /// Passes immediately within the burst.
    Police,
    /// Passes at the steady rate; the outcome carries the delay.
    Delay,
}

/// Which limits may charge the same counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Limits with other counts and bursts: the period is part of a rule's counter key.
    SamePeriod,
    /// Any bucket: the caller states the whole limit with each request.
    AnyPeriod,
}

/// A bucket whose rate is expressed in exact whole numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// Units of time per microsecond.
    pub(crate) k: u64,
    /// Units of time after which one unit of cost is available again.
    pub(crate) interval: u64,
    /// Units of time of a unit of cost as others count it: the same, unless this bucket counts in fractions of one.
    pub(crate) unit: u64,
    /// Capacity in units of cost.
    pub(crate) burst: u64,
    /// Maximum that a TAT may be ahead of now, in microseconds: twice the time from empty to full, or twice the period
    /// where that is longer.
    pub(crate) max_ahead: u64,
    /// Log2 of `max_ahead`, rounded up, where other limits of the same counter (a smaller tier, an override) may have a
    /// shorter one: it is stored with the TAT, so that none of them truncates what this one has counted. 0 where all
    /// have the same: the same period, and bursts up to the count.
    pub(crate) reach: u8,
    /// What is stored with a packed state that this bucket writes; 0 for a bucket that is not narrow.
    pub(crate) layout: u16,
    pub(crate) shaping: Shaping,
    pub(crate) sharing: Sharing,
}

impl Bucket {
    /// The largest k whose TAT fits a word; see `packed`.
    pub(crate) const MAX_NARROW_K: u64 = 1 << 11;
    /// The maximum time from empty to full: 2^50 microseconds, about 35 years.
    pub(crate) const MAX_FILL: u64 = 1 << 50;

    /// Creates a bucket. Returns `None` if it would take longer than [`Self::MAX_FILL`] to fill.
    pub(crate) fn new(
        count: u64,
        period: TimeDelta,
        burst: u64,
        shaping: Shaping,
        sharing: Sharing,
    ) -> Option<Self> {
        let divisor = gcd(count, period.as_micros());
        let (k, interval) = (count / divisor, period.as_micros() / divisor);
        let unit = interval;
        let mut bucket =
            Self { k, interval, unit, burst, max_ahead: 0, reach: 0, layout: 0, shaping, sharing };
        let fill = bucket.fill();
        bucket.max_ahead = 2 * fill.narrow().max(period.as_micros()).min(Self::MAX_FILL);
        if sharing == Sharing::AnyPeriod || fill > u128::from(period.as_micros()) {
            bucket.reach = (u64::BITS - bucket.max_ahead.leading_zeros()) as u8;
        }
        if fill > u128::from(Self::MAX_FILL) {
            return None;
        }
        if bucket.is_narrow() {
            let log2 = (u64::BITS - bucket.horizon().leading_zeros()) as u8;
            let coded = Coded { scale: bucket.scale(), reach: bucket.reach, log2 };
            bucket.layout = Tag::layout_of(ScaleCode::of(coded, sharing == Sharing::AnyPeriod));
        }
        Some(bucket)
    }

    /// Returns the scale of the states that this bucket writes.
    #[inline]
    pub(crate) const fn scale(&self) -> Scale {
        Scale { k: self.k, unit: self.unit }
    }

    /// Returns the scale of a state if it is another than this bucket's.
    #[inline]
    fn other_scale(&self, kept: &Tat) -> Option<Scale> {
        kept.scale.filter(|scale| *scale != self.scale())
    }

    /// Returns the microseconds from empty to full, rounded up.
    fn fill(&self) -> u128 {
        (u128::from(self.burst) * u128::from(self.interval)).div_ceil(u128::from(self.k))
    }

    /// Returns the microseconds from empty to full, for a bucket that passed validation.
    pub(crate) fn horizon(&self) -> u64 {
        self.fill().narrow()
    }

    pub(crate) fn is_narrow(&self) -> bool {
        self.k <= Self::MAX_NARROW_K
    }

    fn scaled<W: Width>(&self, now: Timestamp) -> W {
        W::from(now.as_micros()) * W::from(self.k)
    }

    fn capacity<W: Width>(&self) -> W {
        W::from(self.burst) * W::from(self.interval)
    }

    /// Limits how far `tat`, of a state with this reach, is ahead of `now`. A TAT beyond that bound was written before
    /// the clock moved backward: the key recovers in bounded time and gains no units ahead of time.
    #[inline(always)]
    fn clamp_ahead<W: Width>(&self, tat: W, reach: u8, now: W) -> W {
        let most = now + W::from(self.max_ahead) * W::from(self.k);
        if tat > most { self.clamp_far(tat, reach, now, most) } else { tat }
    }

    #[cold]
    fn clamp_far<W: Width>(&self, tat: W, reach: u8, now: W, most: W) -> W {
        // In whole microseconds: the product could overflow at the end of time.
        let whole = (tat - now) / W::from(self.k);
        let bound = W::from(1 << reach);
        let within = whole < bound || whole == bound && tat - now == whole * W::from(self.k);
        if reach != 0 && reach != self.reach && within { tat } else { most }
    }

    /// Returns the reach to store with a changed TAT, where `before` was stored.
    #[inline]
    pub(crate) fn reach_after(&self, micros: u64, now: Timestamp, before: u8) -> u8 {
        if micros <= now.as_micros() + self.max_ahead { self.reach } else { before.max(self.reach) }
    }

    /// Returns a number of units whose refund leaves the bucket unused and that exceeds the capacity of every bucket.
    pub(crate) fn refill_cost(&self) -> u64 {
        ((u128::from(self.max_ahead) * u128::from(self.k)) / u128::from(self.interval)).narrow() + 1
    }

    #[inline(always)]
    pub(crate) fn step<W: Width>(&self, tat: &mut W, reach: u8, now: Timestamp, cost: Cost) -> Outcome {
        let now = self.scaled::<W>(now);
        let capacity = self.capacity::<W>();
        *tat = self.clamp_ahead(*tat, reach, now);
        let base = (*tat).max(now);
        let next = || base + W::from(cost.units()) * W::from(self.interval);
        let (reached, verdict) = if cost.is_refund() {
            // That many give back all, also what a bucket with a longer burst has counted.
            let all = self.refill_cost();
            let back = W::from(cost.units().min(all)) * W::from(self.interval);
            *tat = if cost.units() >= all { now } else { base.max(now + back) - back };
            (*tat, Verdict::ALLOWED)
        } else if cost.is_peek() {
            (base, Verdict::ALLOWED)
        } else if cost.units() > self.burst {
            (base, Verdict::Denied { retry_after: None })
        } else if next() > now + capacity {
            let wait = self.micros_up(next() - capacity - now);
            (base, Verdict::Denied { retry_after: Some(wait) })
        } else {
            *tat = next();
            let delay = match self.shaping {
                Shaping::Police => TimeDelta::ZERO,
                Shaping::Delay => self.micros_up(base - now),
            };
            (*tat, Verdict::Allowed { delay })
        };
        // In one place, so that it is inlined: an outcome that passes through memory is read again before its parts have
        // left the processor's store buffer, which takes as long as the step.
        self.outcome(reached, now, verdict)
    }

    /// Steps a stored TAT in the width that the rate needs.
    pub(crate) fn step_tat(&self, kept: &mut Tat, now: Timestamp, cost: Cost) -> Outcome {
        if let Some(scale) = self.other_scale(kept) {
            return self.step_other(kept, scale, now, cost);
        }
        if self.is_narrow() {
            self.step_in::<u64>(kept, now, cost)
        } else {
            self.step_in::<u128>(kept, now, cost)
        }
    }

    fn step_in<W: Width>(&self, kept: &mut Tat, now: Timestamp, cost: Cost) -> Outcome {
        let before = kept.units::<W>(self.k);
        let mut tat = before;
        let outcome = self.step(&mut tat, kept.reach, now, cost);
        self.store(kept, before, tat, now);
        outcome
    }

    /// Stores a TAT. An unchanged one is not rewritten: that would truncate a fraction stored under another rate.
    fn store<W: Width>(&self, kept: &mut Tat, before: W, tat: W, now: Timestamp) {
        if tat != before {
            let next = Tat::from_units(tat, self.k);
            let reach = self.reach_after(next.micros, now, kept.reach);
            *kept = Tat { reach, scale: Some(self.scale()), ..next };
        }
    }

    /// Debits a stored TAT.
    pub(crate) fn debit_tat(&self, kept: &mut Tat, now: Timestamp, units: u64) {
        if let Some(scale) = self.other_scale(kept) {
            return self.debit_other(kept, scale, now, units);
        }
        // Debits are rare, so the wider width is used for both.
        let before = kept.units::<u128>(self.k);
        let mut tat = before;
        self.debit(&mut tat, kept.reach, now, units);
        self.store(kept, before, tat, now);
    }

    /// Charges units that were already used, into debt if necessary; a debit raises the debt to one full bucket at
    /// most.
    pub(crate) fn debit<W: Width>(&self, tat: &mut W, reach: u8, now: Timestamp, units: u64) {
        let now = self.scaled::<W>(now);
        let base = self.clamp_ahead(*tat, reach, now).max(now);
        let next = base + W::from(units.min(2 * self.burst)) * W::from(self.interval);
        *tat = base.max(next.min(now + self.capacity::<W>() + self.capacity::<W>()));
    }

    #[inline(always)]
    fn outcome<W: Width>(&self, tat: W, now: W, verdict: Verdict) -> Outcome {
        let owed = tat - now;
        let capacity = self.capacity::<W>();
        let remaining =
            if owed >= capacity { 0 } else { ((capacity - owed) / W::from(self.interval)).narrow() };
        let next_after = match remaining {
            0 if self.burst > 0 => self.micros_up(owed + W::from(self.interval) - capacity),
            _ => TimeDelta::ZERO,
        };
        Outcome { verdict, remaining, next_after, reset_after: self.micros_up(owed) }
    }

    #[inline]
    fn micros_up<W: Width>(&self, units: W) -> TimeDelta {
        if self.k == 1 {
            return TimeDelta::from_micros(units.narrow());
        }
        TimeDelta::from_micros(((units + W::from(self.k - 1)) / W::from(self.k)).narrow())
    }

    /// Returns the instant, in microseconds, from which the state with this TAT is equivalent to an unused one.
    pub(crate) fn full_at(tat: Tat) -> u64 {
        tat.micros + u64::from(tat.fraction > 0)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
