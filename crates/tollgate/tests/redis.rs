//! The binary over a real Redis: nodes share limits, an outage is answered by policy, and it heals by itself.

mod harness;

use harness::{Folder, Redis, Server, eventually, run};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: shared, limit: 10/hour}
  - {key: login, name: login, class: security, limit: 10/hour}
";

fn ask(server: &Server, attribute: &str, value: &str) -> (u16, Value) {
    let answer = server.check("d", &json!({ attribute: value }));
    (answer.status, answer.json())
}

/// Two nodes over one Redis must let through one limit, not two; when Redis dies each rule answers by its policy and
/// says so.
#[test]
fn nodes_share_limits_and_survive_an_outage() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let url = redis.url();
    let rules = rules.to_str().expect("a plain path");
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", "500", "--nodes", "2"];
    let nodes = [Server::start(&flags), Server::start(&flags)];
    let on_redis = |server: &Server| ask(server, "user", "warm-up").1["origin"] == "store";
    eventually("both nodes on Redis", || nodes.iter().all(on_redis).then_some(()));

    let passed = (0..30).filter(|n| ask(&nodes[n % 2], "user", "u").0 == 200).count();
    assert_eq!(passed, 10, "one limit for both");
    let details = nodes[0].get("/readyz?verbose").json();
    assert_eq!(details["store"]["shards"][0]["breaker"], "closed", "{details}");

    drop(redis.stop());
    let away = |server: &Server| ask(server, "login", "u").0 == 503;
    eventually("both nodes without Redis", || nodes.iter().all(away).then_some(()));
    assert_eq!(ask(&nodes[0], "login", "u").1["origin"], "fail_closed");
    let locally: Vec<_> = (0..10).map(|_| ask(&nodes[0], "user", "v")).collect();
    assert!(locally.iter().all(|(_, decision)| decision["origin"] == "local"), "{locally:?}");
    let passed = locally.iter().filter(|(status, _)| *status == 200).count();
    assert_eq!(passed, 5, "a node's share of ten is five");
    let metrics = nodes[0].get("/metrics").text();
    let counted = r#"ratelimit_fallback_decisions_total{rule="login",origin="fail_closed"}"#;
    assert!(metrics.contains(counted), "{metrics}");
}

/// A node that starts before its Redis must answer by policy and take to Redis when it comes.
#[test]
fn a_node_starts_without_redis_and_heals() {
    let dead = Redis::start().stop();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let flags = [
        "--rules",
        rules.to_str().expect("a plain path"),
        "--store",
        &dead.url(),
        "--store-deadline-ms",
        "500",
    ];
    let node = Server::start(&flags);
    assert_eq!(ask(&node, "login", "u").0, 503);
    let _redis = dead.start_again();
    eventually("the node on Redis", || (ask(&node, "user", "u").1["origin"] == "store").then_some(()));
}

/// A password in an address must not end up in a terminal or a log.
#[test]
fn a_bad_address_is_refused_without_repeating_it() {
    let refused = run(&["serve", "--store", "redis://:hunter2@host:notaport"]);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("--store"), "{}", refused.err);
    assert!(!refused.err.contains("hunter2"), "{}", refused.err);
}
