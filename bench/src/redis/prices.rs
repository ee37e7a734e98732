//! Cost of a request for the Redis server: Tollgate's store compared with the bare script of one limit, on the same servers.
//!
//! Contestants take turns in every round. Each has a rate (set by the slower of client and server) and the server's CPU time
//! per request (set by the server alone); the share of time in which the server was busy shows which of the two to read.
//! `redis-benchmark` keeps as many requests in flight as the store does.

use super::requests::{Kind, Requests};
use super::server::Redis;
use crate::process::{CLIENT_CORE, median, ticks};
use crate::report::{at_least, heading, note};
use std::process::Command;
use tollgate_store::RedisStore;

/// Requests in flight, over two connections.
pub(super) const IN_FLIGHT: usize = 256;
const TENANTS: u32 = 30_000;

/// The bare script: one limit, and nothing else.
const BARE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local next = tat + ARGV[1]
if next > now + ARGV[2] then return 0 end
redis.call('SET', KEYS[1], string.format('%d', next), 'PX', math.ceil((next - now) / 1000))
return 1";

/// Contestants in order.
const ROWS: [(&str, Server, Subject); 12] = [
    ("bare script of one limit", Server::Single, Subject::Bare),
    ("one limit, shared calls", Server::Single, Subject::Ours(Kind::One)),
    ("four limits, shared calls", Server::Single, Subject::Ours(Kind::Four)),
    ("denial of one, shared calls", Server::Single, Subject::Ours(Kind::DeniedOne)),
    ("denial of four, shared calls", Server::Single, Subject::Ours(Kind::DeniedFour)),
    ("bare script, in a cluster", Server::Cluster, Subject::Bare),
    ("one limit, separate calls", Server::Cluster, Subject::Ours(Kind::One)),
    ("four limits, separate calls", Server::Cluster, Subject::Ours(Kind::Four)),
    ("denial of one, separate calls", Server::Cluster, Subject::Ours(Kind::DeniedOne)),
    ("denial of four, separate calls", Server::Cluster, Subject::Ours(Kind::DeniedFour)),
    ("GET", Server::Single, Subject::Get),
    ("SET with PX", Server::Single, Subject::Set),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Server {
    Single,
    /// A cluster of one, in which requests of different slots need separate calls.
    Cluster,
}

#[derive(Clone, Copy)]
enum Subject {
    Bare,
    Get,
    Set,
    Ours(Kind),
}

/// Result of one run.
#[derive(Clone, Copy)]
struct Run {
    rate: f64,
    /// Microseconds of the server's CPU time per request.
    cost: f64,
    /// Microseconds of this process's CPU time per request: recomputing, encoding and decoding, tasks.
    client: f64,
    /// Requests that the server got per read: the depth of the pipeline.
    depth: f64,
}

impl Run {
    /// Returns the share of time in which the server was busy.
    fn busy(self) -> f64 {
        self.rate * self.cost / 1e6
    }
}

/// Requests per second with four limits when the client sends as fast as it can, and the maximum of one Redis core: with
/// shared calls, and with separate calls.
pub(super) struct Found {
    pub(super) four_a_second: f64,
    pub(super) a_core: [f64; 2],
}

/// Measures all contestants; prints the table and the bars.
pub(super) fn measure(
    runtime: &tokio::runtime::Runtime,
    single: &Redis,
    cluster: &Redis,
    requests: u32,
    rounds: usize,
) -> Result<Found, String> {
    let stores = [store(runtime, single)?, store(runtime, cluster)?];
    let load_requests = Requests::new(TENANTS);
    let sha: String = single.query(redis::cmd("SCRIPT").arg("LOAD").arg(BARE))?;
    let _: String = cluster.query(redis::cmd("SCRIPT").arg("LOAD").arg(BARE))?;
    for store in &stores {
        runtime.block_on(load_requests.fill(store))?;
    }
    let mut runs = vec![Vec::new(); ROWS.len()];
    // The first round fills what is still empty, and does not count.
    for round in 0..=rounds {
        for ((_, kind, subject), runs) in ROWS.iter().zip(&mut runs) {
            let (server, store) = match kind {
                Server::Single => (single, &stores[0]),
                Server::Cluster => (cluster, &stores[1]),
            };
            let (before, own, reads) = (server.cpu_micros()?, ticks("self"), server.reads()?);
            let key = "tg1:{0000__rand_int__}xxxxxxxx";
            let rate = match subject {
                Subject::Bare => {
                    load(server, requests, &["EVALSHA", &sha, "1", key, "1000000", "1000000000000"])?
                }
                Subject::Get => load(server, requests, &["GET", key])?,
                Subject::Set => load(server, requests, &["SET", key, "1794719042799955", "PX", "1000000"])?,
                Subject::Ours(requested) => {
                    runtime.block_on(load_requests.run(store, *requested, requests, IN_FLIGHT))?
                }
            };
            let cost = (server.cpu_micros()? - before) / f64::from(requests);
            let client = (ticks("self") - own) as f64 * 1e4 / f64::from(requests);
            let depth = f64::from(requests) / (server.reads()? - reads);
            if round > 0 {
                runs.push(Run { rate, cost, client, depth });
            }
        }
    }
    for store in &stores {
        if store.mismatches() > 0 {
            return Err("Redis script result mismatch".to_owned());
        }
    }
    Ok(report(&runs))
}

fn report(runs: &[Vec<Run>]) -> Found {
    let rate = |at: usize| median(runs[at].iter().map(|run| run.rate).collect());
    let cost = |at: usize| median(runs[at].iter().map(|run| run.cost).collect());
    heading("Cost of a request for Redis");
    println!(
        "| | requests/s | ÷ bare | server busy | µs of server CPU | bare ÷ it | µs of client CPU | requests per read |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    for (at, (name, kind, _)) in ROWS.iter().enumerate() {
        let bare = if *kind == Server::Single { 0 } else { 5 };
        println!(
            "| {name} | {:.0} | {:.2} | {:.0}% | {:.1} | {:.2} | {:.1} | {:.0} |",
            rate(at),
            rate(at) / rate(bare),
            100.0 * median(runs[at].iter().map(|run| run.busy()).collect()),
            cost(at),
            cost(bare) / cost(at),
            median(runs[at].iter().map(|run| run.client).collect()),
            median(runs[at].iter().map(|run| run.depth).collect()),
        );
    }
    note("\nBy the server's CPU time (the rate where the server is the bottleneck):");
    for (first, how) in [(0, "shared calls"), (5, "separate calls")] {
        at_least(&format!("four limits ÷ the bare script, {how}"), cost(first) / cost(first + 2), 0.6);
        at_least(&format!("one limit ÷ the bare script, {how}"), cost(first) / cost(first + 1), 0.9);
        at_least(&format!("denial ÷ allowance of one, {how}"), cost(first + 1) / cost(first + 3), 1.3);
        at_least(&format!("denial ÷ allowance of four, {how}"), cost(first + 2) / cost(first + 4), 1.3);
    }
    note("By the rate (with one client core, which also recomputes, encodes and decodes):");
    for (first, how) in [(0, "shared calls"), (5, "separate calls")] {
        at_least(&format!("four limits ÷ the bare script, {how}"), rate(first + 2) / rate(first), 0.6);
        at_least(&format!("one limit ÷ the bare script, {how}"), rate(first + 1) / rate(first), 0.9);
    }
    Found { four_a_second: rate(2), a_core: [1e6 / cost(2), 1e6 / cost(7)] }
}

/// Returns a store with long timeouts, so that slow responses are measured and not cut off.
pub(super) fn store(runtime: &tokio::runtime::Runtime, redis: &Redis) -> Result<RedisStore, String> {
    let mut config = tollgate_store::RedisConfig::parse(&redis.url()).map_err(|error| error.to_string())?;
    config.deadline = std::time::Duration::from_secs(5);
    config.connect_timeout = std::time::Duration::from_secs(5);
    let _within = runtime.enter();
    Ok(RedisStore::connect(config))
}

/// Returns requests per second of `redis-benchmark`, with as many in flight as the store has.
fn load(redis: &Redis, requests: u32, command: &[&str]) -> Result<f64, String> {
    let output = Command::new("taskset")
        .args(["-c", CLIENT_CORE, "redis-benchmark", "--csv", "-c", "2", "-p", &redis.port])
        .args(["-P", &(IN_FLIGHT / 2).to_string(), "-r", &TENANTS.to_string(), "-n", &requests.to_string()])
        .args(command)
        .output()
        .map_err(|error| format!("cannot run redis-benchmark (package redis-tools): {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let rate =
        text.lines().last().unwrap_or_default().split("\",\"").nth(1).and_then(|rate| rate.parse().ok());
    rate.ok_or_else(|| {
        format!("redis-benchmark printed no rate:\n{text}{}", String::from_utf8_lossy(&output.stderr))
    })
}
