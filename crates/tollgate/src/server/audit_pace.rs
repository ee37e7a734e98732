//! Pace of the audit of adapted limits: who may report signals must not be able to fill the audit log.
//!
//! The first step of a tier below 100% and the one back to it are written at once. For the steps between them one entry a
//! minute is written, with all of them: every step is in the log, and what it takes there is bounded.

use std::collections::HashMap;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::AdaptedStep;

/// Least time between two entries of a tier.
const PACE: TimeDelta = TimeDelta::from_secs(60);
/// Thousandths of limits that are not tightened.
const WHOLE: u32 = 1_000;

/// An entry: the steps of a tier since the one before.
#[derive(Debug, PartialEq)]
pub(super) struct Entry {
    /// Level before the first of them, in thousandths.
    pub(super) from: u32,
    /// The steps and their times; there is at least one.
    pub(super) steps: Vec<(Timestamp, AdaptedStep)>,
}

/// A tightened tier.
struct Tier {
    /// Level of its last entry, in thousandths, and when that was written.
    level: u32,
    at: Timestamp,
    /// The steps since.
    pending: Vec<(Timestamp, AdaptedStep)>,
}

/// Decides which steps become entries, and when. It has only the tiers that are tightened.
#[derive(Default)]
pub(super) struct AuditPace(HashMap<(String, String), Tier>);

impl AuditPace {
    /// Adds a step. Returns the entry to write now.
    pub(super) fn add(&mut self, step: AdaptedStep, now: Timestamp) -> Option<Entry> {
        let key = (step.domain.clone(), step.tier.clone());
        if let Some(tier) = self.0.get_mut(&key)
            && step.from < WHOLE
            && step.to < WHOLE
        {
            tier.pending.push((now, step));
            return tier.take_due(now);
        }
        let (from, to) = (step.from, step.to);
        // A tier at 100% that is known as tightened has new settings.
        let (from, mut steps) =
            self.0.remove(&key).map_or((from, Vec::new()), |tier| (tier.level, tier.pending));
        steps.push((now, step));
        if to < WHOLE {
            self.0.insert(key, Tier { level: to, at: now, pending: Vec::new() });
        }
        Some(Entry { from, steps })
    }

    /// Returns when the next pending entry is due.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        self.0.values().filter(|tier| !tier.pending.is_empty()).map(|tier| tier.at + PACE).min()
    }

    /// Takes the pending entries that are due.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Vec<Entry> {
        self.0.values_mut().filter_map(|tier| tier.take_due(now)).collect()
    }
}

impl Tier {
    fn take_due(&mut self, now: Timestamp) -> Option<Entry> {
        if now < self.at + PACE {
            return None;
        }
        let steps = std::mem::take(&mut self.pending);
        let from = self.level;
        (self.level, self.at) = (steps.last()?.1.to, now);
        Some(Entry { from, steps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(from: u32, to: u32) -> AdaptedStep {
        AdaptedStep { domain: "api".to_owned(), tier: "free".to_owned(), from, to, signal: None }
    }

    /// Returns the level before an entry and the levels of its steps.
    fn levels(entry: &Entry) -> (u32, Vec<u32>) {
        (entry.from, entry.steps.iter().map(|(_, step)| step.to).collect())
    }

    #[test]
    fn the_first_step_and_the_last_are_written_and_one_entry_a_minute_between() {
        let (mut pace, begin) = (AuditPace::default(), Timestamp::from_secs(1_000));
        let at = |seconds| begin + TimeDelta::from_secs(seconds);
        let first = pace.add(step(1_000, 800), at(0)).expect("an entry");
        assert_eq!((levels(&first), first.steps[0].0), ((1_000, vec![800]), at(0)));
        assert_eq!(pace.next_due(), None);
        assert_eq!(pace.add(step(800, 640), at(5)), None);
        assert_eq!(pace.add(step(640, 512), at(10)), None);
        assert_eq!((pace.next_due(), pace.take_due(at(59))), (Some(at(60)), Vec::new()));
        let due = pace.take_due(at(60));
        assert_eq!(due.iter().map(levels).collect::<Vec<_>>(), [(800, vec![640, 512])]);
        assert_eq!(due[0].steps.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [at(5), at(10)]);
        assert_eq!(pace.next_due(), None);
        let later = pace.add(step(512, 640), at(121)).expect("an entry");
        assert_eq!(levels(&later), (512, vec![640]));
        assert_eq!(pace.add(step(640, 800), at(126)), None);
        assert_eq!(pace.add(step(800, 640), at(131)), None);
        assert_eq!(pace.next_due(), Some(at(181)), "steps that undo each other are steps");
        let last = pace.add(step(640, 1_000), at(136)).expect("an entry");
        assert_eq!(levels(&last), (640, vec![800, 640, 1_000]));
        assert_eq!(levels(&pace.add(step(1_000, 800), at(137)).expect("an entry")), (1_000, vec![800]));
    }

    /// Rules with other settings may set a tier back to 100% without a step.
    #[test]
    fn a_tier_that_begins_anew_loses_no_step() {
        let (mut pace, now) = (AuditPace::default(), Timestamp::from_secs(1_000));
        assert!(pace.add(step(1_000, 800), now).is_some());
        assert_eq!(pace.add(step(800, 640), now), None);
        let anew = pace.add(step(1_000, 800), now).expect("an entry");
        assert_eq!(levels(&anew), (800, vec![640, 800]));
    }

    #[test]
    fn tiers_are_apart() {
        let (mut pace, now) = (AuditPace::default(), Timestamp::from_secs(1_000));
        assert!(pace.add(step(1_000, 800), now).is_some());
        let other = AdaptedStep { tier: "pro".to_owned(), ..step(1_000, 800) };
        let entry = pace.add(other.clone(), now).expect("an entry");
        assert_eq!(entry.steps, [(now, other)]);
        assert_eq!(pace.add(step(800, 640), now), None);
    }
}
