//! `leased` over links of 100 ms round trip: one key with 1,000 a second, all of it and half as much again requested, evenly
//! at the three nodes.

use super::super::Length;
use super::super::load::lock;
use super::super::nodes::Nodes;
use super::super::tollgate;
use crate::report::{at_least, at_most, heading};
use std::sync::Mutex;
use std::time::Duration;
use tollgate_testing::wait::Stopwatch;

const TRIP: Duration = Duration::from_millis(100);
const RATE: f64 = 1_000.0;
/// Time until leases have grown and the burst is used up.
const WARM: Duration = Duration::from_secs(5);
/// Connections to one node that take turns.
const SENDERS: u32 = 10;
/// Bars: part of the checks that the cell decides, and part of the limit that is used.
const IN_CELL: f64 = 0.99;
const USED: f64 = 0.95;

pub(super) fn run(length: Length) -> Result<(), String> {
    let span = Duration::from_secs(if length == Length::Full { 30 } else { 8 });
    heading("`leased`, one key of 1,000/s, links of 100 ms round trip");
    println!(
        "| requested ÷ limit | decided in the cell, of checks at the other nodes | admitted ÷ limit | since the start ÷ (burst + rate · time) |"
    );
    println!("|---:|---:|---:|---:|");
    let (mut least_local, mut least_used, mut most) = (1.0_f64, f64::INFINITY, 0.0_f64);
    for requested in [1.0, 1.5] {
        let nodes = tollgate::start(&tollgate::rule("leased", "{count: 1000, period: 1s}"), TRIP)?;
        let (local, used, all) = measure(&nodes, requested, span)?;
        println!("| {requested} | {:.2}% | {used:.3} | {all:.3} |", 100.0 * local);
        (least_local, most) = (least_local.min(local), most.max(all));
        if requested > 1.0 {
            least_used = least_used.min(used);
        }
    }
    println!();
    at_least("checks decided in the cell", least_local, IN_CELL);
    at_least("part of the limit that is used", least_used, USED);
    at_most("admitted ÷ (burst + rate · time)", most, 1.0);
    Ok(())
}

/// What the nodes have answered.
#[derive(Default)]
struct Tally {
    /// Checks at other nodes than the owner, and all that were admitted, since the warm-up.
    far_checks: u64,
    admitted: u64,
    /// Admitted since the start.
    all: u64,
}

/// Returns the part of the checks at the other nodes that they decide themselves, what all admit of the limit, and of the
/// limit and its burst since the start.
fn measure(nodes: &Nodes, requested: f64, span: Duration) -> Result<(f64, f64, f64), String> {
    let pause = Duration::from_secs_f64(3.0 * f64::from(SENDERS) / (RATE * requested));
    let (tally, start) = (Mutex::new(Tally::default()), Stopwatch::start());
    let forwarded = |nodes: &Nodes| -> f64 {
        (1..3).flat_map(|node| nodes.metric(node, "ratelimit_region_forwarded_total")).sum()
    };
    let mut before = 0.0;
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            nodes.on_threads(SENDERS as usize, |node, sender| {
                let mut connection = nodes.connect(node)?;
                std::thread::sleep(pause * sender as u32 / SENDERS);
                let mut due = start.elapsed();
                while start.elapsed() < WARM + span {
                    let is_admitted = nodes.check(&mut connection, "leased")?;
                    let mut tally = lock(&tally);
                    tally.all += u64::from(is_admitted);
                    if start.elapsed() > WARM {
                        tally.far_checks += u64::from(node > 0);
                        tally.admitted += u64::from(is_admitted);
                    }
                    drop(tally);
                    due += pause;
                    std::thread::sleep(due.saturating_sub(start.elapsed()));
                }
                Ok(())
            })
        });
        std::thread::sleep(WARM.saturating_sub(start.elapsed()));
        before = forwarded(nodes);
        sending.join().map_err(|_| "a thread panicked".to_owned())?
    })?;
    let after = forwarded(nodes);
    let passed = start.elapsed().as_secs_f64();
    let Tally { far_checks, admitted, all } = tally.into_inner().unwrap_or_default();
    let local = 1.0 - (after - before) / (far_checks as f64).max(1.0);
    // The burst is what the rate gives in a second.
    Ok((local, admitted as f64 / (RATE * span.as_secs_f64()), all as f64 / (RATE * (1.0 + passed))))
}
