//! Connects to peers, and sends them what was consumed in each tick.

use super::LinkedStore;
use super::frames;
use super::links::Links;
use super::repeated::Repeated;
use super::tls::CellTls;
use crate::members::WHOLE;
use crate::message::{self, Hello, Message};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tollgate_core::{Clock, CounterStore, TimeDelta, Timestamp};

/// Time that a connection and the first messages may take.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Longest pause between two attempts to connect.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Address of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerUrl {
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Whether the link is encrypted, and both sides show certificates.
    pub is_tls: bool,
}

impl PeerUrl {
    /// Returns whether the peer is on this machine.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    }

    /// Parses `http://HOST:PORT` (loopback only) or `https://HOST:PORT`.
    ///
    /// # Errors
    /// What is wrong, in words for an operator.
    pub fn parse(url: &str) -> Result<Self, String> {
        let (is_tls, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err("must begin with https://, or with http:// on loopback".to_owned()),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let wrong = || "must be HOST:PORT without a path, as in https://eu.example.com:7400".to_owned();
        let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || !host.chars().all(is_plain) {
            return Err(wrong());
        }
        let url = Self { host: host.to_owned(), port, is_tls };
        if !is_tls && !url.is_loopback() {
            return Err(
                "http:// is for loopback alone; use https://, with certificates on both sides".to_owned()
            );
        }
        Ok(url)
    }
}

/// Moves consumption into the outboxes in each tick, for as long as the process runs. Beside it, makes debits that the store
/// refused after its deadline.
pub async fn run_ticks<S: CounterStore, C: Clock + Clone>(
    store: Arc<LinkedStore<S, C>>,
    ticks: watch::Sender<u64>,
) {
    futures_util::future::join(exchange_in_ticks(&store, ticks), debit_in_ticks(&store)).await;
}

async fn debit_in_ticks<S: CounterStore, C: Clock + Clone>(store: &LinkedStore<S, C>) {
    let mut interval = tokio::time::interval(duration(store.members().config().tick));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        store.make_late_debits().await;
    }
}

async fn exchange_in_ticks<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    ticks: watch::Sender<u64>,
) {
    let mut interval = tokio::time::interval(duration(store.members().config().tick));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut was_displaced, mut was_left_out, mut had_joined) = (false, false, false);
    let mut share = SettledShare::default();
    loop {
        interval.tick().await;
        store.tick();
        let is_displaced = store.members().is_displaced(store.now());
        if was_displaced && !is_displaced {
            tracing::info!("no other process has this cell's name any more: this process is the cell");
        }
        was_displaced = is_displaced;
        let is_left_out = store.members().is_left_out() && !store.members().config().learns_peers;
        if is_left_out && !was_left_out {
            tracing::warn!(
                "this cell has had no store, or no majority of the cells, for too long: it leaves what a hash gives it to others"
            );
        }
        was_left_out = is_left_out;
        let has_joined = store.members().has_joined(store.now()) && !store.members().config().learns_peers;
        if has_joined && !had_joined {
            tracing::info!("this cell decides what a hash gives it");
        }
        had_joined = has_joined;
        if !is_displaced {
            let silence = store.members().config().silence;
            if let Some(settled) = share.settle(store.share_millionths(), silence, store.now()) {
                log_share(settled);
            }
        }
        ticks.send_modify(|tick| *tick += 1);
    }
}

/// Writes by which part of shared limits this cell decides from now on.
fn log_share(millionths: u64) {
    if millionths < WHOLE {
        let percent = millionths / (WHOLE / 100);
        tracing::warn!(
            "not all cells answer each other: this one decides by {percent}% of shared limits until they do"
        );
    } else {
        tracing::info!("all cells answer: this one decides by the whole of shared limits again");
    }
}

/// The share of shared limits, as it is written to the log: once it has settled, because cells notice a silence one after
/// another. A start is no outage unless the others are not reached in the silence time.
#[derive(Default)]
struct SettledShare {
    logged: Option<u64>,
    last: u64,
    since: Timestamp,
}

impl SettledShare {
    /// Returns a share that is to be written.
    fn settle(&mut self, millionths: u64, silence: TimeDelta, now: Timestamp) -> Option<u64> {
        if self.since == Timestamp::ZERO || millionths != self.last {
            (self.last, self.since) = (millionths, now);
        }
        let pause = match (self.logged, millionths >= WHOLE) {
            (_, true) => TimeDelta::ZERO,
            (None, false) => silence,
            (Some(_), false) => TimeDelta::from_micros(silence.as_micros() / 4),
        };
        if self.logged == Some(millionths) || now.since(self.since) < pause {
            return None;
        }
        // Nothing has been lost if the first is the whole.
        let is_first = self.logged.replace(millionths).is_none();
        (!is_first || millionths < WHOLE).then_some(millionths)
    }
}

pub(super) fn duration(delta: TimeDelta) -> Duration {
    Duration::from_micros(delta.as_micros())
}

/// What is written of one link.
#[derive(Default)]
struct LinkLog {
    failures: Repeated,
    refusals: Repeated,
}

/// Keeps the link to one peer connected, for as long as the process runs.
pub async fn run_links<S: CounterStore, C: Clock + Clone>(
    store: Arc<LinkedStore<S, C>>,
    links: Arc<Links>,
    peer: usize,
    url: PeerUrl,
    tls: Option<Arc<CellTls>>,
    ticks: watch::Receiver<u64>,
) {
    let mut pause = Duration::from_millis(50);
    let log = LinkLog::default();
    loop {
        let started = tokio::time::Instant::now();
        if let Err(error) = link(&store, &links, (peer, &url), tls.as_deref(), ticks.clone(), &log).await
            && log.failures.is_due(&error.to_string(), store.now())
        {
            let PeerUrl { host, port, .. } = &url;
            tracing::warn!(%error, "link to the cell at {host}:{port} failed; trying again");
        }
        links.close(peer);
        store.members().on_unlinked(peer);
        pause = if started.elapsed() > MAX_PAUSE {
            Duration::from_millis(50)
        } else {
            (pause * 2).min(MAX_PAUSE)
        };
        tokio::time::sleep(pause).await;
    }
}

async fn link<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    links: &Links,
    (peer, url): (usize, &PeerUrl),
    tls: Option<&CellTls>,
    ticks: watch::Receiver<u64>,
    log: &LinkLog,
) -> io::Result<()> {
    let connect = TcpStream::connect((url.host.as_str(), url.port));
    let stream = timely(connect).await?;
    stream.set_nodelay(true)?;
    match (url.is_tls, tls) {
        (false, _) => exchange(store, links, peer, stream, (ticks, log)).await,
        (true, None) => Err(io::Error::other("no certificates are configured")),
        (true, Some(tls)) => {
            let name = rustls::pki_types::ServerName::try_from(url.host.clone()).map_err(io::Error::other)?;
            let connector = tokio_rustls::TlsConnector::from(tls.configs().1);
            let stream = timely(connector.connect(name, stream)).await?;
            exchange(store, links, peer, stream, (ticks, log)).await
        }
    }
}

async fn timely<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(HANDSHAKE, step).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn exchange<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    links: &Links,
    peer: usize,
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    (ticks, log): (watch::Receiver<u64>, &LinkLog),
) -> io::Result<()> {
    let own = store.hello();
    stream.write_all(&message::encode(0, &Message::Hello(own.clone()))).await?;
    stream.flush().await?;
    let hello = match timely(frames::read(&mut stream)).await? {
        Some((_, Message::Hello(hello))) => hello,
        Some((_, Message::OtherProcess(why))) => {
            if store.on_displaced(peer) {
                tracing::error!(
                    "{why}: this process is not the cell, and denies what cells share until it is reached alone"
                );
            }
            return Err(io::Error::other(why));
        }
        Some((_, Message::Failed(why))) => return Err(io::Error::other(why)),
        _ => return Err(io::Error::other("the peer is no cell")),
    };
    check(store, peer, &own, &hello)?;
    if log.failures.end() {
        tracing::info!("linked to the cell {} of region {}", hello.cell, hello.region);
    }
    store.on_hello(peer, hello);
    let mut queue = links.open(peer);
    let (mut reading, mut writing) = tokio::io::split(stream);
    let read = async {
        while let Some((id, message)) = frames::read(&mut reading).await? {
            links.complete(peer, id, message);
        }
        Err(io::ErrorKind::ConnectionReset.into())
    };
    tokio::select! {
        ended = read => ended,
        ended = frames::write_all(&mut writing, &mut queue) => ended,
        ended = send_batches(store, links, peer, ticks, &log.refusals) => ended,
    }
}

/// Why two cells of a region with the same index refuse each other.
pub(super) const SAME_PART: &str = "two cells of one region have the same part of its limits; give each cell the same address \
                                    in its own --cell-url and in the --peer of the others";

/// Returns whether two cells would have the same part of a limit.
pub(super) fn is_same_part(one: &Hello, other: &Hello) -> bool {
    one.region == other.region && one.rank == other.rank
}

/// Refuses a peer that would count callers apart, or that is not the one configured.
fn check<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    peer: usize,
    own: &Hello,
    hello: &Hello,
) -> io::Result<()> {
    let Some(region) = store.members().peer(peer).map(|peer| peer.region) else {
        return Err(io::Error::other("the peer is gone"));
    };
    let wrong = if hello.key_check != own.key_check {
        "the peer hashes API keys with another secret; give all cells the same identity.api_key.secret_file"
            .to_owned()
    } else if hello.cell == own.cell {
        format!(
            "the peer has this cell's name `{}`; give each cell its own address in --peer and --cell",
            own.cell
        )
    } else if hello.region != region {
        format!("the peer is of region `{}`, and --peer says `{region}`", hello.region)
    } else if is_same_part(own, hello) {
        SAME_PART.to_owned()
    } else {
        if hello.cells_check != own.cells_check && hello.cells_check != 0 && own.cells_check != 0 {
            tracing::warn!(
                cell = hello.cell,
                "the cell is configured with other regions or weights: parts of limits differ"
            );
        }
        if hello.silence.is_some_and(|silence| Some(silence) != own.silence) {
            tracing::warn!(
                cell = hello.cell,
                "the cell has another --cell-silence-ms: owners by hash move after the longest of all"
            );
        }
        return Ok(());
    };
    Err(io::Error::other(wrong))
}

/// Sends a batch in each tick, and the next at once while there is more.
async fn send_batches<S: CounterStore, C: Clock + Clone>(
    store: &LinkedStore<S, C>,
    links: &Links,
    peer: usize,
    mut ticks: watch::Receiver<u64>,
    refusals: &Repeated,
) -> io::Result<()> {
    let within = duration(store.members().config().silence);
    loop {
        let batch = store.next_batch(peer);
        let (sequence, sent) = (batch.sequence, store.now());
        let message = Message::Batch(batch);
        let answer = links.call(peer, &message, within).await;
        // The outbox uses its memory again.
        drop(message);
        let answer = answer.map_err(io::Error::other)?;
        let more = store.on_batch_answer(peer, sequence, sent, &answer);
        // Its store cannot be reached, for example.
        if let Message::Failed(why) | Message::NotApplied(why, _) = &answer
            && refusals.is_due(why, store.now())
        {
            let cell = store.members().hello(peer).map(|hello| hello.cell.clone());
            tracing::warn!(cell, "the cell did not apply a batch of consumption: {why}; sending it again");
        }
        if !more && ticks.changed().await.is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the log has a share of a moment and not the one that holds, or nothing of a cell that reaches nobody.
    #[test]
    fn a_share_is_written_once_it_has_settled() {
        let silence = TimeDelta::from_secs(2);
        let written = |shares: &[(u64, u64)]| -> Vec<u64> {
            let mut share = SettledShare::default();
            let settled = |(tenth, millionths): &(u64, u64)| {
                share.settle(*millionths, silence, Timestamp::from_micros((10_000 + tenth) * 100_000))
            };
            shares.iter().filter_map(settled).collect()
        };
        let third = 333_333;
        assert!(written(&[(0, third), (5, WHOLE), (30, WHOLE)]).is_empty(), "it has just started");
        assert_eq!(written(&[(0, third), (10, third), (20, third), (30, third)]), [third]);
        let cut = [(0, WHOLE), (10, third), (12, 666_666), (18, 666_666), (40, 666_666), (42, WHOLE)];
        assert_eq!(written(&cut), [666_666, WHOLE]);
    }
}
