//! Passes that take long, because charges do, and rules that change meanwhile: the limit is kept.

use super::*;
use crate::rlqs::curve::Curve;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// A clock that moves on each time it is read in a pass, as if the store were slow.
pub(super) struct SlowClock {
    clock: Arc<ManualClock>,
    /// Microseconds by which it moves on in passes.
    each: AtomicU64,
    is_in_pass: AtomicU64,
    /// Rules that become active in a pass, and after how many readings of the clock.
    change: Mutex<Option<(u64, Arc<Ruleset>)>>,
    limiter: Mutex<Option<Arc<Limiter<Memory>>>>,
}

impl SlowClock {
    pub(super) fn new(clock: Arc<ManualClock>) -> Self {
        let (each, is_in_pass) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { clock, each, is_in_pass, change: Mutex::new(None), limiter: Mutex::new(None) }
    }

    /// Runs a pass of this limiter.
    pub(super) fn run<T>(&self, limiter: &Arc<Limiter<Memory>>, pass: impl FnOnce() -> T) -> T {
        *self.limiter.lock().expect("lock") = Some(Arc::clone(limiter));
        self.is_in_pass.store(1, Ordering::Relaxed);
        let result = pass();
        self.is_in_pass.store(0, Ordering::Relaxed);
        result
    }
}

impl Clock for SlowClock {
    fn now(&self) -> Timestamp {
        if self.is_in_pass.load(Ordering::Relaxed) == 1 {
            self.clock.advance(TimeDelta::from_micros(self.each.load(Ordering::Relaxed)));
            let mut change = self.change.lock().expect("lock");
            if let Some((left, rules)) = change.take() {
                match (left, &*self.limiter.lock().expect("lock")) {
                    (0, Some(limiter)) => limiter.replace_rules(rules),
                    _ => *change = Some((left.saturating_sub(1), rules)),
                }
            }
        }
        self.clock.now()
    }
}

/// Limits with burst enough for a whole time to live, as (rule, rate per second, burst). Those of one line share a counter.
const SLOW: [[(&str, f64, f64); 2]; 3] = [
    [
        ("{count: 1000, period: second, burst: 3000}", 1_000.0, 3_000.0),
        ("{count: 10, period: second, burst: 3000}", 10.0, 3_000.0),
    ],
    [
        ("{count: 40, period: second, burst: 400}", 40.0, 400.0),
        ("{count: 20, period: second, burst: 100}", 20.0, 100.0),
    ],
    [("{count: 600, period: minute}", 10.0, 600.0), ("{count: 6000, period: minute}", 100.0, 6_000.0)],
];

proptest! {
    #[test]
    fn slow_passes_keep_a_limit_that_changes_meanwhile(
        limits in prop::sample::select(&SLOW[..]),
        is_raised in any::<bool>(),
        each in 0_u64..=6,
        reads in 0_u64..400,
        histories in prop::collection::vec(prop::collection::vec(happens(), 1..6), 1..4),
    ) {
        let [(_, rate, burst), (_, other_rate, other_burst)] = limits;
        let (rate, burst) = (f64::max(rate, other_rate), f64::max(burst, other_burst));
        let order = if is_raised { [1, 0, 1] } else { [0, 1, 0] };
        let mut world = World::new(limits[order[0]].0, 4);
        world.slow.each.store(each * STEP, Ordering::Relaxed);
        for (history, next) in histories.iter().zip([order[1], order[2], order[1]]) {
            *world.slow.change.lock().expect("lock") = Some((reads, rules(limits[next].0)));
            play(&mut world, history);
        }
        prop_assert!(world.excess(rate, burst) <= 1e-6, "{} units too many", world.excess(rate, burst));
    }
}

/// Rules that become active between two charges of one pass, whichever: cells of time have another length from then on.
#[test]
fn a_limit_that_changes_between_two_charges_is_kept() {
    let [(before, ..), (after, rate, burst)] = SLOW[0];
    for (clients, each) in [(1, 4), (1, 8), (4, 6)] {
        for reads in 2..10 {
            let mut world = World::new(before, clients);
            world.clients.iter_mut().for_each(|client| client.offered = 100.0);
            world.slow.each.store(each * STEP, Ordering::Relaxed);
            *world.slow.change.lock().expect("lock") = Some((reads, rules(after)));
            world.run(3, 0, 1);
            world.slow.each.store(0, Ordering::Relaxed);
            world.run(600, 0, 1);
            let excess = world.excess(rate, burst);
            assert!(
                excess <= 1e-6,
                "{clients} clients, {each} steps, {reads} readings: {excess} units too many"
            );
        }
    }
}

/// A process that was suspended for long goes on at once.
#[test]
fn a_long_pause_is_caught_up_with() {
    for seconds in [3, 10, 60, 400_000] {
        let (rule, rate, burst) = LIMITS[1];
        let mut world = World::new(rule, 4);
        (world.clients[0].offered, world.clients[1].offered) = (2.0, 1.0);
        world.run(400, 0, 1);
        let before = world.admitted.len();
        let pause = TimeDelta::from_secs(seconds);
        world.clock.advance(pause);
        world.start = world.start + pause;
        // No client has an assignment anymore.
        world.clients.iter_mut().for_each(|client| client.expires = 0);
        world.run(600, 0, 1);
        assert!(world.excess_since(before, rate, burst) <= 1e-6, "{seconds} s");
        assert!(world.rate(200) >= 0.9 * rate, "{seconds} s: {}", world.rate(200));
        let largest = world.nodes[0].table.curves.0.values().map(Curve::len).max().unwrap_or(0);
        assert!(largest <= 128, "{seconds} s: {largest} rows");
    }
}
