//! `tollgate ratelimit` compared with envoyproxy/ratelimit: the same environment, rule file, Redis and requests.
//!
//! The service has one core; Redis and the client share the other, for all contestants alike. A request has four descriptors,
//! two of them of one of 100,000 callers, or one descriptor of such a caller. Measures the maximum rate by number of
//! connections, the latency at a rate that all can sustain, and the memory of the service and of Redis after a request of each
//! of a million callers.

use crate::grpc::message_of;
use crate::grpc_load::{PLACEHOLDER, Requests, Until, closed, paced};
use crate::process::{CLIENT_CORE, SERVER_CORE, Server, free_port, median, tollgate_binary, tool};
use crate::redis::pin;
use crate::redis::server::Redis;
use crate::report::{at_least, at_most, heading, note};
use crate::traffic::mix;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// No request is denied, and no counter of a caller expires meanwhile.
const RULES: &str = "domain: bench
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 100000}}
  - {key: api_key, rate_limit: {unit: day, requests_per_unit: 1000000}}
  - {key: path, rate_limit: {unit: minute, requests_per_unit: 1000000000}}
  - {key: tenant, rate_limit: {unit: hour, requests_per_unit: 1000000000}}
  - {key: caller, rate_limit: {unit: day, requests_per_unit: 10}}
";
const CALLERS: u64 = 100_000;
/// Connections of the paced requests.
const PACED: u64 = 8;
/// Bars: requests per second and p99 beside the peer's.
const FASTER: f64 = 4.0;
const LATER: f64 = 0.5;

/// What to measure, and how long.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
    /// The memory after a million callers alone.
    Memory,
}

/// Requests to measure, and the numbers of connections that send them.
struct Case {
    title: &'static str,
    descriptors: &'static [(&'static str, &'static str)],
    connections: &'static [u64],
}

const CASES: [Case; 2] = [
    Case {
        title: "four descriptors",
        descriptors: &[
            ("user", PLACEHOLDER),
            ("api_key", PLACEHOLDER),
            ("path", "GET /orders"),
            ("tenant", "acme"),
        ],
        connections: &[1, 8, 32],
    },
    Case { title: "one descriptor", descriptors: &[("user", PLACEHOLDER)], connections: &[8] },
];

/// A service to start.
#[derive(Clone)]
struct Program {
    name: &'static str,
    path: PathBuf,
    arguments: &'static [&'static str],
    profile: &'static str,
}

struct Contestant {
    name: &'static str,
    server: Server,
    /// Its own: counters of one contestant would change the form in which another's are kept.
    store: Redis,
    /// Requests per second, by number of connections.
    rates: Vec<Vec<f64>>,
    /// Microseconds per request of the service's CPU time, and of Redis's.
    own: Vec<f64>,
    redis: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

/// Runs all parts; needs redis-server, the server's binary and envoyproxy/ratelimit.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (seconds, rounds, keys) = match length {
        Length::Short => (2, 2, 100_000),
        Length::Full | Length::Memory => (8, 5, 1_000_000),
    };
    let cases = if matches!(length, Length::Memory) { &[] } else { &CASES[..] };
    let peer = tool("service_cmd")
        .ok_or("envoyproxy/ratelimit not found; run make .tools/bin/service_cmd (needs Go)")?;
    let ours = tollgate_binary(&std::env::current_exe().map_err(|error| error.to_string())?)?;
    let ours = |name, profile| Program { name, path: ours.clone(), arguments: &["ratelimit"], profile };
    let programs = [
        Program { name: "envoyproxy/ratelimit", path: peer, arguments: &[], profile: "" },
        ours("tollgate ratelimit", "envoy"),
        ours("tollgate ratelimit, TOLLGATE_PROFILE=native", "native"),
    ];
    pin(CLIENT_CORE);
    let folder = std::env::temp_dir().join(format!("tollgate-bench-ratelimit-{}", std::process::id()));
    let rules = folder.join("runtime/config");
    let written =
        std::fs::create_dir_all(&rules).and_then(|()| std::fs::write(rules.join("bench.yaml"), RULES));
    written.map_err(|error| error.to_string())?;
    let span = Duration::from_secs(seconds);
    let result = cases
        .iter()
        .try_for_each(|case| speed(&programs, &folder, case, span, rounds))
        .and_then(|()| memory(&programs, &folder, keys));
    std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
    result
}

/// Rates and latencies, in turns, each over a Redis of its own.
fn speed(
    programs: &[Program],
    folder: &Path,
    case: &Case,
    span: Duration,
    rounds: usize,
) -> Result<(), String> {
    let requests = Requests::new(&message_of(case.descriptors), |number| mix(mix(number) % CALLERS));
    let start = |program: &Program| {
        let [own, redis_cpu, p50, p99] = std::array::from_fn(|_| Vec::new());
        let store = Redis::start(CLIENT_CORE)?;
        let server = start(program, folder, &store)?;
        let rates = vec![Vec::new(); case.connections.len()];
        let name = program.name;
        Ok::<_, String>(Contestant { name, server, store, rates, own, redis: redis_cpu, p50, p99 })
    };
    let mut contestants = programs.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    // The first round fills caches and counters.
    for round in 0..=rounds {
        for (at, connections) in case.connections.iter().copied().enumerate() {
            for one in &mut contestants {
                let (ticks, cpu) = (one.server.ticks(), one.store.cpu_micros()?);
                let address = &one.server.address;
                let (rate, answered) = closed(address, connections, &requests, Until::Passed(span))
                    .map_err(|error| format!("{}: {error}", one.name))?;
                if round > 0 {
                    one.rates[at].push(rate);
                    one.own.push((one.server.ticks() - ticks) as f64 * 1e4 / answered as f64);
                    one.redis.push((one.store.cpu_micros()? - cpu) / answered as f64);
                }
            }
        }
    }
    let slowest = contestants.iter().flat_map(|one| &one.rates).map(|rates| median(rates.clone()));
    let rate = (slowest.fold(f64::INFINITY, f64::min) / 2.0).floor().max(1.0);
    for _ in 0..rounds {
        for one in &mut contestants {
            let micros = paced(&one.server.address, PACED, &requests, rate, span)
                .map_err(|error| format!("{}: {error}", one.name))?;
            let part = |part: f64| micros.get((micros.len() as f64 * part) as usize).copied().unwrap_or(0.0);
            one.p50.push(part(0.5));
            one.p99.push(part(0.99));
        }
    }
    report(case, contestants, rate);
    Ok(())
}

fn report(case: &Case, contestants: Vec<Contestant>, rate: f64) {
    let Case { title, connections, .. } = case;
    heading(&format!("Compared with envoyproxy/ratelimit: {title} over gRPC, the same Redis"));
    let columns =
        connections.iter().map(|connections| format!("requests/s, {connections} × 16 in flight | "));
    let columns: Vec<String> = columns.collect();
    println!("| | {}µs of CPU | µs of Redis CPU | p50 µs at {rate:.0}/s | p99 µs |", columns.concat());
    println!("|---|{}---:|---:|---:|---:|", "---:|".repeat(connections.len()));
    let mut peer = None;
    let mut ratios = Vec::new();
    for one in contestants {
        let rates: Vec<f64> = one.rates.into_iter().map(median).collect();
        let [own, redis, p50, p99] = [one.own, one.redis, one.p50, one.p99].map(median);
        let shown: Vec<String> = rates.iter().map(|rate| format!("{rate:.0} | ")).collect();
        println!("| {} | {}{own:.1} | {redis:.1} | {p50:.0} | {p99:.0} |", one.name, shown.concat());
        match &peer {
            None => peer = Some((rates, p99)),
            Some((theirs, their_p99)) => {
                let worst = rates.iter().zip(theirs).map(|(own, theirs)| own / theirs);
                ratios.push((one.name, worst.fold(f64::INFINITY, f64::min), p99 / their_p99));
            }
        }
    }
    println!();
    for (name, faster, later) in ratios {
        at_least(
            &format!("{title}, {name}: requests/s ÷ envoyproxy/ratelimit's at its worst"),
            faster,
            FASTER,
        );
        at_most(&format!("{title}, {name}: p99 ÷ envoyproxy/ratelimit's"), later, LATER);
    }
}

/// Memory after one request of each of `keys` callers; a service and a Redis of its own for each contestant.
fn memory(programs: &[Program], folder: &Path, keys: u64) -> Result<(), String> {
    heading(&format!("Memory after {keys} callers, one limit each"));
    println!("| | MiB resident, before | after | peak | bytes of Redis per caller |");
    println!("|---|---:|---:|---:|---:|");
    let requests = Requests::new(&message_of(&[("caller", PLACEHOLDER)]), mix);
    for program in programs {
        let redis = Redis::start(CLIENT_CORE)?;
        let server = start(program, folder, &redis)?;
        let (before, empty) = (server.resident_kib(), redis.used_memory()?);
        closed(&server.address, PACED, &requests, Until::Sent(keys))
            .map_err(|error| format!("{}: {error}", program.name))?;
        let stored = (redis.used_memory()? - empty) / keys as f64;
        let mib = |kib: u64| kib as f64 / 1024.0;
        let (after, peak) = (server.resident_kib(), server.peak_kib());
        let name = program.name;
        println!("| {name} | {:.1} | {:.1} | {:.1} | {stored:.1} |", mib(before), mib(after), mib(peak));
        let counters: u64 = redis.query(&redis::cmd("DBSIZE"))?;
        if counters < keys {
            note(&format!("({counters} keys in Redis: some counters have expired, or were never stored)"));
        }
    }
    Ok(())
}

/// Starts a service by the environment that both read, and waits until it has counted in Redis.
fn start(program: &Program, folder: &Path, redis: &Redis) -> Result<Server, String> {
    let (grpc, http, debug) = (free_port()?, free_port()?, free_port()?);
    let local = "127.0.0.1";
    let mut environment = vec![
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", redis.address()),
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
        // A long deadline, because the peer has none: slow responses are to be measured.
        ("TOLLGATE_STORE_DEADLINE_MS", "1000"),
    ];
    let root = folder.display().to_string();
    environment.push(("RUNTIME_ROOT", &root));
    if !program.profile.is_empty() {
        environment.push(("TOLLGATE_PROFILE", program.profile));
    }
    let address = format!("{local}:{grpc}");
    let server = Server::start_with(SERVER_CORE, &program.path, program.arguments, &environment, &address)?;
    let one = Requests::new(&message_of(&[("tenant", program.name)]), mix);
    for _ in 0..1_000 {
        let size: u64 = redis.query(&redis::cmd("DBSIZE"))?;
        if size > 0 {
            redis.query::<()>(&redis::cmd("FLUSHALL"))?;
            return Ok(server);
        }
        closed(&address, 1, &one, Until::Sent(1)).map_err(|error| format!("{}: {error}", program.name))?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(format!("{} did not count in Redis", program.name))
}
