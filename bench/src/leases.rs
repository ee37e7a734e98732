//! Leases: one hot key on four nodes, the cost of the local path, and a million keys with a Zipf distribution; each compared
//! with central mode, with a real redis-server on its own core.
//!
//! | module | contents |
//! |---|---|
//! | `node` | one node: a process with the same stack as the binary |
//! | `nodes` | four of them, started together |
//! | `local` | the local path compared with counters in memory |

mod local;
mod node;
mod nodes;

pub(crate) use node::node;

use crate::process::{SERVER_CORE, median};
use crate::redis::server::Redis;
use crate::report::{at_least, at_most, heading, note};
use nodes::{Load, Sum};

/// How long to measure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Full,
}

/// Runs all parts; needs redis-server and taskset.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (seconds, rounds) = match length {
        Length::Short => (3, 1),
        Length::Full => (10, 3),
    };
    hot_key(seconds, rounds)?;
    local::measure_all(length);
    many_keys(seconds)
}

/// One hot key. Throughput is measured at a limit that is never reached; accuracy at a limit of ten times the central rate,
/// with as much demand as possible.
fn hot_key(seconds: u64, rounds: usize) -> Result<(), String> {
    heading("One hot key, four nodes on one core, Redis on the other");
    println!(
        "| | checks/s | admitted ÷ (burst + rate · time) | script calls ÷ checks | Redis busy | p50 µs | p99 µs |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let run = |mode: &'static str, warm: u64, count: u64| {
        let load = Load { mode, warm, seconds, count, burst: count, keys: 1, tasks: 64, period: "1s" };
        nodes::run(&Redis::start(SERVER_CORE)?, &load)
    };
    let mut ratios = Vec::new();
    let (mut min_used, mut max_used, mut max_calls) = (f64::INFINITY, 0.0_f64, 0.0_f64);
    for _ in 0..rounds {
        let central = run("central", 1, 1_000_000)?;
        row("central", &central, None);
        let ample = run("leased", 1, 10_000_000)?;
        row("leased", &ample, None);
        ratios.push(ample.rate() / central.rate());
        let count = (10.0 * central.rate()) as u64;
        let leased = run("leased", 0, count)?;
        let used = leased.admitted / (count as f64 * (1.0 + leased.span));
        row(&format!("leased, {count}/s"), &leased, Some(used));
        (min_used, max_used) = (min_used.min(used), max_used.max(used));
        max_calls = max_calls.max(leased.calls / leased.checks).max(ample.calls / ample.checks);
        if leased.rate() < count as f64 {
            note("(the nodes could not reach the limit: the machine is too busy)");
        }
    }
    println!();
    at_least("throughput, leased ÷ central", median(ratios), 20.0);
    at_least("admitted share of the limit, minimum", min_used, 0.95);
    at_most("admitted share of the limit, maximum", max_used, 1.0);
    at_most("script calls in percent of checks, maximum", 100.0 * max_calls, 1.0);
    Ok(())
}

fn row(name: &str, sum: &Sum, used: Option<f64>) {
    println!(
        "| {name} | {:.0} | {} | {:.4}% | {:.0}% | {:.1} | {:.1} |",
        sum.rate(),
        used.map_or_else(|| "–".to_owned(), |used| format!("{used:.4}")),
        100.0 * sum.calls / sum.checks,
        100.0 * sum.busy,
        sum.p50 / 1e3,
        sum.p99 / 1e3
    );
}

/// A million keys, few of them hot.
fn many_keys(seconds: u64) -> Result<(), String> {
    heading("1,000,000 keys with a Zipf distribution, four nodes on one core");
    println!(
        "| | limit | checks/s | decided on the node | p50 µs | p99 µs | script calls ÷ checks | Redis busy |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|");
    let mut share = 0.0;
    for (mode, name, count, period) in [
        ("central", "central", 1_000, "1m"),
        ("adaptive", "central, leased while hot", 1_000, "1m"),
        ("leased", "leased", 1_000, "1m"),
        ("roomy", "leased, `max_keys: 1000000`, `idle_ms: 10000`", 1_000, "1m"),
        ("central", "central", 1_000, "1s"),
        ("leased", "leased", 1_000, "1s"),
    ] {
        let redis = Redis::start(SERVER_CORE)?;
        // Leases are created as keys are used.
        let warm = if mode == "central" { 1 } else { 2 * seconds };
        let load = Load { mode, warm, seconds, count, burst: count, keys: 1_000_000, tasks: 64, period };
        let sum = nodes::run(&redis, &load)?;
        let local_share = sum.local / sum.checks;
        println!(
            "| {name} | {count}/{period} | {:.0} | {:.1}% | {:.1} | {:.1} | {:.2}% | {:.0}% |",
            sum.rate(),
            100.0 * local_share,
            sum.p50 / 1e3,
            sum.p99 / 1e3,
            100.0 * sum.calls / sum.checks,
            100.0 * sum.busy
        );
        if mode == "leased" && period == "1m" {
            share = local_share;
        }
    }
    println!();
    at_least("decided on the node, leased", share, 0.95);
    Ok(())
}
