//! Durable counters: rows of all processes are added, a repeated or late write changes nothing.

use crate::{START, open};
use tollgate_control::{DurableTotal, DurableUnits};
use tollgate_core::TimeDelta;

fn row(counter: u8, part: i64, units: i64, reported: i64, seq: i64) -> DurableUnits {
    let start = i64::try_from(START).expect("a time");
    let (slot, last_at, expires_at) = (start * 1_000_000, start * 1_000_000 + seq, start + 600);
    DurableUnits { counter: [counter; 16], slot, part, units, reported, last_at, expires_at, seq }
}

/// A month's consumption that is counted twice after an outage turns customers away; half of it gives them a second month.
pub(crate) async fn durable_rows_are_absolute(address: String) {
    let (one, clock) = open(&address).await;
    let (two, _) = open(&address).await;
    assert_eq!(one.counter_hash_key(), two.counter_hash_key(), "both name counters alike");
    one.write_durable("eu", &[row(1, 1, 10, 2, 1), row(2, 2, 5, 0, 2)]).await.expect("written");
    one.write_durable("eu", &[row(1, 1, 30, 3, 9)]).await.expect("written");
    // Late, and repeated.
    one.write_durable("eu", &[row(1, 1, 10, 2, 1)]).await.expect("written");
    one.write_durable("eu", &[row(1, 1, 30, 3, 9)]).await.expect("written");
    // Another part of the same process, another process, another cell.
    one.write_durable("eu", &[row(1, 10, 4, 0, 10)]).await.expect("written");
    two.write_durable("eu", &[row(1, 1, 100, 0, 1)]).await.expect("written");
    two.write_durable("us", &[row(1, 1, 1_000, 7, 1), row(3, 2, -4, 0, 2)]).await.expect("written");
    let many: Vec<DurableUnits> = (0..250).map(|part| row(9, part, 1, 0, 1)).collect();
    two.write_durable("eu", &many).await.expect("written");

    let totals = one.read_durable("eu", 100).await.expect("read");
    let sums: Vec<(u8, i64, i64, i64)> =
        totals.iter().map(|total| (total.counter[0], total.own, total.reported, total.all)).collect();
    assert_eq!(sums, [(1, 134, 3, 1_134), (2, 5, 0, 5), (3, 0, 0, -4), (9, 250, 0, 250)]);
    let DurableTotal { slot, last_at, .. } = totals[0];
    assert_eq!(last_at - slot, 10, "the last use");
    assert_eq!(one.read_durable("eu", 2).await.expect("read").len(), 2, "bounded");

    clock.advance(TimeDelta::from_secs(601));
    assert_eq!(one.read_durable("eu", 100).await.expect("read"), [], "it no longer counts");
    clock.advance(TimeDelta::from_secs(7_200));
    // Writes of other nodes never wait for more than a batch.
    for rows in [100, 100, 56, 0] {
        assert_eq!(one.purge_durable(100).await.expect("purged"), rows);
    }
}
