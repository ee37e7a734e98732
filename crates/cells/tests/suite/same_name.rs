//! Two processes with the name of one cell: the one that is reached at its address is linked, and the other refused.

use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tollgate_cells::message::{self, Message};
use tollgate_cells::net::{LinkedStore, Links, serve};
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms};
use tollgate_core::{Clock, ManualClock, Timestamp};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Store = LinkedStore<MemoryStore<Arc<ManualClock>>, Arc<ManualClock>>;

/// Returns a process of one of two cells that are each other's peers.
fn process(own: &str, other: &str, incarnation: u64, clock: &Arc<ManualClock>) -> Arc<Store> {
    let memory = MemoryConfig::with_bytes(MemoryConfig::MIN_BYTES);
    let config = CellConfig::new(own, own, vec![PeerConfig::new(other, other)]);
    let members = Arc::new(Members::new(config, incarnation, Clock::now(&**clock)));
    let links = Arc::new(Links::new(members.slots(), Duration::from_secs(1)));
    let store = MemoryStore::new(&memory, Arc::clone(clock)).expect("a store");
    let names = Pseudonyms::new(b"a secret of all cells");
    Arc::new(Store::new(store, members, links, names, Arc::clone(clock), LeaseConfig::default()))
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
    tokio::spawn(serve(Arc::clone(&near), listener, None));
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
    assert!(matches!(&answer, Some(Message::Failed(why)) if why.contains("--cell-url")), "{answer:?}");
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
