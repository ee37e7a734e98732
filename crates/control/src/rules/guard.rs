//! Rollback guard: watches the denials of callers after rules are published, and rolls back on a denial spike.
//!
//! Time is divided into parts. Before a publication, a caller's denials per part form its baseline, a running mean
//! over about as long as new rules are watched. While new rules are watched, a caller has a spike when its denials
//! exceeded a multiple of its baseline in every part of the required duration. A baseline counts as at least one
//! denial in ten seconds: a first denial is no spike.

use crate::db::transaction::Actor;
use crate::error::ControlError;
use crate::rules::denial_counts::DenialCounts;
use crate::rules::guardrails::{Guardrails, PARTS};
use crate::rules::manager::RuleManager;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Minimum baseline, in denials per second.
const MIN_BASELINE: f64 = 0.1;
/// States of the guard.
const STATES: [&str; 4] = ["off", "learning", "ready", "watching"];
/// Mean below which a caller is forgotten, in denials per second.
const NOTHING: f64 = 0.001;

/// Baselines of callers, and the revision being watched. Pure: counts in, spikes out.
#[derive(Debug)]
struct RollbackGuard {
    guardrails: Guardrails,
    /// Number of parts seen while nothing was watched.
    known_for: u32,
    baseline: HashMap<u64, f64>,
    watched: Option<(i64, u32)>,
    /// Number of consecutive parts in which a caller exceeded its baseline.
    over: HashMap<u64, u32>,
}

/// A caller whose denials have risen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct DenialSpike {
    rev: i64,
    caller: u64,
    /// Denials per second, now and before.
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

    /// Starts watching new rules. Without enough history, a rise cannot be recognized.
    fn begin(&mut self, rev: i64) {
        self.over.clear();
        self.watched = (self.known_for >= PARTS).then_some((rev, 0));
    }

    fn stop(&mut self) {
        self.watched = None;
        self.over.clear();
    }

    /// Processes the counts of one part.
    fn part(&mut self, counts: &[(u64, u64)]) -> Option<DenialSpike> {
        let Some((rev, seen)) = self.watched else {
            self.learn(counts);
            return None;
        };
        let part = self.seconds();
        let max_parts = (self.guardrails.within.as_secs_f64() / part).ceil() as u32;
        if seen >= max_parts {
            self.stop();
            self.learn(counts);
            return None;
        }
        self.watched = Some((rev, seen + 1));
        let mut spike = None;
        for (caller, count) in counts {
            let (rate, known) =
                (*count as f64 / part, self.baseline.get(caller).copied().unwrap_or(0.0) / part);
            let over = self.over.entry(*caller).or_default();
            *over = if rate > self.guardrails.rise * known.max(MIN_BASELINE) { *over + 1 } else { 0 };
            if *over >= PARTS {
                spike.get_or_insert(DenialSpike { rev, caller: *caller, rate, baseline: known });
            }
        }
        spike
    }

    fn learn(&mut self, counts: &[(u64, u64)]) {
        self.known_for = self.known_for.saturating_add(1);
        let parts = (self.guardrails.within.as_secs_f64() / self.seconds()).max(1.0);
        // A young mean weighs its few parts equally.
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

    /// Returns the index of its state in [`STATES`].
    fn state(&self) -> u8 {
        match self.watched {
            Some(_) => 3,
            None if self.known_for >= PARTS => 2,
            None => 1,
        }
    }

    /// Returns whether the guard needs nothing about a caller any more.
    fn is_unknown(&self, caller: u64) -> bool {
        self.watched.is_none() && !self.baseline.contains_key(&caller)
    }
}

impl RuleManager {
    /// Returns the state of the guard: `off`, `learning` the baselines, `ready`, or `watching` new rules.
    #[must_use]
    pub fn guard_state(&self) -> &'static str {
        STATES[usize::from(self.guard.load(Ordering::Relaxed)) % STATES.len()]
    }

    /// Watches published rules; never returns, unless the guard is off.
    pub async fn guard(self: Arc<Self>, denials: Arc<DenialCounts>) {
        let rails = self.guardrails;
        if rails.rise <= 0.0 {
            return;
        }
        let mut watch = RollbackGuard::new(rails);
        let mut rev = self.active().rev();
        let mut parts = tokio::time::interval(rails.part());
        parts.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        parts.tick().await;
        loop {
            parts.tick().await;
            let counts = denials.drain();
            let spike = watch.part(&counts);
            denials.clear(|caller| {
                watch.is_unknown(caller) && counts.iter().all(|(seen, count)| *seen != caller || *count == 0)
            });
            let now = self.active();
            if now.rev() != rev {
                rev = now.rev();
                watch.stop();
                if let Some(published) = now.published.as_ref().filter(|published| published.watched) {
                    watch.begin(published.rev);
                }
            } else if let Some(spike) = spike {
                watch.stop();
                self.roll_back_by_guard(spike, &denials.name(spike.caller)).await;
            }
            self.guard.store(watch.state(), Ordering::Relaxed);
        }
    }

    async fn roll_back_by_guard(self: &Arc<Self>, spike: DenialSpike, name: &str) {
        let Some(to) = self.active().published.as_ref().and_then(|published| published.base_rev) else {
            return;
        };
        let reason = format!(
            "denials of {name} rose from {:.1} to {:.1} per second and stayed there for {} s",
            spike.baseline,
            spike.rate,
            self.guardrails.lasting.as_secs_f64()
        );
        let actor = Actor { name: "guard".to_owned(), origin: "itself".to_owned() };
        let rev = spike.rev;
        match self.control.roll_back_rules(to, Some(rev), &reason, &actor).await {
            Ok(new) => {
                self.rollbacks.fetch_add(1, Ordering::Relaxed);
                tracing::error!(rev, new, to, reason, "published rules rolled back");
                self.activate_latest().await;
            }
            // Another node or an operator was faster.
            Err(ControlError::Conflict) => {}
            Err(error) => {
                tracing::error!(rev, to, reason, %error, "rolling back published rules failed");
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

    /// Feeds parts with these denials of the first and the second caller; returns the part and caller of the first
    /// spike.
    fn parts(watch: &mut RollbackGuard, one: u64, two: u64, max: usize) -> Option<(usize, u64)> {
        (1..=max).find_map(|n| Some((n, watch.part(&[(1, one), (2, two)])?.caller)))
    }

    #[test]
    fn only_a_sustained_rise_is_a_spike() {
        let mut watch = quiet();
        watch.begin(7);
        // Ten times two per second does not exceed ten times the baseline.
        assert_eq!(parts(&mut watch, 20, 1, 100), None);
        assert_eq!(parts(&mut watch, 21, 0, 11), None, "not sustained for long enough");
        assert_eq!(parts(&mut watch, 3, 0, 1), None);
        assert_eq!(parts(&mut watch, 21, 0, 100), Some((12, 1)));
        // A caller that was never denied before has a spike above one denial per second.
        let mut watch = quiet();
        watch.begin(7);
        assert_eq!(parts(&mut watch, 2, 2, 100), Some((12, 2)));
    }

    #[test]
    fn only_what_is_new_is_watched() {
        let mut watch = quiet();
        watch.begin(7);
        assert_eq!(parts(&mut watch, 2, 0, 300), None);
        assert_eq!(parts(&mut watch, 100, 100, 100), None, "not watched after five minutes");
        let mut young = RollbackGuard::new(Guardrails::default());
        young.part(&[]);
        young.begin(7);
        assert_eq!(parts(&mut young, 1_000, 1_000, 100), None, "no baseline yet");
    }
}
