//! Bytes of Redis's memory for a counter of one bucket, beside the smallest key that could hold one.

use super::prices::{UNDER_WAY, store};
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
    let kept = Arc::new((Scope::in_group("api|user|gcra|1d", "api|user"), limit));
    let charge = move |number: u64| {
        let (store, kept) = (store.clone(), Arc::clone(&kept));
        async move {
            let name = format!("{number:016}");
            let key = CounterKey { scope: &kept.0, parts: &[KeyPart::Text(&name)] };
            let answer = store.charge(&[Charge::new(key, &kept.1, Cost::ONE)]).await;
            answer.map(drop).map_err(|error| error.to_string())
        }
    };
    // A server that has just run the script is as empty as it gets.
    runtime.block_on(charge(0))?;
    let empty = redis.used_memory()?;
    runtime.block_on(async {
        let tasks: Vec<_> = (0..UNDER_WAY as u64)
            .map(|task| {
                let charge = charge.clone();
                tokio::spawn(async move {
                    for number in (1 + task..=keys).step_by(UNDER_WAY) {
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
    let kept: u64 = redis.ask(&redis::cmd("DBSIZE"))?;
    if kept != keys + 1 {
        return Err(format!("{kept} keys in Redis, where {} were made", keys + 1));
    }
    let ours = (redis.used_memory()? - empty) / keys as f64;
    heading(&format!("Memory, {keys} counters of tenants with names of 16 bytes"));
    note(&format!("the smallest key with a whole number and an expiry: {floor:.1} bytes of used_memory"));
    at_most("bytes of used_memory a counter", ours, 120.0);
    Ok(())
}

/// A key of the same length with a whole number and an expiry.
fn floor(keys: u64) -> Result<f64, String> {
    let redis = Redis::start(SERVER_CORE)?;
    let fill = "for i = ARGV[1], ARGV[2] do redis.call('SET', string.format('tg1:{%016d}xxxxxxxx', i), \
                1.7e15 + i, 'PX', 100000000) end";
    let make =
        |first: u64, last: u64| redis.ask::<()>(redis::cmd("EVAL").arg(fill).arg(0).arg(first).arg(last));
    make(0, 0)?;
    let empty = redis.used_memory()?;
    for first in (1..=keys).step_by(10_000) {
        make(first, (first + 9_999).min(keys))?;
    }
    Ok((redis.used_memory()? - empty) / keys as f64)
}
