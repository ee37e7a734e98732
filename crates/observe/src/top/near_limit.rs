//! Who has been near a limit for minutes: a list for "consider upgrading". A minute of the clock counts if the caller was near
//! at some time in it; a bucket that is used up again and again is full in between. How long it has been so is from the first
//! time to the last, so that a minute that had hardly begun is not taken for a whole one.

use super::NEAR_THRESHOLD;
use crate::mask::MaskedCaller;
use crate::metrics::labels::RuleLabel;
use crate::recorder::capture::CallerUtilization;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{TimeDelta, Timestamp};

/// Callers that are watched at once.
const MAX_TRACKED: usize = 4_096;
/// For so long somebody must have been near to be told of.
const MIN_MINUTES: TimeDelta = TimeDelta::from_secs(300);

#[derive(Debug, Default)]
pub(super) struct NearLimitTracker {
    tracked: HashMap<(u64, u32), TrackedCaller>,
    now: Timestamp,
}

#[derive(Debug)]
struct TrackedCaller {
    caller: Arc<MaskedCaller>,
    name: RuleLabel,
    tier: u16,
    /// The most that was used in this minute; nothing, if nobody has asked in it.
    used: f32,
    /// What it was in the minute before.
    before: f32,
    /// When it was near for the first time, of every minute since then.
    since: Timestamp,
    /// When it was last.
    last: Timestamp,
}

/// A caller that has been near a limit for a while.
#[derive(Clone, Debug)]
pub(crate) struct NearLimit {
    pub(crate) caller: Arc<MaskedCaller>,
    pub(crate) slot: u32,
    pub(crate) name: RuleLabel,
    pub(crate) tier: u16,
    pub(crate) used: f32,
    pub(crate) minutes: u64,
}

impl NearLimitTracker {
    pub(super) fn record(&mut self, caller: &Arc<MaskedCaller>, name: &RuleLabel, own: &CallerUtilization) {
        let (key, now) = ((caller.id, own.slot), self.now);
        if let Some(watched) = self.tracked.get_mut(&key) {
            watched.used = watched.used.max(own.used);
            watched.tier = own.tier;
            if own.used >= NEAR_THRESHOLD {
                watched.last = now;
            }
        } else if own.used >= NEAR_THRESHOLD && self.tracked.len() < MAX_TRACKED {
            let (caller, name) = (Arc::clone(caller), name.clone());
            let (tier, used) = (own.tier, own.used);
            self.tracked
                .insert(key, TrackedCaller { caller, name, tier, used, before: 0.0, since: now, last: now });
        }
    }

    /// A minute that has ended counts, or ends the row. Time does not go back: whoever says so is late.
    pub(super) fn rotate(&mut self, now: Timestamp) {
        let (minute, last) = (now.as_secs() / 60, self.now.as_secs() / 60);
        self.now = self.now.max(now);
        if minute <= last {
            return;
        }
        // More than a minute without a look: nobody has asked in between.
        let in_a_row = minute == last + 1;
        self.tracked.retain(|_, watched| {
            watched.before = std::mem::take(&mut watched.used);
            in_a_row && watched.before >= NEAR_THRESHOLD
        });
    }

    /// Those who are watched.
    pub(super) fn callers(&self) -> impl Iterator<Item = &Arc<MaskedCaller>> {
        self.tracked.values().map(|watched| &watched.caller)
    }

    pub(super) fn top_n(&self, most: usize) -> Vec<NearLimit> {
        let long =
            self.tracked.iter().filter(|(_, watched)| watched.last.since(watched.since) >= MIN_MINUTES);
        let mut all: Vec<NearLimit> = long
            .map(|((_, slot), watched)| NearLimit {
                caller: Arc::clone(&watched.caller),
                slot: *slot,
                name: watched.name.clone(),
                tier: watched.tier,
                used: watched.used.max(watched.before),
                minutes: watched.last.since(watched.since).as_micros() / 60_000_000,
            })
            .collect();
        all.sort_by(|a, b| b.used.total_cmp(&a.used).then(b.minutes.cmp(&a.minutes)));
        all.truncate(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CallerSample, TopCallers};
    use super::*;

    const BEGIN: u64 = 600_000;

    fn record(top: &mut TopCallers, id: u64, used: f32) {
        let caller = Arc::new(MaskedCaller { id, display: format!("caller {id}"), key: None });
        let name = RuleLabel { domain: "d".into(), rule: "r".into() };
        let own = Some((CallerUtilization { slot: 3, tier: 2, used }, &name));
        let denied = used >= 1.0;
        top.record(&CallerSample {
            caller: &caller,
            network: None,
            slot: 3,
            name: &name,
            denied,
            utilization: own,
            weight: 1,
        });
    }

    fn rotate(top: &mut TopCallers, secs: u64) {
        top.rotate(Timestamp::from_secs(BEGIN + secs));
    }

    fn top_n(top: &TopCallers) -> Vec<(u64, u64)> {
        top.near().iter().map(|near| (near.caller.id, near.minutes)).collect()
    }

    /// Against what a person would say with all the numbers before them.
    #[test]
    fn only_callers_that_stay_near_are_listed() {
        let mut top = TopCallers::default();
        for secs in 0..360 {
            rotate(&mut top, secs);
            record(&mut top, 1, 0.95);
            record(&mut top, 2, if secs % 50 == 0 { 0.85 } else { 0.1 });
            record(&mut top, 3, if (120..180).contains(&secs) { 0.5 } else { 0.9 });
            record(&mut top, 4, 0.79);
            if secs < 200 {
                record(&mut top, 5, 1.0);
            }
        }
        rotate(&mut top, 360);
        record(&mut top, 1, 0.95);
        assert_eq!(top_n(&top), [(1, 6), (2, 5)]);
        assert_eq!(top.near()[0].tier, 2);
        // Nobody asks for a while: nobody is near.
        rotate(&mut top, 1_000);
        assert_eq!(top_n(&top), []);
    }

    /// A caller who came in the last second of a minute has not been there for all of it.
    #[test]
    fn five_minutes_are_five_minutes() {
        let mut top = TopCallers::default();
        for secs in 59..360 {
            rotate(&mut top, secs);
            record(&mut top, 1, 1.0);
            let minutes = if secs < 359 { None } else { Some(5) };
            assert_eq!(top_n(&top).first().map(|(_, minutes)| *minutes), minutes, "after {secs} s");
        }
    }

    /// Rounds that overlap at the end of a minute: one has been told the next minute already when the other still has the old.
    #[test]
    fn no_caller_is_lost_when_the_clock_steps_back() {
        let mut top = TopCallers::default();
        for secs in 0..400 {
            rotate(&mut top, secs);
            record(&mut top, 1, 0.9);
            rotate(&mut top, secs.saturating_sub(2));
            record(&mut top, 2, 0.9);
        }
        let mut told = top_n(&top);
        told.sort_unstable();
        assert_eq!(told, [(1, 6), (2, 6)]);
    }
}
