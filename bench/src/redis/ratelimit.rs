//! The rate limit service over gRPC compared with envoyproxy/ratelimit: the same Redis, the same requests with four
//! descriptors.
//!
//! The service has one core; Redis and `h2load` share the other. Measures the maximum rate, and the latency at a rate that
//! both can sustain.

use super::server::Redis;
use crate::grpc::{METHOD, load, message};
use crate::process::{CLIENT_CORE, SERVER_CORE, Server, free_port, median, tollgate_binary, tool};
use crate::report::{heading, note};
use std::path::{Path, PathBuf};
use std::process::Command;

const PEERS: &str = "domain: bench
descriptors:
  - {key: user, rate_limit: {unit: second, requests_per_unit: 1000000000}}
  - {key: api_key, rate_limit: {unit: second, requests_per_unit: 1000000000}}
  - {key: path, rate_limit: {unit: minute, requests_per_unit: 1000000000}}
  - {key: tenant, rate_limit: {unit: hour, requests_per_unit: 1000000000}}
";

/// Tollgate's rules; `mode` is appended to each limit.
fn rules(mode: &str) -> String {
    let limit = |key: &str, unit: &str| format!("  - {{key: {key}, limit: 1000000000/{unit}{mode}}}\n");
    let all = [("user", "second"), ("api_key", "second"), ("path", "minute"), ("tenant", "hour")];
    let all: String = all.iter().map(|(key, unit)| limit(key, unit)).collect();
    format!("domain: bench\ndescriptors:\n{all}")
}

struct Contestant {
    name: &'static str,
    server: Server,
    rates: Vec<f64>,
    /// Microseconds per request of the service's CPU time, and of Redis's.
    own: Vec<f64>,
    redis: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Contestant {
    fn new(name: &'static str, server: Server) -> Self {
        let [rates, own, redis, p50, p99] = std::array::from_fn(|_| Vec::new());
        Self { name, server, rates, own, redis, p50, p99 }
    }
}

pub(super) fn measure(requests: u32, rounds: usize) -> Result<(), String> {
    heading("Compared with envoyproxy/ratelimit: four descriptors over gRPC, the same Redis");
    let redis = Redis::start(CLIENT_CORE)?;
    let folder = std::env::temp_dir().join(format!("tollgate-bench-rl-{}", std::process::id()));
    let write = |path: &str, bytes: &[u8]| {
        let path = folder.join(path);
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(&path, bytes)).map(|()| path).map_err(|error| error.to_string())
    };
    let payload = write("four", &message(4))?;
    write("runtime/config/bench.yaml", PEERS.as_bytes())?;
    let (central, adaptive) = (
        write("central.yaml", rules(", mode: central").as_bytes())?,
        write("plain.yaml", rules("").as_bytes())?,
    );

    let mut contestants = Vec::new();
    if let Some(program) = tool("service_cmd") {
        contestants.push(Contestant::new("envoyproxy/ratelimit", peer(&program, &folder, &redis)?));
    } else {
        note("envoyproxy/ratelimit not found, skipped; run make .tools/bin/service_cmd (needs Go)");
    }
    for (name, rules) in [("tollgate, mode: central", central), ("tollgate, default mode", adaptive)] {
        contestants.push(Contestant::new(name, ours(&rules, &redis)?));
    }
    for round in 0..=rounds {
        for contestant in &mut contestants {
            let (ticks, cpu) = (contestant.server.ticks(), redis.cpu_micros()?);
            let rate = load(&contestant.server.address, &payload, requests)?;
            if round > 0 {
                contestant.rates.push(rate);
                let own = (contestant.server.ticks() - ticks) as f64 * 1e4;
                contestant.own.push(own / f64::from(requests));
                contestant.redis.push((redis.cpu_micros()? - cpu) / f64::from(requests));
            }
        }
    }
    let slowest = contestants.iter().map(|one| median(one.rates.clone())).fold(f64::INFINITY, f64::min);
    let half = (slowest / 2.0 / 8.0).floor().max(1.0);
    let log = folder.join("times");
    for _ in 0..rounds {
        for contestant in &mut contestants {
            let mut times = paced(&contestant.server.address, &payload, half, &log)?;
            times.sort_unstable();
            let part = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64;
            contestant.p50.push(part(0.5));
            contestant.p99.push(part(0.99));
        }
    }
    println!("| | requests/s | µs of CPU | µs of Redis CPU | p50 µs at {:.0}/s | p99 µs |", half * 8.0);
    println!("|---|---:|---:|---:|---:|---:|");
    for one in contestants {
        let [rate, own, redis, p50, p99] = [one.rates, one.own, one.redis, one.p50, one.p99].map(median);
        println!("| {} | {rate:.0} | {own:.1} | {redis:.1} | {p50:.0} | {p99:.0} |", one.name);
    }
    std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())
}

fn ours(rules: &Path, redis: &Redis) -> Result<Server, String> {
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let (rules, url) = (rules.display().to_string(), redis.url());
    let local = "127.0.0.1:0";
    let flags =
        ["serve", "--rules", &rules, "--grpc", local, "--http", local, "--resp", "off", "--store", &url];
    // A long deadline, because the peer has none: slow responses are to be measured.
    let deadline = ["--store-deadline-ms", "1000"];
    Server::start(&tollgate_binary(&myself)?, &[&flags[..], &deadline[..]].concat(), "grpc")
}

fn peer(program: &Path, folder: &Path, redis: &Redis) -> Result<Server, String> {
    let (grpc, http, debug) = (free_port()?, free_port()?, free_port()?);
    let root: PathBuf = folder.join("runtime");
    let local = "127.0.0.1";
    let environment = [
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", redis.address()),
        ("RUNTIME_ROOT", &folder.display().to_string()),
        ("RUNTIME_SUBDIRECTORY", "runtime"),
        ("RUNTIME_WATCH_ROOT", "false"),
        ("USE_STATSD", "false"),
        ("LOG_LEVEL", "error"),
        ("HOST", local),
        ("GRPC_HOST", local),
        ("DEBUG_HOST", local),
        ("GRPC_PORT", &grpc),
        ("PORT", &http),
        ("DEBUG_PORT", &debug),
    ];
    debug_assert!(root.exists());
    Server::start_with(SERVER_CORE, program, &[], &environment, &format!("{local}:{grpc}"))
}

/// Returns microseconds of each request, at this rate on each of eight connections.
fn paced(address: &str, payload: &Path, rate: f64, log: &Path) -> Result<Vec<u64>, String> {
    let _ = std::fs::remove_file(log);
    let requests = (rate * 8.0 * 4.0) as u64;
    let output = Command::new("taskset")
        .args(["-c", CLIENT_CORE, "h2load", "-c8", "-m16", "-t1", "-n", &requests.to_string()])
        .arg(format!("--rps={rate}"))
        .arg(format!("--log-file={}", log.display()))
        .arg(format!("--data={}", payload.display()))
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers"])
        .arg(format!("http://{address}{METHOD}"))
        .output()
        .map_err(|error| format!("cannot run h2load (package nghttp2-client): {error}"))?;
    let text = std::fs::read_to_string(log).map_err(|error| error.to_string())?;
    let times: Vec<u64> =
        text.lines().filter_map(|line| line.split('\t').nth(2)?.trim().parse().ok()).collect();
    if times.is_empty() {
        return Err(format!("h2load logged no times:\n{}", String::from_utf8_lossy(&output.stdout)));
    }
    Ok(times)
}
