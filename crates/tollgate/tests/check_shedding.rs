//! A real server whose checks wait for a store that has become slow: comfort goes without it, security keeps it, and the server
//! says so, over HTTP and over the Redis protocol.

mod harness;

use harness::{FarLink, Redis, Server, WebConnection, eventually};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: comfort, limit: 1000000/minute, on_error: open}
  - {key: login, name: security, class: security, limit: 1000000/minute}
";

/// Callers that check one after the other.
const CALLERS: usize = 96;

fn figure(server: &Server, name: &str) -> f64 {
    let text = server.get("/metrics").text();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
}

/// The origin of a check over the Redis protocol.
fn origin_by_resp(server: &Server) -> String {
    let address = server.resp.expect("the Redis protocol");
    let client = redis::Client::open(format!("redis://{address}")).expect("an address");
    let mut connection = client.get_connection().expect("a server");
    let check = redis::cmd("TG.CHECK").arg(&["d", "user", "u"]).query::<Vec<redis::Value>>(&mut connection);
    let reply = check.expect("a reply");
    redis::from_redis_value(reply[7].clone()).expect("an origin")
}

/// Origins of answers, by attribute.
type Origins = Mutex<BTreeMap<(&'static str, String), u64>>;

/// Sends checks until `done`; one in eight is about a login.
fn call(server: &Server, number: usize, origins: &Origins, done: &AtomicBool) {
    let mut connection = WebConnection::to(server.http).expect("a server");
    let key = if number.is_multiple_of(8) { "login" } else { "user" };
    let body = json!({"domain": "d", "attributes": {key: "u"}}).to_string();
    let sent =
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    while !done.load(Ordering::Relaxed) {
        connection.send(sent.as_bytes()).expect("a server");
        let answer = connection.response().expect("an answer").json();
        let origin = answer["origin"].as_str().expect("an origin").to_owned();
        if origin == "shed" {
            assert_eq!(answer["allowed"], true, "{answer}");
            let reason = answer["reason"].as_str().unwrap_or_default();
            assert!(reason.starts_with("Tollgate is overloaded"), "{answer}");
        }
        *origins.lock().expect("whole").entry((key, origin)).or_default() += 1;
    }
}

#[test]
fn comfort_is_shed_while_the_store_is_slow_and_charged_again_afterwards() {
    let redis = Redis::start();
    let link = FarLink::to(redis.port(), Duration::ZERO);
    let url = format!("redis://{}", link.address);
    // All waits are within the deadline: what is shed is not what fails.
    let flags =
        ["--store", &url, "--store-deadline-ms", "10000", "--shed-wait-ms", "100", "--hot-per-second", "0"];
    let server = Server::start_with_rules(RULES, &flags);
    let (origins, done) = (Origins::default(), AtomicBool::new(false));
    let take = || std::mem::take(&mut *origins.lock().expect("whole"));
    std::thread::scope(|scope| {
        for number in 0..CALLERS {
            let (server, origins, done) = (&server, &origins, &done);
            scope.spawn(move || call(server, number, origins, done));
        }
        // An assertion that fails must not leave the callers running.
        let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let of = |key: &'static str, origin: &str| {
                origins.lock().expect("whole").get(&(key, origin.to_owned())).copied().unwrap_or(0)
            };
            eventually("a server that has seen how fast the store is", || {
                (of("user", "store") > 2_000 && figure(&server, "ratelimit_check_wait_seconds") > 0.0)
                    .then_some(())
            });
            take();
            link.set(Duration::from_millis(400));
            eventually("comfort to be shed", || (of("user", "shed") > 100).then_some(()));
            assert!(figure(&server, "ratelimit_checks_shed_total{class=\"comfort\"}") > 0.0);
            eventually("a check over the Redis protocol to be shed", || {
                (origin_by_resp(&server) == "shed").then_some(())
            });
            server.wait_for_log("checks wait too long for the store");
            link.set(Duration::ZERO);
            eventually("nothing to be shed any more", || {
                (figure(&server, "ratelimit_checks_shed_part{class=\"comfort\"}") == 0.0).then_some(())
            });
            let seen = take();
            eventually("comfort to be charged again", || (of("user", "store") > 100).then_some(()));
            seen
        }));
        done.store(true, Ordering::Relaxed);
        let seen = seen.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(
            seen.keys().all(|(_, origin)| origin == "store" || origin == "shed"),
            "no check failed: {seen:?}"
        );
        assert!(seen.get(&("login", "store".to_owned())).is_some_and(|count| *count > 0), "{seen:?}");
        assert!(!seen.contains_key(&("login", "shed".to_owned())), "security is not let pass: {seen:?}");
    });
}
