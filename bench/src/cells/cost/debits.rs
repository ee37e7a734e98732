//! The exchange over Redis, by the server's CPU time: what another cell's consumption of a counter costs beside a charge.
//!
//! Charges and debits of the same counters take turns on one Redis. Charges come with as many in flight as in `bench redis`,
//! which lets them share script calls; debits come as a tick's batch of a cell that is charged 50,000 counters a second.

use super::super::Length;
use crate::process::{CLIENT_CORE, SERVER_CORE, median};
use crate::redis::pin;
use crate::redis::server::Redis;
use crate::report::{at_most, heading};
use crate::traffic::mix;
use std::sync::Arc;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, LimitSpec, Rate, Scope,
    TimeDelta,
};
use tollgate_store::{RedisConfig, RedisStore};

/// Counters of a batch.
const BATCH: usize = 10_000;
const COUNTERS: usize = 50_000;
/// Charges in flight.
const IN_FLIGHT: usize = 256;
/// Bar: a debit beside a charge.
const DEBIT: f64 = 0.5;

/// Counters of one limit.
struct Counters {
    scope: Scope,
    limit: Limit,
    keys: Vec<String>,
}

impl Counters {
    fn new(algorithm: Algorithm) -> Result<Self, String> {
        let name = algorithm.name();
        let limit = LimitSpec::new(algorithm, Rate::per(3_600, TimeDelta::from_secs(3_600))).build();
        let limit = limit.map_err(|error| error.to_string())?;
        let scope = Scope::in_group(format!("bench|{name}|{name}|1h"), &format!("bench|{name}"));
        Ok(Self {
            scope,
            limit,
            keys: (0..COUNTERS as u64).map(|key| format!("{:016x}", mix(key))).collect(),
        })
    }

    /// Charges each of these counters by one; returns microseconds of the server's CPU time for each.
    async fn charge(self: &Arc<Self>, store: &RedisStore, redis: &Redis) -> Result<f64, String> {
        let before = redis.cpu_micros()?;
        let tasks: Vec<_> = (0..IN_FLIGHT)
            .map(|task| {
                let (own, store) = (Arc::clone(self), store.clone());
                tokio::spawn(async move {
                    for key in own.keys.iter().skip(task).step_by(IN_FLIGHT) {
                        let parts = [KeyPart::Text(key)];
                        let key = CounterKey { scope: &own.scope, parts: &parts };
                        let charge = Charge::new(key, &own.limit, Cost::ONE);
                        store.charge(&[charge]).await.map_err(|error| error.to_string())?;
                    }
                    Ok::<(), String>(())
                })
            })
            .collect();
        for task in tasks {
            task.await.map_err(|error| error.to_string())??;
        }
        Ok((redis.cpu_micros()? - before) / COUNTERS as f64)
    }

    /// Debits each of these counters by one, in batches; returns microseconds of the server's CPU time for each.
    async fn debit(&self, store: &RedisStore, redis: &Redis) -> Result<f64, String> {
        let before = redis.cpu_micros()?;
        for keys in self.keys.chunks(BATCH) {
            let parts: Vec<[KeyPart<'_>; 1]> = keys.iter().map(|key| [KeyPart::Text(key)]).collect();
            let charge = |parts| {
                let key = CounterKey { scope: &self.scope, parts };
                Charge { enforcement: Enforcement::Independent, ..Charge::new(key, &self.limit, Cost::ONE) }
            };
            let charges: Vec<Charge<'_>> = parts.iter().map(|parts| charge(parts)).collect();
            store.debit_reported(&charges).await.map_err(|error| error.to_string())?;
        }
        Ok((redis.cpu_micros()? - before) / COUNTERS as f64)
    }
}

pub(super) fn run(length: Length) -> Result<(), String> {
    let rounds = if length == Length::Full { 9 } else { 3 };
    pin(CLIENT_CORE);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let redis = Redis::start(SERVER_CORE)?;
    let mut config = RedisConfig::parse(&redis.url()).map_err(|error| error.to_string())?;
    config.deadline = std::time::Duration::from_secs(5);
    let store = {
        let _within = runtime.enter();
        RedisStore::connect(config)
    };
    heading("Over Redis: a debit of another cell's consumption beside a charge");
    println!("| limit | µs of server CPU, charge | debit | debit ÷ charge |");
    println!("|---|---:|---:|---:|");
    let mut worst = 0.0_f64;
    for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow] {
        let counters = Arc::new(Counters::new(algorithm)?);
        let (mut charges, mut debits) = (Vec::new(), Vec::new());
        // The first round creates the counters.
        for round in 0..=rounds {
            let (charge, debit) = runtime.block_on(async {
                let charge = counters.charge(&store, &redis).await?;
                Ok::<_, String>((charge, counters.debit(&store, &redis).await?))
            })?;
            if round > 0 {
                charges.push(charge);
                debits.push(debit);
            }
        }
        let (charge, debit) = (median(charges), median(debits));
        println!("| {} | {charge:.2} | {debit:.2} | {:.2} |", algorithm.name(), debit / charge);
        worst = worst.max(debit / charge);
    }
    println!();
    at_most("Redis's CPU time of a debit ÷ of a charge", worst, DEBIT);
    Ok(())
}
