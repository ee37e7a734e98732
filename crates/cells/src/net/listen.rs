//! Serves the requests of other cells.

use super::LinkedStore;
use super::dial::{SAME_PART, is_same_part};
use super::frames;
use super::links::QUEUE;
use super::tls::CellTls;
use crate::message::{self, Hello, Message};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tollgate_core::{Clock, CounterStore};

/// Connections at once: some for each cell there may be.
const MAX_CONNECTIONS: usize = 512;
/// Requests of one connection that are performed at once; further ones are not read.
const MAX_REQUESTS: usize = 256;
/// Time that the first messages may take.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Time without a message after which a connection ends: a living peer sends one in each tick.
const IDLE: Duration = Duration::from_secs(60);

/// Accepts connections of other cells, for as long as the process runs. Without certificates the listener must be on
/// loopback.
pub async fn serve<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    store: Arc<LinkedStore<S, C>>,
    listener: TcpListener,
    tls: Option<Arc<CellTls>>,
) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of another cell");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (store, tls) = (Arc::clone(&store), tls.clone());
        tokio::spawn(async move {
            let _slot = slot;
            if let Err(error) = connection(store, stream, tls).await {
                tracing::debug!(%error, "a connection of another cell ended");
            }
        });
    }
}

async fn connection<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    store: Arc<LinkedStore<S, C>>,
    stream: TcpStream,
    tls: Option<Arc<CellTls>>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match tls {
        None => requests(store, stream).await,
        Some(tls) => {
            let acceptor = tokio_rustls::TlsAcceptor::from(tls.configs().0);
            let accepted = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
            requests(store, accepted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?).await
        }
    }
}

async fn requests<S: CounterStore + 'static, C: Clock + Clone + 'static>(
    store: Arc<LinkedStore<S, C>>,
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
) -> io::Result<()> {
    let first = tokio::time::timeout(HANDSHAKE, frames::read_first(&mut stream)).await;
    let Some((id, Message::Hello(from))) = first.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?
    else {
        return Err(io::Error::other("not the first message of a cell"));
    };
    let own = store.hello();
    let refusal = refusal(&store, &own, &from);
    let answer = refusal.clone().map_or(Message::Hello(own), Message::Failed);
    stream.write_all(&message::encode(id, &answer)).await?;
    stream.flush().await?;
    if let Some(why) = refusal {
        tracing::warn!(cell = from.cell, "a cell was refused: {why}");
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

/// Returns why a cell is refused.
fn refusal<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    own: &Hello,
    from: &Hello,
) -> Option<String> {
    if from.key_check != own.key_check {
        return Some(
            "the cells hash API keys with different secrets; give all the same identity.api_key.secret_file"
                .to_owned(),
        );
    }
    if from.cell == own.cell {
        return Some(format!("two cells have the name `{}`", own.cell));
    }
    if store.members().has_other_process(from, store.now()) {
        return Some(OTHER_PROCESS.to_owned());
    }
    if is_same_part(own, from) {
        return Some(SAME_PART.to_owned());
    }
    (!store.members().expects_region(&from.region))
        .then(|| format!("no peer of region `{}` is configured here", from.region))
}
