//! Regions that fail: three regions of two nodes and a Redis each, over links that are long, lose their order and break, keep the
//! limits of attackers and of honest callers; gubernator with six nodes over the same links.
//!
//! All modes run beside each other, each with limits of its own. An attacker sends three times its limit, evenly to all nodes;
//! in the middle of each fault another one sends half of a burst to every node at once. Honest callers use half of their
//! limits, one through all regions and one at home in the region that is cut off. What each mode admits is compared with its
//! bound over every span, and what honest callers are denied is counted. The ledger, a limit that never runs out, shows when
//! all cells know what all have admitted, and whether units were lost or counted twice.
//!
//! | module | contents |
//! |---|---|
//! | `links` | the links between nodes, and how they fail |
//! | `sites` | the processes of the regions |
//! | `subjects` | Tollgate and gubernator: how they are started and asked |
//! | `callers` | the traffic |
//! | `faults` | what fails and when, and when all agree again |
//! | `figures` | what was admitted as a part of the bound, and what honest callers were denied |

mod callers;
mod faults;
mod figures;
mod links;
mod sites;
mod subjects;

use super::Length;
use crate::report::{at_most, heading, note};
use callers::Caller;
use faults::{Fault, Found};
use figures::Figures;
use std::time::Duration;
use subjects::Subject;

/// Regions, with two nodes each. `owner` and `leased` name the first one.
const REGIONS: [&str; 3] = ["eu", "us", "ap"];
const NODES: usize = 2 * REGIONS.len();
/// Units in a second that the limits have, and the burst of an attacker's limit: more than other cells admit within the
/// silence time, as the documentation asks of regions with several nodes.
const RATE: u64 = 40;
const BURST: u64 = 240;
/// Least and most milliseconds of a round trip between regions.
const TRIP_MS: (u64, u64) = (40, 120);

/// Runs Tollgate and its peer; needs the server's binary and redis-server.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let fault = Duration::from_secs(if length == Length::Full { 10 } else { 6 });
    let (least, most) = TRIP_MS;
    heading(&format!(
        "Three regions of two nodes, round trips of {least} to {most} ms, {RATE} a second with a burst of {BURST}"
    ));
    let worst = measure(&subjects::tollgate()?, fault)?;
    match subjects::gubernator()? {
        Some(gubernator) => drop(measure(&gubernator, fault)?),
        None => note("gubernator not found, left out; run make .tools/bin/gubernator-node (needs Go)"),
    }
    println!();
    at_most("admitted ÷ bound, Tollgate, all modes and faults", worst, 1.0);
    Ok(())
}

/// Runs one limiter through all faults and prints its tables. Returns the largest part of a bound that was admitted.
fn measure(subject: &Subject, length: Duration) -> Result<f64, String> {
    let (found, records) = faults::run(subject, length)?;
    let figures = Figures::new(records);
    println!(
        "| {} | region | burst: admitted ÷ limit | ÷ bound | steady: admitted ÷ rate | worst span ÷ bound | denied: honest, everywhere | denied: honest, in ap |",
        subject.name
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|");
    let mut worst = 0.0_f64;
    for one in &found {
        for (at, mode) in subject.modes.iter().enumerate() {
            let bound = mode.bound(one);
            let burst = figures.admitted_at_once(at, one.number);
            let of_bound = bound.part(burst.0, burst.1);
            let span = figures.worst_span(at, one, bound);
            let denied = |caller| percent(figures.denied(at, caller, one));
            println!(
                "| {} | {} | {:.2} | {of_bound:.2} | {:.2} | {span:.2} | {} | {} |",
                one.fault.name(),
                mode.name,
                burst.0 as f64 / BURST as f64,
                figures.admitted_of_rate(at, one),
                denied(Caller::Even),
                denied(Caller::Home),
            );
            worst = worst.max(of_bound).max(span);
        }
    }
    println!();
    if subject.has_metrics {
        agreement(&found);
    }
    Ok(worst)
}

/// Prints when the cells agreed again, and on what.
fn agreement(found: &[Found]) {
    let regions = REGIONS.join(", ");
    println!(
        "| | largest lag ms | all agree again, s after its end | ledger: admitted | counted beyond that in {regions} |"
    );
    println!("|---|---:|---:|---:|---:|");
    for Found { fault, lag_ms, agreed, ledger, admitted, .. } in found {
        let agreed = match agreed {
            _ if *fault == Fault::Nothing => "–".to_owned(),
            Some(after) => format!("{:.1}", after.as_secs_f64()),
            None => "not in time".to_owned(),
        };
        let beyond =
            ledger.iter().map(|one| one.map_or_else(|| "?".to_owned(), |units| format!("{units:+}")));
        let beyond: Vec<String> = beyond.collect();
        println!("| {} | {lag_ms:.0} | {agreed} | {admitted} | {} |", fault.name(), beyond.join(", "));
    }
    println!();
}

/// Returns a part of a number of requests in words.
fn percent((part, all): (usize, usize)) -> String {
    match all {
        0 => "–".to_owned(),
        _ => format!("{:.1}%", 100.0 * part as f64 / all as f64),
    }
}
