//! Watches what newly published rules do to callers, and goes back by itself where denials of one rise too much.
//!
//! Time is cut into parts. Before, a caller's denials in a part make its baseline, a running mean over about as long as new
//! rules are watched. Under watch, a caller is in trouble when its denials were a multiple of its baseline in every part of
//! the time that they must last. A baseline counts as at least one denial in ten seconds: a first denial is no rise.

use crate::db::transaction::Actor;
use crate::error::ControlError;
use crate::rules::denial_counts::DenialCounts;
use crate::rules::guardrails::{Guardrails, PARTS};
use crate::rules::manager::RuleManager;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The least baseline, in denials a second.
const MIN_BASELINE: f64 = 0.1;
/// What the guard may be doing.
const STATES: [&str; 4] = ["off", "learning", "ready", "watching"];
/// A mean below this, in denials a second, is forgotten.
const NOTHING: f64 = 0.001;

/// What is known of callers' denials, and which revision is under watch. Pure: counts in, trouble out.
#[derive(Debug)]
struct RollbackGuard {
    guardrails: Guardrails,
    /// Parts that have been seen while nothing was under watch.
    known_for: u32,
    baseline: HashMap<u64, f64>,
    watched: Option<(i64, u32)>,
    /// In how many parts in a row a caller was over.
    over: HashMap<u64, u32>,
}

/// A caller whose denials have risen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct DenialSpike {
    rev: i64,
    caller: u64,
    /// Denials a second, and what they were.
    rate: f64,
    baseline: f64,
}

impl RollbackGuard {
    fn new(rails: Guardrails) -> Self {
        Self {
            guardrails: rails,
            known_for: 0,
            baseline: HashMap::new(),
            watched: None,
            over: HashMap::new(),
        }
    }

    fn seconds(&self) -> f64 {
        self.guardrails.part().as_secs_f64()
    }

    /// New rules act. Who has not seen enough of what was before cannot tell a rise.
    fn begin(&mut self, rev: i64) {
        self.over.clear();
        self.watched = (self.known_for >= PARTS).then_some((rev, 0));
    }

    fn stop(&mut self) {
        self.watched = None;
        self.over.clear();
    }

    /// One part is over.
    fn part(&mut self, counts: &[(u64, u64)]) -> Option<DenialSpike> {
        let Some((rev, seen)) = self.watched else {
            self.learn(counts);
            return None;
        };
        let part = self.seconds();
        let most = (self.guardrails.within.as_secs_f64() / part).ceil() as u32;
        if seen >= most {
            self.stop();
            self.learn(counts);
            return None;
        }
        self.watched = Some((rev, seen + 1));
        let mut trouble = None;
        for (caller, count) in counts {
            let (rate, known) =
                (*count as f64 / part, self.baseline.get(caller).copied().unwrap_or(0.0) / part);
            let over = self.over.entry(*caller).or_default();
            *over = if rate > self.guardrails.rise * known.max(MIN_BASELINE) { *over + 1 } else { 0 };
            if *over >= PARTS {
                trouble.get_or_insert(DenialSpike { rev, caller: *caller, rate, baseline: known });
            }
        }
        trouble
    }

    fn learn(&mut self, counts: &[(u64, u64)]) {
        self.known_for = self.known_for.saturating_add(1);
        let parts = (self.guardrails.within.as_secs_f64() / self.seconds()).max(1.0);
        // A young mean weighs what little there is alike.
        let weight = 1.0 / f64::from(self.known_for).min(parts);
        for mean in self.baseline.values_mut() {
            *mean *= 1.0 - weight;
        }
        for (caller, count) in counts.iter().filter(|(_, count)| *count > 0) {
            *self.baseline.entry(*caller).or_default() += weight * *count as f64;
        }
        let nothing = NOTHING * self.seconds();
        self.baseline.retain(|_, mean| *mean > nothing);
    }

    /// Which of [`STATES`] it is in.
    fn state(&self) -> u8 {
        match self.watched {
            Some(_) => 3,
            None if self.known_for >= PARTS => 2,
            None => 1,
        }
    }

    /// Whether nothing is known of a caller that would be missed.
    fn is_unknown(&self, caller: u64) -> bool {
        self.watched.is_none() && !self.baseline.contains_key(&caller)
    }
}

impl RuleManager {
    /// What the guard does: `off`, `learning` what is usual, `ready`, or `watching` new rules.
    #[must_use]
    pub fn guard_state(&self) -> &'static str {
        STATES[usize::from(self.guard.load(Ordering::Relaxed)) % STATES.len()]
    }

    /// Watches published rules for as long as it is asked to.
    pub async fn guard(self: Arc<Self>, denials: Arc<DenialCounts>) {
        let rails = self.guardrails;
        if rails.rise <= 0.0 {
            return;
        }
        let mut watch = RollbackGuard::new(rails);
        let mut acting = self.active().rev();
        let mut parts = tokio::time::interval(rails.part());
        parts.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        parts.tick().await;
        loop {
            parts.tick().await;
            let counts = denials.drain();
            let trouble = watch.part(&counts);
            denials.clear(|caller| {
                watch.is_unknown(caller) && counts.iter().all(|(seen, count)| *seen != caller || *count == 0)
            });
            let now = self.active();
            if now.rev() != acting {
                acting = now.rev();
                watch.stop();
                if let Some(published) = now.published.as_ref().filter(|published| published.watched) {
                    watch.begin(published.rev);
                }
            } else if let Some(trouble) = trouble {
                watch.stop();
                self.roll_back_by_guard(trouble, &denials.name(trouble.caller)).await;
            }
            self.guard.store(watch.state(), Ordering::Relaxed);
        }
    }

    async fn roll_back_by_guard(self: &Arc<Self>, trouble: DenialSpike, name: &str) {
        let Some(to) = self.active().published.as_ref().and_then(|published| published.base_rev) else {
            return;
        };
        let because = format!(
            "denials of {name} rose from {:.1} to {:.1} a second and stayed there for {} s",
            trouble.baseline,
            trouble.rate,
            self.guardrails.lasting.as_secs_f64()
        );
        let actor = Actor { name: "guard".to_owned(), origin: "itself".to_owned() };
        let rev = trouble.rev;
        match self.control.roll_back_rules(to, Some(rev), &because, &actor).await {
            Ok(new) => {
                self.rollbacks.fetch_add(1, Ordering::Relaxed);
                tracing::error!(
                    rev,
                    new,
                    "published rules were rolled back to what revision {to} said: {because}"
                );
                self.activate_latest().await;
            }
            // Another node, or a person, was quicker.
            Err(ControlError::Conflict) => {}
            Err(error) => {
                tracing::error!(rev, %error, "published rules could not be rolled back, though {because}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn quiet() -> RollbackGuard {
        let mut watch =
            RollbackGuard::new(Guardrails { lasting: Duration::from_secs(12), ..Guardrails::default() });
        for _ in 0..50 {
            assert_eq!(watch.part(&[(1, 2), (2, 0)]), None);
        }
        watch
    }

    /// Parts of new rules with these denials of the first and the second caller, until trouble is seen.
    fn parts(watch: &mut RollbackGuard, one: u64, two: u64, most: usize) -> Option<(usize, u64)> {
        (1..=most).find_map(|n| Some((n, watch.part(&[(1, one), (2, two)])?.caller)))
    }

    #[test]
    fn only_a_sustained_rise_is_a_spike() {
        let mut watch = quiet();
        watch.begin(7);
        // Ten times two in each second is no more than ten times.
        assert_eq!(parts(&mut watch, 20, 1, 100), None);
        assert_eq!(parts(&mut watch, 21, 0, 11), None, "not for as long as it must last");
        assert_eq!(parts(&mut watch, 3, 0, 1), None);
        assert_eq!(parts(&mut watch, 21, 0, 100), Some((12, 1)));
        // Who was never denied before is in trouble from more than one a second on.
        let mut watch = quiet();
        watch.begin(7);
        assert_eq!(parts(&mut watch, 2, 2, 100), Some((12, 2)));
    }

    #[test]
    fn only_what_is_new_is_watched() {
        let mut watch = quiet();
        watch.begin(7);
        assert_eq!(parts(&mut watch, 2, 0, 300), None);
        assert_eq!(parts(&mut watch, 100, 100, 100), None, "five minutes later it is no longer new");
        let mut young = RollbackGuard::new(Guardrails::default());
        young.part(&[]);
        young.begin(7);
        assert_eq!(parts(&mut young, 1_000, 1_000, 100), None, "nobody knows what was before");
    }
}
