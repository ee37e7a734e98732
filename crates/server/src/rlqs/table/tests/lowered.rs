//! A limit that is lowered while streams have units of it.

use super::*;

const SECOND: u64 = 1_000_000 / STEP;
const PER_SECOND: f64 = STEP as f64 / 1e6;

/// An emergency measure that checks follow at once must reach streams within a report.
#[test]
fn a_lowered_window_reaches_streams_that_have_its_units() {
    for (before, after, most) in [
        ("7200/hour\n    algorithm: fixed_window", "72/hour\n    algorithm: fixed_window", 0),
        ("7200/hour\n    algorithm: fixed_window", "400/hour\n    algorithm: fixed_window", 0),
        ("7200/hour\n    algorithm: sliding_window", "400/hour\n    algorithm: sliding_window", 0),
        ("7200/hour\n    algorithm: fixed_window", "2000/hour\n    algorithm: fixed_window", 2_000),
    ] {
        let mut world = World::new(before, 2);
        (world.clients[0].offered, world.clients[1].offered) = (20.0 * PER_SECOND, 20.0 * PER_SECOND);
        world.run(25 * SECOND, 0, 1);
        world.change(after);
        world.run(REPORT_STEPS + SECOND, 0, 1);
        let reached = world.total();
        world.run(120 * SECOND, 0, 1);
        if most == 0 {
            assert_eq!(world.total(), reached, "{after}: {} more", world.total() - reached);
        } else {
            assert!(world.total() <= most && world.total() * 10 >= most * 9, "{after}: {}", world.total());
        }
    }
}
