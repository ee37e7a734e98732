//! Traces as those see them who follow them: spans of sampled requests, and of no others, at a collector that knows
//! OpenTelemetry's own messages; and decisions that go on when there is none.

use crate::harness::{
    self, Collector, Folder, Gateway, Origin, Server, WebConnection, certificate, eventually, plain,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::TcpListener;

const RULES: &str = "domain: d\ndescriptors: [{key: api_key, name: per-key, limit: 3/hour}, {key: global, limit: 100000/hour}]\n";
const KEY: &str = "sk_live_PLANTED0123456789abcdef";

/// A request that is part of a trace, with a key that must appear nowhere.
fn traced(method: &str, path: &str, parent: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntraceparent: {parent}\r\nx-api-key: {KEY}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// A trace, by the last digits of the caller's span and its flags.
fn parent(span: &str, flags: &str) -> String {
    format!("00-000000000000000000000000000000ab-00000000000000{span}-{flags}")
}

fn asked(domain: &str) -> String {
    json!({"domain": domain, "attributes": {"api_key": KEY}}).to_string()
}

/// By their parents, each of which is there once.
fn by_parent(spans: &[Value]) -> BTreeMap<&str, &Value> {
    let all: BTreeMap<_, _> =
        spans.iter().map(|span| (span["parent"].as_str().expect("a parent"), span)).collect();
    assert_eq!(all.len(), spans.len(), "{spans:?}");
    all
}

fn figure(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn sampled_requests_have_spans_and_others_have_none() {
    let mut collector = Collector::start();
    let flags = ["--otlp", &collector.url(), "--node", "n1", "--region", "eu-1"];
    let mut server = Server::start_with_rules(RULES, &flags);
    let post = |path: &str, parent: &str, body: &str| {
        let answer = server.exchange(&traced("POST", path, parent, body));
        (answer.status, answer.header("x-ratelimit-decision-id").map(str::to_owned))
    };
    assert_eq!(post("/v1/check", &parent("01", "01"), &asked("d")).0, 200);
    for other in [parent("02", "00"), parent("03", "01").replace("ab-", "AB-"), "nonsense".to_owned()] {
        assert_eq!(post("/v1/check", &other, &asked("elsewhere")).0, 200);
    }
    let (status, reserved) = post("/v1/reserve", &parent("04", "03"), &asked("d"));
    assert_eq!((status, reserved), (200, None));
    // Two are treated as none: one of them is forged.
    let twice = format!("{}\r\ntraceparent: {}", parent("05", "01"), parent("06", "01"));
    assert_eq!(post("/v1/check", &twice, &asked("elsewhere")).0, 200);
    harness::foreign_client("traced.py", &server);
    let (status, denied) = post("/v1/check", &parent("07", "01"), &asked("d"));
    assert_eq!(status, 429);
    assert_eq!(post("/v1/check", &parent("08", "01"), &asked(KEY)).0, 200);
    // The same caller, who has nothing left.
    assert_eq!(server.exchange(&traced("GET", "/check/orders", &parent("09", "01"), "")).status, 429);
    let envoy = json!({"domain": "d", "descriptors": [{"entries": [{"key": "nobody", "value": KEY}]}]});
    assert_eq!(post("/json", &parent("10", "01"), &envoy.to_string()).0, 200);
    collector.wait_for(7);
    let text = eventually("all to be sent", || {
        let text = server.get("/metrics").text();
        (figure(&text, "ratelimit_trace_spans_sent_total") == 7.0).then_some(text)
    });
    assert_eq!(figure(&text, "ratelimit_trace_spans_total"), 7.0);
    assert_eq!(figure(&text, "ratelimit_trace_spans_dropped_total{where=\"memory\"}"), 0.0);
    assert_eq!(figure(&text, "ratelimit_trace_spans_dropped_total{where=\"collector\"}"), 0.0);

    // The last of them is sent when the server ends.
    assert_eq!(post("/v1/check", &parent("11", "01"), &asked("d")).0, 429);
    server.signal("TERM");
    assert!(server.wait().success());
    let spans = collector.wait_for(8);
    assert!(spans.iter().all(|span| !span.to_string().contains("PLANTED")), "{spans:?}");
    let spans = by_parent(&spans);
    let of = |parent: &str| spans[format!("00000000000000{parent}").as_str()];
    let parents: Vec<_> = spans.keys().map(|parent| &parent[14..]).collect();
    assert_eq!(parents, ["01", "04", "07", "08", "09", "10", "11", "a1"]);
    for span in spans.values() {
        let trace = if span["parent"] == "00000000000000a1" { "aa" } else { "ab" };
        assert_eq!(span["trace"], format!("{trace:0>32}"));
        assert_eq!((&span["name"], &span["kind"]), (&json!("ratelimit check"), &json!("SPAN_KIND_SERVER")));
        let place = ["service.name", "service.instance.id", "cloud.region"].map(|key| &span["resource"][key]);
        assert_eq!(place, ["tollgate", "n1", "eu-1"]);
        assert!(span["start"].as_u64() > Some(1_600_000_000_000_000_000), "{span}");
        assert!(span["end"].as_u64() >= span["start"].as_u64(), "{span}");
        assert_eq!(span["flags"], 0x301, "sampled, and its parent is elsewhere");
        let revision = span["attributes"]["ratelimit.revision"].as_str();
        assert!(revision.is_some_and(|revision| revision.len() >= 8), "{span}");
    }
    let attribute = |parent: &str, name: &str| of(parent)["attributes"][format!("ratelimit.{name}")].clone();
    assert_eq!(
        ["domain", "rule", "verdict", "origin", "protocol"].map(|name| attribute("07", name)),
        ["d", "per-key", "deny", "store", "http"]
    );
    assert_eq!(attribute("07", "decision_id"), json!(denied.expect("a denial names itself")));
    assert_eq!(
        ["rule", "verdict", "protocol"].map(|name| attribute("a1", name)),
        ["per-key", "allow", "rls"]
    );
    assert_eq!(
        ["domain", "rule", "origin"].map(|name| attribute("08", name)),
        [json!("other"), Value::Null, json!("unmatched")]
    );
    let ids: std::collections::BTreeSet<_> = spans.values().map(|span| span["span"].as_str()).collect();
    assert_eq!(ids.len(), 8);
}

/// The gateway's span stands between its caller's and its upstream's, and is as long as the request.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn the_gateway_hands_a_trace_on() {
    let (mut collector, origin) = (Collector::start(), Origin::start());
    let rules = "domain: d\ndescriptors: [{key: global, name: total, limit: 4/hour}]\n";
    let more = format!("otlp: {}\n", collector.url());
    let mut gateway = Gateway::start_in(Folder::new(), rules, &more, &plain(origin.address, ""));
    let ask = |method: &str, path: &str, parent: &str, body: &str| {
        let answer = gateway.exchange(&traced(method, path, parent, body));
        (answer.status, answer.text())
    };
    let (status, head) = ask("GET", "/head", &parent("01", "01"), "");
    assert_eq!(status, 200);
    let passed = head.lines().find_map(|line| line.strip_prefix("traceparent: ")).expect("a parent").trim();
    for other in [parent("02", "00"), "nonsense".to_owned()] {
        let (_, head) = ask("GET", "/head", &other, "");
        assert!(head.contains(&format!("traceparent: {other}\r\n")), "as it came: {head}");
    }
    assert_eq!(ask("GET", "/status/503", &parent("03", "01"), "").0, 503);
    let reached = origin.requests();
    assert_eq!(ask("GET", &format!("/{KEY}"), &parent("04", "01"), "").0, 429);
    assert_eq!(ask("PURGE", "/b", &parent("05", "01"), "body").0, 429);
    assert_eq!(origin.requests(), reached);
    collector.wait_for(8);
    gateway.signal("TERM");
    assert!(gateway.wait().success());

    let spans = collector.spans();
    assert!(spans.iter().all(|span| !span.to_string().contains("PLANTED")), "{spans:?}");
    let spans = by_parent(&spans);
    assert_eq!(spans.len(), 8);
    let whole = |parent: &str| spans[format!("00000000000000{parent}").as_str()];
    let decided = |parent: &str| spans[whole(parent)["span"].as_str().expect("an id")];
    for (parent, name, status, outcome, verdict) in [
        ("01", "GET /{*rest}", 200, "STATUS_CODE_UNSET", "allow"),
        ("03", "GET /{*rest}", 503, "STATUS_CODE_ERROR", "allow"),
        ("04", "GET /{*rest}", 429, "STATUS_CODE_UNSET", "deny"),
        ("05", "HTTP /{*rest}", 429, "STATUS_CODE_UNSET", "deny"),
    ] {
        let (whole, decided) = (whole(parent), decided(parent));
        assert_eq!((&whole["name"], &whole["kind"]), (&json!(name), &json!("SPAN_KIND_SERVER")));
        assert_eq!((&whole["status"], &whole["flags"]), (&json!(outcome), &json!(0x301)));
        assert_eq!(whole["attributes"]["http.response.status_code"], status);
        assert_eq!(whole["attributes"]["http.route"], "/{*rest}");
        assert_eq!((&decided["kind"], &decided["flags"]), (&json!("SPAN_KIND_INTERNAL"), &json!(0x101)));
        let attribute = |name: &str| &decided["attributes"][format!("ratelimit.{name}")];
        assert_eq!(
            [attribute("verdict"), attribute("rule"), attribute("protocol")],
            [verdict, "total", "gateway"]
        );
        let time = |span: &Value, name: &str| span[name].as_u64().expect("a time");
        assert!(time(whole, "start") <= time(decided, "start") && time(decided, "end") <= time(whole, "end"));
    }
    assert_eq!(whole("05")["attributes"]["http.request.method"], "_OTHER");
    let ours = whole("01")["span"].as_str().expect("an id");
    assert_eq!(passed, parent("01", "01").replace("0000000000000001", ours));
}

/// A service that asks a server about its callers hands their traces on to it.
#[tokio::test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
async fn the_rust_layer_hands_a_trace_on() {
    use tollgate_sdk::{CheckRequest, Remote, RemoteConfig, TollgateLayer};
    use tower::{Layer, ServiceExt};
    let mut collector = Collector::start();
    let server = Server::start_with_rules(RULES, &["--otlp", &collector.url()]);
    let address = format!("http://{}", server.grpc);
    let settings = RemoteConfig { deadline: harness::LONG, ..RemoteConfig::new(address, "d") };
    let layer = TollgateLayer::new(Remote::new(settings).expect("an address"), |_: &http::request::Parts| {
        Some(CheckRequest::attributes([("api_key", KEY)]))
    });
    let service = layer.layer(tower::service_fn(|request: http::Request<()>| async move {
        let own = request.headers().get("traceparent").cloned();
        Ok::<_, std::convert::Infallible>(http::Response::new(format!("{own:?}")))
    }));
    for parent in [None, Some(parent("01", "00")), Some("x".repeat(9_000)), Some(parent("02", "01"))] {
        let mut request = http::Request::new(());
        if let Some(parent) = &parent {
            request.headers_mut().insert("traceparent", parent.parse().expect("a value"));
        }
        assert!(
            service.clone().oneshot(request).await.expect("an answer").headers().contains_key("ratelimit")
        );
    }
    let spans = collector.wait_for(1);
    assert_eq!((spans.len(), &spans[0]["parent"]), (1, &json!("0000000000000002")));
    assert_eq!(spans[0]["attributes"]["ratelimit.verdict"], "deny");
}

/// Who does not follow traces leaves those of others alone.
#[test]
fn without_a_collector_nothing_is_changed() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let answer = gateway.exchange(&traced("GET", "/head", &parent("01", "01"), ""));
    assert!(answer.text().contains(&format!("traceparent: {}\r\n", parent("01", "01"))), "{}", answer.text());
    let server =
        Server::start_with(&["--otlp", "off"], &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")]);
    let body = asked("sample");
    assert_eq!(server.exchange(&traced("POST", "/v1/check", &parent("01", "01"), &body)).status, 200);
    assert!(!server.get("/metrics").text().contains("ratelimit_trace_spans"));
    // What is set for all programs of a machine keeps none of them from starting.
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:9");
    for (of_the_machine, expected) in [
        (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")][..], "OTEL_EXPORTER_OTLP_ENDPOINT: write"),
        (
            &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "grpc://u:hunter2@c")],
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        ),
        (&[endpoint, ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2")], "OTEL_EXPORTER_OTLP_HEADERS: write"),
        (&[endpoint, ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere.pem")], "/nowhere.pem"),
        (&[endpoint, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")], "only http/protobuf"),
    ] {
        let server = Server::start_with(&[], of_the_machine);
        let log =
            eventually("a warning", || Some(server.log()).filter(|log| log.contains("traces disabled")));
        assert!(log.contains(expected) && !log.contains("hunter2"), "{log}");
        assert!(!server.get("/metrics").text().contains("ratelimit_trace_spans"));
    }
    for (wrong, expected) in
        [("127.0.0.1:4318", "--otlp: write the HTTP address"), ("http://u:hunter2@c", "--otlp")]
    {
        let run = harness::run(&["serve", "--http", "127.0.0.1:0", "--otlp", wrong]);
        assert!(run.code == Some(1) && run.err.contains(expected), "{}", run.err);
        assert!(!run.err.contains("hunter2"), "{}", run.err);
    }
}

/// By OpenTelemetry's own variables, over TLS, to a collector that is busy at first.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python and openssl: make test")]
fn a_busy_collector_is_asked_again() {
    let folder = Folder::new();
    certificate(&folder, "collector");
    let file = |name: &str| folder.join(name).to_str().expect("a plain path").to_owned();
    let mut collector =
        Collector::start_with(&["0", "503", "--tls", &file("collector.crt"), &file("collector.key")]);
    let url = format!("https://localhost:{}", collector.address.port());
    let server = Server::start_with(
        &[],
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &url),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", &file("collector.crt")),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=for%20us"),
            ("OTEL_SERVICE_NAME", "limits"),
        ],
    );
    let body = asked("sample");
    assert_eq!(server.exchange(&traced("POST", "/v1/check", &parent("01", "01"), &body)).status, 200);
    let spans = collector.wait_for(1);
    assert_eq!(
        (&spans[0]["headers"]["api-key"], &spans[0]["resource"]["service.name"]),
        (&json!("for us"), &json!("limits"))
    );
    eventually("it to be counted", || {
        (figure(&server.get("/metrics").text(), "ratelimit_trace_spans_sent_total") == 1.0).then_some(())
    });
    assert!(!server.log().contains("for us"), "{}", server.log());
}

/// A collector that takes a connection and never answers holds up neither decisions nor the end.
#[test]
fn a_silent_collector_is_not_waited_for() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", silent.local_addr().expect("an address"));
    let mut server = Server::start_with_rules(RULES, &["--otlp", &url]);
    let ask =
        |span: &str| server.exchange(&traced("POST", "/v1/check", &parent(span, "01"), &asked("d"))).status;
    assert_eq!(ask("01"), 200);
    let (mut connection, _) = silent.accept().expect("it is asked");
    let mut line = [0; 24];
    std::io::Read::read_exact(&mut connection, &mut line).expect("a request");
    assert_eq!(&line, b"POST /v1/traces HTTP/1.1");
    assert_eq!(["02", "03", "04"].map(ask), [200, 200, 429]);
    server.signal("TERM");
    assert!(server.wait().success());
    server.wait_for_log("spans lost at shutdown");
}

/// Ten thousand sampled requests and no collector for their spans: each is answered, what has no room is counted, and when the
/// collector is there it gets what still waits.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn decisions_go_on_without_the_collector() {
    // Bound and not listened at: connections are refused, no other process is given the port, and the collector may have it.
    let held = tokio::net::TcpSocket::new_v4().expect("a socket");
    held.set_reuseaddr(true).expect("an option");
    held.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let free = held.local_addr().expect("an address");
    let server = Server::start_with_rules(RULES, &["--otlp", &format!("http://{free}")]);
    let (body, many) = (asked("d"), 10_000);
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ntraceparent: {}\r\ncontent-length: {}\r\n\r\n{body}",
        parent("01", "01"),
        body.len()
    );
    let mut connection = WebConnection::to(server.http).expect("a connection");
    let mut ask = || {
        let mut statuses = BTreeMap::<u16, usize>::new();
        for _ in 0..many / 100 {
            connection.send(request.repeat(100).as_bytes()).expect("it is taken");
            for _ in 0..100 {
                *statuses.entry(connection.response().expect("an answer").status).or_default() += 1;
            }
        }
        statuses
    };
    assert_eq!(ask(), BTreeMap::from([(200, 3), (429, many - 3)]));
    let dropped = |text: &str, place: &str| {
        figure(text, &format!("ratelimit_trace_spans_dropped_total{{where=\"{place}\"}}"))
    };
    // A busy machine may give batches up as fast as spans come, and needs more of them to run out of room.
    let mut rounds = 1;
    let text = loop {
        let text = server.get("/metrics").text();
        if dropped(&text, "memory") >= 1.0 {
            break text;
        }
        assert!(rounds < 20, "{text}");
        assert_eq!(ask().values().sum::<usize>(), many, "each is answered");
        rounds += 1;
    };
    let many = rounds * many;
    assert_eq!(figure(&text, "ratelimit_trace_spans_total"), many as f64);
    assert_eq!(figure(&text, "ratelimit_trace_spans_sent_total"), 0.0);
    eventually("a batch to be given up", || {
        (dropped(&server.get("/metrics").text(), "collector") >= 1.0).then_some(())
    });
    eventually("it to be said", || server.log().contains("unavailable; dropping spans").then_some(()));
    let mut collector = Collector::start_with(&[&free.port().to_string()]);
    collector.wait_for(1);
    let text = eventually("every span to be sent or counted", || {
        let text = server.get("/metrics").text();
        let known = figure(&text, "ratelimit_trace_spans_sent_total")
            + dropped(&text, "memory")
            + dropped(&text, "collector");
        (known == many as f64).then_some(text)
    });
    let sent = figure(&text, "ratelimit_trace_spans_sent_total") as usize;
    assert_eq!(collector.wait_for(sent).len(), sent);
    eventually("it to be said", || server.log().contains("available again").then_some(()));
    assert_eq!(server.log().matches("dropping spans").count(), 1, "said once: {}", server.log());
}
