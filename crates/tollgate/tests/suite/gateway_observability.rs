//! Seeing what the gateway decides: its figures on the admin address, clean by Prometheus' own tool, and its decision log,
//! for callers of HTTP/1 and HTTP/2 alike.

use crate::harness::{Folder, Gateway, Origin, eventually, exchange, foreign, plain, promtool, run};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 3 per 3650d, algorithm: fixed_window}
";
const KEY: &str = "sk_live_PLANTED0123456789abcdef";

#[test]
fn decisions_of_the_gateway_are_recorded() {
    let origin = Origin::start();
    let more =
        "node: gw-1\nregion: eu-west-1\ndecision_log: {output: DIR/decisions.ndjson, allowed_sample: 1}";
    let folder = Folder::new();
    let path = folder.join("decisions.ndjson");
    let more = more.replace("DIR/decisions.ndjson", path.to_str().expect("a plain path"));
    let mut gateway = Gateway::start_in(folder, RULES, &more, &plain(origin.address, ""));

    // Two by HTTP/1, two by HTTP/2, of which the last is denied; one more by HTTP/1.
    let by_hand =
        format!("GET /a?x={KEY} HTTP/1.1\r\nhost: t\r\nx-api-key: {KEY}\r\nconnection: close\r\n\r\n");
    let statuses: Vec<u16> = (0..2).map(|_| gateway.exchange(by_hand.as_bytes()).status).collect();
    assert_eq!(statuses, [200, 200]);
    let target = format!("http://{}/a", gateway.address());
    let header = format!("x-api-key: {KEY}");
    let ask =
        ["-s", "-o", "/dev/null", "-w", "%{http_code}", "--http2-prior-knowledge", "-H", &header, &target];
    assert_eq!([foreign("curl", &ask), foreign("curl", &ask)], ["200", "429"]);
    let denied = gateway.exchange(by_hand.as_bytes());
    assert_eq!(denied.status, 429);

    let get = |path: &str| {
        let asked = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        exchange(gateway.admin, asked.as_bytes()).expect("an answer")
    };
    let metrics = get("/metrics").text();
    promtool(&metrics);
    let decided = |verdict: &str, count: u64| {
        format!(
            "ratelimit_decisions_total{{domain=\"d\",rule=\"per-key\",verdict=\"{verdict}\",origin=\"store\",shadow=\"false\"}} {count}\n"
        )
    };
    for line in [
        &decided("allow", 3),
        &decided("deny", 2),
        "ratelimit_check_duration_seconds_count{protocol=\"gateway\"} 5\n",
        "ratelimit_node_info{node=\"gw-1\",region=\"eu-west-1\",version=",
        "\ngateway_connections ",
    ] {
        assert!(metrics.contains(line), "no {line} in\n{metrics}");
    }

    let lines = eventually("five lines", || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        (text.lines().count() == 5).then_some(text)
    });
    let all: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(all.iter().filter(|line| line["verdict"] == "deny").count(), 2, "{lines}");
    for line in &all {
        assert_eq!(
            (&line["protocol"], &line["node"], &line["region"], &line["rule"]),
            (&json!("gateway"), &json!("gw-1"), &json!("eu-west-1"), &json!("per-key"))
        );
    }

    // The caller's id leads to the story.
    let id = denied.header("x-ratelimit-decision-id").expect("an id");
    let why = run(&["why", id, "--admin", &format!("http://{}", gateway.admin)]);
    assert!(why.out.contains("Denied by rule `per-key`: 3 of 3 units were in use"), "{}{}", why.out, why.err);
    assert!(why.out.contains("via gateway"), "{}", why.out);
    let found = get("/admin/v1/decisions?verdict=deny").text();
    for output in [&metrics, &lines, &why.out, &found, &get("/admin/v1/top").text(), &gateway.log()] {
        assert!(!output.contains("PLANTED"), "a key is shown in\n{output}");
    }

    // The last decisions before the end are in the log, too.
    (0..10).for_each(|_| assert_eq!(gateway.exchange(by_hand.as_bytes()).status, 429));
    gateway.signal("TERM");
    assert!(gateway.wait().success(), "{}", gateway.log());
    assert_eq!(std::fs::read_to_string(&path).expect("a file").lines().count(), 15);
}
