//! The accept loop of every server: connections bounded in number, accepted with back-off, drained before the end.
//!
//! A server gives [`serve`] a function that serves one connection. Servers whose settings change while they run (the
//! gateway) or whose connections are served by another library (gRPC) use [`accept`], which `serve` is made of.

use super::drain::{Drain, GRACE_PERIOD};
use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The pause after a failed accept. The process is out of file descriptors, most likely: wait for some to be closed
/// rather than spin.
const BACK_OFF: Duration = Duration::from_millis(50);

/// The connections that a listener may have open.
#[derive(Clone, Debug)]
pub struct ConnectionSlots {
    free: Arc<Semaphore>,
    when_full: WhenFull,
}

/// What happens to a client that connects while no slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits in the kernel's queue until a slot is free.
    Wait,
    /// It is sent these bytes and closed.
    Reject(&'static [u8]),
}

/// One admitted connection; dropping it frees its slot.
#[derive(Debug)]
pub struct ConnectionSlot(#[allow(dead_code, reason = "dropping it frees the slot")] OwnedSemaphorePermit);

impl ConnectionSlots {
    /// Admits at most `max` connections at a time.
    #[must_use]
    pub fn new(max: usize, when_full: WhenFull) -> Self {
        Self { free: Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS))), when_full }
    }
}

/// Accepts one connection within `slots`.
pub async fn accept(
    listener: &TcpListener,
    slots: &ConnectionSlots,
) -> (TcpStream, SocketAddr, ConnectionSlot) {
    // The semaphore is never closed.
    let acquire = || async { Arc::clone(&slots.free).acquire_owned().await.ok() };
    let mut reserved = match slots.when_full {
        WhenFull::Wait => acquire().await,
        WhenFull::Reject(_) => None,
    };
    loop {
        let (stream, peer) = accept_any(listener).await;
        let slot = reserved.take().or_else(|| Arc::clone(&slots.free).try_acquire_owned().ok());
        match (slot, slots.when_full) {
            (Some(slot), _) => return (stream, peer, ConnectionSlot(slot)),
            // The send buffer of a new connection has room for a line; if the write fails, the connection is closed
            // anyway.
            (None, WhenFull::Reject(message)) => drop(stream.try_write(message)),
            (None, WhenFull::Wait) => reserved = acquire().await,
        }
    }
}

/// Accepts one connection, however many there are.
async fn accept_any(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let _ = stream.set_nodelay(true);
                return (stream, peer);
            }
            // The client gave up before it was accepted.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }
}

/// How a server shuts down.
#[derive(Clone, Copy, Debug)]
pub struct Shutdown {
    /// Maximum time for open connections to finish.
    pub timeout: Duration,
    /// What happens to clients that connect during the drain.
    pub new_connections: NewConnections,
}

/// What happens to clients that connect while a server drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewConnections {
    /// They are served too, so that a probe can read that the process is not ready any more.
    Serve,
    /// The listener is closed first.
    Reject,
}

/// Accepts and serves connections until `stop` resolves, then drains. Each connection is a task; its [`Drain`] signals
/// when to finish.
pub async fn serve<F, C>(
    listener: TcpListener,
    slots: ConnectionSlots,
    shutdown: Shutdown,
    stop: impl Future<Output = ()> + Send,
    connection: F,
) where
    F: Fn(TcpStream, SocketAddr, Arc<Drain>) -> C + Send + Sync,
    C: Future<Output = ()> + Send + 'static,
{
    let accept_into = async |drain: &Arc<Drain>| {
        loop {
            let (stream, peer, slot) = accept(&listener, &slots).await;
            spawn(drain, slot, connection(stream, peer, Arc::clone(drain)));
        }
    };
    let (early, late) = (Arc::new(Drain::default()), Arc::new(Drain::default()));
    tokio::select! {
        () = stop => {}
        () = accept_into(&early) => {}
    }
    let draining = tokio::time::timeout(shutdown.timeout, early.run());
    if shutdown.new_connections == NewConnections::Reject {
        drop(listener);
        let _ = draining.await;
        return;
    }
    tokio::select! {
        _ = draining => {}
        () = accept_into(&late) => {}
    }
    drop(listener);
    let _ = tokio::time::timeout(GRACE_PERIOD, late.run()).await;
}

/// Runs one connection in a task that counts as open until it ends.
pub fn spawn(
    drain: &Arc<Drain>,
    slot: ConnectionSlot,
    connection: impl Future<Output = ()> + Send + 'static,
) {
    let guard = drain.enter();
    tokio::spawn(async move {
        connection.await;
        drop((slot, guard));
    });
}
