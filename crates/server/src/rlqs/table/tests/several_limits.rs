//! Rules with a short and a long limit: what lapses by the short one is not lost to the long one.

use super::*;

const SECOND: u64 = 1_000_000 / STEP;
const PER_SECOND: f64 = STEP as f64 / 1e6;

/// Limits with the count of the long one, which is the second, and the rate of the short one.
const SEVERAL: [(&str, u64, f64); 6] = [
    ("[100/second, 5000/day]", 5_000, 100.0),
    ("[10/second, 1000/hour]", 1_000, 10.0),
    ("[{count: 10, period: second, burst: 40}, 1000/hour]", 1_000, 10.0),
    (
        "[{count: 10, period: second, algorithm: fixed_window}, {count: 1000, period: hour, algorithm: fixed_window}]",
        1_000,
        10.0,
    ),
    ("[100/second, {count: 5000, period: day, algorithm: fixed_window}]", 5_000, 100.0),
    (
        "[{count: 20, period: second, burst: 200}, {count: 2000, period: day, algorithm: fixed_window}]",
        2_000,
        20.0,
    ),
];

/// A day's limit must not be used up by a stream that hardly sends.
#[test]
fn a_slow_or_idle_stream_does_not_drain_the_long_limit() {
    for (rule, count, _) in SEVERAL {
        for offered in [0.0, 0.5] {
            let mut world = World::new(rule, 1);
            (world.clients[0].is_subscribed, world.clients[0].offered) = (true, offered * PER_SECOND);
            world.run(300 * SECOND, 0, 1);
            let left = world.remaining_of_each()[1];
            let used = count - left;
            assert!(used <= world.total() + 60, "{rule}: {used} charged for {}", world.total());
            assert!(world.total() as f64 >= offered * 250.0, "{rule}: {} admitted", world.total());
        }
    }
}

/// Both limits are used by those that want them.
#[test]
fn a_busy_stream_uses_the_short_limit_until_the_long_one_is_used() {
    for (rule, count, rate) in SEVERAL {
        let mut world = World::new(rule, 2);
        (world.clients[0].offered, world.clients[1].offered) =
            (2.0 * rate * PER_SECOND, 0.2 * rate * PER_SECOND);
        world.run(20 * SECOND, 0, 1);
        let before = world.total();
        world.run(10 * SECOND, 0, 1);
        let passed = (world.total() - before) as f64;
        // Ten units are few for two streams that are covered until the next pass.
        let is_few = rate < 20.0 && !rule.contains("burst");
        let least = if is_few { 3.0 } else { 6.0 };
        assert!(passed >= least * rate, "{rule}: {passed} in ten seconds");
        world.run(470 * SECOND, 0, 1);
        assert!(world.total() * 10 >= count * 9, "{rule}: {} of {count}", world.total());
    }
}

/// What has passed is charged to each limit as far as it goes: the long one has not been used by it any less.
#[test]
fn a_report_is_charged_to_each_limit_by_itself() {
    for (rule, count, _) in SEVERAL {
        let mut world = World::new(rule, 0);
        let (place, now) = (Place::uncounted(&world.bucket), world.clock.now());
        world.nodes[0].table.report(1, Report { place, allowed: 500, denied: 1 }, now);
        pollster::block_on(world.nodes[0].table.pass());
        let left = world.remaining_of_each();
        assert!(left[1] <= count - 500 && left[1] + 600 >= count, "{rule}: {left:?}");
    }
}

/// Limits that are covered until assignments expire, with rate and burst of both.
const KEPT: [(&str, [(f64, f64); 2]); 3] = [
    ("[{count: 10, period: second, burst: 40}, 1000/hour]", [(10.0, 40.0), (1_000.0 / 3_600.0, 1_000.0)]),
    (
        "[{count: 20, period: second, burst: 100}, {count: 600, period: minute}]",
        [(20.0, 100.0), (10.0, 600.0)],
    ),
    (
        "[{count: 20, period: second, burst: 200}, {count: 1000, period: day, algorithm: fixed_window}]",
        [(20.0, 200.0), (0.0, 1_000.0)],
    ),
];

proptest! {
    /// Units of one limit that are used again for the next assignment must not have been spent.
    #[test]
    fn streams_stay_within_both_limits(
        limit in prop::sample::select(&KEPT[..]),
        nodes in 1_usize..4,
        history in prop::collection::vec(happens(), 1..16),
    ) {
        let (rule, bounds) = limit;
        let mut world = World::with_nodes(rule, 4, nodes);
        play(&mut world, &history);
        for (rate, burst) in bounds {
            prop_assert!(world.excess(rate, burst) <= 1e-6, "{} units too many", world.excess(rate, burst));
        }
    }
}
