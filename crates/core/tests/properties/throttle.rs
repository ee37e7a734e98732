//! CL.THROTTLE as redis-cell answers it: every line of the observed table, by `Limit::step` alone.

use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, State, TimeDelta, Timestamp, Verdict};

/// A key that is asked at one instant.
struct Key {
    state: State,
}

impl Key {
    fn new() -> Self {
        Self { state: State::default() }
    }

    fn throttle(&mut self, max_burst: u64, count: u64, period: u64, quantity: i64) -> [i64; 5] {
        let rate = Rate::per(count, TimeDelta::from_secs(period));
        let limit = LimitSpec::new(Algorithm::Gcra, rate).burst(max_burst + 1).build().expect("in range");
        let units = quantity.unsigned_abs();
        let cost = if quantity < 0 { Cost::refund(units) } else { Cost::new(units) };
        let outcome = limit.step(&mut self.state, Timestamp::from_secs(1_700_000_000), cost);
        let whole = |number: u64| i64::try_from(number).expect("a small number");
        let retry = match outcome.verdict {
            Verdict::Denied { retry_after: Some(wait) } => whole(wait.ceil_secs()),
            _ => -1,
        };
        [
            i64::from(outcome.verdict.is_denied()),
            whole(limit.capacity()),
            whole(outcome.remaining),
            retry,
            whole(outcome.reset_after.ceil_secs()),
        ]
    }
}

/// Without it a client of redis-cell that moves over reads other numbers.
#[test]
fn the_observed_table_is_reproduced() {
    assert_eq!(Key::new().throttle(15, 30, 60, 1), [0, 16, 15, -1, 2]);

    let mut b = Key::new();
    assert_eq!(b.throttle(0, 1, 10, 1), [0, 1, 0, -1, 10]);
    assert_eq!(b.throttle(0, 1, 10, 1), [1, 1, 0, 10, 10]);
    assert_eq!(b.throttle(0, 1, 10, 0), [0, 1, 0, -1, 10], "a look at an exhausted key is allowed");

    assert_eq!(Key::new().throttle(2, 1, 1, 4), [1, 3, 3, -1, 0], "more than the limit never fits");

    let mut r = Key::new();
    let _ = r.throttle(5, 1, 10, 3);
    assert_eq!(r.throttle(5, 1, 10, -1), [0, 6, 4, -1, 20], "a refund");
}
