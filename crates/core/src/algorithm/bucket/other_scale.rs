//! A bucket whose state was written by a limit with another scale: a tier, an override, another revision of the rules, or
//! `CL.THROTTLE` with other arguments.
//!
//! The debt is converted to units and back (see [`Scale`]). A charge that is admitted, and a debit, write it in this
//! bucket's scale. A refund gives back units in the writer's scale, which stays, and so does the reach: what is owed
//! beyond this bucket's capacity is neither cut off nor stretched to this bucket's rate. A denial changes nothing. What it
//! says is exact: the debt drains by the writer's rate until a charge is admitted.

use super::{Bucket, Shaping, Tat};
use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::scale::{Rounding, Scale};
use crate::time::{TimeDelta, Timestamp};

impl Bucket {
    /// A debt that no bucket holds, in microseconds; longer ones are cut off here.
    const FAR: u64 = 1 << 51;

    /// Returns how far `kept` is ahead, in the writer's units of time. A TAT beyond what its writer may be ahead was
    /// written before the clock moved backward, and is corrected.
    fn ahead_of(&self, kept: &mut Tat, writer: Scale, now: Timestamp) -> u128 {
        let stated = if kept.reach == 0 { 0 } else { 1 << kept.reach };
        let bound = self.max_ahead.max(stated);
        let fraction = kept.fraction.min(writer.k - 1);
        let micros = kept.micros.saturating_sub(now.as_micros());
        if kept.micros > now.as_micros() && (micros > bound || micros == bound && fraction > 0) {
            *kept = Tat { micros: now.as_micros() + bound, fraction: 0, ..*kept };
            return u128::from(bound) * u128::from(writer.k);
        }
        if kept.micros < now.as_micros() {
            return 0;
        }
        u128::from(micros) * u128::from(writer.k) + u128::from(fraction)
    }

    /// Steps a state of another scale.
    #[cold]
    pub(super) fn step_other(&self, kept: &mut Tat, writer: Scale, now: Timestamp, cost: Cost) -> Outcome {
        let mut ahead = self.ahead_of(kept, writer, now);
        if ahead == 0 {
            return self.step_unused(kept, now, cost);
        }
        let interval = u128::from(self.interval);
        if cost.is_refund() {
            let back = match cost.units() >= self.refill_cost() {
                true => ahead,
                false => {
                    let time = u128::from(cost.units()) * interval;
                    self.scale().convert(time, writer, Rounding::Down)
                }
            };
            ahead = ahead.saturating_sub(back);
            let micros = u128::from(now.as_micros()) * u128::from(writer.k) + ahead;
            *kept = Tat { reach: kept.reach, scale: kept.scale, ..Tat::from_units(micros, writer.k) };
            return self.outcome_of(self.debt(ahead, writer), ahead, writer, Verdict::ALLOWED);
        }
        let debt = self.debt(ahead, writer);
        if cost.is_peek() {
            return self.outcome_of(debt, ahead, writer, Verdict::ALLOWED);
        }
        if cost.units() > self.burst {
            return self.outcome_of(debt, ahead, writer, Verdict::Denied { retry_after: None });
        }
        let (time, capacity) = (u128::from(cost.units()) * interval, self.capacity::<u128>());
        let next = debt + time;
        if next > capacity {
            let wait = self.wait_for(time, ahead, writer);
            return self.outcome_of(debt, ahead, writer, Verdict::Denied { retry_after: Some(wait) });
        }
        self.write(kept, next, now);
        let delay = match self.shaping {
            Shaping::Police => TimeDelta::ZERO,
            Shaping::Delay => micros_up(debt, self.k),
        };
        self.outcome_of(next, next, self.scale(), Verdict::Allowed { delay })
    }

    /// Debits a state of another scale. A debt that is beyond one full bucket already stays as it is.
    #[cold]
    pub(super) fn debit_other(&self, kept: &mut Tat, writer: Scale, now: Timestamp, units: u64) {
        let mut corrected = *kept;
        let ahead = self.ahead_of(&mut corrected, writer, now);
        if ahead == 0 {
            let mut fresh = Tat::default();
            self.debit_tat(&mut fresh, now, units);
            *kept = fresh;
            return;
        }
        let debt = self.debt(ahead, writer);
        let next = debt + u128::from(units.min(2 * self.burst)) * u128::from(self.interval);
        let next = next.min(2 * self.capacity::<u128>());
        if next > debt {
            self.write(kept, next, now);
        }
    }

    /// Steps a state that is no longer ahead as an unused one.
    fn step_unused(&self, kept: &mut Tat, now: Timestamp, cost: Cost) -> Outcome {
        let mut fresh = Tat::default();
        let outcome = self.step_tat(&mut fresh, now, cost);
        if fresh != Tat::default() {
            *kept = fresh;
        }
        outcome
    }

    /// Returns the same units in this bucket's time.
    fn debt(&self, ahead: u128, writer: Scale) -> u128 {
        let far = u128::from(Self::FAR) * u128::from(self.k);
        writer.convert(ahead, self.scale(), Rounding::Up).min(far)
    }

    fn write(&self, kept: &mut Tat, ahead: u128, now: Timestamp) {
        let tat = Tat::from_units(self.scaled::<u128>(now) + ahead, self.k);
        *kept = Tat { reach: self.reach, scale: Some(self.scale()), ..tat };
    }

    /// Returns the outcome where `debt` is owed in this bucket's time, and `ahead` in the state's.
    fn outcome_of(&self, debt: u128, ahead: u128, scale: Scale, verdict: Verdict) -> Outcome {
        let outcome = self.outcome(debt, 0, verdict);
        let next_after = match outcome.remaining {
            0 if self.burst > 0 => self.wait_for(u128::from(self.interval), ahead, scale),
            _ => TimeDelta::ZERO,
        };
        Outcome { next_after, reset_after: micros_up(ahead, scale.k), ..outcome }
    }

    /// Returns the wait until a charge of this bucket's `time` fits: as soon as no more is owed than the rest.
    fn wait_for(&self, time: u128, ahead: u128, writer: Scale) -> TimeDelta {
        let fitting =
            self.scale().convert(self.capacity::<u128>().saturating_sub(time), writer, Rounding::Down);
        micros_up(ahead - fitting.min(ahead), writer.k)
    }
}

fn micros_up(time: u128, k: u64) -> TimeDelta {
    TimeDelta::from_micros(u64::try_from(time.div_ceil(u128::from(k))).unwrap_or(u64::MAX))
}
