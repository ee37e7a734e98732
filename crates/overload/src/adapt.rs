//! Adapted limits: tier by tier, limits follow signals of a service's health.
//!
//! One step at a time, never more often than the configured interval: while a signal is above its bound, the first tier
//! that is not at its least is tightened by a fifth; when all signals have been calm for two steps, the tier that was
//! tightened last is loosened by a quarter. Between 80% and 100% of a bound nothing changes, so that limits do not swing
//! around it. A signal that is no longer reported is calm.

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
    peaks: Vec<f64>,
    before: Vec<f64>,
    factors: Vec<u32>,
    calm: u32,
    next: Timestamp,
}

impl AdaptController {
    /// Creates a controller with all limits as the rules have them.
    #[must_use]
    pub fn new(config: AdaptConfig) -> Self {
        let (peaks, factors) = (vec![0.0; config.bounds.len()], vec![WHOLE; config.tiers]);
        Self { config, before: peaks.clone(), peaks, factors, calm: 0, next: Timestamp::ZERO }
    }

    /// Begins with these thousandths instead, as far as the configuration allows them.
    #[must_use]
    pub fn with_factors(mut self, factors: &[u32]) -> Self {
        for (own, factor) in self.factors.iter_mut().zip(factors) {
            *own = (*factor).clamp(self.config.least.min(WHOLE), WHOLE);
        }
        self
    }

    /// Records the value of a signal. Of several reporters and several reports, the highest counts.
    pub fn record(&mut self, signal: usize, value: f64) {
        if let Some(peak) = self.peaks.get_mut(signal).filter(|peak| value > **peak) {
            *peak = value;
        }
    }

    /// Makes a step if its time has come and there is one to make.
    pub fn step(&mut self, now: Timestamp) -> Option<AdaptStep> {
        if now < self.next {
            return None;
        }
        self.next = now + self.config.step;
        self.step_now()
    }

    /// Makes a step whose time may not have come, if there is one to make.
    pub fn step_now(&mut self) -> Option<AdaptStep> {
        let Self { config, peaks, before, factors, calm, .. } = self;
        let over = |(_, (peak, bound)): &(usize, (&f64, &f64))| peak > bound;
        let loudest =
            peaks.iter().zip(&config.bounds).enumerate().find(over).map(|(at, (peak, _))| (at, *peak));
        let is_calm = peaks.iter().zip(&config.bounds).all(|(peak, bound)| *peak < CALM * bound);
        before.copy_from_slice(peaks);
        peaks.fill(0.0);
        *calm = if is_calm { *calm + 1 } else { 0 };
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
        self.peaks.iter().zip(&self.before).map(|(now, before)| now.max(*before))
    }

    /// Returns the thousandths of each tier's limits that apply.
    #[must_use]
    pub fn factors(&self) -> &[u32] {
        &self.factors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn controller() -> AdaptController {
        AdaptController::new(AdaptConfig {
            bounds: vec![100.0, 300.0],
            tiers: 3,
            least: 200,
            step: TimeDelta::from_secs(5),
        })
    }

    fn run(controller: &mut AdaptController, from: u64, steps: u64, value: f64) -> Vec<AdaptStep> {
        (from..from + steps)
            .filter_map(|n| {
                controller.record(0, value);
                controller.step(Timestamp::from_secs(5 * n))
            })
            .collect()
    }

    #[test]
    fn tiers_are_tightened_in_order_down_to_the_least_and_come_back() {
        let mut controller = controller();
        let tightened = run(&mut controller, 1, 8, 150.0);
        assert_eq!(tightened.iter().map(|step| step.tier).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 0, 0]);
        run(&mut controller, 9, 30, 150.0);
        assert_eq!(controller.factors(), [200, 200, 200]);
        assert!(run(&mut controller, 39, 5, 90.0).is_empty(), "near the bound nothing changes");
        let loosened = run(&mut controller, 44, 60, 10.0);
        assert_eq!(loosened.first().map(|step| step.tier), Some(2), "last tightened, first loosened");
        assert_eq!(controller.factors(), [WHOLE; 3]);
    }

    #[test]
    fn no_step_comes_early() {
        let mut controller = controller();
        controller.record(1, 400.0);
        assert!(controller.step(Timestamp::from_secs(10)).is_some());
        controller.record(1, 400.0);
        assert_eq!(controller.step(Timestamp::from_secs(14)), None);
        assert!(controller.step(Timestamp::from_secs(15)).is_some());
    }

    proptest! {
        #[test]
        fn factors_stay_between_the_least_and_the_whole(values in prop::collection::vec(0.0f64..400.0, 1..200)) {
            let mut controller = controller();
            for (n, value) in (1..).zip(values) {
                controller.record(n as usize % 3, value);
                controller.step(Timestamp::from_secs(5 * n));
                prop_assert!(controller.factors().iter().all(|factor| (200..=WHOLE).contains(factor)));
                // An earlier tier is at its least before a later one is touched.
                let touched = controller.factors().iter().rposition(|factor| *factor < WHOLE).unwrap_or(0);
                prop_assert!(controller.factors()[..touched].iter().all(|factor| *factor == 200));
            }
        }
    }
}
