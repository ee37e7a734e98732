//! Windows that end while assignments last, and limits of a few units.

use super::*;

const SECOND: u64 = 1_000_000 / STEP;
const PER_SECOND: f64 = STEP as f64 / 1e6;

/// Returns the most that was admitted in a window of so many seconds.
fn most(world: &World, seconds: u64) -> u64 {
    let mut windows: HashMap<u64, u64> = HashMap::new();
    for (step, admitted) in (1..).zip(&world.admitted) {
        *windows.entry((1_000_000 + step * STEP / 1_000_000) / seconds).or_default() += admitted;
    }
    windows.into_values().max().unwrap_or(0)
}

/// Rules with the seconds of their window, their count, and the least part of it that is used by up to two streams and by more:
/// each change of a share costs its stream's tokens, and of a few units per second that is much.
const WINDOWS: [(&str, u64, u64, [f64; 2]); 7] = [
    ("{count: 100, period: 10s, algorithm: fixed_window}", 10, 100, [0.8, 0.7]),
    ("{count: 1000, period: 10s, algorithm: fixed_window}", 10, 1_000, [0.88, 0.88]),
    ("{count: 300, period: 30s, algorithm: fixed_window}", 30, 300, [0.9, 0.9]),
    ("{count: 600, period: minute, algorithm: fixed_window}", 60, 600, [0.9, 0.85]),
    ("{unit: minute, requests_per_unit: 600}", 60, 600, [0.9, 0.9]),
    ("{count: 100, period: second, algorithm: fixed_window}", 1, 100, [0.6, 0.6]),
    ("{unit: second, requests_per_unit: 100}", 1, 100, [0.6, 0.6]),
];

/// Busy streams use the limit, no window is exceeded, and a stream with little demand is served too.
#[test]
fn a_window_is_used_and_kept_by_all_streams() {
    for (rule, seconds, count, least) in WINDOWS {
        let rate = count as f64 / seconds as f64;
        for demand in [&[1.6, 0.3][..], &[3.0], &[0.5, 0.4, 0.3, 2.0]] {
            let mut world = World::new(rule, demand.len());
            for (client, demand) in world.clients.iter_mut().zip(demand) {
                client.offered = rate * demand * PER_SECOND;
            }
            world.run(120 * SECOND, 0, 1);
            let used = world.rate((60 * SECOND) as usize) / rate;
            assert!(used >= least[usize::from(demand.len() > 2)], "{rule}, {demand:?}: {used}");
            assert!(most(&world, seconds) <= count, "{rule}, {demand:?}: {}", most(&world, seconds));
            // Demand moves.
            let swapped: Vec<f64> = demand.iter().rev().copied().collect();
            for (client, demand) in world.clients.iter_mut().zip(&swapped) {
                client.offered = rate * demand * PER_SECOND;
            }
            world.run(120 * SECOND, 0, 1);
            let used = world.rate((60 * SECOND) as usize) / rate;
            assert!(used >= least[usize::from(demand.len() > 2)], "{rule}, {swapped:?}: {used}");
            assert!(most(&world, seconds) <= count, "{rule}, {swapped:?}: {}", most(&world, seconds));
        }
    }
}

/// A stream that wants less than its part gets it, in whatever order streams come.
#[test]
fn no_stream_is_starved_of_a_window() {
    for (rule, seconds, count, _) in WINDOWS {
        let rate = count as f64 / seconds as f64;
        let mut world = World::new(rule, 2);
        (world.clients[0].offered, world.clients[1].offered) =
            (1.6 * rate * PER_SECOND, 0.3 * rate * PER_SECOND);
        world.run(60 * SECOND, 0, 1);
        let (mut allowed, mut offered) = (0, 0.0);
        for _ in 0..60 {
            let before = world.clients[1].allowed;
            world.run(SECOND, 0, 1);
            allowed += world.clients[1].allowed.saturating_sub(before);
            offered += 0.3 * rate;
        }
        // A minute is used up within half of it.
        assert!(allowed as f64 >= 0.3 * offered, "{rule}: {allowed} of {offered}");
    }
}

/// A limit of one admits one.
#[test]
fn windows_of_a_few_units_are_used() {
    for (rule, seconds, count) in [
        ("{count: 1, period: minute, algorithm: fixed_window}", 60, 1),
        ("{count: 2, period: minute, algorithm: fixed_window}", 60, 2),
        ("{count: 3, period: minute, algorithm: fixed_window}", 60, 3),
        ("{count: 5, period: minute, algorithm: fixed_window}", 60, 5),
        ("{count: 1, period: hour, algorithm: fixed_window}", 3_600, 1),
        ("{count: 5, period: hour, algorithm: fixed_window}", 3_600, 5),
    ] {
        let mut world = World::new(rule, 1);
        world.clients[0].offered = PER_SECOND;
        world.run(600 * SECOND, 0, 1);
        let fair = (600 / seconds).max(1) * count;
        assert!(world.total() * 10 >= fair * 8, "{rule}: {} of {fair}", world.total());
        assert!(most(&world, seconds) <= count, "{rule}: {}", most(&world, seconds));
    }
}

/// A bucket of so few units that none can be assigned is left to checks.
#[test]
fn units_that_cannot_be_assigned_are_not_taken() {
    for (rule, count) in [("{count: 1, period: minute}", 1), ("{count: 1, period: hour}", 1)] {
        let mut world = World::new(rule, 1);
        world.clients[0].offered = PER_SECOND;
        world.run(60 * SECOND, 0, 1);
        assert_eq!((world.total(), world.remaining()), (0, count), "{rule}");
    }
}
