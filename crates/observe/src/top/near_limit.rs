//! Who has been near a limit for minutes: a list for "consider upgrading". A minute of the clock counts if the caller was near
//! at some time in it; a bucket that is used up again and again is full in between. How long it has been so is from the first
//! time to the last, so that a minute that had hardly begun is not taken for a whole one.

use super::NEAR;
use crate::mask::Caller;
use crate::metrics::labels::Name;
use crate::recorder::capture::OwnUse;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Span, Timestamp};

/// Callers that are watched at once.
const MOST: usize = 4_096;
/// For so long somebody must have been near to be told of.
const LONG: Span = Span::from_secs(300);

#[derive(Debug, Default)]
pub(super) struct Near {
    watched: HashMap<(u64, u32), Watched>,
    now: Timestamp,
}

#[derive(Debug)]
struct Watched {
    caller: Arc<Caller>,
    name: Name,
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
    pub(crate) caller: Arc<Caller>,
    pub(crate) slot: u32,
    pub(crate) name: Name,
    pub(crate) tier: u16,
    pub(crate) used: f32,
    pub(crate) minutes: u64,
}

impl Near {
    pub(super) fn see(&mut self, caller: &Arc<Caller>, name: &Name, own: &OwnUse) {
        let (key, now) = ((caller.id, own.slot), self.now);
        if let Some(watched) = self.watched.get_mut(&key) {
            watched.used = watched.used.max(own.used);
            watched.tier = own.tier;
            if own.used >= NEAR {
                watched.last = now;
            }
        } else if own.used >= NEAR && self.watched.len() < MOST {
            let (caller, name) = (Arc::clone(caller), name.clone());
            let (tier, used) = (own.tier, own.used);
            self.watched
                .insert(key, Watched { caller, name, tier, used, before: 0.0, since: now, last: now });
        }
    }

    /// A minute that has ended counts, or ends the row. Time does not go back: whoever says so is late.
    pub(super) fn turn(&mut self, now: Timestamp) {
        let (minute, last) = (now.as_secs() / 60, self.now.as_secs() / 60);
        self.now = self.now.max(now);
        if minute <= last {
            return;
        }
        // More than a minute without a look: nobody has asked in between.
        let in_a_row = minute == last + 1;
        self.watched.retain(|_, watched| {
            watched.before = std::mem::take(&mut watched.used);
            in_a_row && watched.before >= NEAR
        });
    }

    /// Those who are watched.
    pub(super) fn callers(&self) -> impl Iterator<Item = &Arc<Caller>> {
        self.watched.values().map(|watched| &watched.caller)
    }

    pub(super) fn told(&self, most: usize) -> Vec<NearLimit> {
        let long = self.watched.iter().filter(|(_, watched)| watched.last.since(watched.since) >= LONG);
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
    use super::super::{Seen, Top};
    use super::*;

    const BEGIN: u64 = 600_000;

    fn see(top: &mut Top, id: u64, used: f32) {
        let caller = Arc::new(Caller { id, shown: format!("caller {id}"), key: None });
        let name = Name { domain: "d".into(), rule: "r".into() };
        let own = Some((OwnUse { slot: 3, tier: 2, used }, &name));
        let denied = used >= 1.0;
        top.see(&Seen { caller: &caller, network: None, slot: 3, name: &name, denied, own, weight: 1 });
    }

    fn turn(top: &mut Top, secs: u64) {
        top.turn(Timestamp::from_secs(BEGIN + secs));
    }

    fn told(top: &Top) -> Vec<(u64, u64)> {
        top.near().iter().map(|near| (near.caller.id, near.minutes)).collect()
    }

    /// Against what a person would say with all the numbers before them.
    #[test]
    fn only_those_who_stay_near_are_told() {
        let mut top = Top::default();
        for secs in 0..360 {
            turn(&mut top, secs);
            see(&mut top, 1, 0.95);
            see(&mut top, 2, if secs % 50 == 0 { 0.85 } else { 0.1 });
            see(&mut top, 3, if (120..180).contains(&secs) { 0.5 } else { 0.9 });
            see(&mut top, 4, 0.79);
            if secs < 200 {
                see(&mut top, 5, 1.0);
            }
        }
        turn(&mut top, 360);
        see(&mut top, 1, 0.95);
        assert_eq!(told(&top), [(1, 6), (2, 5)]);
        assert_eq!(top.near()[0].tier, 2);
        // Nobody asks for a while: nobody is near.
        turn(&mut top, 1_000);
        assert_eq!(told(&top), []);
    }

    /// A caller who came in the last second of a minute has not been there for all of it.
    #[test]
    fn five_minutes_are_five_minutes() {
        let mut top = Top::default();
        for secs in 59..360 {
            turn(&mut top, secs);
            see(&mut top, 1, 1.0);
            let minutes = if secs < 359 { None } else { Some(5) };
            assert_eq!(told(&top).first().map(|(_, minutes)| *minutes), minutes, "after {secs} s");
        }
    }

    /// Rounds that overlap at the end of a minute: one has been told the next minute already when the other still has the old.
    #[test]
    fn nobody_is_lost_where_time_steps_back() {
        let mut top = Top::default();
        for secs in 0..400 {
            turn(&mut top, secs);
            see(&mut top, 1, 0.9);
            turn(&mut top, secs.saturating_sub(2));
            see(&mut top, 2, 0.9);
        }
        let mut told = told(&top);
        told.sort_unstable();
        assert_eq!(told, [(1, 6), (2, 6)]);
    }
}
