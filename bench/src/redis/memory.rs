//! Redis memory per counter of one bucket, compared with the smallest key that could hold one.

use super::prices::{IN_FLIGHT, store};
use super::server::Redis;
use crate::process::SERVER_CORE;
use crate::report::{at_most, heading, note};
use std::sync::Arc;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, LimitSpec, Rate, Scope, nonzero,
};

pub(super) fn measure(runtime: &tokio::runtime::Runtime, keys: u64) -> Result<(), String> {
    let floor = floor(keys)?;
    let redis = Redis::start(SERVER_CORE)?;
    let store = store(runtime, &redis)?;
    let limit =
        LimitSpec::new(Algorithm::Gcra, Rate::per_day(nonzero!(10))).build().map_err(|e| e.to_string())?;
    let counter = Arc::new((Scope::in_group("api|user|gcra|1d", "api|user"), limit));
    let charge = move |number: u64| {
        let (store, counter) = (store.clone(), Arc::clone(&counter));
        async move {
            let name = format!("{number:016}");
            let key = CounterKey { scope: &counter.0, parts: &[KeyPart::Text(&name)] };
            let result = store.charge(&[Charge::new(key, &counter.1, Cost::ONE)]).await;
            result.map(drop).map_err(|error| error.to_string())
        }
    };
    // After one run of the script the server is as empty as it gets.
    runtime.block_on(charge(0))?;
    let empty = redis.used_memory()?;
    runtime.block_on(async {
        let tasks: Vec<_> = (0..IN_FLIGHT as u64)
            .map(|task| {
                let charge = charge.clone();
                tokio::spawn(async move {
                    for number in (1 + task..=keys).step_by(IN_FLIGHT) {
                        charge(number).await?;
                    }
                    Ok::<(), String>(())
                })
            })
            .collect();
        for task in tasks {
            task.await.map_err(|error| error.to_string())??;
        }
        Ok::<(), String>(())
    })?;
    let stored: u64 = redis.query(&redis::cmd("DBSIZE"))?;
    if stored != keys + 1 {
        return Err(format!("{stored} keys in Redis instead of {}", keys + 1));
    }
    let ours = (redis.used_memory()? - empty) / keys as f64;
    heading(&format!("Memory, {keys} counters with values of 16 bytes"));
    note(&format!("smallest key with an integer and an expiry: {floor:.1} bytes of used_memory"));
    at_most("bytes of used_memory per counter", ours, 120.0);
    Ok(())
}

/// Measures keys of the same length with an integer and an expiry.
fn floor(keys: u64) -> Result<f64, String> {
    let redis = Redis::start(SERVER_CORE)?;
    let fill = "for i = ARGV[1], ARGV[2] do redis.call('SET', string.format('tg1:{%016d}xxxxxxxx', i), \
                1.7e15 + i, 'PX', 100000000) end";
    let make =
        |first: u64, last: u64| redis.query::<()>(redis::cmd("EVAL").arg(fill).arg(0).arg(first).arg(last));
    make(0, 0)?;
    let empty = redis.used_memory()?;
    for first in (1..=keys).step_by(10_000) {
        make(first, (first + 9_999).min(keys))?;
    }
    Ok((redis.used_memory()? - empty) / keys as f64)
}
