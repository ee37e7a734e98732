//! What a process reports about itself: liveness, readiness and metrics.

use crate::harness::{Folder, Server, run, run_with};
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

/// A container whose HTTP port has TLS would otherwise never be healthy.
#[cfg(feature = "external-tests")]
#[test]
fn the_health_command_speaks_tls() {
    use crate::harness::certificate;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Stdio};
    struct Killed(Child);
    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let folder = Folder::new();
    certificate(&folder, "own");
    certificate(&folder, "other");
    let file = |name: &str| folder.join(name).display().to_string();
    let (cert, key, other) = (file("own.crt"), file("own.key"), file("other.crt"));
    let rules = folder.write("rules.yaml", RULES).display().to_string();
    let off = ["--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off", "--admin", "off"];
    let mut process = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"));
    process.args(["serve", "--rules", &rules, "--http-tls-cert", &cert, "--http-tls-key", &key]).args(off);
    let child = process.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it runs");
    let mut child = Killed(child);
    let mut lines = BufReader::new(child.0.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let address = lines.find_map(|line| {
        let mut words = line.split_whitespace();
        words.next().filter(|word| *word == "http")?;
        words.next().map(str::to_owned)
    });
    let address = address.expect("its address");
    let ask = |more: &[&str]| run(&[&["health", "--http", &address, "--timeout-ms", "20000"], more].concat());
    let healthy = ask(&["--http-tls-cert", &cert]);
    assert_eq!((healthy.code, healthy.out.as_str()), (Some(0), "ok\n"), "{}", healthy.err);
    let config = folder.write("tollgate.yml", format!("http_tls_cert: {cert}\n"));
    let by_file = ask(&["--ready", "--config", config.to_str().expect("a plain path")]);
    assert_eq!(by_file.code, Some(0), "{}", by_file.err);
    let wrong = ask(&["--http-tls-cert", &other]);
    assert!(wrong.code == Some(1) && wrong.err.contains("--http-tls-cert"), "{}", wrong.err);
    assert_eq!(ask(&[]).code, Some(1), "plain text");
}

/// Orchestrators restart what is not healthy and route to what is ready; dashboards read the figures.
#[test]
fn health_readiness_and_metrics_can_be_read() {
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

/// An image without a shell has no other way to ask: an orchestrator that runs it restarts what is not alive.
#[test]
fn a_health_command_asks_the_configured_address() {
    let mut server = Server::with_rules(RULES);
    let http = server.http.to_string();
    let alive = run(&["health", "--http", &http]);
    assert_eq!((alive.code, alive.out.as_str()), (Some(0), "ok\n"), "{}", alive.err);
    let everywhere = format!("0.0.0.0:{}", server.http.port());
    let ready = run_with(&["health", "--ready", "--json"], &[("TOLLGATE_HTTP", &everywhere)]);
    let readiness: Value = serde_json::from_str(&ready.out).expect("JSON");
    assert_eq!(
        (ready.code, &readiness["status"], &readiness["address"]),
        (Some(0), &json!(200), &json!(http)),
        "{}",
        ready.err
    );
    let folder = Folder::new();
    let file = folder.write("tollgate.yml", format!("http: {http}\n"));
    let file = file.to_str().expect("a plain path");
    let by_file = run(&["health", "--config", file]);
    assert_eq!(by_file.code, Some(0), "{}", by_file.err);

    server.signal("KILL");
    server.wait();
    let dead = run(&["health", "--config", file]);
    assert_eq!(dead.code, Some(1));
    assert!(dead.err.contains(&http) && dead.err.contains("refused"), "{}", dead.err);
    let off = run(&["health", "--http", "off"]);
    assert_eq!(off.code, Some(1));
    assert!(off.err.contains("set --http"), "{}", off.err);
}
