//! Open file limit of the process: every connection needs a file. Systems start programs with a low soft limit (often
//! 1024) below the hard one; the server raises it to the hard limit at the start.
//!
//! What remains after the files that the process itself needs is the budget of all listeners. Each has some held back
//! for it, so that a flood on one port starves neither the checks nor the probes and operators on the others.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use std::sync::OnceLock;
use tollgate_http::server::connections::ConnectionBudget;

/// Files other than connections of clients: listeners, logs, databases, stores. A quarter of a very low limit.
const OTHERS: u64 = 100;
/// Connections of each listener that the others cannot take, at most.
const MAX_GUARANTEED: u64 = 64;

/// Raises the soft limit to the hard limit and logs the result.
pub(crate) fn raise() {
    let before = getrlimit(Resource::Nofile);
    if before.current != before.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before })
    {
        tracing::warn!(%error, "cannot raise the open file limit");
    }
    match getrlimit(Resource::Nofile).current {
        Some(allowed) => {
            let connections = connections(allowed);
            tracing::info!("open file limit is {allowed}: room for about {connections} connections");
        }
        None => tracing::info!("open file limit is unlimited"),
    }
}

const fn connections(allowed: u64) -> u64 {
    let others = if allowed / 4 < OTHERS { allowed / 4 } else { OTHERS };
    allowed - others
}

/// Returns the files of all listeners of this process.
pub(crate) fn budget() -> ConnectionBudget {
    static BUDGET: OnceLock<ConnectionBudget> = OnceLock::new();
    let read = || match getrlimit(Resource::Nofile).current {
        Some(allowed) => {
            ConnectionBudget::new(usize::try_from(connections(allowed)).unwrap_or(usize::MAX / 4))
        }
        None => ConnectionBudget::default(),
    };
    BUDGET.get_or_init(read).clone()
}

/// Returns how many connections are held back for each listener.
pub(crate) fn guaranteed() -> usize {
    let share =
        getrlimit(Resource::Nofile).current.map_or(MAX_GUARANTEED, |allowed| connections(allowed) / 16);
    usize::try_from(share.clamp(2, MAX_GUARANTEED)).unwrap_or(2)
}

/// Returns the limit for `/readyz?verbose`; null means unlimited.
pub(crate) fn details() -> Value {
    let allowed = getrlimit(Resource::Nofile).current;
    json!({"allowed": allowed, "connections": allowed.map(connections)})
}
