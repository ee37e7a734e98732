//! Adapted limits: tier by tier, limits follow signals of a service's health.
//!
//! One step at a time, never more often than the configured interval: while a signal is above its bound, the first tier
//! that is not at its least is tightened by a fifth; when all signals have been calm for two steps, the tier that was
//! tightened last is loosened by a quarter. Between 80% and 100% of a bound nothing changes, so that limits do not swing
//! around it. A signal that is no longer reported is calm.
//!
//! Steps have their times, whoever makes them: a caller that comes late makes up for those that were missed, each by what had been
//! reported until then. A report counts in one step. While limits are whole and nothing is reported there are no steps, so that the first
//! report after a calm time makes one at once.

use tollgate_core::{TimeDelta, Timestamp};

/// Thousandths: a limit as the rules have it.
pub const WHOLE: u32 = 1_000;
/// Part of a bound below which a signal is calm.
const CALM: f64 = 0.8;
/// Calm steps before limits are loosened.
const CALM_STEPS: u32 = 2;

/// Configuration of adapted limits.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptConfig {
    /// Bound of each signal.
    pub bounds: Vec<f64>,
    /// Number of tiers, in the order in which they are tightened.
    pub tiers: usize,
    /// Thousandths of a limit that are always left.
    pub least: u32,
    /// Time between two steps.
    pub step: TimeDelta,
}

/// A step: a tier's limits have changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptStep {
    /// Index of the tier.
    pub tier: usize,
    /// Thousandths of its limits that apply before.
    pub from: u32,
    /// Thousandths that apply now.
    pub to: u32,
    /// Index of the signal that is above its bound, and its value; none if limits are loosened.
    pub signal: Option<(usize, f64)>,
}

/// Controller of adapted limits.
#[derive(Clone, Debug)]
pub struct AdaptController {
    config: AdaptConfig,
    /// Highest value of each signal since the last step, and before it.
    peaks: Vec<Peak>,
    before: Vec<f64>,
    factors: Vec<u32>,
    calm: u32,
    next: Timestamp,
}

/// Highest value of a signal that no step has counted yet, and when it was reported.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    value: f64,
    at: Timestamp,
}

impl AdaptController {
    /// Creates a controller with all limits as the rules have them.
    #[must_use]
    pub fn new(config: AdaptConfig) -> Self {
        let (signals, factors) = (config.bounds.len(), vec![WHOLE; config.tiers]);
        Self {
            config,
            peaks: vec![Peak::default(); signals],
            before: vec![0.0; signals],
            factors,
            calm: 0,
            next: Timestamp::ZERO,
        }
    }

    /// Begins with these thousandths instead, as far as the configuration allows them, and makes the first step at `next`.
    #[must_use]
    pub fn with_factors(mut self, factors: &[u32], next: Timestamp) -> Self {
        self.next = next;
        for (own, factor) in self.factors.iter_mut().zip(factors) {
            *own = (*factor).clamp(self.config.least.min(WHOLE), WHOLE);
        }
        self
    }

    /// Records values of signals by their indexes, and makes all steps whose time has come. Of several reporters and several reports, the
    /// highest value counts. Returns the steps that change limits.
    pub fn report(
        &mut self,
        values: impl IntoIterator<Item = (usize, f64)>,
        now: Timestamp,
    ) -> Vec<AdaptStep> {
        let mut steps = self.catch_up(now);
        self.record(values, now);
        steps.extend(self.advance(now, now));
        steps
    }

    /// Records values of signals by their indexes.
    fn record(&mut self, values: impl IntoIterator<Item = (usize, f64)>, now: Timestamp) {
        for (signal, value) in values {
            if let Some(peak) = self.peaks.get_mut(signal).filter(|peak| value > peak.value) {
                *peak = Peak { value, at: now };
            }
        }
    }

    /// Makes the steps that were missed: those after which another one is due. The last one is left to the next report. Returns those that
    /// change limits.
    pub fn catch_up(&mut self, now: Timestamp) -> Vec<AdaptStep> {
        self.advance(now, now - self.config.step)
    }

    /// Makes the steps until `last`.
    fn advance(&mut self, now: Timestamp, last: Timestamp) -> Vec<AdaptStep> {
        let mut steps = Vec::new();
        while self.next <= last {
            let mut at = self.next;
            if self.factors.iter().all(|factor| *factor == WHOLE) {
                // Nothing is to be loosened, so that only reports make steps.
                let reported = self.peaks.iter().filter(|peak| peak.value > 0.0).map(|peak| peak.at).min();
                let Some(reported) = reported else {
                    self.before.fill(0.0);
                    break;
                };
                at = at.max(reported);
                if at > last {
                    break;
                }
            }
            // What was reported after a step that was missed counts in a later one.
            let until = if at + self.config.step > now { now } else { at };
            steps.extend(self.step_by(|peak| peak.at <= until));
            // Counted from when the step was due: reports that come a little more often than steps would else make every second
            // one. Not so soon that a late step and the next one are one after the other.
            let half = TimeDelta::from_micros(self.config.step.as_micros() / 2);
            self.next = (at + self.config.step).max(until + half);
        }
        steps
    }

    /// Makes the step of a report whose time may not have come, if there is one to make.
    pub fn suppose(
        &mut self,
        values: impl IntoIterator<Item = (usize, f64)>,
        now: Timestamp,
    ) -> Option<AdaptStep> {
        self.record(values, now);
        self.step_by(|_| true)
    }

    /// Makes a step by the peaks that it counts.
    fn step_by(&mut self, counts: impl Fn(&Peak) -> bool) -> Option<AdaptStep> {
        let Self { config, peaks, before, factors, calm, .. } = self;
        for (value, peak) in before.iter_mut().zip(peaks) {
            *value = if counts(peak) { std::mem::take(peak).value } else { 0.0 };
        }
        let values = || before.iter().zip(&config.bounds);
        let loudest = values().enumerate().find(|(_, (value, bound))| value > bound);
        let loudest = loudest.map(|(at, (value, _))| (at, *value));
        let is_calm = values().all(|(value, bound)| *value < CALM * bound);
        *calm = if is_calm { calm.saturating_add(1) } else { 0 };
        let (tier, to) = if loudest.is_some() {
            let tier = factors.iter().position(|factor| *factor > config.least)?;
            (tier, (factors[tier] * 4 / 5).max(config.least))
        } else if *calm >= CALM_STEPS {
            let tier = factors.iter().rposition(|factor| *factor < WHOLE)?;
            (tier, (factors[tier] * 5 / 4).max(factors[tier] + 1).min(WHOLE))
        } else {
            return None;
        };
        let from = std::mem::replace(&mut factors[tier], to);
        Some(AdaptStep { tier, from, to, signal: loudest })
    }

    /// Returns the highest value of each signal since the step before the last.
    pub fn signals(&self) -> impl Iterator<Item = f64> {
        self.peaks.iter().zip(&self.before).map(|(now, before)| now.value.max(*before))
    }

    /// Returns when the next step may be made.
    #[must_use]
    pub const fn next_step(&self) -> Timestamp {
        self.next
    }

    /// Returns the thousandths of each tier's limits that apply.
    #[must_use]
    pub fn factors(&self) -> &[u32] {
        &self.factors
    }
}

#[cfg(test)]
mod tests;
