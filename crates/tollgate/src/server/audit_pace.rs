//! Pace of the audit of adapted limits: who may report signals must not be able to fill the audit log.
//!
//! The first step of a tier below 100% and the one back to it are written at once. Of the steps between them one entry a
//! minute is written: from the level of the entry before to the latest one.

use std::collections::HashMap;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::AdaptedStep;

/// Least time between two entries of a tier.
const PACE: TimeDelta = TimeDelta::from_secs(60);
/// Thousandths of limits that are not tightened.
const WHOLE: u32 = 1_000;

/// A tightened tier.
struct Tier {
    /// Level of its last entry, in thousandths, and when that was written.
    level: u32,
    at: Timestamp,
    /// The latest step since.
    pending: Option<AdaptedStep>,
}

/// Decides which steps become entries. It has only the tiers that are tightened.
#[derive(Default)]
pub(super) struct AuditPace(HashMap<(String, String), Tier>);

impl AuditPace {
    /// Adds a step. Returns the entry to write now.
    pub(super) fn add(&mut self, mut step: AdaptedStep, now: Timestamp) -> Option<AdaptedStep> {
        let key = (step.domain.clone(), step.tier.clone());
        if step.to >= WHOLE {
            step.from = self.0.remove(&key).map_or(step.from, |tier| tier.level);
            return Some(step);
        }
        match self.0.get_mut(&key) {
            // A tier at 100% that is known as tightened has new settings.
            Some(tier) if step.from < WHOLE => {
                step.from = tier.level;
                tier.pending = Some(step).filter(|step| step.from != step.to);
                tier.take_due(now)
            }
            _ => {
                self.0.insert(key, Tier { level: step.to, at: now, pending: None });
                Some(step)
            }
        }
    }

    /// Returns when the next pending entry is due.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        self.0.values().filter(|tier| tier.pending.is_some()).map(|tier| tier.at + PACE).min()
    }

    /// Takes the pending entries that are due.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Vec<AdaptedStep> {
        self.0.values_mut().filter_map(|tier| tier.take_due(now)).collect()
    }
}

impl Tier {
    fn take_due(&mut self, now: Timestamp) -> Option<AdaptedStep> {
        if now < self.at + PACE {
            return None;
        }
        let step = self.pending.take()?;
        (self.level, self.at) = (step.to, now);
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(from: u32, to: u32) -> AdaptedStep {
        AdaptedStep { domain: "api".to_owned(), tier: "free".to_owned(), from, to, signal: None }
    }

    #[test]
    fn the_first_step_and_the_last_are_written_and_one_a_minute_between() {
        let (mut pace, begin) = (AuditPace::default(), Timestamp::from_secs(1_000));
        let at = |seconds| begin + TimeDelta::from_secs(seconds);
        assert_eq!(pace.add(step(1_000, 800), at(0)), Some(step(1_000, 800)));
        assert_eq!(pace.next_due(), None);
        assert_eq!(pace.add(step(800, 640), at(5)), None);
        assert_eq!(pace.add(step(640, 512), at(10)), None);
        assert_eq!((pace.next_due(), pace.take_due(at(59))), (Some(at(60)), Vec::new()));
        assert_eq!(pace.take_due(at(60)), [step(800, 512)]);
        assert_eq!(pace.next_due(), None);
        assert_eq!(pace.add(step(512, 640), at(121)), Some(step(512, 640)));
        assert_eq!(pace.add(step(640, 800), at(126)), None);
        assert_eq!(pace.add(step(800, 640), at(131)), None);
        assert_eq!(pace.next_due(), None, "the level is that of the last entry");
        assert_eq!(pace.add(step(800, 1_000), at(136)), Some(step(640, 1_000)));
        assert_eq!(pace.add(step(1_000, 800), at(137)), Some(step(1_000, 800)));
    }

    #[test]
    fn tiers_are_apart() {
        let (mut pace, now) = (AuditPace::default(), Timestamp::from_secs(1_000));
        assert!(pace.add(step(1_000, 800), now).is_some());
        let other = AdaptedStep { tier: "pro".to_owned(), ..step(1_000, 800) };
        assert_eq!(pace.add(other.clone(), now), Some(other));
        assert_eq!(pace.add(step(800, 640), now), None);
    }
}
