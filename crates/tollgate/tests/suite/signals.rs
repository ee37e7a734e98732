//! Signals that limits follow: from a real Prometheus, from the gateway's own measurements, and from one node to the others.

use crate::harness::{self, Folder, Gateway, Prometheus, Redis, Server, eventually, exchange, request};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

fn rules(signals: &str) -> String {
    format!(
        "
domain: d
descriptors: [{{key: user, limit: 10/day, algorithm: fixed_window}}]
overload:
  adapt: {{signals: {{{signals}}}, order: [free], least: 50%, step: 1s}}
"
    )
}

fn metrics(at: SocketAddr) -> String {
    exchange(at, &request("GET", "/metrics", b"")).expect("metrics").text()
}

/// Percent of the tier's limits that apply.
fn percent(at: SocketAddr) -> f64 {
    let line = "ratelimit_overload_adapted_percent{domain=\"d\",tier=\"free\"} ";
    let text = metrics(at);
    let value = text.lines().find_map(|found| found.strip_prefix(line));
    value.unwrap_or_else(|| panic!("no level in {text}")).parse().expect("a number")
}

fn push(server: &Server, value: f64) -> Value {
    let answer = server.post("/v1/signals", &json!({"domain": "d", "signals": {"queue": value}}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// Pushes to one of the servers until the other follows, and shows that it does, and that it comes back.
fn shares(one: &Server, other: &Server) {
    eventually("the other node's limits to follow", || {
        push(one, 150.0);
        (percent(other.http) == 50.0).then_some(())
    });
    let attributes = json!({"user": "u", "tier": "free"});
    // The signal expires a few seconds after it was pushed, so it is pushed again before each check.
    let pushed_check = || {
        eventually("the limits to follow", || {
            push(one, 150.0);
            (percent(other.http) == 50.0).then_some(())
        });
        other.check("d", &attributes)
    };
    let passed = (0..10).filter(|_| pushed_check().status == 200).count();
    assert!(passed <= 6, "{passed} of ten");
    let reason = pushed_check().json()["reason"].clone();
    assert!(reason.as_str().is_some_and(|reason| reason.contains("because of overload")), "{reason}");
    eventually("the signal to expire on both", || {
        one.check("d", &attributes);
        other.check("d", &attributes);
        (percent(one.http) == 100.0 && percent(other.http) == 100.0).then_some(())
    });
}

/// A worker that reports to one node must protect itself from the callers of all.
#[test]
fn a_signal_pushed_to_one_node_bears_on_the_others_through_redis() {
    let redis = Redis::start();
    let text = rules("queue: 100");
    let flags = ["--store", &redis.url(), "--store-deadline-ms", "10000"];
    let (one, two) = (Server::start_with_rules(&text, &flags), Server::start_with_rules(&text, &flags));
    shares(&one, &two);
    // Without the store, each node follows what it is told.
    let _dead = redis.stop();
    eventually("the first node alone", || {
        push(&one, 150.0);
        (percent(one.http) == 50.0).then_some(())
    });
    assert_eq!(percent(two.http), 100.0);
}

#[test]
fn a_signal_pushed_to_one_node_bears_on_the_others_through_the_database() {
    let folder = Folder::new();
    let db = format!("sqlite:{}", folder.join("t.db").display());
    let text = rules("queue: 100");
    let flags = ["--db", &db, "--admin", "127.0.0.1:0"];
    let (one, two) = (Server::start_with_rules(&text, &flags), Server::start_with_rules(&text, &flags));
    shares(&one, &two);
}

#[test]
fn without_a_store_in_common_each_node_follows_its_own_signals() {
    let text = rules("queue: 100");
    let (one, two) = (Server::with_rules(&text), Server::with_rules(&text));
    eventually("the first node to follow", || {
        push(&one, 150.0);
        (percent(one.http) == 50.0).then_some(())
    });
    assert_eq!(percent(two.http), 100.0);
}

#[test]
fn a_prometheus_is_asked_and_its_death_lets_the_signal_expire() {
    let folder = Folder::new();
    let prometheus = Prometheus::start(&folder, &[]);
    let url = format!("http://{}", prometheus.address);
    // The first is wrong, which must not delay the others.
    let signals = "broken: {above: 1, query: 'sum('}, none: {above: 1, query: absent_metric}, \
                   queue: {above: 100, query: 'vector(150) or vector(7)'}";
    let server = Server::start_with_rules(&rules(signals), &["--prometheus", &url]);
    eventually("limits to follow the query", || (percent(server.http) == 50.0).then_some(()));
    let text = metrics(server.http);
    for line in [
        "ratelimit_overload_signal{domain=\"d\",signal=\"queue\",source=\"query\"} 150",
        "ratelimit_overload_signal{domain=\"d\",signal=\"none\",source=\"query\"} 0",
        "ratelimit_overload_signal_bound{domain=\"d\",signal=\"queue\",source=\"query\"} 100",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    let figure = |result: &str| {
        let name = format!("ratelimit_signal_queries_total{{result=\"{result}\"}} ");
        let text = metrics(server.http);
        text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok()).expect("a figure")
    };
    assert!(figure("answered") > 0 && figure("empty") > 0 && figure("failed") > 0);
    eventually("the broken query to be logged", || server.log().contains("signal=\"broken\"").then_some(()));
    let pushed = server.post("/v1/signals", &json!({"domain": "d", "signals": {"queue": 1.0}}));
    assert_eq!((pushed.status, pushed.text().contains("`query`")), (400, true), "{}", pushed.text());

    drop(prometheus);
    eventually("the signal to expire", || {
        server.check("d", &json!({"user": "u", "tier": "free"}));
        (percent(server.http) == 100.0).then_some(())
    });
    server.wait_for_log("its signals expire");
}

/// Answers queries in the place of a Prometheus, which is not overloaded on request: those that contain `heavy` as one that gives up.
fn overloaded_prometheus() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    // Ends with the test process.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let (mut received, mut chunk) = (Vec::new(), [0; 1024]);
            while !received.windows(8).any(|end| end == b"timeout=") {
                match stream.read(&mut chunk) {
                    Ok(1..) => received.extend_from_slice(&chunk),
                    _ => break,
                }
            }
            let (status, body) = match String::from_utf8_lossy(&received).contains("heavy") {
                true => ("503 Service Unavailable", json!({"status": "error", "errorType": "timeout"})),
                false => (
                    "200 OK",
                    json!({"status": "success", "data": {"resultType": "scalar", "result": [1, "150"]}}),
                ),
            };
            let body = body.to_string();
            let head =
                format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    address
}

#[test]
fn a_query_that_fails_puts_off_no_other() {
    let signals = "first: {above: 1, query: heavy}, queue: {above: 100, query: light}";
    let url = format!("http://{}", overloaded_prometheus());
    let server = Server::start_with_rules(&rules(signals), &["--prometheus", &url]);
    eventually("limits to follow the other query", || (percent(server.http) == 50.0).then_some(()));
}

#[test]
fn rules_that_query_without_a_prometheus_are_reported() {
    let server = Server::with_rules(&rules("queue: {above: 100, query: up}"));
    eventually("a warning", || server.log().contains("set --prometheus").then_some(()));
}

/// The gateway itself sees that its upstream is slow.
#[test]
fn the_gateway_measures_its_upstreams() {
    let upstream = harness::Origin::start();
    let section = harness::plain(upstream.address, "");
    let text = rules("busy: {above: 5, measure: upstream_in_flight}");
    let gateway = Gateway::start(&text, &section);
    assert_eq!(gateway.get("/").status, 200);
    // Requests that the upstream holds are in flight.
    let held: Vec<_> = (0..12)
        .map(|_| {
            let mut connection = gateway.open();
            connection.send(&request("GET", "/hold", b"")).expect("sent");
            connection
        })
        .collect();
    eventually("limits to follow the requests in flight", || {
        gateway.get("/");
        (percent(gateway.http) < 100.0).then_some(())
    });
    upstream.release(held.len());
    drop(held);
    eventually("limits as the rules have them", || {
        gateway.get("/");
        (percent(gateway.http) == 100.0).then_some(())
    });
}
