//! One node: a process with the same stack as the binary (leases over a deny cache over Redis) that checks as fast as it can.
//!
//! `bench lease-node URL MODE PERIOD WARM SECONDS COUNT BURST KEYS TASKS`. It prints a line when it is ready, waits for a
//! line, prints another after the warm-up, and at the end: checks, admitted, decided locally, start and end in microseconds
//! since the Unix epoch, p50 and p99 in nanoseconds.

use crate::traffic::{Law, Traffic};
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tollgate_core::{PermitId, SystemClock, TimeDelta};
use tollgate_engine::{Check, DecisionId, Limiter, Origin};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{DenyCache, LeaseConfig, LeasedStore, RedisConfig, RedisStore};

type Stack = LeasedStore<DenyCache<RedisStore, SystemClock>, RedisStore, SystemClock>;

/// One check in this many is timed.
const TIMED: u64 = 16;
/// Number of checks after which a task yields, as one does that reads requests from a socket.
const TURN: u64 = 16;

#[derive(Default)]
struct Tally {
    checks: AtomicU64,
    admitted: AtomicU64,
    /// Decisions by the fail policy, without the store.
    failed: AtomicU64,
    ended: AtomicBool,
}

pub(crate) fn node(arguments: &[&str]) -> Result<(), String> {
    let [url, mode, period, ref numbers @ ..] = *arguments else {
        return Err("missing arguments: URL MODE PERIOD".to_owned());
    };
    let numbers: Vec<u64> = numbers.iter().filter_map(|number| number.parse().ok()).collect();
    let [warm, seconds, count, burst, keys, tasks] = numbers[..] else {
        return Err("expected six numbers: WARM SECONDS COUNT BURST KEYS TASKS".to_owned());
    };
    let rules = rules(if mode == "roomy" { "leased" } else { mode }, count, period, burst)?;
    let mut leases = LeaseConfig { nodes: 4, ..LeaseConfig::default() };
    if mode == "roomy" {
        (leases.max_keys, leases.idle) = (1_000_000, TimeDelta::from_secs(10));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(async {
        let clock = SystemClock::new();
        let mut config = RedisConfig::parse(url).map_err(|error| error.to_string())?;
        config.deadline = Duration::from_secs(5);
        let redis = RedisStore::connect(config);
        let stack = LeasedStore::new(DenyCache::new(redis.clone(), clock, 65_536), redis, clock, leases);
        let limiter = Arc::new(Limiter::new(rules, stack, Arc::new(clock)));
        tokio::spawn(run_lease_tasks(Arc::clone(&limiter)));
        print_line("ready")?;
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map_err(|error| error.to_string())?;
        drive(&limiter, warm, seconds, keys, tasks).await
    })
}

fn print_line(what: &str) -> Result<(), String> {
    println!("{what}");
    std::io::stdout().flush().map_err(|error| error.to_string())
}

fn rules(mode: &str, count: u64, period: &str, burst: u64) -> Result<Arc<Ruleset>, String> {
    // Without a mode, a limit is central and leased while hot.
    let mode = if mode == "adaptive" { String::new() } else { format!(", mode: {mode}") };
    let limit = format!("{{count: {count}, period: {period}, burst: {burst}}}");
    let text = format!("domain: bench\ndescriptors:\n  - {{key: user, limit: {limit}{mode}}}\n");
    let source = Source { name: "bench.yaml".to_owned(), text };
    Ruleset::load(&[source], &Options::default()).map(Arc::new).map_err(|error| error.to_string())
}

/// Runs lease tasks as the binary does.
async fn run_lease_tasks(limiter: Arc<Limiter<Stack>>) {
    loop {
        tokio::select! {
            () = limiter.store().task_ready() => {}
            () = tokio::time::sleep(Duration::from_millis(250)) => {}
        }
        for errand in limiter.store().due_tasks() {
            let limiter = Arc::clone(&limiter);
            tokio::spawn(async move {
                limiter.store().run_task(errand, PermitId(DecisionId::generate().0)).await;
            });
        }
    }
}

async fn drive(
    limiter: &Arc<Limiter<Stack>>,
    warm: u64,
    seconds: u64,
    keys: u64,
    tasks: u64,
) -> Result<(), String> {
    let tally = Arc::new(Tally::default());
    let mut start = micros();
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let seed = u64::from(std::process::id()) << 32 | task << 16;
            tokio::spawn(run_checks(Arc::clone(limiter), Arc::clone(&tally), keys, seed))
        })
        .collect();
    if warm > 0 {
        tokio::time::sleep(Duration::from_secs(warm)).await;
        start = micros();
    }
    let seen = |tally: &Tally| {
        let central = limiter.store().stats().central;
        [tally.checks.load(Ordering::Relaxed), tally.admitted.load(Ordering::Relaxed), central]
    };
    let before = if warm > 0 { seen(&tally) } else { [0; 3] };
    print_line("warm")?;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    tally.ended.store(true, Ordering::Relaxed);
    let mut nanos: Vec<u32> = Vec::new();
    for task in running {
        nanos.extend(task.await.map_err(|error| error.to_string())?);
    }
    let [checks, admitted, central]: [u64; 3] = {
        let after = seen(&tally);
        std::array::from_fn(|at| after[at] - before[at])
    };
    let end = micros();
    let failed = tally.failed.load(Ordering::Relaxed);
    if failed > 0 {
        return Err(format!("{failed} checks were decided without the store"));
    }
    nanos.sort_unstable();
    let percentile = |percentile: usize| nanos.get(nanos.len() * percentile / 100).copied().unwrap_or(0);
    let local = checks.saturating_sub(central);
    print_line(&format!("{checks} {admitted} {local} {start} {end} {} {}", percentile(50), percentile(99)))
}

/// Checks until the end of the run; returns nanoseconds of the timed checks.
#[allow(clippy::disallowed_methods, reason = "a stopwatch")]
async fn run_checks(limiter: Arc<Limiter<Stack>>, tally: Arc<Tally>, keys: u64, seed: u64) -> Vec<u32> {
    let mut nanos = Vec::new();
    let mut traffic = Traffic::new(keys, if keys > 1 { Law::Zipf } else { Law::Uniform }, seed);
    let mut n = 0_u64;
    loop {
        traffic.next_block();
        for key in &traffic.block {
            if tally.ended.load(Ordering::Relaxed) {
                return nanos;
            }
            let attributes = [("user", key.as_str())];
            let check = Check::attributes("bench", &attributes);
            let begun = n.is_multiple_of(TIMED).then(Instant::now);
            let decision = limiter.check(&check).await;
            if let Some(begun) = begun {
                nanos.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
            }
            tally.admitted.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
            tally.checks.fetch_add(1, Ordering::Relaxed);
            if decision.origin != Origin::Store {
                tally.failed.fetch_add(1, Ordering::Relaxed);
            }
            n += 1;
            if n.is_multiple_of(TURN) {
                tokio::task::yield_now().await;
            }
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "nodes are compared by the wall clock")]
fn micros() -> u64 {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(unix.as_micros()).unwrap_or(0)
}
