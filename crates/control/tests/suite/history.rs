//! History: written by every node, summed by readers, compacted as it ages.

use crate::{START, open};
use tollgate_control::{HistoryCounts, HistoryMinute, HistoryOf, history_step};
use tollgate_core::TimeDelta;

fn counts(allow: u64, deny: u64) -> HistoryCounts {
    HistoryCounts { allow, deny, ..HistoryCounts::default() }
}

fn minute(at: u64, allow: u64, deny: u64) -> HistoryMinute {
    let rule = |name: &str| ("d".to_owned(), name.to_owned());
    let (domain, name) = rule("per-key");
    HistoryMinute {
        at,
        total: counts(allow + 5, deny),
        latency: [Some(allow), Some(allow * 2), None],
        rules: vec![(domain.clone(), name.clone(), counts(allow, deny))],
        callers: vec![
            (7, "abc…".to_owned(), counts(allow, deny)),
            (u64::MAX, "xyz…".to_owned(), counts(1, 0)),
        ],
        denials: vec![(7, "abc…".to_owned(), domain, name, deny)],
    }
}

/// A graph of one node alone would show a part of the traffic as if it were all of it.
pub(crate) async fn minutes_of_all_nodes_are_summed(address: String) {
    let (one, clock) = open(&address).await;
    let (two, _) = open(&address).await;
    one.write_history(&minute(START, 10, 2)).await.expect("written");
    two.write_history(&minute(START, 100, 20)).await.expect("written");
    // A write whose response was lost is repeated.
    two.write_history(&minute(START, 100, 20)).await.expect("written");
    // The first node was down in the minute that follows; then a minute without traffic of this rule.
    let quiet = HistoryMinute { at: START + 120, total: counts(1, 0), ..HistoryMinute::default() };
    one.write_history(&quiet).await.expect("written");
    clock.advance(TimeDelta::from_secs(300));
    let start = i64::try_from(START).expect("a time");
    let of = |of: HistoryOf| {
        let one = &one;
        async move { one.history(&of, start, start + 180, 60).await.expect("a series") }
    };
    let all = of(HistoryOf::All).await;
    assert_eq!(all.t, [start, start + 60, start + 120]);
    assert_eq!(all.allow, [Some(120), None, Some(1)]);
    assert_eq!(all.deny, [Some(22), None, Some(0)]);
    assert_eq!((all.p50_us[0], all.p99_us[0], all.p999_us[0]), (Some(100), Some(200), None), "the highest");
    let rule = of(HistoryOf::Rule("d".to_owned(), "per-key".to_owned())).await;
    assert_eq!((rule.allow, rule.deny), (vec![Some(110), None, Some(0)], vec![Some(22), None, Some(0)]));
    let other = of(HistoryOf::Rule("e".to_owned(), "per-key".to_owned())).await;
    assert_eq!(other.allow, [Some(0), None, Some(0)], "the rule of another domain");
    let caller = of(HistoryOf::Caller(7)).await;
    assert_eq!((caller.allow, caller.deny), (vec![Some(110), None, Some(0)], vec![Some(22), None, Some(0)]));

    let rule = HistoryOf::Rule("d".to_owned(), "per-key".to_owned());
    let top = one.history_top(&rule, start, start + 180, 10).await.expect("a list");
    assert_eq!(top.len(), 1);
    assert_eq!(
        (top[0].key_id.as_deref(), top[0].key_masked.as_deref()),
        (Some("0000000000000007"), Some("abc…"))
    );
    assert_eq!(top[0].deny, 22);
    let top = one.history_top(&HistoryOf::Caller(7), start, start + 180, 10).await.expect("a list");
    assert_eq!(
        (top[0].domain.as_deref(), top[0].rule.as_deref(), top[0].deny),
        (Some("d"), Some("per-key"), 22)
    );
    let top = one.history_top(&HistoryOf::All, start, start + 180, 1).await.expect("a list");
    assert_eq!((top.len(), top[0].key_id.as_deref()), (1, Some("0000000000000007")));
    assert_eq!(one.history_caller(u64::MAX).await.expect("an answer").as_deref(), Some("xyz…"));
    assert_eq!(one.history_caller(8).await.expect("an answer"), None);
}

/// Without compaction the table would grow by a row a minute, rule and node for a month.
pub(crate) async fn old_minutes_become_coarse_and_expire(address: String) {
    let (one, clock) = open(&address).await;
    let (two, _) = open(&address).await;
    for at in 0..30 {
        one.write_history(&minute(START + at * 60, 1, 1)).await.expect("written");
        two.write_history(&minute(START + at * 60, 2, 0)).await.expect("written");
    }
    let start = i64::try_from(START).expect("a time");
    let rule = HistoryOf::Rule("d".to_owned(), "per-key".to_owned());
    let read = async |step: i64| {
        let series = one.history(&rule, start, start + 1_800, step).await.expect("a series");
        (
            series.t.len(),
            series.allow.iter().flatten().sum::<i64>(),
            series.deny.iter().flatten().sum::<i64>(),
        )
    };
    assert_eq!(read(60).await, (30, 90, 30));
    assert_eq!(one.compact_history(30).await.expect("compacted"), 0, "fresh minutes stay");
    clock.advance(TimeDelta::from_secs(2 * 86_400 + 1_200));
    // The first two steps are due: each minute has four series in two nodes.
    assert_eq!(one.compact_history(30).await.expect("compacted"), 20 * 5 * 2);
    assert_eq!(one.compact_history(30).await.expect("compacted"), 0);
    let step = history_step(start, start + 1_800, start + 2 * 86_400 + 1_200);
    assert_eq!((step, read(step).await), (600, (3, 90, 30)), "nothing is lost");
    clock.advance(TimeDelta::from_secs(28 * 86_400));
    one.compact_history(30).await.expect("compacted");
    assert_eq!(read(600).await.1, 30, "two of three steps have expired");
    clock.advance(TimeDelta::from_secs(5 * 86_400));
    one.compact_history(30).await.expect("compacted");
    assert_eq!(read(600).await.1, 0);
    assert_eq!(one.history_caller(7).await.expect("an answer"), None, "names too");
}

/// Callers are spelled by strangers: a flood of new ones must not fill the database.
pub(crate) async fn a_step_keeps_its_busiest_callers(address: String) {
    let (control, clock) = open(&address).await;
    for at in 0..10_u64 {
        let callers = (1..=80_u64).map(|n| (at * 80 + n, format!("c{n}"), counts(n, 0)));
        let minute = HistoryMinute {
            at: START + at * 60,
            callers: callers.rev().collect(),
            denials: (1..=80).map(|n| (n, String::new(), "d".to_owned(), "r".to_owned(), 1)).collect(),
            ..HistoryMinute::default()
        };
        control.write_history(&minute).await.expect("written");
    }
    let start = i64::try_from(START).expect("a time");
    let listed = async || {
        let top = control.history_top(&HistoryOf::All, start, start + 600, 10_000).await.expect("a list");
        let rule = HistoryOf::Rule("d".to_owned(), "r".to_owned());
        (top.len(), control.history_top(&rule, start, start + 600, 10_000).await.expect("a list").len())
    };
    assert_eq!(listed().await, (500, 50));
    clock.advance(TimeDelta::from_secs(3 * 86_400));
    control.compact_history(30).await.expect("compacted");
    assert_eq!(listed().await, (50, 50));
    let top = control.history_top(&HistoryOf::All, start, start + 600, 1).await.expect("a list");
    assert_eq!(top[0].allow, 80, "the busiest stay");
}
