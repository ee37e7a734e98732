//! Streams that report more than their places, over real counters in virtual time.

use super::super::table::{Action, Bucket};
use super::*;
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

type Memory = Arc<MemoryStore<Arc<ManualClock>>>;

/// The table of a server, its places, and the way of reports to it.
struct Server {
    clock: Arc<ManualClock>,
    table: Table<Memory>,
    places: Arc<Places>,
    stats: RlqsStats,
}

impl Server {
    fn new(most: Amount) -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let text = "domain: edge\ndescriptors:\n  - key: tenant\n    limit: {count: 600, period: minute}\n";
        let rules = Ruleset::load(&[Source::new("rules.yaml", text)], &Options::default()).expect("rules");
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(16 << 20), Arc::clone(&clock)).expect("memory");
        let limiter = Limiter::new(Arc::new(rules), Arc::new(store), Arc::clone(&clock) as Arc<dyn Clock>);
        let table = Table::new(Arc::new(limiter));
        Self { clock, table, places: Places::new(most), stats: RlqsStats::default() }
    }

    /// Reports these tenants without requests, and returns how many have a place.
    fn report(
        &mut self,
        id: StreamId,
        own: &Arc<StreamPlaces>,
        tenants: impl Iterator<Item = String>,
    ) -> usize {
        let usages = tenants.map(|tenant| Usage {
            bucket: Bucket {
                domain: Arc::from("edge"),
                entries: vec![("tenant".to_owned(), tenant)].into_boxed_slice(),
            },
            allowed: 0,
            denied: 0,
        });
        let reports = reports(usages.collect(), own, &self.stats);
        let (count, now) = (reports.len(), self.clock.now());
        reports.into_iter().for_each(|report| self.table.report(id, report, now));
        count
    }

    fn pass(&mut self) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        pollster::block_on(self.table.pass())
    }
}

fn tenants(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|at| at.to_string())
}

const MOST: Amount = Amount { buckets: 20_000, bytes: 8 << 20 };

/// An Envoy that has seen as many tenants as a stream may have must not be denied every new one for ever.
#[test]
fn abandoned_buckets_leave_the_count_of_their_stream() {
    let mut server = Server::new(MOST);
    let own = server.places.stream(40);
    assert_eq!(server.report(1, &own, tenants(50)), 40);
    let mut abandoned = 0;
    for _ in 0..20 {
        abandoned += server.pass().iter().filter(|(_, _, action)| *action == Action::Abandon).count();
        if abandoned > 0 {
            break;
        }
        server.clock.advance(TimeDelta::from_secs(5));
        server.report(1, &own, tenants(40));
    }
    assert_eq!((abandoned, server.places.taken()), (40, Amount::default()));
    assert_eq!(server.report(1, &own, std::iter::once("new".to_owned())), 1);
    assert!(server.pass().iter().any(|(_, bucket, _)| bucket.entries[0].1 == "new"));
}

/// A flood of reports that come before any pass must stay within the maximum, and must not keep another stream waiting.
#[test]
fn a_flood_is_bounded_and_a_new_stream_is_served_in_its_first_pass() {
    let mut server = Server::new(MOST);
    let streams: Vec<_> = (0..8).map(|_| server.places.stream(4_096)).collect();
    let counts: Vec<usize> =
        (0..).zip(&streams).map(|(id, own)| server.report(id, own, tenants(4_000))).collect();
    assert!(server.places.taken().buckets <= MOST.buckets, "{counts:?}");
    assert!(counts[0] == 4_000 && counts[7] >= 16, "{counts:?}");
    let first = server.pass().len();
    assert!(first < MOST.buckets as usize / 2, "{first} in one pass");
    let own = server.places.stream(4_096);
    assert_eq!(server.report(100, &own, tenants(1)), 1);
    assert!(server.pass().iter().any(|(id, _, _)| *id == 100), "the new stream waits");
    while server.table.has_more() {
        assert!(!server.pass().is_empty());
    }
    assert_eq!(server.table.stats().buckets, server.places.taken().buckets);
}

/// Large entries count by their size.
#[test]
fn buckets_are_bounded_in_bytes() {
    let mut server = Server::new(MOST);
    for id in 0..4 {
        let own = server.places.stream(4_096);
        server.report(id, &own, (0..4_000).map(|at| format!("{at}{}", "x".repeat(1_000))));
    }
    let taken = server.places.taken();
    assert!(taken.bytes <= MOST.bytes && taken.buckets > 6_000, "{taken:?}");
}

/// One message with the same bucket many times is one report.
#[test]
fn repeated_buckets_of_a_message_are_one_report() {
    let mut server = Server::new(MOST);
    let own = server.places.stream(4_096);
    assert_eq!(server.report(1, &own, (0..1_000).map(|_| "a".to_owned())), 1);
}

mod admission;
mod streams;
