//! A cluster in virtual time: the real engine and the real leases, over a network that loses, delays, doubles and
//! reorders, with nodes that pause and crash, clocks that drift, and a store that fails over and forgets.
//!
//! A run is made of one number. Each run checks what `docs/leases.md` proves: the ceiling over every span, that nothing
//! leaks, that nodes are served, and that they are served alike. A run that fails prints its history; the same number
//! gives the same run again: `sim --seed 42 --trace`.
//!
//! | file | what |
//! |---|---|
//! | `scenario` | what a seed stands for |
//! | `world` | time, events, the network |
//! | `authority` | the store: a plain ledger, with a replica and planted bugs |
//! | `node` | a node: engine and leases over a link |
//! | `run` | one run: events, tasks, faults |
//! | `ceiling` | the ceiling |

mod authority;
mod ceiling;
mod node;
mod run;
mod scenario;
mod world;

/// A bug that can be planted, to see that runs find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The store grants leases and does not deduct them.
    SkipsDeduction,
    /// The store gives back twice what is given back.
    ReturnsTwice,
    /// Nodes spend leases however old they are.
    ForgetsTime,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// Its number.
    pub seed: u64,
    /// What was wrong, if anything.
    pub violation: Option<String>,
    /// What happened, in order.
    pub history: Vec<String>,
    /// Checks made, and those answered without asking the store.
    pub checks: u64,
    /// See `checks`.
    pub local: u64,
    /// Units let through.
    pub admitted: u64,
}

/// Runs one seed.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>) -> Report {
    run::Run::new(seed, bug).finish()
}
