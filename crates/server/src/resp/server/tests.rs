//! Disconnection of slow and idle clients, over a real listener with short timeouts.

use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate_core::{ManualClock, Timestamp};
use tollgate_rules::{Options, Ruleset};
use tollgate_store::{MemoryConfig, MemoryStore};

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

/// Starts a server and returns its address.
async fn start(config: RespConfig) -> std::net::SocketAddr {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
    let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
    let limiter = Arc::new(Limiter::new(Arc::new(rules), store, clock));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one");
    tokio::spawn(serve(listener, limiter, config, std::future::pending()));
    address
}

fn short_timeouts() -> RespConfig {
    RespConfig { tick: Duration::from_millis(20), idle_ticks: 1_000_000, ..RespConfig::default() }
}

async fn open(address: std::net::SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("a connection")
}

/// Reads until the server closes or resets the connection.
async fn until_closed(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes).await;
    bytes
}

async fn is_served(stream: &mut TcpStream) -> bool {
    let mut reply = [0; PONG.len()];
    stream.write_all(PING).await.is_ok() && stream.read_exact(&mut reply).await.is_ok() && reply == *PONG
}

#[tokio::test]
async fn a_client_with_an_unfinished_command_is_disconnected_and_an_idle_one_is_not() {
    let address = start(short_timeouts()).await;
    let mut patient = open(address).await;
    assert!(is_served(&mut patient).await);
    let mut half = open(address).await;
    half.write_all(&[PING, &PING[..9]].concat()).await.expect("sent");
    assert_eq!(until_closed(&mut half).await, PONG);
    // Single bytes that never complete a command do not count as activity.
    let mut dripping = open(address).await;
    dripping.write_all(b"*1\r\n$8000\r\n").await.expect("sent");
    let (mut read, mut write) = dripping.split();
    let drip = async {
        while write.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let mut nothing = [0];
    tokio::select! {
        () = drip => {}
        closed = read.read(&mut nothing) => assert!(!matches!(closed, Ok(1..)), "there was a reply"),
    }
    assert!(is_served(&mut patient).await, "an idle connection stays open");
}

#[tokio::test]
async fn a_client_that_reads_no_replies_is_disconnected() {
    let address = start(short_timeouts()).await;
    let mut greedy = open(address).await;
    let commands = b"*2\r\n$7\r\nCOMMAND\r\n$4\r\nDOCS\r\n".repeat(100);
    // The loop ends when the server has closed the connection.
    while greedy.write_all(&commands).await.is_ok() {}
    assert!(is_served(&mut open(address).await).await);
}

#[tokio::test]
async fn an_unauthenticated_client_is_disconnected() {
    let address = start(RespConfig { password: Some("hunter2".to_owned()), ..short_timeouts() }).await;
    assert_eq!(until_closed(&mut open(address).await).await, b"");
}

#[tokio::test]
async fn idle_connections_are_closed_after_the_timeout() {
    let address = start(RespConfig { idle_ticks: 3, ..short_timeouts() }).await;
    let mut idle = open(address).await;
    assert!(is_served(&mut idle).await);
    assert_eq!(until_closed(&mut idle).await, b"");
}

#[tokio::test]
async fn a_connection_over_the_limit_gets_an_error() {
    let address = start(RespConfig { connections: 1, ..short_timeouts() }).await;
    let mut first = open(address).await;
    assert!(is_served(&mut first).await);
    assert_eq!(until_closed(&mut open(address).await).await, b"-ERR max number of clients reached\r\n");
    assert!(is_served(&mut first).await);
    drop(first);
    // Its slot is free as soon as the server has detected the close.
    while !is_served(&mut open(address).await).await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
