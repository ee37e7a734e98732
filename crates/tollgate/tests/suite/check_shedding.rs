//! Real processes whose checks wait for a store that has become slow: comfort goes without it, security keeps it, and answers,
//! metrics and the log say so: over HTTP, the Redis protocol and Envoy's rate limit service, and in the gateway.

use crate::harness::{
    self, FarLink, Folder, Gateway, Origin, Redis, Server, WebConnection, eventually, plain,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic_prost::ProstCodec;

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: comfort, limit: 1000000/minute, on_error: open}
  - {key: login, name: security, class: security, limit: 1000000/minute}
";

/// The same for callers of a gateway, which identifies them.
const GATEWAY_RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: comfort, limit: 1000000/minute, on_error: open}
  - {key: path, value: /login, name: security, class: security, limit: 1000000/minute}
";

/// Callers that check one after the other, and those that stay when the store is fast again: so few are never shed, however
/// late a busy machine answers them.
const CALLERS: usize = 96;
const STAYING: usize = 24;
/// One test at a time: the callers of several would make each other wait.
static ALONE: Mutex<()> = Mutex::new(());
/// Part of the reason that answers to shed checks have.
const REASON: &str = "Tollgate is overloaded and sheds checks of class comfort";

/// Returns a figure of `/metrics`.
fn figure(http: SocketAddr, name: &str) -> f64 {
    let text = harness::exchange(http, &harness::request("GET", "/metrics", b"")).expect("metrics").text();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
}

/// Origins of answers, by attribute.
type Origins = BTreeMap<(&'static str, String), u64>;

/// What callers have seen.
#[derive(Default)]
struct Seen {
    origins: Mutex<Origins>,
    is_fast_again: AtomicBool,
    is_over: AtomicBool,
}

impl Seen {
    fn record(&self, key: &'static str, origin: &str) {
        *self.origins.lock().expect("whole").entry((key, origin.to_owned())).or_default() += 1;
    }

    fn of(&self, key: &'static str, origin: &str) -> u64 {
        self.origins.lock().expect("whole").get(&(key, origin.to_owned())).copied().unwrap_or(0)
    }

    fn take(&self) -> Origins {
        std::mem::take(&mut *self.origins.lock().expect("whole"))
    }

    /// Returns whether this caller is done.
    fn is_over_for(&self, number: usize) -> bool {
        self.is_over.load(Ordering::Relaxed)
            || (number >= STAYING && self.is_fast_again.load(Ordering::Relaxed))
    }
}

/// Returns what a caller asks about: one in eight a login.
const fn key_of(number: usize) -> &'static str {
    if number.is_multiple_of(8) { "login" } else { "user" }
}

/// Lets callers check until the store has become slow and fast again. `charged` is the origin of an answer by the store;
/// `while_shed` runs while comfort is shed.
fn run(
    http: SocketAddr,
    link: &FarLink,
    (charged, shed): (&str, &str),
    call: impl Fn(usize, &Seen) + Sync,
    while_shed: impl Fn(),
) {
    // Of a test that has failed, nothing is left.
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let seen = Seen::default();
    let (call, seen) = (&call, &seen);
    std::thread::scope(|scope| {
        for number in 0..CALLERS {
            scope.spawn(move || call(number, seen));
        }
        // An assertion that fails must not leave the callers running.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually("a process that has seen how fast the store is", || {
                (seen.of("user", charged) > 2_000 && figure(http, "ratelimit_check_wait_seconds") > 0.0)
                    .then_some(())
            });
            seen.take();
            link.set(Duration::from_secs(2));
            eventually("comfort to be shed", || {
                (seen.of("user", shed) > 100
                    && figure(http, "ratelimit_checks_shed_total{class=\"comfort\"}") > 100.0)
                    .then_some(())
            });
            while_shed();
            eventually("a login that the slow store has answered", || {
                (seen.of("login", charged) > 0).then_some(())
            });
            link.set(Duration::ZERO);
            seen.is_fast_again.store(true, Ordering::Relaxed);
            eventually("nothing to be shed any more", || {
                (figure(http, "ratelimit_checks_shed_part{class=\"comfort\"}") == 0.0).then_some(())
            });
            let during = seen.take();
            eventually("comfort to be charged again", || (seen.of("user", charged) > 100).then_some(()));
            assert_eq!(
                figure(http, "ratelimit_checks_shed_total{class=\"security\"}"),
                0.0,
                "security is not let pass"
            );
            during
        }));
        seen.is_over.store(true, Ordering::Relaxed);
        let during = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(
            during.keys().all(|(key, origin)| origin == charged || (origin == shed && *key == "user")),
            "no check failed: {during:?}"
        );
    });
}

/// Starts a server whose way to Redis can become long. All waits are within the deadline: what is shed is not what fails.
fn server(link: &FarLink) -> Server {
    let url = format!("redis://{}", link.address);
    let flags =
        ["--store", &url, "--store-deadline-ms", "10000", "--shed-wait-ms", "500", "--hot-per-second", "0"];
    Server::start_with_rules(RULES, &flags)
}

/// The origin of a check over the Redis protocol, and its reason.
fn origin_by_resp(server: &Server) -> (String, Option<String>) {
    let address = server.resp.expect("the Redis protocol");
    let client = redis::Client::open(format!("redis://{address}")).expect("an address");
    let mut connection = client.get_connection().expect("a server");
    let check = redis::cmd("TG.CHECK")
        .arg(&["d", "user", "u", "WITHREASON"])
        .query::<Vec<redis::Value>>(&mut connection);
    let reply = check.expect("a reply");
    let origin = redis::from_redis_value(reply[7].clone()).expect("an origin");
    (origin, redis::from_redis_value(reply[9].clone()).expect("a reason or none"))
}

#[test]
fn comfort_is_shed_while_the_store_is_slow_and_charged_again_afterwards() {
    let redis = Redis::start();
    let link = FarLink::to(redis.port(), Duration::ZERO);
    let server = server(&link);
    let call = |number: usize, seen: &Seen| {
        let mut connection = WebConnection::to(server.http).expect("a server");
        let key = key_of(number);
        let body = json!({"domain": "d", "attributes": {key: "u"}}).to_string();
        let length = body.len();
        let sent =
            format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}");
        while !seen.is_over_for(number) {
            connection.send(sent.as_bytes()).expect("a server");
            let answer = connection.response().expect("an answer").json();
            let origin = answer["origin"].as_str().expect("an origin");
            if origin == "shed" {
                assert_eq!(
                    (&answer["allowed"], &answer["shed"], &answer["reason"]),
                    (&json!(true), &json!("comfort"), &json!(REASON)),
                    "{answer}"
                );
            }
            seen.record(key, origin);
        }
    };
    run(server.http, &link, ("store", "shed"), call, || {
        eventually("a check over the Redis protocol to be shed", || {
            let (origin, reason) = origin_by_resp(&server);
            assert_eq!(reason.as_deref(), (origin == "shed").then_some(REASON));
            (origin == "shed").then_some(())
        });
        server.wait_for_log("checks wait too long for the store");
    });
}

/// An Envoy that asks must not wait for what may go without the store, and is told why.
#[test]
fn calls_of_the_rate_limit_service_are_shed_and_say_so() {
    let redis = Redis::start();
    let link = FarLink::to(redis.port(), Duration::ZERO);
    let server = server(&link);
    let call = |number: usize, seen: &Seen| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let endpoint =
                tonic::transport::Endpoint::from_shared(format!("http://{}", server.grpc)).expect("a URL");
            let mut client = tonic::client::Grpc::new(endpoint.connect().await.expect("a connection"));
            let key = key_of(number);
            let entries = vec![Entry { key: key.to_owned(), value: "u".to_owned() }];
            let descriptors = vec![RateLimitDescriptor { entries, ..Default::default() }];
            let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
            while !seen.is_over_for(number) {
                client.ready().await.expect("ready");
                let path =
                    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit".parse().expect("a path");
                let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
                let response = client.unary(tonic::Request::new(request.clone()), path, codec).await;
                let response = response.expect("a response").into_inner();
                assert_eq!(response.overall_code, 1, "{response:?}");
                // What the store has decided has no metadata.
                let metadata = response.dynamic_metadata.unwrap_or_default();
                let text = |name: &str| match metadata.fields.get(name).and_then(|field| field.kind.as_ref())
                {
                    Some(prost_types::value::Kind::StringValue(text)) => text.as_str(),
                    _ => "",
                };
                if text("origin") == "shed" {
                    assert_eq!(text("reason"), REASON, "{metadata:?}");
                }
                seen.record(key, if text("origin").is_empty() { "store" } else { text("origin") });
            }
        });
    };
    run(server.http, &link, ("store", "shed"), call, || {
        server.wait_for_log("checks wait too long for the store");
    });
}

/// Requests through the gateway must not wait either: they reach the upstream as before.
#[test]
fn requests_through_the_gateway_pass_while_their_checks_are_shed() {
    let (redis, origin) = (Redis::start(), Origin::start());
    let link = FarLink::to(redis.port(), Duration::ZERO);
    let store = format!(
        "store: redis://{}\nstore_deadline_ms: 10000\nshed_wait_ms: 500\nleases: {{hot_per_second: 0}}",
        link.address
    );
    let gateway = Gateway::start_in(Folder::new(), GATEWAY_RULES, &store, &plain(origin.address, ""));
    let call = |number: usize, seen: &Seen| {
        let mut connection = gateway.open();
        let key = key_of(number);
        let head = if key == "login" { "GET /login" } else { "GET /" };
        let caller = if key == "login" { "" } else { "x-api-key: u\r\n" };
        let sent = format!("{head} HTTP/1.1\r\nhost: t\r\n{caller}\r\n");
        while !seen.is_over_for(number) {
            connection.send(sent.as_bytes()).expect("a gateway");
            let answer = connection.response().expect("an answer");
            // A gateway does not say to callers what a decision rests on.
            seen.record(key, if answer.status == 200 { "passed" } else { "failed" });
        }
    };
    run(gateway.http, &link, ("passed", "passed"), call, || {
        gateway.wait_for_log("checks wait too long for the store");
    });
}
