//! Nodes whose clocks are wrong: counters go by the server's time, so all nodes agree.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Calendar, CalendarUnit, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart,
    LimitSpec, ManualClock, Period, Rate, Scope, SystemClock, TimeDelta,
};
use tollgate_store::RedisStore;

#[tokio::test]
async fn nodes_that_are_days_apart_share_every_kind_of_limit() {
    let server = Server::start(&[]);
    let now = SystemClock::new().now();
    let days = |count: u64| TimeDelta::from_secs(86_400 * count);
    let node = |time| RedisStore::with_own_clock(patient(&server.url()), Arc::new(ManualClock::at(time)));
    let nodes = [node(now), node(now - days(40)), node(now + days(40))];
    let zone = |unit| Period::Calendar(Calendar::new(unit, "Europe/Zurich").expect("a zone"));
    let by =
        |algorithm, period| LimitSpec::new(algorithm, Rate { count: 7, period }).build().expect("a limit");
    let day = || Period::Rolling(days(1));
    for (number, limit) in [
        by(Algorithm::Gcra, day()),
        by(Algorithm::FixedWindow, zone(CalendarUnit::Month)),
        by(Algorithm::FixedWindow, zone(CalendarUnit::Day)),
        by(Algorithm::SlidingWindow, day()),
        by(Algorithm::StrictWindow, day()),
        by(Algorithm::SlidingLog, day()),
    ]
    .iter()
    .enumerate()
    {
        let (scope, parts) = (Scope::new(format!("clocks|{number}")), [KeyPart::Text("alice")]);
        let charge = [Charge::new(CounterKey { scope: &scope, parts: &parts }, limit, Cost::ONE)];
        let mut results = Vec::new();
        for turn in 0..9 {
            let outcomes = nodes[turn % 3].charge(&charge).await.expect("an answer");
            results.push((outcomes.admission == Admission::Admitted, outcomes.per_charge[0].remaining));
        }
        let expected: Vec<_> = (0..9).map(|turn: u64| (turn < 7, 6_u64.saturating_sub(turn))).collect();
        assert_eq!(results, expected, "{limit}");
    }
    assert!(nodes.iter().all(|node| node.mismatches() == 0));
}
