//! Who has been near a limit for minutes: a list for "consider upgrading". A minute counts if the caller was near at some
//! time in it; a bucket that is used up again and again is full in between.

use super::{NEAR, Seen};
use crate::mask::Caller;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::Timestamp;

/// Callers that are watched at once.
const MOST: usize = 4_096;
/// Minutes in a row that make it worth telling.
const MINUTES: u64 = 5;

#[derive(Debug, Default)]
pub(super) struct Near {
    watched: HashMap<(u64, u32), Watched>,
    minute: u64,
}

#[derive(Debug)]
struct Watched {
    caller: Arc<Caller>,
    rule: Arc<str>,
    tier: u16,
    /// The most that was used in this minute; nothing, if nobody has asked in it.
    used: f32,
    /// What it was in the minute before.
    before: f32,
    /// Whole minutes in a row.
    minutes: u64,
}

/// A caller that has been near a limit for a while.
#[derive(Clone, Debug)]
pub(crate) struct NearLimit {
    pub(crate) caller: Arc<Caller>,
    pub(crate) slot: u32,
    pub(crate) rule: Arc<str>,
    pub(crate) tier: u16,
    pub(crate) used: f32,
    pub(crate) minutes: u64,
}

impl Near {
    pub(super) fn see(&mut self, seen: &Seen<'_>, used: f32) {
        let key = (seen.caller.id, seen.slot);
        if let Some(watched) = self.watched.get_mut(&key) {
            watched.used = watched.used.max(used);
            watched.tier = seen.tier;
        } else if used >= NEAR && self.watched.len() < MOST {
            let (caller, rule) = (Arc::clone(seen.caller), Arc::clone(seen.rule));
            self.watched
                .insert(key, Watched { caller, rule, tier: seen.tier, used, before: 0.0, minutes: 0 });
        }
    }

    /// A minute that has ended counts, or ends the row.
    pub(super) fn turn(&mut self, now: Timestamp) {
        let minute = now.as_secs() / 60;
        if minute == self.minute {
            return;
        }
        // More than a minute without a look: nobody has asked in between.
        let in_a_row = minute == self.minute + 1;
        self.minute = minute;
        self.watched.retain(|_, watched| {
            let stays = in_a_row && watched.used >= NEAR;
            watched.minutes += 1;
            watched.before = std::mem::take(&mut watched.used);
            stays
        });
    }

    /// Those who are watched.
    pub(super) fn callers(&self) -> impl Iterator<Item = &Arc<Caller>> {
        self.watched.values().map(|watched| &watched.caller)
    }

    pub(super) fn told(&self, most: usize) -> Vec<NearLimit> {
        let long = self.watched.iter().filter(|(_, watched)| watched.minutes >= MINUTES);
        let mut all: Vec<NearLimit> = long
            .map(|((_, slot), watched)| NearLimit {
                caller: Arc::clone(&watched.caller),
                slot: *slot,
                rule: Arc::clone(&watched.rule),
                tier: watched.tier,
                used: watched.used.max(watched.before),
                minutes: watched.minutes,
            })
            .collect();
        all.sort_by(|a, b| b.used.total_cmp(&a.used).then(b.minutes.cmp(&a.minutes)));
        all.truncate(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::Top;
    use super::*;

    fn see(top: &mut Top, id: u64, used: f32, secs: u64) {
        let caller = Arc::new(Caller { id, shown: format!("caller {id}"), key: None });
        let (rule, at) = ("r".into(), Timestamp::from_secs(600_000 + secs));
        let (network, denied) = (None, used >= 1.0);
        top.see(&Seen {
            caller: &caller,
            network,
            slot: 3,
            rule: &rule,
            tier: 2,
            denied,
            used: Some(used),
            weight: 1,
            at,
        });
    }

    /// Against what a person would say with all the numbers before them.
    #[test]
    fn only_those_who_stay_near_are_told() {
        let mut top = Top::default();
        for secs in 0..360 {
            see(&mut top, 1, 0.95, secs);
            see(&mut top, 2, if secs % 50 == 0 { 0.85 } else { 0.1 }, secs);
            see(&mut top, 3, if (120..180).contains(&secs) { 0.5 } else { 0.9 }, secs);
            see(&mut top, 4, 0.79, secs);
            if secs < 200 {
                see(&mut top, 5, 1.0, secs);
            }
        }
        let told =
            |top: &Top| top.near().iter().map(|near| (near.caller.id, near.minutes)).collect::<Vec<_>>();
        see(&mut top, 1, 0.95, 360);
        assert_eq!(told(&top), [(1, 6), (2, 6)]);
        assert_eq!(top.near()[0].tier, 2);
        // Nobody asks for a while: nobody is near.
        top.turn(Timestamp::from_secs(600_000 + 1_000));
        assert_eq!(told(&top), []);
    }
}
