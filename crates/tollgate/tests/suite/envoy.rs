//! The real Envoy in front of a small service, with the configuration that the documentation shows: limits bite, and
//! what a caller and an operator need arrives.

use crate::harness::{Envoy, Folder, Server, Service, WebResponse, eventually, exchange};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;

struct Edge {
    address: SocketAddr,
    envoy: Envoy,
    _folder: Folder,
}

impl Edge {
    /// The documented configuration on free ports, and with time for a busy machine to answer.
    fn start(server: &Server, service: &Service) -> Self {
        let config = std::fs::read_to_string(example("envoy.yaml")).expect("the example");
        assert_eq!(config.matches("timeout: 0.02s").count(), 1);
        Self::start_with(config, server, service)
    }

    fn start_with(mut config: String, server: &Server, service: &Service) -> Self {
        let folder = Folder::new();
        config = config.replace("timeout: 0.02s", "timeout: 10s");
        let changes = [
            ("port_value: 10000", "port_value: 0".to_owned()),
            ("port_value: 9901", "port_value: 0".to_owned()),
            ("port_value: 9000", format!("port_value: {}", service.address.port())),
            ("port_value: 8081", format!("port_value: {}", server.grpc.port())),
        ];
        for (from, to) in changes {
            assert_eq!(config.matches(from).count(), 1, "`{from}` in the example");
            config = config.replace(from, &to);
        }
        let path = folder.write("envoy.yaml", config);
        let admin_path = folder.join("admin");
        let mut address = None;
        let envoy = Envoy::start(&path, &admin_path, || {
            let admin = std::fs::read_to_string(&admin_path).ok().and_then(|text| text.trim().parse().ok());
            address = admin.and_then(listening);
            address.is_some()
        });
        Self { address: address.expect("it listens"), envoy, _folder: folder }
    }

    fn get(&self, path: &str, headers: &str) -> WebResponse {
        let request = format!("GET {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n{headers}\r\n");
        exchange(self.address, request.as_bytes())
            .unwrap_or_else(|error| panic!("{error}\n{}", self.envoy.log()))
    }
}

fn example(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/envoy").join(name)
}

/// A file of the example with `match: all` and hits at the end of a stream.
fn llm_example(name: &str) -> String {
    let path = example("../envoy-llm").join(name);
    path.to_str().expect("a plain path").to_owned()
}

/// Without `match: all` each combination of keys needs its own action, and what a stream did not use is lost.
#[test]
fn all_rules_apply_and_unused_tokens_and_permits_come_back_through_envoy() {
    let server = Server::start(&["--rules", &llm_example("rules.yaml"), "--rules", &llm_example("llm.yaml")]);
    let service = Service::start();
    let config = std::fs::read_to_string(llm_example("envoy.yaml")).expect("the example");
    // The service of this test has no headers of its own to send; Envoy has the request's until the end, too.
    assert_eq!(config.matches("%RESP(x-unused-tokens)%").count(), 1);
    let edge = Edge::start_with(config.replace("%RESP(", "%REQ("), &server, &service);
    let left = |key: &str| -> Vec<u64> {
        let body = json!({"domain": "llm", "attributes": {"api_key": key}, "cost": 0});
        let decision = server.post("/v1/check", &body).json();
        let limits = decision["limits"].as_array().expect("limits").iter();
        limits.map(|limit| limit["remaining"].as_u64().expect("a number")).collect()
    };

    // Rules on a key of one descriptor and a path of the other, whatever their order.
    let get =
        |path: &str, key: &str| edge.get(path, &format!("x-api-key: {key}\r\nx-unused-tokens: 3000\r\n"));
    let is_back = |key: &str| eventually("the end of the stream", || (left(key)[2] == 2).then_some(()));
    for _ in 0..5 {
        assert_eq!(get("/v1/batch?page=1", "k").status, 200);
        is_back("k");
    }
    let denied = get("/v1/batch", "k");
    assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("batches")));
    assert_eq!(get("/v1/other", "k").status, 200);
    assert_eq!(edge.get("/v1/batch", "").status, 200, "that limit is for each key");

    // What is charged at the beginning comes back at the end: the tokens that were not used, and the permit.
    for requests in 1..=6_u64 {
        assert_eq!(get("/v1/chat", "a").status, 200);
        is_back("a");
        let left = left("a");
        // A little refills while the test runs.
        assert!(left[1] >= 100_000 - 1_000 * requests, "{left:?}");
        assert!(left[0] >= 60 - requests, "{left:?}");
    }

    // A service that does not say what is left keeps both.
    let keep = || edge.get("/v1/chat", "x-api-key: b\r\n");
    assert_eq!((keep().status, keep().status), (200, 200));
    let denied = keep();
    assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("budget")));
    assert_eq!(left("b")[2], 0, "a denied request gives nothing back");
}

/// Where Envoy listens, once it does and has found Tollgate healthy.
fn listening(admin: SocketAddr) -> Option<SocketAddr> {
    let ask = |path: &str| -> Option<Value> {
        let request = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
        serde_json::from_slice(&exchange(admin, request.as_bytes()).ok()?.body).ok()
    };
    let clusters = ask("/clusters?format=json")?;
    let clusters = clusters["cluster_statuses"].as_array()?;
    let tollgate = clusters.iter().find(|cluster| cluster["name"] == "tollgate")?;
    if tollgate["host_statuses"][0]["health_status"] != json!({"eds_health_status": "HEALTHY"}) {
        return None;
    }
    let listeners = ask("/listeners?format=json")?;
    let bound = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
    format!("{}:{}", bound["address"].as_str()?, bound["port_value"]).parse().ok()
}

/// This is what a user installs Tollgate for.
#[test]
fn limits_apply_and_explain_themselves_through_envoy() {
    let rules = example("rules.yaml");
    let server = Server::start(&["--rules", rules.to_str().expect("a plain path")]);
    let service = Service::start();
    let edge = Edge::start(&server, &service);

    for left in (0..5).rev() {
        let answer = edge.get("/login", "");
        assert_eq!((answer.status, answer.text().as_str()), (200, "hello"), "{:?}", answer.headers);
        assert_eq!(
            answer.header("x-ratelimit-remaining"),
            Some(left.to_string().as_str()),
            "{:?}",
            answer.headers
        );
        assert!(
            answer.header("x-ratelimit-limit").is_some_and(|limit| limit.starts_with('5')),
            "{:?}",
            answer.headers
        );
        assert_eq!(answer.header("x-ratelimit-denied-by"), None);
    }
    assert_eq!(service.served(), 5);
    let denied = edge.get("/login", "");
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("x-envoy-ratelimited"), Some("true"));
    assert_eq!(denied.header("x-ratelimit-denied-by"), Some("logins"));
    assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
    let reset: u64 = denied.header("x-ratelimit-reset").and_then(|text| text.parse().ok()).expect("a time");
    assert!((170..=180).contains(&reset), "a fifth of a quarter of an hour: {reset}");
    says_what_other_integrations_say(&denied, reset);
    assert_eq!(service.served(), 5, "the service never saw it");

    // Another route is another limit; with a key, the key's is the tighter of two.
    let other = edge.get("/", "x-api-key: k\r\n");
    assert_eq!(
        (other.status, other.header("x-ratelimit-remaining")),
        (200, Some("49")),
        "{:?}",
        other.headers
    );

    // The operator's log has the rule, its metadata and the decision to look up.
    let line = eventually("the access log", || {
        let log = edge.envoy.output();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.into_iter().find(|line| line["status"] == 429)
    });
    assert_eq!((&line["path"], &line["denied_by"]), (&json!("/login"), &json!("logins")), "{line}");
    assert_eq!(line["alert"], "brute-force", "{line}");
    assert_eq!(line["decision"].as_str().map(str::len), Some(32), "{line}");
}

/// A denial has the fields and the body of every other integration, each once.
fn says_what_other_integrations_say(denied: &WebResponse, wait: u64) {
    for name in ["ratelimit", "ratelimit-policy", "retry-after", "x-ratelimit-denied-by", "content-type"] {
        let count = denied.headers.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name)).count();
        assert_eq!(count, 1, "{name} in {:?}", denied.headers);
    }
    assert_eq!(denied.header("retry-after"), Some(wait.to_string().as_str()));
    assert_eq!(denied.header("ratelimit"), Some(format!("\"logins\";r=0;t={wait}").as_str()));
    assert_eq!(denied.header("ratelimit-policy"), Some("\"logins\";q=5;w=900"));
    assert_eq!(denied.header("content-type"), Some("application/problem+json"));
    let body = denied.json();
    assert_eq!((&body["retry_after"], &body["status"]), (&json!(wait), &json!(429)), "{body}");
    assert_eq!(body["violated-policies"], json!(["logins"]), "{body}");
}

/// Whatever lines the filter has, and where Envoy writes the same.
#[test]
fn denials_explain_themselves_whatever_the_filter_sets() {
    let rules = example("rules.yaml");
    let server = Server::start(&["--rules", rules.to_str().expect("a plain path")]);
    let service = Service::start();
    let config = std::fs::read_to_string(example("envoy.yaml")).expect("the example");
    let line = "enable_x_ratelimit_headers: DRAFT_VERSION_03";
    assert_eq!(config.matches(line).count(), 1);
    for lines in ["stat_prefix: plain", "enable_retry_after_header: true"] {
        let edge = Edge::start_with(config.replace(line, lines), &server, &service);
        let denied =
            eventually("a denial", || Some(edge.get("/login", "")).filter(|answer| answer.status == 429));
        let wait = denied.header("retry-after").and_then(|text| text.parse().ok()).expect("a time");
        says_what_other_integrations_say(&denied, wait);
        assert_eq!(denied.header("x-ratelimit-reset"), None);
    }
}

/// The caller is not over a limit of its own, so it must not read that it is.
#[test]
fn rules_that_fail_closed_are_a_503_through_envoy() {
    let folder = Folder::new();
    let text = std::fs::read_to_string(example("rules.yaml")).expect("the example");
    let path = folder
        .write("rules.yaml", text.replace("limit: 5 per 15m", "limit: 5 per 15m\n        on_error: closed"));
    // Nothing listens there.
    let dead = format!("redis://{}", tollgate_testing::ports::free_address());
    let server = Server::start(&["--rules", path.to_str().expect("a plain path"), "--store", &dead]);
    let edge = Edge::start(&server, &Service::start());
    let closed = edge.get("/login", "");
    assert_eq!(closed.status, 503, "{:?}\n{}", closed.headers, closed.text());
    assert_eq!(closed.header("x-ratelimit-origin"), Some("fail_closed"), "{:?}", closed.headers);
    assert_eq!(closed.header("retry-after"), Some("1"));
    assert_eq!(
        (&closed.json()["status"], closed.header("x-ratelimit-denied-by")),
        (&json!(503), Some("logins"))
    );
}

/// A limit that is lowered in an incident bites at once, through connections that are already open.
#[test]
fn new_rules_act_on_traffic_that_envoy_already_carries() {
    let folder = Folder::new();
    let text = std::fs::read_to_string(example("rules.yaml")).expect("the example");
    let path = folder.write("rules.yaml", &text);
    let server = Server::start(&["--rules", path.to_str().expect("a plain path")]);
    let service = Service::start();
    let edge = Edge::start(&server, &service);
    let key = "x-api-key: k\r\n";
    assert_eq!(edge.get("/", key).status, 200);
    folder.write("rules.yaml", text.replace("600/minute", "1/hour").replace("burst: 50", "burst: 1"));
    let denied = eventually("the lower limit", || {
        let answer = edge.get("/", key);
        (answer.status == 429).then_some(answer)
    });
    assert_eq!(denied.header("x-ratelimit-denied-by"), Some("per-key"));
    let limit = denied.header("x-ratelimit-limit").expect("a limit");
    assert!(limit.starts_with("1, 1;w=3600"), "{limit}");
}
