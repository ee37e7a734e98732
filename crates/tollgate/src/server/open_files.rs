//! How many files the process may have open: every connection is one. Systems start programs with few (1024, often) and let
//! them have more: all that they may have is taken at the start.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

/// Files that are no connections: listeners, logs, databases.
const OTHERS: u64 = 100;

/// Raises the limit as far as it goes, and says how far that is.
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
    allowed.saturating_sub(OTHERS)
}

/// For `/readyz?verbose`; nothing stands for no limit.
pub(crate) fn details() -> Value {
    let allowed = getrlimit(Resource::Nofile).current;
    json!({"allowed": allowed, "connections": allowed.map(connections)})
}
