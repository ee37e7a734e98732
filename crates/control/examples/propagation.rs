//! Measures propagation between two nodes over a real PostgreSQL on this machine: prints latencies, asserts nothing
//! about them. `cargo run --profile dist -p tollgate-control --example propagation`.

#![allow(clippy::print_stdout, reason = "the example prints its results")]

#[path = "../tests/databases/mod.rs"]
mod databases;

use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{Actor, ControlPlane, Precondition, SyncConfig};
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::{Check, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const CHANGES: usize = 300;

struct Node {
    control: Arc<ControlPlane>,
    limiter: Limiter<MemoryStore<SystemClock>>,
}

async fn node(address: &str, rules: &Arc<Ruleset>) -> Node {
    let clock = SystemClock::new();
    let control = ControlPlane::open(address, Arc::new(clock)).await.expect("a database");
    tokio::spawn(Arc::clone(&control).run_sync(SyncConfig::default()));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a store");
    let limiter = Limiter::new(Arc::clone(rules), store, Arc::new(clock))
        .with_quotas(control.quota_table())
        .with_measures(control.active_measures());
    Node { control, limiter }
}

/// Polls until a check has the expected verdict.
async fn wait_for(node: &Node, key: &str, allowed: bool) {
    let attributes = [("api_key", key)];
    let check = Check::attributes("d", &attributes);
    while pollster::block_on(node.limiter.check(&check)).is_allowed() != allowed {
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
}

fn report(name: &str, mut micros: Vec<u64>) {
    micros.sort_unstable();
    let at = |part: usize| micros[(micros.len() * part / 1_000).min(micros.len() - 1)] as f64 / 1_000.0;
    println!(
        "{name}: {} changes, p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
        micros.len(),
        at(500),
        at(990),
        at(1_000)
    );
}

#[tokio::main]
async fn main() {
    let text = "{domain: d, descriptors: [{key: api_key, limit: 1000000/second}]}";
    let rules = Arc::new(Ruleset::load(&[Source::new("r.yaml", text)], &Options::default()).expect("rules"));
    let server = databases::Postgres::start();
    let address = server.database("propagation");
    let nodes = [node(&address, &rules).await, node(&address, &rules).await];
    let actor = Actor { name: "bench".to_owned(), origin: "here".to_owned() };
    let clock = SystemClock::new();
    let (mut emergencies, mut quotas) = (Vec::new(), Vec::new());
    // Measures from before the write until the other node applies it; the nodes take turns at writing.
    for i in 0..CHANGES / 2 {
        let (here, there) = (&nodes[i % 2], &nodes[(i + 1) % 2]);
        let key = format!("some-caller-{i}");
        let draft =
            json!({"action": "block", "reason": "bench", "target": {"kind": "api_key", "value": key}});
        let began = clock.now();
        let draft = serde_json::from_value(draft).expect("a draft");
        let declared = here.control.create_emergency(draft, &rules, &actor).await.expect("a database");
        wait_for(there, &key, false).await;
        emergencies.push(clock.now().since(began).as_micros());
        let began = clock.now();
        here.control.end_emergency(&declared.expect("a measure").id, &actor).await.expect("a database");
        wait_for(there, &key, true).await;
        emergencies.push(clock.now().since(began).as_micros());

        let shut = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 0, "unit": "day"}]});
        let began = clock.now();
        let draft = serde_json::from_value(shut).expect("a draft");
        let put = here.control.put_quota(&key, draft, &rules, Precondition::Any, &actor).await;
        put.expect("a database").expect("a quota");
        wait_for(there, &key, false).await;
        quotas.push(clock.now().since(began).as_micros());
        let began = clock.now();
        here.control.delete_quota(&key, Precondition::Any, &actor).await.expect("a database");
        wait_for(there, &key, true).await;
        quotas.push(clock.now().since(began).as_micros());
    }
    report("emergencies", emergencies);
    report("quotas", quotas);
}
