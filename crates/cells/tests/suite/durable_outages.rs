//! Durable counters of a store that comes back empty from an outage: what is debited then must not hide what it has lost.

use crate::durable::{Clock, Table, charge, counters, month, node, write};
use std::sync::Arc;
use tollgate_cells::durable::ReadBack;
use tollgate_core::conformance::{Fault, FaultyStore};
use tollgate_core::{
    Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, ManualClock, Scope, StoreError, TimeDelta,
    Timestamp,
};
use tollgate_store::MemoryStore;

/// A server that may be away, and may come back as another one.
type Server = FaultyStore<Arc<MemoryStore<Clock>>>;

fn stop(server: &Server) {
    server.set_fault(|_, _| Fault::Fail(StoreError::Unavailable("a server".to_owned())));
}

fn restart(server: &Server, counters: Arc<MemoryStore<Clock>>) {
    server.replace_inner(counters);
    server.clear_fault();
}

type Debit =
    fn(&tollgate_cells::durable::DurableStore<Arc<Server>, Clock>, &[Charge<'_>]) -> Result<(), StoreError>;

/// Ways to debit: what nodes have admitted meanwhile, and what other cells report.
const DEBITS: [Debit; 2] = [
    |node, charges| pollster::block_on(node.debit(charges)),
    |node, charges| pollster::block_on(node.debit_reported(charges)),
];

fn with_charges<T>(limit: &Limit, units: u64, run: impl FnOnce(&[Charge<'_>]) -> T) -> T {
    let scopes = [
        Scope::new("d|api_key|fixed_window|1mo").with_durable(true),
        Scope::new("d|other|fixed_window|1mo").with_durable(false),
    ];
    let parts = [KeyPart::Secret("a")];
    let each = scopes
        .each_ref()
        .map(|scope| Charge::new(CounterKey { scope, parts: &parts }, limit, Cost::new(units)));
    run(&each)
}

/// Otherwise a Redis that dies for ten minutes, and comes back empty, gives callers their month again: what was admitted in
/// those ten minutes is debited first and taken for what was lost.
#[test]
fn what_is_debited_after_an_outage_waits_for_what_was_lost() {
    for debit in DEBITS {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
        let (limit, mut table) = (month(), Table::default());
        let server = Arc::new(Server::new(counters(&clock)));
        let node = node(&server, "one", &clock);
        pollster::block_on(node.write_canaries()).expect("renewed");
        assert_eq!(charge(&node, &limit, "a", Cost::new(300)), 700);
        write(&mut table, 0, &node);

        stop(&server);
        assert!(pollster::block_on(node.is_lost()).is_err());
        restart(&server, counters(&clock));
        // Of the two, the limit that is not durable is debited.
        let held = with_charges(&limit, 400, |charges| debit(&node, charges)).expect_err("it waits");
        assert_eq!(held.failed_of(2), [0]);
        assert_eq!(charge(&node, &limit, "a", Cost::PEEK), 1_000, "nothing is restored yet");

        // As the process does once it has noticed.
        assert!(pollster::block_on(node.is_lost()).expect("an answer"));
        node.durable().expect("a record").install(table.saved(), ReadBack::Loss);
        pollster::block_on(node.write_canaries()).expect("renewed");
        with_charges(&limit, 400, |charges| debit(&node, &charges[..1])).expect("debited");
        assert_eq!(charge(&node, &limit, "a", Cost::PEEK), 300, "what was lost, and what came since");
    }
}

/// Otherwise each short outage costs other cells' reports, or a database that is away holds them back for ever.
#[test]
fn debits_wait_only_for_what_is_lost_and_not_for_long() {
    for debit in DEBITS {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
        let limit = month();
        let own = counters(&clock);
        let server = Arc::new(Server::new(Arc::clone(&own)));
        let node = node(&server, "one", &clock);
        pollster::block_on(node.write_canaries()).expect("renewed");
        let debit = |units| with_charges(&limit, units, |charges| debit(&node, charges));
        stop(&server);
        assert!(debit(1).is_err());
        restart(&server, own);
        debit(10).expect("nothing is lost");

        stop(&server);
        assert!(debit(1).is_err());
        restart(&server, counters(&clock));
        assert!(debit(1).is_err());
        clock.advance(TimeDelta::from_secs(4));
        assert!(debit(1).is_err());
        clock.advance(TimeDelta::from_secs(1));
        debit(20).expect("nothing was read back in time");
        assert_eq!(charge(&node, &limit, "a", Cost::PEEK), 980);
    }
}
