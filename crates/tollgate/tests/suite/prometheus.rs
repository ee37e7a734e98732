//! The real Prometheus scrapes real servers, and every question that the Grafana dashboard and the alerts ask has an answer.

use crate::harness::{Folder, Gateway, Prometheus, Redis, Server, eventually, exchange, request};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, limit: 3/second, tiers: {free: 2/second}, on_error: open}
  - {key: path, limit: 1/hour, shadow_mode: true}
  - {key: login, limit: 1/hour, on_error: closed}
overload: {fleet: {capacity: 1/hour}, shadow: true}
";

/// Sheds before an upstream, which does not answer, and by all three parts.
const SHEDDING: &str = "
domain: d
overload: {workers: {limit: 1}, fleet: {capacity: 1/hour}, adapt: {signals: {queue: 1}, order: [free]}}
descriptors: [{key: api_key, limit: 9/second}]
";
const UPSTREAM: &str = "  listeners: [{address: \"127.0.0.1:0\"}]
  upstreams: {web: {addresses: [\"127.0.0.1:9\"]}}
  routes: [{path: \"/{*rest}\", upstream: web, domain: d}]
";

fn admin(server: &Server) -> SocketAddr {
    let line = server.greeting.lines().find(|line| line.trim_start().starts_with("admin "));
    let address = line.and_then(|line| line.split_whitespace().nth(1)).expect("an admin address");
    address.parse().expect("an address")
}

/// Every query of the dashboard, with its panel's name, as it is asked when all nodes and domains are chosen.
fn panels() -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/grafana/tollgate.json");
    let dashboard: Value =
        serde_json::from_slice(&std::fs::read(path).expect("the dashboard")).expect("JSON");
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().expect("a query");
            let query =
                query.replace("$instance", ".*").replace("$domain", ".*").replace("$__rate_interval", "10s");
            queries.push((panel["title"].as_str().expect("a title").to_owned(), query));
        }
    }
    queries
}

/// A panel that stays empty, or an alert on a metric that is never written, would be found out in an outage.
#[test]
fn every_panel_has_an_answer_and_every_alert_a_figure() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let rules = rules.to_str().expect("a plain path");
    let db = format!("sqlite:{}", folder.write("unused", "").with_file_name("t.db").display());
    let redis = Redis::start();
    let flags = ["--rules", rules, "--admin", "127.0.0.1:0"];
    // There is no collector there; lost spans are a metric, too.
    let memory = Server::start(&[&flags[..], &["--db", &db, "--otlp", "http://127.0.0.1:9"]].concat());
    let shared =
        Server::start(&[&flags[..], &["--store", &redis.url(), "--store-deadline-ms", "200"]].concat());
    let cell = Server::start(
        &[
            &flags[..],
            &[
                "--region",
                "eu",
                "--cell",
                "127.0.0.1:0",
                "--cell-url",
                "http://127.0.0.1:9",
                "--peer",
                "us=http://127.0.0.1:7",
            ],
        ]
        .concat(),
    );
    let gateway = Gateway::start(SHEDDING, UPSTREAM);
    let targets = [admin(&memory), admin(&shared), admin(&cell), gateway.admin];
    let prometheus = Prometheus::start(&folder, &targets);
    let ask = |server: &Server| {
        for _ in 0..5 {
            server.check("d", &json!({"api_key": "one", "tier": "free", "path": "/"}));
            server.check("d", &json!({"login": "one"}));
        }
        gateway.get("/");
    };
    eventually("all servers up", || prometheus.ask("up == 1").filter(|up| up.len() == targets.len()));
    // Figures of failures need a failure.
    ask(&shared);
    let _dead = redis.stop();
    for (panel, query) in panels() {
        eventually(&format!("an answer to the panel {panel}: {query}"), || {
            ask(&memory);
            ask(&shared);
            prometheus.ask(&query)
        });
    }
    let rules =
        exchange(prometheus.address, &request("GET", "/api/v1/rules", b"")).expect("an answer").json();
    let alerts = rules["data"]["groups"][0]["rules"].as_array().expect("alerts").clone();
    assert!(alerts.len() >= 14, "{rules}");
    for alert in &alerts {
        assert_eq!(alert["health"], "ok", "{alert}");
        // What it asks about, without the threshold, has figures.
        let query = alert["query"].as_str().expect("a query");
        let (figure, _) = query.rsplit_once([' ']).expect("a threshold");
        let figure =
            figure.trim_end_matches(['>', '<', '=', ' ']).replace("[5m]", "[10s]").replace("[10m]", "[10s]");
        let figure = figure.replace("[15m]", "[10s]");
        eventually(&format!("figures for {}: {figure}", alert["name"]), || {
            ask(&memory);
            ask(&shared);
            prometheus.ask(&figure)
        });
    }
}
