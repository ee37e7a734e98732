//! The accept loop of every server: connections within their slots (`connections`), accepted with back-off, drained
//! before the end.
//!
//! A server gives [`serve`] a function that serves one connection. The gateway, whose settings change while it runs, uses
//! [`accept`], which `serve` is made of.

use super::connections::{Activity, ConnectionSlot, ConnectionSlots, WhenFull};
use super::drain::{Drain, GRACE_PERIOD};
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

/// The pause after a failed accept. The process is out of file descriptors, most likely: wait for some to be closed
/// rather than spin.
const BACK_OFF: Duration = Duration::from_millis(50);
/// Minimum time between two log lines about failed accepts.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// A peer that has vanished is detected after about half a minute: 15 s of silence, then three probes.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_PROBES: u32 = 3;

/// How many connections the kernel keeps until they are accepted. One too many is dropped, and its client tries again
/// only after a second, then after three: a probe must find a place in the queue while a flood waits for slots.
const BACKLOG: i32 = 4096;

/// Sets the options of a listener's connections, which inherit them: no delay of small packets, and probes that detect
/// peers which have vanished; and a long queue.
pub fn prepare(listener: &TcpListener) {
    let socket = socket2::SockRef::from(listener);
    let keep_alive =
        socket2::TcpKeepalive::new().with_time(KEEP_ALIVE_AFTER).with_interval(KEEP_ALIVE_INTERVAL);
    let prepared = socket
        .set_tcp_keepalive(&keep_alive.with_retries(KEEP_ALIVE_PROBES))
        .and_then(|()| socket.set_tcp_nodelay(true))
        .and_then(|()| socket.listen(BACKLOG));
    if let Err(error) = prepared {
        tracing::warn!(%error, "cannot set the options of a listener; vanished clients are detected late");
    }
}

/// A bound listener, of TCP or of another kind.
pub trait Listener: Send + Sync {
    /// A connection.
    type Stream: Send;

    /// Sets the options of its connections.
    fn prepare(&self);

    /// Waits for the next connection, and returns it with its peer. Those without a network have an address of loopback.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>> + Send;

    /// Sends what fits in the send buffer of a new connection.
    fn try_write(stream: &Self::Stream, message: &[u8]);
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    fn prepare(&self) {
        prepare(self);
    }

    fn accept(&self) -> impl Future<Output = io::Result<(TcpStream, SocketAddr)>> + Send {
        Self::accept(self)
    }

    fn try_write(stream: &TcpStream, message: &[u8]) {
        drop(stream.try_write(message));
    }
}

/// Accepts one connection within `slots`, and ends those whose first request is overdue meanwhile.
pub async fn accept<L: Listener>(
    listener: &L,
    slots: &ConnectionSlots,
) -> (L::Stream, SocketAddr, ConnectionSlot) {
    loop {
        let (stream, peer) = accept_any(listener, slots).await;
        match (slots.admit(peer.ip()), slots.when_full()) {
            (Some(slot), _) => return (stream, peer, slot),
            // The send buffer of a new connection has room for a line; if the write fails, the connection is closed
            // anyway.
            (None, WhenFull::Reject(message)) => L::try_write(&stream, message),
            // The others must not wait for one network.
            (None, WhenFull::Wait) if slots.is_network_full(peer.ip()) => drop(stream),
            (None, WhenFull::Wait) => {
                let slot = slots.admit_when_free(peer.ip()).await;
                return (stream, peer, slot);
            }
        }
    }
}

/// Accepts one connection, however many there are.
async fn accept_any<L: Listener>(listener: &L, slots: &ConnectionSlots) -> (L::Stream, SocketAddr) {
    loop {
        slots.closed().await;
        let accepted = match slots.end_silent() {
            None => listener.accept().await,
            Some(due) => match tokio::time::timeout_at(due, listener.accept()).await {
                Ok(accepted) => accepted,
                Err(_) => continue,
            },
        };
        match accepted {
            Ok(accepted) => return accepted,
            // The client gave up before it was accepted.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(error) => {
                log_failure(&error);
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }
}

/// Logs a failed accept, at most once a second for the whole process: out of file descriptors, every listener fails
/// twenty times a second.
fn log_failure(error: &io::Error) {
    static BASE: OnceLock<Instant> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static FAILED: AtomicU64 = AtomicU64::new(0);
    let failed = FAILED.fetch_add(1, Ordering::Relaxed) + 1;
    let now = BASE.get_or_init(Instant::now).elapsed().as_millis() as u64;
    let next = NEXT.load(Ordering::Relaxed);
    let after = now + LOG_INTERVAL.as_millis() as u64;
    if now >= next && NEXT.compare_exchange(next, after, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        FAILED.fetch_sub(failed, Ordering::Relaxed);
        tracing::warn!(%error, failed, "accept failed; if the process has too many open files, raise the limit");
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
/// when to finish, and it keeps its [`Activity`] up to date.
pub async fn serve<L: Listener, F, C>(
    listener: L,
    slots: ConnectionSlots,
    shutdown: Shutdown,
    stop: impl Future<Output = ()> + Send,
    connection: F,
) where
    F: Fn(L::Stream, SocketAddr, Arc<Drain>, Arc<Activity>) -> C + Send + Sync,
    C: Future<Output = ()> + Send + 'static,
{
    listener.prepare();
    let accept_into = async |drain: &Arc<Drain>| {
        loop {
            let (stream, peer, slot) = accept(&listener, &slots).await;
            let connection = connection(stream, peer, Arc::clone(drain), slot.activity());
            spawn(drain, slot, connection);
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

/// Runs one connection in a task that counts as open until it ends. It is dropped when its slot is taken from it.
pub fn spawn(
    drain: &Arc<Drain>,
    slot: ConnectionSlot,
    connection: impl Future<Output = ()> + Send + 'static,
) {
    let guard = drain.enter();
    tokio::spawn(async move {
        {
            let activity = slot.activity();
            let mut connection = pin!(connection);
            let mut is_registered = false;
            poll_fn(|cx| {
                // The waker of a task does not change, so it is registered once.
                let has_ended = match std::mem::replace(&mut is_registered, true) {
                    true => activity.has_ended(),
                    false => activity.poll_ended(cx).is_ready(),
                };
                if has_ended { Poll::Ready(()) } else { connection.as_mut().poll(cx) }
            })
            .await;
        }
        drop((slot, guard));
    });
}
