//! Limits of the profile `envoy`, whose windows count denied requests too.

use super::*;

const SECOND: u64 = 1_000_000 / STEP;
const PER_SECOND: f64 = STEP as f64 / 1e6;

/// What a table asks for and does not get is no request: counting it would use the window up.
#[test]
fn a_demand_below_the_limit_is_met_as_by_other_windows() {
    for (rule, native) in [
        ("{unit: second, requests_per_unit: 100}", "100/second\n    algorithm: fixed_window"),
        ("{unit: minute, requests_per_unit: 6000}", "6000/minute\n    algorithm: fixed_window"),
    ] {
        let passed = [rule, native].map(|limit| {
            let mut world = World::new(limit, 1);
            world.clients[0].offered = 60.0 * PER_SECOND;
            world.run(123 * SECOND, 0, 1);
            world.total()
        });
        assert!(passed[0] * 20 >= passed[1] * 19 && passed[1] > 5_000, "{rule}: {passed:?} in two minutes");
    }
}

#[test]
fn a_demand_above_the_limit_uses_it() {
    let mut world = World::new("{unit: minute, requests_per_unit: 600}", 2);
    (world.clients[0].offered, world.clients[1].offered) = (60.0 * PER_SECOND, 5.0 * PER_SECOND);
    // A whole number of windows, from the start of one.
    let before = world.total();
    world.run(180 * SECOND, 0, 1);
    let passed = world.total() - before;
    assert!((4 * 600 * 9 / 10 - 600..=4 * 600).contains(&passed), "{passed} in three minutes");
}

/// A check beside the streams is denied only if the limit is used.
#[test]
fn checks_find_what_streams_leave() {
    let mut world = World::new("{unit: hour, requests_per_unit: 1000}", 1);
    world.clients[0].is_subscribed = true;
    world.run(20 * SECOND, 0, 1);
    assert!(world.remaining() >= 900, "{}", world.remaining());
    world.clients[0].offered = 1_000.0 * PER_SECOND;
    world.run(60 * SECOND, 0, 1);
    assert!((900..=1_000).contains(&world.total()), "{}", world.total());
}
