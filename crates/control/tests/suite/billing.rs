//! Consumption of billed rules: complete, counted once, and delivered.

use crate::access::execute;
use crate::active_rules::Memory;
use crate::{START, open};
use std::collections::BTreeMap;
use std::sync::Arc;
use tollgate_control::{
    Billing, BillingRetention, ConsumptionCursor, ConsumptionFilter, ConsumptionRow, ControlPlane, Db,
    Granularity,
};
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
billing: true
descriptors:
  - key: tenant
    name: llm
    limit: [100/minute, 1000/day, {count: 10000, period: day, cost: tokens}]
    concurrency: 50
  - key: api_key
    name: calls
    limit: 5/hour
  - key: path
    limit: 100/minute
    billing: false
";

const HOUR: i64 = 3_600;
const DAY: u64 = 86_400;

/// A node that counts: its control plane, its limiter and its billing.
struct Node {
    control: Arc<ControlPlane>,
    clock: Arc<ManualClock>,
    limiter: Limiter<Memory>,
    billing: Arc<Billing>,
}

async fn node(address: &str) -> Node {
    let (control, clock) = open(address).await;
    let display = Box::new(|key: &str, value: &str| format!("{key}:{value}"));
    let billing = Billing::new(Arc::clone(&control), display, BillingRetention::default());
    let rules = Ruleset::load(&[Source::new("t.yaml", RULES)], &Options::default());
    let rules = Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let limiter = Limiter::new(rules, store, time).with_meter(billing.meter());
    Node { control, clock, limiter, billing }
}

impl Node {
    async fn send(&self, attributes: &[(&str, &str)]) -> bool {
        self.limiter.check(&Check::attributes("d", attributes)).await.is_allowed()
    }

    /// Reads everything, in pages of this many rows.
    async fn read(&self, granularity: Granularity, limit: usize) -> Vec<ConsumptionRow> {
        let mut rows = Vec::new();
        let mut filter =
            ConsumptionFilter { granularity, to: i64::MAX, limit, ..ConsumptionFilter::default() };
        loop {
            let page = self.control.consumption(&filter).await.expect("an answer");
            assert!(page.rows.len() <= limit);
            rows.extend(page.rows);
            let Some(next) = page.next_cursor else { return rows };
            filter.after = Some(ConsumptionCursor::parse(&next).expect("a cursor"));
        }
    }

    /// Units and requests by period, caller and meter.
    async fn sums(&self, granularity: Granularity) -> BTreeMap<(String, String, String), (i64, i64)> {
        let rows = self.read(granularity, 1_000).await;
        let sums = rows.iter().map(|row| {
            let period = row.start[..13].to_owned();
            ((period, row.caller.clone(), row.meter.clone()), (row.units, row.requests))
        });
        let sums: BTreeMap<_, _> = sums.collect();
        assert_eq!(sums.len(), rows.len(), "one row for each");
        sums
    }
}

fn key(period: &str, caller: &str, meter: &str) -> (String, String, String) {
    (period.to_owned(), caller.to_owned(), meter.to_owned())
}

pub(crate) async fn consumption_is_complete_and_counted_once(address: String) {
    let (one, two) = (node(&address).await, node(&address).await);
    for (node, sent) in [(&one, 3), (&two, 2)] {
        for _ in 0..sent {
            assert!(node.send(&[("tenant", "acme"), ("tokens", "40"), ("path", "/")]).await);
        }
        node.billing.flush().await.expect("a database");
        // Nothing new: nothing is counted again.
        node.billing.flush().await.expect("a database");
    }
    let first = [
        (key("2026-01-01T00", "tenant:acme", "requests"), (5, 5)),
        (key("2026-01-01T00", "tenant:acme", "tokens"), (200, 5)),
    ];
    assert_eq!(two.sums(Granularity::Hour).await, BTreeMap::from(first.clone()));
    // What is denied is not consumed; a peek consumes nothing; a refund gives back.
    for sent in 0..8 {
        assert_eq!(one.send(&[("api_key", "k1")]).await, sent < 5);
    }
    one.limiter.check(&Check::attributes("d", &[("api_key", "k2")]).with_cost(Cost::PEEK)).await;
    one.limiter.check(&Check::attributes("d", &[("api_key", "k1")]).with_cost(Cost::refund(2))).await;
    // An estimate that is settled in the next hour corrects the hour in which it was made.
    one.clock.advance(TimeDelta::from_secs(3_500));
    let request = [("tenant", "globex"), ("tokens", "500")];
    let within = TimeDelta::from_secs(600);
    let check = Check::attributes("d", &request);
    let reserve = || one.limiter.reserve(&check, within, None);
    let settled = reserve().await.expect("a reservation").id.expect("held");
    let canceled = reserve().await.expect("a reservation").id.expect("held");
    one.billing.flush().await.expect("a database");
    assert_eq!(
        one.sums(Granularity::Hour).await[&key("2026-01-01T00", "tenant:globex", "tokens")],
        (1_000, 2)
    );
    one.clock.advance(TimeDelta::from_secs(200));
    one.billing.flush().await.expect("a database");
    one.limiter.settle(settled, 120).await.expect("settled");
    one.limiter.settle(settled, 120).await.expect("settled again, with no further effect");
    one.limiter.cancel(canceled).await.expect("canceled");
    assert!(one.send(&[("tenant", "acme"), ("tokens", "1")]).await);
    one.billing.flush().await.expect("a database");
    let mut expected = BTreeMap::from(first);
    expected.extend([
        (key("2026-01-01T00", "api_key:k1", "cost"), (3, 5)),
        (key("2026-01-01T00", "tenant:globex", "requests"), (1, 1)),
        (key("2026-01-01T00", "tenant:globex", "tokens"), (120, 1)),
        (key("2026-01-01T01", "tenant:acme", "requests"), (1, 1)),
        (key("2026-01-01T01", "tenant:acme", "tokens"), (1, 1)),
    ]);
    assert_eq!(two.sums(Granularity::Hour).await, expected);
    let months = two.sums(Granularity::Month).await;
    assert_eq!(months[&key("2026-01-01T00", "tenant:acme", "tokens")], (201, 6));
    assert_eq!(months.len(), 5);
    // Pages of any size have the same rows in the same order, and ids stay.
    for granularity in [Granularity::Hour, Granularity::Month] {
        let all = two.read(granularity, 1_000).await;
        assert_eq!(two.read(granularity, 2).await, all);
        let ids: std::collections::BTreeSet<_> = all.iter().map(|row| &row.id).collect();
        assert_eq!(ids.len(), all.len());
    }
    let hour = &one.read(Granularity::Hour, 1_000).await[0];
    assert_eq!((hour.start.as_str(), hour.end.as_str()), ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"));
    assert!(hour.closed);
    let caller = one.control.key_hash("k1");
    let filter = ConsumptionFilter {
        to: i64::MAX,
        caller: Some(caller),
        rule: Some("calls".to_owned()),
        domain: Some("d".to_owned()),
        limit: 10,
        ..ConsumptionFilter::default()
    };
    let page = one.control.consumption(&filter).await.expect("an answer");
    assert_eq!(page.rows.len(), 1);
    assert_eq!((&page.rows[0].caller_id, page.rows[0].units), (&caller.to_string(), 3));
    let other = ConsumptionFilter { rule: Some("llm".to_owned()), ..filter };
    assert!(one.control.consumption(&other).await.expect("an answer").rows.is_empty());
}

pub(crate) async fn consumption_survives_an_outage(address: String) {
    let one = node(&address).await;
    let db = Db::open(&address).await.expect("a database");
    assert!(one.send(&[("tenant", "acme"), ("tokens", "1")]).await);
    one.billing.flush().await.expect("a database");
    let away = "ALTER TABLE consumption RENAME TO away";
    execute(&db, away, away).await.expect("an alteration");
    for hour in 0..3 {
        assert!(one.send(&[("tenant", "acme"), ("tokens", "10")]).await);
        one.billing.flush().await.expect_err("no table");
        assert_eq!(one.billing.stats().pending_rows, 2 * (hour + 1));
        one.clock.advance(TimeDelta::from_secs(3_600));
    }
    let stats = one.billing.stats();
    assert_eq!((stats.failures, stats.dropped_units, stats.unattributed_units), (3, 0, 0));
    assert!(stats.behind_millis >= 3 * HOUR * 1_000, "{stats:?}");
    let back = "ALTER TABLE away RENAME TO consumption";
    execute(&db, back, back).await.expect("an alteration");
    one.billing.flush().await.expect("a database");
    assert_eq!(one.billing.stats().pending_rows, 0);
    let sums = one.sums(Granularity::Hour).await;
    assert_eq!(sums[&key("2026-01-01T00", "tenant:acme", "tokens")], (11, 2));
    assert_eq!(sums[&key("2026-01-01T02", "tenant:acme", "tokens")], (10, 1));
    assert_eq!(one.sums(Granularity::Month).await[&key("2026-01-01T00", "tenant:acme", "tokens")], (31, 4));
}

pub(crate) async fn old_hours_become_months(address: String) {
    let one = node(&address).await;
    for _ in 0..50 {
        assert!(one.send(&[("tenant", "acme"), ("tokens", "7")]).await);
        one.billing.flush().await.expect("a database");
        one.clock.advance(TimeDelta::from_secs(DAY));
    }
    let before = one.read(Granularity::Month, 1_000).await;
    assert_eq!(before.iter().map(|row| row.units).collect::<Vec<_>>(), [31, 217, 19, 133]);
    assert!(one.billing.purge().await.expect("a database") > 0);
    assert_eq!(one.billing.purge().await.expect("a database"), 0);
    let hours = one.read(Granularity::Hour, 1_000).await;
    assert_eq!(hours.len(), 2 * 35, "{} hours", hours.len());
    let after = one.read(Granularity::Month, 1_000).await;
    assert_eq!(after, before, "sums, ids and versions stay");
    // A node whose clock is years ahead, so that all months are old by it; not by the database's.
    one.clock.set(Timestamp::from_secs(START + 4_000 * DAY));
    one.billing.purge().await.expect("a database");
    one.clock.set(Timestamp::from_secs(START + 300 * DAY));
    let kept = one.read(Granularity::Month, 1_000).await;
    assert_eq!(kept.iter().map(|row| row.units).collect::<Vec<_>>(), [31, 217, 19, 133]);
    assert!(one.read(Granularity::Hour, 1_000).await.is_empty());
    let short = BillingRetention { monthly_days: 250, ..BillingRetention::default() };
    let display = Box::new(|key: &str, value: &str| format!("{key}:{value}"));
    let shorter = Billing::new(Arc::clone(&one.control), display, short);
    shorter.purge().await.expect("a database");
    let left = one.read(Granularity::Month, 1_000).await;
    assert_eq!(left.iter().map(|row| row.units).collect::<Vec<_>>(), [19, 133], "January is gone");
}

pub(crate) async fn deliveries_resume_and_are_corrected(address: String) {
    let (one, two) = (node(&address).await, node(&address).await);
    let forward = |seconds| {
        one.clock.advance(TimeDelta::from_secs(seconds));
        two.clock.advance(TimeDelta::from_secs(seconds));
    };
    for n in 0..700 {
        assert!(one.send(&[("api_key", &format!("k{n}"))]).await);
    }
    one.billing.flush().await.expect("a database");
    let next = async |node: &Node| node.control.next_delivery().await.expect("a database");
    assert!(next(&one).await.is_none(), "the hour has not ended");
    forward(3_601);
    assert!(next(&one).await.is_none(), "nodes may still write");
    forward(60);
    let page = next(&one).await.expect("rows");
    assert_eq!(page.rows.len(), 500);
    assert!(next(&two).await.is_none(), "one node sends at a time");
    // The receiver has not accepted it: the same rows again.
    let again = next(&one).await.expect("rows");
    assert_eq!(again.rows, page.rows);
    one.control.record_delivered(&again).await.expect("a database");
    one.control.release_delivery_lease().await.expect("a database");
    // Another node goes on.
    let rest = next(&two).await.expect("rows");
    assert_eq!(rest.rows.len(), 200);
    let mut ids: Vec<_> = page.rows.iter().chain(&rest.rows).map(|row| row.id.clone()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 700, "all rows, each once");
    two.control.record_delivered(&rest).await.expect("a database");
    assert!(next(&two).await.is_none());
    // A late correction is sent again under the same id, and a later hour after it.
    one.limiter.check(&Check::attributes("d", &[("api_key", "k5")])).await;
    one.clock.set(Timestamp::from_secs(START + 10));
    one.limiter.check(&Check::attributes("d", &[("api_key", "k7")])).await;
    one.clock.set(two.clock.now());
    one.billing.flush().await.expect("a database");
    let corrected = next(&two).await.expect("rows");
    assert_eq!(corrected.rows.len(), 1);
    let earlier = page.rows.iter().chain(&rest.rows).find(|row| row.id == corrected.rows[0].id);
    let earlier = earlier.expect("known");
    assert_eq!((earlier.units, corrected.rows[0].units), (1, 2));
    assert!(corrected.rows[0].version > earlier.version);
    two.control.record_delivered(&corrected).await.expect("a database");
    forward(3_600);
    let later = next(&two).await.expect("rows");
    assert_eq!(later.rows.iter().map(|row| row.start.as_str()).collect::<Vec<_>>(), ["2026-01-01T01:00:00Z"]);
    two.control.record_delivered(&later).await.expect("a database");
    assert!(next(&two).await.is_none());
}
