//! Open file limit of the process: every connection needs a file. Systems start programs with a low soft limit (often
//! 1024) below the hard one; the server raises it to the hard limit at the start.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

/// Files other than connections: listeners, logs, databases.
const OTHERS: u64 = 100;

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
    allowed.saturating_sub(OTHERS)
}

/// Returns the limit for `/readyz?verbose`; null means unlimited.
pub(crate) fn details() -> Value {
    let allowed = getrlimit(Resource::Nofile).current;
    json!({"allowed": allowed, "connections": allowed.map(connections)})
}
