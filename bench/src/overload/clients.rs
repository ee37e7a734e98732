//! The clients: an open-loop Poisson load of four priorities and 50 tenants. A client leaves after a second.
//!
//! Latency is counted from the time at which a request was due, not from when it was sent: a busy machine is no excuse.

use super::workers::CAPACITY;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate_core::conformance::SplitMix64;

/// Time after which a client is gone.
pub(crate) const PATIENCE: f64 = 1.0;
pub(crate) const PRIORITIES: [&str; 4] = ["critical", "important", "normal", "sheddable"];
const MIX: [f64; 4] = [0.15, 0.25, 0.4, 0.2];
const TENANTS: usize = 50;
const ENTERPRISE: usize = 5;
const PRO: usize = 10;
const CALLERS: u64 = 20;

/// Returns a tenant's tier and its part of the load: at three times the capacity, enterprise and pro tenants stay within
/// their guarantees; one of the others sends ten times as much as the rest.
fn tenant(number: usize) -> (&'static str, f64) {
    match number {
        number if number < ENTERPRISE => ("enterprise", 0.75),
        number if number < ENTERPRISE + PRO => ("pro", 0.12),
        number if number + 1 == TENANTS => ("free", 10.0),
        _ => ("free", 1.0),
    }
}

/// A part of a scenario.
#[derive(Clone, Copy)]
pub(crate) struct Phase {
    pub(crate) seconds: f64,
    /// Load in capacities of the upstream as it is at first.
    pub(crate) load: f64,
    /// How many times as long a request takes.
    pub(crate) slower: f64,
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Fate {
    /// Served after this many seconds.
    Served(f64),
    /// Answered with an error.
    Refused,
    /// Not answered while the client waited.
    Lost,
}

#[derive(Clone, Copy)]
pub(crate) struct Sent {
    /// When it was due, in seconds.
    pub(crate) at: f64,
    /// How late it was sent.
    pub(crate) late: f64,
    pub(crate) priority: usize,
    pub(crate) is_guaranteed: bool,
    pub(crate) fate: Fate,
}

/// Sends a scenario's load to an address; `on_phase` is called when a phase begins.
pub(crate) async fn send(
    address: SocketAddr,
    phases: &[Phase],
    seed: u64,
    mut on_phase: impl FnMut(&Phase),
) -> Vec<Sent> {
    let mut random = SplitMix64::new(seed);
    let tenants: Vec<(&str, f64)> = (0..TENANTS).map(tenant).collect();
    let weights: Vec<f64> = tenants.iter().map(|(_, weight)| *weight).collect();
    let idle: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    let (start, mut at, mut end) = (Instant::now(), 0.0, 0.0);
    let (mut sent, mut requests) = (Vec::new(), JoinSet::new());
    for phase in phases {
        end += phase.seconds;
        on_phase(phase);
        loop {
            let next = at + random.exponential(1.0 / (phase.load * CAPACITY));
            if next > end {
                // What is left of the gap has no memory: the next phase begins with a gap of its own.
                at = end;
                break;
            }
            at = next;
            let due = start + Duration::from_secs_f64(at);
            tokio::time::sleep_until(due).await;
            let late = due.elapsed().as_secs_f64();
            let (priority, tenant) = (random.weighted_index(&MIX), random.weighted_index(&weights));
            let caller = random.below(CALLERS);
            let head = format!(
                "GET / HTTP/1.1\r\nhost: api\r\nx-api-key: key-{tenant}-{caller}\r\nx-tenant: tenant-{tenant}\r\nx-tier: {}\r\nx-class: {}\r\n\r\n",
                tenants[tenant].0, PRIORITIES[priority]
            );
            let idle = Arc::clone(&idle);
            let one = Sent { at, late, priority, is_guaranteed: tenant < ENTERPRISE + PRO, fate: Fate::Lost };
            requests.spawn(async move {
                let until = due + Duration::from_secs_f64(PATIENCE);
                let status = tokio::time::timeout_at(until, request(address, &head, &idle)).await;
                let fate = match status {
                    Ok(Ok(200)) => Fate::Served(due.elapsed().as_secs_f64()),
                    Ok(Ok(_)) => Fate::Refused,
                    Ok(Err(_)) | Err(_) => Fate::Lost,
                };
                Sent { fate, ..one }
            });
            while let Some(done) = requests.try_join_next() {
                sent.extend(done);
            }
        }
    }
    sent.extend(requests.join_all().await);
    sent.sort_by(|a, b| a.at.total_cmp(&b.at));
    sent
}

/// Sends a request over an idle connection or a new one. Returns the status.
async fn request(address: SocketAddr, head: &str, idle: &Mutex<Vec<TcpStream>>) -> std::io::Result<u16> {
    let reused = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let mut stream = match reused {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            stream
        }
    };
    stream.write_all(head.as_bytes()).await?;
    let mut received = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut received).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let Some(answer) = parse(&received) else { continue };
        if answer.keeps_open {
            idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
        return Ok(answer.status);
    }
}

struct Answer {
    status: u16,
    keeps_open: bool,
}

/// Reads a response, once all of it is there.
fn parse(received: &[u8]) -> Option<Answer> {
    let end = received.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = std::str::from_utf8(received.get(..end)?).ok()?.to_ascii_lowercase();
    let value = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let length: usize = value("content-length:").map_or(Some(0), |length| length.parse().ok())?;
    if received.len() < end + 4 + length {
        return None;
    }
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, keeps_open: value("connection:") != Some("close") })
}
