//! Cells: three nodes with links of 0, 80 and 200 ms round trip keep one limit of 1,000 in 10 s, Tollgate in each mode of
//! `region`, and gubernator with the same links. Nodes have their counters in memory.
//!
//! First three times the limit is spread evenly over the nodes for 30 s: what the worst window admits, as a part of the
//! limit, and what a request costs at the node that is not the owner. Then 1,000 requests reach each node at once. The limit
//! is a fixed window, so that windows of other limiters can be compared; the owner of `owner` and `leased` is the first node.
//! Nodes, links and clients share the machine: times are upper bounds.
//!
//! | module | contents |
//! |---|---|
//! | `nodes` | three nodes, the links between them, and their metrics |
//! | `tollgate`, `gubernator` | how they are started |
//! | `load` | the traffic of the scenario |
//! | `connection` | the HTTP client |
//! | `cost` | `--cost`: what the modes cost |
//! | `regions` | `--regions`: regions that fail |

mod connection;
mod cost;
#[path = "../../crates/tollgate/tests/harness/far_link.rs"]
#[allow(dead_code, reason = "shared with tests, which also change the length of a link")]
mod far_link;
mod gubernator;
mod load;
mod nodes;
mod regions;
mod tollgate;

pub(crate) use cost::run as run_cost;
pub(crate) use regions::run as run_regions;

use crate::report::{at_most, heading, note};
use nodes::Nodes;
use std::time::Duration;

/// How long to measure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Full,
}

const LIMIT: u64 = 1_000;
const WINDOW_MS: u64 = 10_000;
const NODES: usize = 3;

/// Runs Tollgate in all modes and its peers over all links.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (trips, windows): (&[u64], u64) = match length {
        Length::Short => (&[0, 80], 1),
        Length::Full => (&[0, 80, 200], 3),
    };
    heading("Three nodes with counters in memory, one key, 1,000 in 10 s");
    println!(
        "| | round trip ms | steady: worst window ÷ limit | burst: admitted ÷ limit | p50 ms at a far node | lag ms |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    let mut worst = 0.0_f64;
    for mode in ["shared", "split", "owner", "leased"] {
        for trip in trips {
            let nodes = tollgate::start(&tollgate::window(mode), Duration::from_millis(*trip))?;
            let (steady, burst) = row(&format!("Tollgate, {mode}"), *trip, &nodes, windows)?;
            if mode != "shared" {
                worst = worst.max(steady).max(burst);
            }
        }
    }
    let failed = gubernator_rows(trips, windows)?;
    println!();
    at_most("admitted share of the limit, all modes but shared", worst, 1.0);
    note("(shared: at most 1 + 2 bursts in the worst case; `tollgate explain --bound` prints it)");
    failed.iter().for_each(|line| note(line));
    Ok(())
}

/// Prints the rows of gubernator. Returns what to say about them.
fn gubernator_rows(trips: &[u64], windows: u64) -> Result<Vec<String>, String> {
    let Some(program) = gubernator::program() else {
        return Ok(vec![
            "gubernator not found, left out; run make .tools/bin/gubernator-node (needs Go)".to_owned(),
        ]);
    };
    let mut failed = Vec::new();
    for (name, behavior) in [("owner by hash", "BATCHING"), ("GLOBAL", "GLOBAL")] {
        for trip in trips {
            let nodes = gubernator::start(&program, behavior, Duration::from_millis(*trip))?;
            row(&format!("gubernator, {name}"), *trip, &nodes, windows)?;
            let errors = nodes.errors();
            if errors > 0 {
                failed.push(format!(
                    "(gubernator, {name}, {trip} ms: {errors} requests got an error, not counted as admitted)"
                ));
            }
        }
    }
    Ok(failed)
}

/// Measures one row. Returns what the worst window and the burst admitted.
fn row(name: &str, trip: u64, nodes: &Nodes, windows: u64) -> Result<(f64, f64), String> {
    let (steady, p50) = nodes.steady(windows)?;
    let burst = nodes.burst()?;
    let lag = nodes.lag_ms().map_or_else(|| "–".to_owned(), |lag| format!("{lag:.0}"));
    println!("| {name} | {trip} | {steady:.2} | {burst:.2} | {p50:.1} | {lag} |");
    Ok((steady, burst))
}
