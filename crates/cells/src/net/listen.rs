//! Serves the requests of other cells.
//!
//! Connections are accepted by the loop of all servers, within the file descriptors that these share. A connection that has
//! sent no first message may be closed for another one; a link never is.

use super::LinkedStore;
use super::dial::{SAME_PART, is_same_part};
use super::frames;
use super::handshakes::{Handshake, Handshakes};
use super::links::QUEUE;
use super::repeated::Repeated;
use super::tls::CellTls;
use crate::message::{self, Hello, Message};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tollgate_core::{Clock, CounterStore, LogThrottle};
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::{Activity, ConnectionSlots, LATE, PortLimits, WhenFull};

/// Requests of one connection that are performed at once; further ones are not read.
const MAX_REQUESTS: usize = 256;
/// Time without a message after which a connection ends: a living peer sends one in each tick.
const IDLE: Duration = Duration::from_secs(60);

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Links at once: some for each cell there may be.
    links: usize,
    /// Connections whose first message has not come.
    handshakes: usize,
    /// Time that each of the first messages may take.
    patience: Duration,
}

/// What all connections share.
struct Places {
    links: Arc<Semaphore>,
    /// Messages about cells that are refused: they try again each second.
    refusals: Repeated,
}

const PATIENCE: Duration = Duration::from_secs(3);
const BOUNDS: Bounds = Bounds { links: 512, handshakes: 256, patience: PATIENCE };
/// Time beyond which a connection is closed that has not done so itself: it has sent neither the first messages of TLS nor
/// its own.
const FIRST_REQUEST: Duration = PATIENCE.saturating_mul(2).saturating_add(LATE);

/// Returns the limits of a listener for other cells, of which `guaranteed` connections are kept from all other listeners.
#[must_use]
pub const fn port_limits(guaranteed: usize) -> PortLimits {
    PortLimits {
        guaranteed,
        first_request: FIRST_REQUEST,
        ..PortLimits::new(BOUNDS.links + BOUNDS.handshakes, WhenFull::Wait)
    }
}

/// Accepts connections of other cells within `slots`, for as long as the process runs. Without certificates the listener must
/// be on loopback.
pub async fn serve<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    store: Arc<LinkedStore<S, C>>,
    listener: TcpListener,
    slots: ConnectionSlots,
    tls: Option<Arc<CellTls>>,
) {
    serve_within(BOUNDS, store, listener, slots, tls).await;
}

async fn serve_within<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    bounds: Bounds,
    store: Arc<LinkedStore<S, C>>,
    listener: TcpListener,
    slots: ConnectionSlots,
    tls: Option<Arc<CellTls>>,
) {
    let places = Places { links: Arc::new(Semaphore::new(bounds.links)), refusals: Repeated::default() };
    let (places, handshakes) = (Arc::new(places), Handshakes::new(bounds.handshakes));
    let ended = LogThrottle::default();
    // Links are used until the process has ended.
    let shutdown = Shutdown { timeout: Duration::ZERO, new_connections: NewConnections::Reject };
    accept::serve(listener, slots, shutdown, std::future::pending(), |stream, _, _, activity| {
        let (handshake, is_full) = handshakes.begin();
        if is_full && let Some(count) = ended.due(store.now()) {
            let most = bounds.handshakes;
            tracing::warn!(
                count,
                "more than {most} connections to --cell have sent no first message: the oldest ones were closed"
            );
        }
        let (store, tls, places) = (Arc::clone(&store), tls.clone(), Arc::clone(&places));
        async move {
            let begun = (handshake, bounds.patience, activity);
            if let Err(error) = connection(store, stream, tls, begun, places).await {
                tracing::debug!(%error, "a connection of another cell ended");
            }
        }
    })
    .await;
}

async fn connection<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    store: Arc<LinkedStore<S, C>>,
    stream: TcpStream,
    tls: Option<Arc<CellTls>>,
    (handshake, patience, activity): (Handshake, Duration, Arc<Activity>),
    places: Arc<Places>,
) -> io::Result<()> {
    match tls {
        None => {
            let (stream, first) = handshake.run(first_message(stream, patience)).await?;
            // From here on it is a link, which no newcomer displaces.
            activity.busy();
            requests(store, stream, first, &places).await
        }
        Some(tls) => {
            let acceptor = tokio_rustls::TlsAcceptor::from(tls.configs().0);
            let steps = async {
                let stream = timely(patience, acceptor.accept(stream)).await?;
                first_message(stream, patience).await
            };
            let (stream, first) = handshake.run(steps).await?;
            activity.busy();
            requests(store, stream, first, &places).await
        }
    }
}

async fn timely<T>(within: Duration, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(within, step).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Reads who has opened a connection.
async fn first_message<T: AsyncRead + Unpin>(
    mut stream: T,
    within: Duration,
) -> io::Result<(T, (u64, Hello))> {
    match timely(within, frames::read_first(&mut stream)).await? {
        Some((id, Message::Hello(from))) => Ok((stream, (id, from))),
        _ => Err(io::Error::other("not the first message of a cell")),
    }
}

async fn requests<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    store: Arc<LinkedStore<S, C>>,
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    (id, from): (u64, Hello),
    places: &Places,
) -> io::Result<()> {
    let (own, slot) = (store.hello(), Arc::clone(&places.links).try_acquire_owned().ok());
    let refusal = refusal(&store, &own, &from);
    let refusal = refusal
        .or_else(|| slot.is_none().then(|| Message::Failed("too many cells are connected".to_owned())));
    let answer = refusal.unwrap_or(Message::Hello(own));
    stream.write_all(&message::encode(id, &answer)).await?;
    stream.flush().await?;
    if let Message::Failed(why) | Message::OtherProcess(why) = answer {
        if places.refusals.is_due(&format!("{}: {why}", from.cell), store.now()) {
            tracing::warn!(cell = from.cell, "a cell was refused: {why}");
        }
        return Ok(());
    }
    let (replies, mut queue) = mpsc::channel(QUEUE);
    let (mut reading, mut writing) = tokio::io::split(stream);
    let (from, running) = (Arc::new(from), Arc::new(Semaphore::new(MAX_REQUESTS)));
    let read = async {
        loop {
            let next = tokio::time::timeout(IDLE, frames::read(&mut reading)).await;
            let Some((id, message)) = next.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? else {
                return Ok(());
            };
            // Its replacement has been reached since.
            if matches!(message, Message::Batch(_)) && store.members().has_other_process(&from, store.now()) {
                tracing::warn!(cell = from.cell, "the link of a cell was closed: {OTHER_PROCESS}");
                return Err(io::Error::other(OTHER_PROCESS));
            }
            let Ok(slot) = Arc::clone(&running).acquire_owned().await else { return Ok(()) };
            let (store, from, replies) = (Arc::clone(&store), Arc::clone(&from), replies.clone());
            tokio::spawn(async move {
                let _slot = slot;
                let reply = store.handle(&from, message).await;
                let _ = replies.send(message::encode(id, &reply)).await;
            });
        }
    };
    tokio::select! {
        ended = read => ended,
        ended = frames::write_all(&mut writing, &mut queue) => ended,
    }
}

/// Why one of two processes with one name is refused.
const OTHER_PROCESS: &str = "another process has the same --region and --cell-url, and answers; end one of the two, or give \
                             each its own --cell-url";

/// Returns the refusal of a cell.
fn refusal<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    own: &Hello,
    from: &Hello,
) -> Option<Message> {
    let why = if from.key_check != own.key_check {
        "the cells hash API keys with different secrets; give all the same identity.api_key.secret_file"
            .to_owned()
    } else if from.cell == own.cell {
        format!("two cells have the name `{}`", own.cell)
    } else if store.members().has_other_process(from, store.now()) {
        return Some(Message::OtherProcess(OTHER_PROCESS.to_owned()));
    } else if is_same_part(own, from) {
        SAME_PART.to_owned()
    } else if store.members().expects_region(&from.region) {
        return None;
    } else {
        format!("no peer of region `{}` is configured here", from.region)
    };
    Some(Message::Failed(why))
}

#[cfg(test)]
mod tests;
