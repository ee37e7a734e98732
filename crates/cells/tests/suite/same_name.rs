//! Two processes with the name of one cell: the one that is reached at its address is linked, and the other refused.

use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tollgate_cells::message::{self, Message};
use tollgate_cells::net::{LinkedStore, Links, PeerUrl, port_limits, run_links, serve};
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterOwner, CounterStore, Enforcement, KeyPart,
    LimitSpec, ManualClock, Rate, RegionMode, Scope, StoreError, TimeDelta, Timestamp, Verdict,
    region_prefix,
};
use tollgate_http::server::connections::{ConnectionBudget, ConnectionSlots};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Store = LinkedStore<MemoryStore<Arc<ManualClock>>, Arc<ManualClock>>;

/// Returns a process of one of two cells that are each other's peers.
fn process(own: &str, other: &str, incarnation: u64, clock: &Arc<ManualClock>) -> Arc<Store> {
    linked_process(own, other, incarnation, clock).0
}

/// Returns a process and its links.
fn linked_process(
    own: &str,
    other: &str,
    incarnation: u64,
    clock: &Arc<ManualClock>,
) -> (Arc<Store>, Arc<Links>) {
    let memory = MemoryConfig::with_bytes(MemoryConfig::MIN_BYTES);
    let config = CellConfig::new(own, own, vec![PeerConfig::new(other, other)]);
    let members = Arc::new(Members::new(config, incarnation, Clock::now(&**clock)));
    let links = Arc::new(Links::new(members.slots(), Duration::from_secs(1)));
    let store = MemoryStore::new(&memory, Arc::clone(clock)).expect("a store");
    let names = Pseudonyms::new(b"a secret of all cells");
    let (clock, leases) = (Arc::clone(clock), LeaseConfig::default());
    (Arc::new(Store::new(store, members, Arc::clone(&links), names, clock, leases)), links)
}

fn slots() -> ConnectionSlots {
    ConnectionBudget::default().port(port_limits(0))
}

/// Sends a message, and returns the answer; `None` if the link is closed.
async fn send(stream: &mut TcpStream, message: &Message) -> Option<Message> {
    stream.write_all(&message::encode(1, message)).await.ok()?;
    let mut length = [0; 4];
    stream.read_exact(&mut length).await.ok()?;
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes).await.ok()?;
    Some(message::decode(&bytes).expect("a message").1)
}

/// Without it a copy of a cell, or the process that its replacement runs beside, admits a cell's part of every limit once more.
#[tokio::test]
async fn a_second_process_with_a_cells_name_is_refused() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let near = process("a", "b", 1, &clock);
    tokio::spawn(serve(Arc::clone(&near), listener, slots(), None));
    let [old, new] = [2, 3].map(|incarnation| process("b", "a", incarnation, &clock).hello());
    let batch = Message::Batch(Arc::default());

    // Nobody is known yet: the first is linked.
    let mut first = TcpStream::connect(address).await.expect("connected");
    let answer = send(&mut first, &Message::Hello(old.clone())).await;
    assert!(matches!(answer, Some(Message::Hello(_))), "{answer:?}");
    near.members().on_hello(0, old.clone());
    near.members().on_answer(0, near.now(), &[], near.now());
    let mut second = TcpStream::connect(address).await.expect("connected");
    let answer = send(&mut second, &Message::Hello(new.clone())).await;
    assert!(matches!(&answer, Some(Message::OtherProcess(why)) if why.contains("--cell-url")), "{answer:?}");
    assert!(matches!(send(&mut first, &batch).await, Some(Message::Done(_))));

    // The other one is reached at the address: the first is what is left of it.
    near.members().on_hello(0, new.clone());
    assert_eq!(send(&mut first, &batch).await, None);
    let mut second = TcpStream::connect(address).await.expect("connected");
    assert!(matches!(send(&mut second, &Message::Hello(new)).await, Some(Message::Hello(_))));
    assert!(matches!(send(&mut second, &batch).await, Some(Message::Done(_))));

    // A process that has ended does not keep its successor out.
    near.members().on_unlinked(0);
    let mut third = TcpStream::connect(address).await.expect("connected");
    assert!(matches!(send(&mut third, &Message::Hello(old)).await, Some(Message::Hello(_))));
}

/// Charges one unit of ten a day of a counter, by this mode.
async fn charge(store: &Store, mode: RegionMode, value: &str) -> Result<(Admission, Verdict), StoreError> {
    let scope = Scope::new(format!("{}s", region_prefix(mode, CounterOwner::Region("b"))));
    let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per(10, TimeDelta::from_secs(86_400)));
    let (limit, parts) = (limit.build().expect("valid"), [KeyPart::Text(value)]);
    let one = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE);
    let outcomes = store.charge(&[Charge { enforcement: Enforcement::Required, ..one }]).await?;
    Ok((outcomes.admission, outcomes.per_charge[0].verdict))
}

/// Without it the second process of a cell goes on with the cell's part of every limit, so that each mode admits more than its
/// bound for as long as both run.
#[tokio::test]
async fn a_refused_process_decides_nothing_that_cells_share() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = PeerUrl {
        host: "127.0.0.1".to_owned(),
        port: listener.local_addr().expect("bound").port(),
        is_tls: false,
    };
    let near = process("a", "b", 1, &clock);
    tokio::spawn(serve(Arc::clone(&near), listener, slots(), None));
    let (real, (copy, links)) = (process("b", "a", 2, &clock), linked_process("b", "a", 3, &clock));
    for (mode, value) in [(RegionMode::Shared, "k"), (RegionMode::Split, "k"), (RegionMode::Owner, "k")] {
        let (admission, _) = charge(&copy, mode, value).await.expect("decided");
        assert_eq!(admission, Admission::Admitted, "{mode:?}: nobody has refused it yet");
    }

    near.members().on_hello(0, real.hello());
    near.members().on_answer(0, near.now(), &[], near.now());
    let (_tick, ticks) = tokio::sync::watch::channel(0);
    tokio::spawn(run_links(Arc::clone(&copy), links, 0, url, None, ticks));
    let is_displaced = |is: bool| {
        let (store, clock) = (Arc::clone(&copy), Arc::clone(&clock));
        async move {
            while store.members().is_displaced(Clock::now(&*clock)) != is {
                tokio::task::yield_now().await;
            }
        }
    };
    is_displaced(true).await;
    assert!(copy.stats().is_displaced && !near.stats().is_displaced && !real.stats().is_displaced);
    assert_eq!((copy.stats().share_millionths, copy.is_regional_only()), (0, true));
    for mode in [RegionMode::Shared, RegionMode::Split] {
        let (admission, verdict) = charge(&copy, mode, "k").await.expect("decided");
        assert_eq!(admission, Admission::Denied, "{mode:?}");
        assert!(matches!(verdict, Verdict::Denied { retry_after: Some(_) }), "{mode:?}: not for ever");
    }
    for mode in [RegionMode::Owner, RegionMode::Leased] {
        let refused = charge(&copy, mode, "other").await;
        assert!(
            matches!(&refused, Err(StoreError::Unavailable(why)) if why.contains("name")),
            "{mode:?}: {refused:?}"
        );
    }

    // The other one ends: the next attempt to connect is accepted.
    near.members().on_unlinked(0);
    is_displaced(false).await;
    copy.tick();
    for mode in [RegionMode::Shared, RegionMode::Split, RegionMode::Owner] {
        assert_eq!(charge(&copy, mode, "k").await.expect("decided").0, Admission::Admitted, "{mode:?}");
    }
}
