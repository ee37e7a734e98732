//! Latency of a check at half of saturation, compared with a bare `GET` measured in the same way: from the same process, at
//! the same rate, over as many connections, from the time at which each request was due.

use super::requests::{Kind, Requests};
use super::server::Redis;
use crate::process::median;
use crate::report::{at_most, heading};
use std::future::Future;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tollgate_store::RedisStore;

/// Measures at `rate` requests per second; prints percentiles and the bar.
pub(super) fn measure(
    runtime: &tokio::runtime::Runtime,
    redis: &Redis,
    store: &RedisStore,
    rate: f64,
    seconds: f64,
    rounds: usize,
) -> Result<(), String> {
    let requests = Requests::new(30_000);
    let url = format!("redis://{}", redis.address());
    let (mut checks, mut gets) = (Vec::new(), Vec::new());
    runtime.block_on(async {
        let client = redis::Client::open(url).map_err(|error| error.to_string())?;
        let mut connections = Vec::new();
        for _ in 0..2 {
            let connection = client.get_multiplexed_async_connection().await;
            connections.push(connection.map_err(|error| error.to_string())?);
        }
        requests.fill(store).await?;
        for _ in 0..rounds {
            let get = |n: usize| {
                let mut connection = connections[n % 2].clone();
                async move {
                    let mut command = redis::cmd("GET");
                    command.arg(format!("tg1:{{{:016x}}}xxxxxxxx", n % 30_000));
                    let value: redis::RedisResult<Option<Vec<u8>>> =
                        command.query_async(&mut connection).await;
                    value.map(drop).map_err(|error| error.to_string())
                }
            };
            let check = |n: usize| {
                let (requests, store) = (requests.clone(), store.clone());
                async move { requests.send(&store, Kind::Four, n).await.map(drop) }
            };
            gets.push(paced(rate, seconds, get).await?);
            checks.push(paced(rate, seconds, check).await?);
        }
        Ok::<(), String>(())
    })?;
    heading(&format!("Latency at {rate:.0} requests/s (half of saturation), four limits"));
    println!("| | p50 µs | p99 µs | p99.9 µs |");
    println!("|---|---:|---:|---:|");
    let middle = |runs: &[Vec<u64>], part: f64| {
        median(runs.iter().map(|run| run[(run.len() as f64 * part) as usize] as f64 / 1e3).collect())
    };
    for (name, runs) in [("GET", &gets), ("a check", &checks)] {
        println!(
            "| {name} | {:.0} | {:.0} | {:.0} |",
            middle(runs, 0.5),
            middle(runs, 0.99),
            middle(runs, 0.999)
        );
    }
    at_most("p99 of a check ÷ of a GET", middle(&checks, 0.99) / middle(&gets, 0.99), 2.0);
    Ok(())
}

/// Sends requests at a steady rate, independent of responses; returns sorted nanoseconds from when each was due.
#[allow(clippy::disallowed_methods, reason = "a stopwatch")]
async fn paced<F>(rate: f64, seconds: f64, send: impl Fn(usize) -> F) -> Result<Vec<u64>, String>
where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let gap = Duration::from_secs_f64(1.0 / rate);
    let start = Instant::now();
    let mut pending = JoinSet::new();
    let mut due = start;
    for n in 0..(rate * seconds) as usize {
        // At least one yield: a sender that is behind must not starve the tasks that receive responses.
        loop {
            tokio::task::yield_now().await;
            if Instant::now() >= due {
                break;
            }
        }
        let (response, since) = (send(n), due);
        pending.spawn(async move { response.await.map(|()| since.elapsed().as_nanos() as u64) });
        due += gap;
    }
    let mut nanos = Vec::with_capacity(pending.len());
    while let Some(response) = pending.join_next().await {
        nanos.push(response.map_err(|error| error.to_string())??);
    }
    nanos.sort_unstable();
    Ok(nanos)
}
