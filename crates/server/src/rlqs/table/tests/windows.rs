//! Limits with long windows and bursts: an idle stream takes next to nothing of them, and what a stream does not use comes
//! back.

use super::*;

/// Limits whose whole count can be used at once, with that count.
const LONG: [(&str, u64); 5] = [
    ("3600/hour\n    algorithm: fixed_window", 3_600),
    ("1000/day\n    algorithm: fixed_window", 1_000),
    ("1000/day\n    algorithm: sliding_window", 1_000),
    ("{count: 3600, period: hour}", 3_600),
    ("{count: 600, period: minute}", 600),
];
/// Steps of a second.
const SECOND: u64 = 1_000_000 / STEP;
const PER_SECOND: f64 = STEP as f64 / 1e6;

/// A world in which the first client subscribes without a request, as one does after a restart.
fn with_idle(rule: &str, clients: usize) -> World {
    let mut world = World::new(rule, clients);
    world.clients[0].is_subscribed = true;
    world
}

/// An Envoy that restarts at night must not cost the day's limit.
#[test]
fn an_idle_stream_leaves_the_limit_to_checks() {
    // A minute's bucket is back within a minute.
    for (rule, count) in LONG.into_iter().take(4) {
        let mut world = with_idle(rule, 1);
        for _ in 0..20 {
            world.run(3 * SECOND, 0, 1);
            assert!(world.remaining() * 10 >= count * 9, "{rule}: {} of {count}", world.remaining());
        }
        for restart in 0..3 {
            world.reconnect(0);
            world.clients[0].is_subscribed = true;
            world.run(20 * SECOND, 0, 1);
            assert!(world.remaining() * 10 >= count * 9, "{rule}: {} after {restart}", world.remaining());
        }
        world.run(60 * SECOND, 5, 1);
        assert!(world.total() * 10 >= count * 9, "{rule}: {} of {count} by checks", world.total());
    }
}

#[test]
fn an_idle_stream_leaves_the_limit_to_a_busy_one() {
    for (rule, count) in LONG {
        let mut world = with_idle(rule, 2);
        world.run(10 * SECOND, 0, 1);
        world.clients[1].offered = 100.0 * PER_SECOND;
        world.run(2 * REPORT_STEPS, 0, 1);
        let before = world.total();
        // Demand is met while there is something left.
        let least = 450_u64.min((count - before.min(count)) * 18 / 100);
        world.run(REPORT_STEPS, 0, 1);
        assert!(world.total() - before >= least, "{rule}: {} after {before}", world.total() - before);
        world.run(120 * SECOND, 0, 1);
        assert!(world.total() * 10 >= count * 9, "{rule}: {} of {count}", world.total());
    }
}

/// A stream that was busy and is idle now, or is abandoned, gives back what it has not used.
#[test]
fn what_a_stream_does_not_use_comes_back_to_its_window() {
    for (rule, count) in LONG.into_iter().take(2) {
        let mut world = World::new(rule, 1);
        world.clients[0].offered = 40.0 * PER_SECOND;
        world.run(12 * SECOND, 0, 1);
        world.clients[0].offered = 0.0;
        world.run(4 * REPORT_STEPS, 0, 1);
        let used = world.total();
        assert!(world.nodes[0].table.stats().returned > 0, "{rule}");
        assert!(
            used > 100 && used + world.remaining() + 20 >= count,
            "{rule}: {used} and {}",
            world.remaining()
        );
        world.run(14 * REPORT_STEPS, 0, 1);
        assert!(world.nodes[0].table.accounts.is_empty() && !world.clients[0].is_subscribed);
        world.run(SECOND, 0, 1);
        assert!(used + world.remaining() + 3 >= count, "{rule}: {used} and {}", world.remaining());
    }
}

/// With a bucket beside the window, units lapse when their slots pass, and would be lost to the window.
#[test]
fn a_slow_stream_does_not_drain_a_window_beside_a_bucket() {
    let text = "domain: edge\ndescriptors:\n  - key: tenant\n    limit: [{count: 20, period: second, burst: 200}, {count: 2000, period: day, algorithm: fixed_window}]\n";
    let rules = Ruleset::load(&[Source::new("rules.yaml", text)], &Options::default()).expect("rules");
    let mut world = with_idle("{count: 1, period: second}", 1);
    world.nodes[0].limiter.replace_rules(Arc::new(rules));
    world.clients[0].offered = 2.0 * PER_SECOND;
    world.run(300 * SECOND, 0, 1);
    let check = Check::attributes("edge", &[("tenant", "a")]).with_cost(Cost::PEEK);
    let counters = pollster::block_on(world.nodes[0].limiter.charge_ahead(&check, &[])).counters;
    let window = counters.iter().find(|counter| counter.kind == AheadKind::Window).expect("the window");
    let used = 2_000 - window.remaining;
    assert!(used <= world.total() + 400, "{used} charged for {}", world.total());
}

proptest! {
    /// Returned units must not be spent twice: not one request more passes in a window, whatever the streams do.
    #[test]
    fn a_window_is_kept_while_units_come_back(
        rule in prop::sample::select(&LONG[..2]),
        nodes in 1_usize..4,
        history in prop::collection::vec(happens(), 1..16),
    ) {
        let mut world = World::with_nodes(rule.0, 4, nodes);
        play(&mut world, &history);
        prop_assert!(world.total() <= rule.1, "{} of {}", world.total(), rule.1);
    }
}

/// The test above is worth nothing if it does not find a server that returns what streams may still spend.
#[test]
fn units_that_are_returned_too_early_are_found() {
    let (rule, count) = LONG[1];
    let mut world = World::new(rule, 2);
    world.returns_all = true;
    (world.clients[0].offered, world.clients[1].offered) = (2.0, 2.0);
    world.run(120 * SECOND, 1, 1);
    assert!(world.total() > count, "{}", world.total());
}
