//! Quota streams (Envoy's RLQS): 1,000 streams that report 100 buckets each, every five seconds as Envoy does, to one
//! server on one core with counters in memory. Measures the share of the core in each report interval, and the time from
//! a report to the assignment of each of its buckets.
//!
//! All streams begin at once, as after a restart of the server; from then on each reports in its own part of the interval.
//! The clients are tasks of this process, on the other core.

#![allow(clippy::disallowed_methods, reason = "a stopwatch")]

use crate::http2::{Received, frame, greeting, grpc_headers, grpc_message, push};
use crate::process::{CLIENT_CORE, Server, tollgate_binary};
use crate::redis::pin;
use crate::report::{at_most, heading};
use prost::Message as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tollgate_server::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_usage_reports::BucketQuotaUsage;
use tollgate_server::rls::proto::envoy::service::rate_limit_quota::v3::{
    BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
};

const METHOD: &str = "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas";
const RULES: &str =
    "{domain: edge, descriptors: [{key: tenant, limit: {count: 100000, period: second, burst: 1000000}}]}";
/// Connections, and streams on each.
const CONNECTIONS: u64 = 100;
const STREAMS: u64 = 10;
const BUCKETS: usize = 100;
/// Envoy's report interval.
const INTERVAL: Duration = Duration::from_secs(5);
/// Requests that a stream admits per bucket and interval: a fifth of the limits in all.
const ADMITTED: u64 = 100;
/// Share of the core.
const BAR: f64 = 1.0;

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

/// What the clients have seen.
#[derive(Clone)]
struct Seen {
    actions: Arc<AtomicU64>,
    /// Microseconds from a report to the assignment of a bucket.
    times: mpsc::UnboundedSender<f64>,
}

/// Runs the benchmark; needs the server's binary.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let intervals = match length {
        Length::Short => 3,
        Length::Full => 12,
    };
    pin(CLIENT_CORE);
    let rules = std::env::temp_dir().join(format!("tollgate-bench-rlqs-{}.yaml", std::process::id()));
    std::fs::write(&rules, RULES).map_err(|error| error.to_string())?;
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let (path, local) = (rules.display().to_string(), "127.0.0.1:0");
    let flags = ["serve", "--rules", &path, "--grpc", local, "--http", local, "--resp", "off"];
    let server = Server::start(&tollgate_binary(&myself)?, &flags, "grpc")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(|error| error.to_string())?.block_on(measure(&server, intervals));
    std::fs::remove_file(&rules).map_err(|error| error.to_string())?;
    result
}

async fn measure(server: &Server, intervals: u32) -> Result<(), String> {
    let streams = CONNECTIONS * STREAMS;
    heading(&format!("Quota streams: {streams} streams of {BUCKETS} buckets, a report every 5 s, one core"));
    println!("| interval | share of the core | assignments | p50 ms | p99 ms | slowest ms | MiB resident |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let (times, mut measured) = mpsc::unbounded_channel();
    let seen = Seen { actions: Arc::default(), times };
    let (mut failures, start) = (tokio::task::JoinSet::new(), Instant::now());
    for connection in 0..CONNECTIONS {
        failures.spawn(serve(server.address.clone(), connection, start, seen.clone()));
    }
    let (mut ticks, mut actions, mut worst) = (server.ticks(), 0, 0.0_f64);
    for interval in 1..=intervals {
        tokio::select! {
            () = tokio::time::sleep_until(start + INTERVAL * interval) => {}
            Some(ended) = failures.join_next() => {
                let ended = ended.map_err(|error| error.to_string())?;
                return Err(ended.err().unwrap_or_else(|| "a client ended".to_owned()));
            }
        }
        let (now_ticks, now_actions) = (server.ticks(), seen.actions.load(Ordering::Relaxed));
        let share = (now_ticks - ticks) as f64 / 100.0 / INTERVAL.as_secs_f64();
        let mut micros: Vec<f64> = std::iter::from_fn(|| measured.try_recv().ok()).collect();
        micros.sort_by(f64::total_cmp);
        let part = |part: f64| {
            let at = (micros.len() as f64 * part) as usize;
            let micros = micros.get(at.min(micros.len().saturating_sub(1)));
            micros.map_or_else(|| "–".to_owned(), |micros| format!("{:.0}", micros / 1e3))
        };
        let name = if interval == 1 { "all at once".to_owned() } else { interval.to_string() };
        println!(
            "| {name} | {share:.2} | {} | {} | {} | {} | {:.0} |",
            now_actions - actions,
            part(0.5),
            part(0.99),
            part(1.0),
            server.resident_kib() as f64 / 1024.0
        );
        (ticks, actions) = (now_ticks, now_actions);
        worst = if interval > 1 { worst.max(share) } else { worst };
    }
    println!();
    at_most("share of one core, the most of an interval after the first", worst, BAR);
    Ok(())
}

/// One stream of a connection.
struct Stream {
    next_report: Instant,
    reported: Instant,
    /// Buckets whose assignment has not come since the last report.
    waiting: [bool; BUCKETS],
    /// Bytes of an incomplete message.
    partial: Vec<u8>,
}

/// Opens a connection and serves its streams.
async fn serve(address: String, connection: u64, start: Instant, seen: Seen) -> Result<(), String> {
    let fail = |error: std::io::Error| error.to_string();
    let mut socket = TcpStream::connect(&address).await.map_err(fail)?;
    socket.set_nodelay(true).map_err(fail)?;
    let [first, later] = [0, ADMITTED].map(report);
    let mut opening = greeting();
    let mut streams = Vec::new();
    for at in 0..STREAMS {
        let id = number(at);
        push(&mut opening, frame::HEADERS, frame::END_HEADERS, id, &grpc_headers(METHOD));
        push(&mut opening, frame::DATA, 0, id, &first);
        // Spread over the interval after the first.
        let part = (connection * STREAMS + at) as f64 / (CONNECTIONS * STREAMS) as f64;
        let next_report = start + INTERVAL + INTERVAL.mul_f64(part);
        let reported = Instant::now();
        streams.push(Stream { next_report, reported, waiting: [true; BUCKETS], partial: Vec::new() });
    }
    socket.write_all(&opening).await.map_err(fail)?;
    let mut received = Received::new();
    loop {
        let due = streams.iter().map(|stream| stream.next_report).min().unwrap_or(start);
        tokio::select! {
            () = tokio::time::sleep_until(due) => {
                let mut out = Vec::new();
                let now = Instant::now();
                for (at, stream) in (0..).zip(&mut streams).filter(|(_, stream)| stream.next_report <= now) {
                    push(&mut out, frame::DATA, 0, number(at), &later);
                    (stream.reported, stream.waiting) = (now, [true; BUCKETS]);
                    stream.next_report += INTERVAL;
                }
                socket.write_all(&out).await.map_err(fail)?;
            }
            read = socket.read(received.room()) => {
                received.add(read.map_err(fail)?)?;
                let mut replies = Vec::new();
                while let Some(frame) = received.next()? {
                    replies.extend(frame.reply()?.unwrap_or_default());
                    if frame.ends_stream() {
                        return Err(format!("the server ended stream {}", frame.stream));
                    }
                    if frame.kind == frame::DATA {
                        let stream = streams.get_mut(frame.stream as usize / 2);
                        stream.ok_or("a frame of no stream")?.receive(frame.payload, &seen)?;
                    }
                }
                socket.write_all(&replies).await.map_err(fail)?;
            }
        }
    }
}

/// Returns the number of a connection's stream.
fn number(at: u64) -> u32 {
    u32::try_from(2 * at + 1).unwrap_or(u32::MAX)
}

/// Returns a report of all buckets.
fn report(allowed: u64) -> Vec<u8> {
    let usage = |tenant: usize| BucketQuotaUsage {
        bucket_id: Some(BucketId { bucket: [("tenant".to_owned(), tenant.to_string())].into() }),
        num_requests_allowed: allowed,
        ..BucketQuotaUsage::default()
    };
    let reports = RateLimitQuotaUsageReports {
        domain: "edge".to_owned(),
        bucket_quota_usages: (0..BUCKETS).map(usage).collect(),
    };
    grpc_message(&reports.encode_to_vec())
}

impl Stream {
    /// Reads what has come of the stream's messages.
    fn receive(&mut self, payload: &[u8], seen: &Seen) -> Result<(), String> {
        self.partial.extend_from_slice(payload);
        while let Some((head, rest)) = self.partial.split_first_chunk::<5>() {
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let Some(message) = rest.get(..length) else { break };
            let message = RateLimitQuotaResponse::decode(message).map_err(|error| error.to_string())?;
            self.partial.drain(..5 + length);
            seen.actions.fetch_add(message.bucket_action.len() as u64, Ordering::Relaxed);
            let late = self.reported.elapsed().as_nanos() as f64 / 1e3;
            for action in message.bucket_action {
                let tenant = action.bucket_id.and_then(|id| id.bucket.get("tenant")?.parse::<usize>().ok());
                let waiting = tenant.and_then(|tenant| self.waiting.get_mut(tenant));
                if std::mem::take(waiting.ok_or("an action for no bucket")?) {
                    let _ = seen.times.send(late);
                }
            }
        }
        Ok(())
    }
}
