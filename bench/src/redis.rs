//! Counters in Redis: cost of a request for the server, latency, and memory per counter.
//!
//! | module | contents |
//! |---|---|
//! | `server` | a real redis-server and its statistics |
//! | `requests` | the requests to the store |
//! | `prices` | rate and server time compared with the bare script |
//! | `latency` | percentiles at half of saturation compared with a bare `GET` |
//! | `memory` | bytes per counter |

mod latency;
mod memory;
mod prices;
mod requests;
pub(crate) mod server;

use crate::process::{CLIENT_CORE, SERVER_CORE};
use crate::report::{heading, note};
use server::Redis;

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

/// Decisions per second that a cluster is planned for.
const WANTED: f64 = 500_000.0;

/// Runs all parts; needs redis-server and redis-benchmark.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (requests, rounds, seconds, keys) = match length {
        Length::Short => (100_000, 3, 2.0, 62_500),
        Length::Full => (400_000, 7, 5.0, 1_000_000),
    };
    pin(CLIENT_CORE);
    // One thread, on the core without servers.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let single = Redis::start(SERVER_CORE)?;
    let cluster = Redis::start_cluster(SERVER_CORE)?;
    let found = prices::measure(&runtime, &single, &cluster, requests, rounds)?;
    let store = prices::store(&runtime, &single)?;
    latency::measure(&runtime, &single, &store, found.four_a_second / 2.0, seconds, rounds)?;
    memory::measure(&runtime, keys)?;
    heading("500,000 decisions per second with four limits each");
    for (a_core, how) in found.a_core.iter().zip(["shared calls", "separate calls"]) {
        let shards = (WANTED / a_core).ceil();
        note(&format!(
            "- {how}: {a_core:.0} per second and Redis core, so {shards} shards at full load, {} at half load; \
             {} nodes with one core each at the client's rate above",
            2.0 * shards,
            (WANTED / found.four_a_second).ceil()
        ));
    }
    Ok(())
}

/// Pins this thread, and those that it starts, to a core.
pub(crate) fn pin(core: &str) {
    let wanted: usize = core.parse().unwrap_or(0);
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    if let Some(core) = cores.into_iter().find(|core| core.id == wanted) {
        core_affinity::set_for_current(core);
    }
}
