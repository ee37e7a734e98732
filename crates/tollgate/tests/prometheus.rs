//! The real Prometheus scrapes real servers, and every question that the Grafana dashboard and the alerts ask has an answer.

mod harness;

use harness::{Folder, Redis, Server, eventually, exchange, request};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, limit: 3/second, tiers: {free: 2/second}, on_error: open}
  - {key: path, limit: 1/hour, shadow_mode: true}
  - {key: login, limit: 1/hour, on_error: closed}
";

struct Prometheus {
    child: Child,
    address: SocketAddr,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(folder: &Folder, targets: &[SocketAddr]) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
        let alerts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus/alerts.yml");
        let config = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [alerts],
            "scrape_configs": [{"job_name": "tollgate", "static_configs": [{"targets": targets}]}],
        });
        let config = folder.write("prometheus.yml", config.to_string());
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", config.with_file_name("tsdb").display()))
            .arg(format!("--web.listen-address={free}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Prometheus: run `make setup`");
        Self { child, address: free }
    }

    /// What it answers; nothing while it has no series to answer with.
    fn ask(&self, query: &str) -> Option<Vec<Value>> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer =
            exchange(self.address, &request("GET", &format!("/api/v1/query?query={encoded}"), b"")).ok()?;
        if answer.status == 503 {
            return None;
        }
        let answer = answer.json();
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        answer["data"]["result"].as_array().filter(|series| !series.is_empty()).cloned()
    }
}

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

/// A panel that stays empty, or an alert that asks for a figure that nobody writes, would be found out in an outage.
#[test]
fn every_panel_has_an_answer_and_every_alert_a_figure() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let rules = rules.to_str().expect("a plain path");
    let db = format!("sqlite:{}", folder.write("unused", "").with_file_name("t.db").display());
    let redis = Redis::start();
    let flags = ["--rules", rules, "--admin", "127.0.0.1:0"];
    // Nobody collects spans there; that they could be lost is a figure, too.
    let memory = Server::start(&[&flags[..], &["--db", &db, "--otlp", "http://127.0.0.1:9"]].concat());
    let shared =
        Server::start(&[&flags[..], &["--store", &redis.url(), "--store-deadline-ms", "200"]].concat());
    let prometheus = Prometheus::start(&folder, &[admin(&memory), admin(&shared)]);
    let ask = |server: &Server| {
        for _ in 0..5 {
            server.check("d", &json!({"api_key": "one", "tier": "free", "path": "/"}));
            server.check("d", &json!({"login": "one"}));
        }
    };
    eventually("both servers up", || prometheus.ask("up == 1").filter(|up| up.len() == 2));
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
