//! Requests that were admitted without an assignment: they are charged as far as the limits have units.

use super::*;

/// Limits of which a hundred units can be used at once.
const HUNDRED: [&str; 3] = [
    "{count: 100, period: hour, algorithm: fixed_window}",
    "{count: 100, period: hour, algorithm: sliding_window}",
    "{count: 10, period: second, burst: 100}",
];
const REPORTED: [u64; 9] = [0, 50, 98, 100, 101, 150, 1_000, 1_000_000, u64::MAX];

fn report(world: &mut World, stream: StreamId, allowed: u64) {
    let (place, now) = (Place::uncounted(&world.bucket), world.clock.now());
    world.nodes[0].table.report(stream, Report { place, allowed, denied: 1 }, now);
}

fn pass(world: &mut World) -> Vec<Action> {
    let actions = pollster::block_on(world.nodes[0].table.pass());
    actions.into_iter().map(|(_, _, action)| action).collect()
}

/// Who reports more must not pay less: others would use the whole limit again. In a first report and in a later one.
#[test]
fn a_report_costs_all_it_says_as_far_as_the_limit_goes() {
    for (rule, earlier) in HUNDRED.into_iter().flat_map(|rule| [(rule, 0), (rule, 1)]) {
        let mut before = u64::MAX;
        for allowed in REPORTED {
            let mut world = World::new(rule, 0);
            for reported in std::iter::repeat_n(0, earlier).chain([allowed]) {
                report(&mut world, 1, reported);
                pass(&mut world);
            }
            let left = world.remaining();
            assert!(left <= before && left <= 100_u64.saturating_sub(allowed), "{rule}, {allowed}: {left}");
            before = left;
        }
    }
}

/// A reconnect must not make what was reported free of charge.
#[test]
fn a_stream_that_ends_right_after_its_report_is_charged() {
    for rule in HUNDRED {
        for allowed in REPORTED {
            let mut world = World::new(rule, 0);
            report(&mut world, 1, allowed);
            world.nodes[0].table.lose(1);
            assert!(pass(&mut world).is_empty());
            let left = world.remaining();
            assert_eq!(left, 100_u64.saturating_sub(allowed), "{rule}, {allowed}");
            pass(&mut world);
            assert!(world.nodes[0].table.accounts.is_empty(), "{rule}, {allowed}");
        }
    }
}

/// Both want all that is left; who is second is tried again.
#[test]
fn streams_that_report_at_once_are_charged_together() {
    for rule in HUNDRED {
        for (first, second) in [(90, 90), (150, 150), (40, 40), (1_000, 1)] {
            let mut world = World::new(rule, 0);
            for (stream, allowed) in [(1, first), (2, second)] {
                report(&mut world, stream, allowed);
                world.nodes[0].table.lose(stream);
            }
            pass(&mut world);
            pass(&mut world);
            let left = world.remaining();
            assert_eq!(left, 100_u64.saturating_sub(first + second), "{rule}: {first} and {second}");
            pass(&mut world);
            assert!(world.nodes[0].table.accounts.is_empty(), "{rule}: {first} and {second}");
        }
    }
}

/// What exceeds the limit is not charged to later requests: one report could deny everybody for years.
#[test]
fn what_a_limit_does_not_have_is_not_charged_later() {
    let mut world = World::new(HUNDRED[2], 1);
    report(&mut world, 0, u64::MAX);
    (world.clients[0].is_subscribed, world.clients[0].offered) = (true, 0.25);
    world.run(600, 0, 1);
    assert!(matches!(world.clients[0].assignment, Some(Assignment::Tokens(_))));
    assert!(world.rate(100) > 4.0, "{}", world.rate(100));
    assert!(world.remaining() > 0);
}

/// A client that must wait for the next window gets `DENY_ALL` before the last assignment has expired, and not every second.
#[test]
fn the_same_denial_is_not_sent_every_second() {
    let mut world = World::new(HUNDRED[0], 0);
    report(&mut world, 1, 150);
    let (mut sent, mut lasts) = (0, u64::MAX);
    for second in 0..60 {
        for action in pass(&mut world) {
            assert_eq!(action, Action::Assign(Assignment::DenyAll, BLANKET_TTL));
            (sent, lasts) = (sent + 1, second + BLANKET_TTL);
        }
        assert!(second < lasts, "expired at {second} s");
        if second % 5 == 0 {
            report(&mut world, 1, 0);
        }
        world.clock.advance(TimeDelta::from_secs(1));
    }
    assert!((6..=12).contains(&sent), "{sent} in a minute");
}
