use super::super::Links;
use super::*;
use crate::{CellConfig, Members, PeerConfig, Pseudonyms};
use std::net::SocketAddr;
use tokio::io::AsyncReadExt;
use tollgate_core::{ManualClock, Timestamp};
use tollgate_http::server::connections::ConnectionBudget;
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Store = LinkedStore<MemoryStore<Arc<ManualClock>>, Arc<ManualClock>>;

const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);

/// Returns one of two cells that are each other's peers.
fn cell(own: &str, other: &str) -> Arc<Store> {
    let (clock, memory) = (Arc::new(ManualClock::at(NOW)), MemoryConfig::with_bytes(MemoryConfig::MIN_BYTES));
    let peers = vec![PeerConfig::new(other.to_owned(), other.to_owned())];
    let members = Arc::new(Members::new(CellConfig::new(own.to_owned(), own.to_owned(), peers), 1, NOW));
    let links = Arc::new(Links::new(members.slots(), Duration::from_secs(1)));
    let store = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a store");
    let names = Pseudonyms::new(b"a secret of all cells");
    Arc::new(Store::new(store, members, links, names, clock, LeaseConfig::default()))
}

/// Starts a cell whose handshakes never run out of time, so that nothing here depends on it.
async fn start(links: usize, handshakes: usize) -> SocketAddr {
    start_within(links, handshakes, &ConnectionBudget::default()).await
}

async fn start_within(links: usize, handshakes: usize, budget: &ConnectionBudget) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let bounds = Bounds { links, handshakes, patience: Duration::from_secs(3_600) };
    let slots = budget.port(PortLimits { first_request: bounds.patience, ..port_limits(0) });
    tokio::spawn(serve_within(bounds, cell("a", "b"), listener, slots, None));
    address
}

/// Opens a link, and returns its stream and the answer.
async fn link(to: SocketAddr) -> (TcpStream, Message) {
    let mut stream = TcpStream::connect(to).await.expect("connected");
    let hello = Message::Hello(cell("b", "a").hello());
    stream.write_all(&message::encode(0, &hello)).await.expect("sent");
    let (_, answer) = frames::read(&mut stream).await.expect("an answer").expect("a message");
    (stream, answer)
}

/// Without it clients that connect and send nothing keep a restarted cell out until their time has run out.
#[tokio::test]
async fn idle_connections_do_not_keep_a_cell_out() {
    let address = start(2, 4).await;
    let mut idle = Vec::new();
    for _ in 0..20 {
        idle.push(TcpStream::connect(address).await.expect("connected"));
    }
    let (mut linked, answer) = link(address).await;
    assert!(matches!(answer, Message::Hello(_)), "{answer:?}");
    // The oldest ones were closed, and no others.
    for stream in idle.iter_mut().take(16) {
        assert_eq!(stream.read(&mut [0]).await.expect("closed"), 0);
    }
    // More of them do not end a link.
    for _ in 0..20 {
        idle.push(TcpStream::connect(address).await.expect("connected"));
    }
    assert_eq!(idle[30].read(&mut [0]).await.expect("closed"), 0);
    let batch = Message::Batch(Arc::default());
    linked.write_all(&message::encode(7, &batch)).await.expect("sent");
    let (id, answer) = frames::read(&mut linked).await.expect("an answer").expect("a message");
    assert!(id == 7 && matches!(answer, Message::Done(_)), "{answer:?}");
}

/// Without it links take what a cell has for all, and a link that ends leaves no room for the next.
#[tokio::test]
async fn links_are_bounded_and_a_closed_one_makes_room() {
    let address = start(2, 4).await;
    let (first, answer) = link(address).await;
    assert!(matches!(answer, Message::Hello(_)), "{answer:?}");
    let (_second, answer) = link(address).await;
    assert!(matches!(answer, Message::Hello(_)), "{answer:?}");
    let (_, answer) = link(address).await;
    assert_eq!(answer, Message::Failed("too many cells are connected".to_owned()));
    drop(first);
    while !matches!(link(address).await.1, Message::Hello(_)) {
        tokio::task::yield_now().await;
    }
}

/// Without it idle connections to this port take the file descriptors of all others, or a flood ends the links of cells.
#[tokio::test]
async fn connections_count_in_the_budget_of_the_process_and_links_stay() {
    let address = start_within(2, 256, &ConnectionBudget::new(4)).await;
    let (mut linked, answer) = link(address).await;
    assert!(matches!(answer, Message::Hello(_)), "{answer:?}");
    let mut idle = Vec::new();
    for _ in 0..8 {
        idle.push(TcpStream::connect(address).await.expect("connected"));
    }
    for stream in idle.iter_mut().take(5) {
        assert_eq!(stream.read(&mut [0]).await.expect("closed"), 0);
    }
    linked.write_all(&message::encode(7, &Message::Batch(Arc::default()))).await.expect("sent");
    let (id, answer) = frames::read(&mut linked).await.expect("an answer").expect("a message");
    assert!(id == 7 && matches!(answer, Message::Done(_)), "{answer:?}");
}
