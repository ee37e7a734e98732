//! Callers near a limit for minutes: candidates for a higher tier. A minute of the clock counts if the caller was near its
//! limit at any time in it, since a bucket that is exhausted again and again refills in between. The duration is from the
//! first such time to the last, so that a minute that has barely begun does not count as a whole one.

use super::NEAR_THRESHOLD;
use crate::mask::MaskedCaller;
use crate::metrics::labels::RuleLabel;
use crate::recorder::capture::CallerUtilization;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tollgate_core::{TimeDelta, Timestamp};

/// Maximum number of tracked callers.
const MAX_TRACKED: usize = 4_096;
/// Time near a limit after which a caller is listed.
const MIN_DURATION: TimeDelta = TimeDelta::from_secs(300);

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
    /// Highest utilization in this minute; 0 without requests.
    used: f32,
    /// Highest utilization in the previous minute.
    before: f32,
    /// Time from which the caller has been near its limit in every minute.
    since: Timestamp,
    /// Last time the caller was near its limit.
    last: Timestamp,
}

/// A caller that has been near a limit for some minutes.
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
        if let Some(tracked) = self.tracked.get_mut(&key) {
            tracked.used = tracked.used.max(own.used);
            tracked.tier = own.tier;
            if own.used >= NEAR_THRESHOLD {
                tracked.last = now;
            }
        } else if own.used >= NEAR_THRESHOLD && self.tracked.len() < MAX_TRACKED {
            let (caller, name) = (Arc::clone(caller), name.clone());
            let (tier, used) = (own.tier, own.used);
            self.tracked
                .insert(key, TrackedCaller { caller, name, tier, used, before: 0.0, since: now, last: now });
        }
    }

    /// Closes the minute if it is over: callers that were not near their limit in it are dropped. An earlier `now` is ignored.
    pub(super) fn rotate(&mut self, now: Timestamp) {
        let (minute, last) = (now.as_secs() / 60, self.now.as_secs() / 60);
        self.now = self.now.max(now);
        if minute <= last {
            return;
        }
        // A gap of more than a minute: there were no requests in between.
        let in_a_row = minute == last + 1;
        self.tracked.retain(|_, tracked| {
            tracked.before = std::mem::take(&mut tracked.used);
            in_a_row && tracked.before >= NEAR_THRESHOLD
        });
    }

    /// Returns all tracked callers.
    pub(super) fn callers(&self) -> impl Iterator<Item = &Arc<MaskedCaller>> {
        self.tracked.values().map(|tracked| &tracked.caller)
    }

    /// Returns the number of callers that used this share of a limit in this minute or the one before, by domain and
    /// rule.
    pub(super) fn count_from(&self, share: f32) -> BTreeMap<(Arc<str>, Arc<str>), usize> {
        let mut counts = BTreeMap::new();
        for tracked in self.tracked.values().filter(|tracked| tracked.used.max(tracked.before) >= share) {
            let RuleLabel { domain, rule } = &tracked.name;
            *counts.entry((Arc::clone(domain), Arc::clone(rule))).or_default() += 1;
        }
        counts
    }

    pub(super) fn top_n(&self, max: usize) -> Vec<NearLimit> {
        let long =
            self.tracked.iter().filter(|(_, tracked)| tracked.last.since(tracked.since) >= MIN_DURATION);
        let mut all: Vec<NearLimit> = long
            .map(|((_, slot), tracked)| NearLimit {
                caller: Arc::clone(&tracked.caller),
                slot: *slot,
                name: tracked.name.clone(),
                tier: tracked.tier,
                used: tracked.used.max(tracked.before),
                minutes: tracked.last.since(tracked.since).as_micros() / 60_000_000,
            })
            .collect();
        all.sort_by(|a, b| b.used.total_cmp(&a.used).then(b.minutes.cmp(&a.minutes)));
        all.truncate(max);
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

    /// Compares with the list that a person would make from all the numbers.
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
        assert_eq!(
            top.at_90_percent().into_values().collect::<Vec<_>>(),
            [2],
            "1 and 3, in the minute before"
        );
        assert_eq!(top.near()[0].tier, 2);
        // No requests for a while: no caller is near.
        rotate(&mut top, 1_000);
        assert_eq!(top_n(&top), []);
    }

    /// A caller that appeared in the last second of a minute was not near its limit for all of it.
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

    /// Runs that overlap at the end of a minute: one has already reached the next minute while the other is still in the old one.
    #[test]
    fn no_caller_is_lost_when_the_clock_steps_back() {
        let mut top = TopCallers::default();
        for secs in 0..400 {
            rotate(&mut top, secs);
            record(&mut top, 1, 0.9);
            rotate(&mut top, secs.saturating_sub(2));
            record(&mut top, 2, 0.9);
        }
        let mut listed = top_n(&top);
        listed.sort_unstable();
        assert_eq!(listed, [(1, 6), (2, 6)]);
    }
}
