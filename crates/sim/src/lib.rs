//! Deterministic simulation of a cluster: the real engine and the real leases in virtual time, over a network that loses,
//! delays, duplicates and reorders messages, with nodes that pause and crash, clocks that drift, and a store that fails over
//! and loses data.
//!
//! A run is determined by its seed. Each run checks what `docs/internals/lease-proof.md` proves: the ceiling over every
//! span, no leaked units, no starved node, and fairness between nodes. A failed run prints its history; the same seed
//! repeats it: `sim --seed 42 --trace`.
//!
//! | module | contents |
//! |---|---|
//! | `scenario` | what a seed determines |
//! | `world` | time, events, the network |
//! | `authority` | the store: a plain ledger with a replica and planted bugs |
//! | `node` | a node: engine and leases over a link |
//! | `run` | one run: events, tasks, faults |
//! | `ceiling` | the ceiling check |
//! | `cells` | cells that share a limit over links that fail |

mod authority;
mod ceiling;
mod cells;
mod fairness;
mod node;
mod run;
mod scenario;
mod world;

pub use cells::{CellBug, CellReport, run_cells};

/// A bug that can be planted, to verify that runs find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The store grants leases without deducting them.
    SkipsDeduction,
    /// The store returns units twice.
    ReturnsTwice,
    /// Nodes spend leases regardless of their age.
    ForgetsTime,
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Seed of the run.
    pub seed: u64,
    /// Violated property, if any.
    pub violation: Option<String>,
    /// Events in order.
    pub history: Vec<String>,
    /// Number of checks.
    pub checks: u64,
    /// Number of checks decided without the store.
    pub local: u64,
    /// Number of admitted units.
    pub admitted: u64,
}

/// Runs one seed.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>) -> Report {
    run::Run::new(seed, bug).finish()
}
