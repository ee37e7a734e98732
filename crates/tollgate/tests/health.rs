//! What a process tells of itself: that it is healthy, that it is ready, and its figures.

mod harness;

use harness::Server;
use serde_json::{Value, json};

const RULES: &str = "
domain: shop
descriptors:
  - key: api_key
    name: per-key
    limit: 3/hour
    descriptors:
      - key: endpoint
        value: POST /login
        name: logins
        limit: [2/hour, 5/day]
  - key: tokens
    name: tokens
    limit: 1000/hour
  - key: search
    name: searches
    algorithm: leaky_bucket
    action: delay
    limit: 60/hour
    burst: 3
  - key: global
    name: total
    limit: 100000/hour
";

/// Orchestrators restart what is not healthy and route to what is ready; dashboards read the figures.
#[test]
fn health_readiness_and_figures_can_be_read() {
    let server = Server::with_rules(RULES);
    let healthy = server.get("/healthz");
    assert_eq!((healthy.status, healthy.text().as_str()), (200, "ok\n"));
    let ready = server.get("/readyz");
    assert_eq!((ready.status, ready.json()), (200, json!({"ready": true})));
    let verbose = server.get("/readyz?verbose").json();
    assert_eq!(verbose["rules"]["domains"], json!(["shop"]));
    assert_eq!(verbose["rules"]["error"], Value::Null);
    assert_eq!(verbose["rules"]["paths"], json!([server.rules_path().to_str()]));
    assert_eq!(verbose["store"]["kind"], "memory");
    server.check("shop", &json!({"api_key": "m"}));
    let figures = server.get("/metrics");
    assert!(figures.header("content-type").expect("a type").starts_with("text/plain; version=0.0.4"));
    let figures = figures.text();
    let figure = |name: &str| -> u64 {
        let line = figures.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.and_then(|line| line.split(' ').nth(1))
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(|| panic!("{name}"))
    };
    assert_eq!(figure("ratelimit_memory_cap_bytes"), 16 << 20);
    assert_eq!(figure("ratelimit_memory_inserted_total"), 2, "the key's counter and the total's");
    assert_eq!(figure("ratelimit_memory_evicted_total"), 0);
    for line in figures.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().expect("a name");
        let parts = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
        let has_type = |name: &str| figures.contains(&format!("# TYPE {name} "));
        assert!(has_type(name) || parts.is_some_and(has_type), "{line}");
    }
    let head = server.exchange(b"HEAD /healthz HTTP/1.0\r\n\r\n");
    assert_eq!(head.status, 200);
}
