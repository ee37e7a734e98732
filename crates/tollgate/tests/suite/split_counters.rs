//! Split counters over a real Redis: every protocol admits the whole limits of two split rules in one request, and
//! reports the whole limits and what remains of them.

use crate::harness::{Folder, Gateway, LONG, Origin, Redis, WebConnection, WebResponse, eventually, plain};
use bytes::Bytes;
use http::uri::PathAndQuery;
use http_body_util::Full;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::Limiter;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_sdk::{CheckRequest, InProcess, TollgateLayer};
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_store::{RedisConfig, RedisStore};
use tonic::client::Grpc;
use tonic_prost::ProstCodec;
use tower::{Layer, ServiceExt, service_fn};

/// By the day, so that no unit comes back within the test.
const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: per-user, limit: 80/day, split: 8}
  - {key: tenant, name: per-tenant, limit: 96/day, split: 4}
";
const USER: u64 = 80;
const TENANT: u64 = 96;

/// The server's settings. A remaining number is exact for the requests of one thread, because others are elsewhere in
/// their rounds of the shards, and for units that are not leased.
const SETTINGS: &str = "grpc: 127.0.0.1:0
resp: 127.0.0.1:0
store_deadline_ms: 10000
leases: {hot_per_second: 0}
identity: {headers: {user: x-user, tenant: x-tenant}}
forward_auth: {domain: d}";
const ONE_THREAD: (&str, &str) = ("TOKIO_WORKER_THREADS", "1");

/// A response: the verdict, and the limit and remaining units of each rule that it reports.
#[derive(Debug)]
struct Reply {
    is_allowed: bool,
    limits: Vec<(u64, u64)>,
}

impl Reply {
    /// Returns a reply without limits if the request was denied: a denial may come before all counters were read.
    fn new(is_allowed: bool, limits: impl Iterator<Item = (u64, u64)>) -> Self {
        let limits = if is_allowed { limits.collect() } else { Vec::new() };
        Self { is_allowed, limits }
    }
}

/// How many limits a protocol reports.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reports {
    All,
    /// The limit nearest exhaustion.
    Nearest,
    /// The same to concurrent requests. When few units are left, others may have taken some of those that a request reports.
    NearestOfMany,
}

/// Sends 104 requests of one user and 24 of another one of the same tenant; `send` sends so many requests in order. What each
/// counter is charged (80, 16 and 96), and how often it denies, are whole rounds of its shards: a protocol's counters may share
/// their place in the round with those of another, and remaining numbers are exact for a counter that begins a round.
fn assert_whole_limits(name: &str, reports: Reports, mut send: impl FnMut(&str, &str, usize) -> Vec<Reply>) {
    let [tenant, first, second] = ["tenant", "first", "second"].map(|part| format!("{name} {part}"));
    let mut tenant_taken = 0;
    for (user, count, passing) in [(&first, 104, USER), (&second, 24, TENANT - USER)] {
        let replies = send(user, &tenant, count);
        assert_eq!(replies.len(), count, "{name}");
        for (at, reply) in (0..).zip(&replies) {
            let context = format!("{name}, request {} of `{user}`: {reply:?}", at + 1);
            assert_eq!(reply.is_allowed, at < passing, "{context}");
            if !reply.is_allowed {
                continue;
            }
            tenant_taken += 1;
            let all = [(USER, USER - at - 1), (TENANT, TENANT - tenant_taken)];
            match reports {
                Reports::All => assert_eq!(reply.limits, all, "{context}"),
                Reports::Nearest | Reports::NearestOfMany => {
                    let nearest = all.into_iter().min_by_key(|(_, remaining)| *remaining).expect("two");
                    let [(limit, remaining)] = reply.limits[..] else { panic!("{context}") };
                    let is_last = reports == Reports::NearestOfMany && passing < USER;
                    let is_right = remaining == nearest.1 || (is_last && remaining < nearest.1);
                    assert!(limit == nearest.0 && is_right, "{context}");
                }
            }
        }
    }
}

/// Returns the number at this path in an element of a JSON response.
fn number(within: &Value, path: &str) -> u64 {
    within.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no number {path} in {within}"))
}

/// Returns what the response's header fields report: all of them agree.
fn by_fields(status: u16, field: impl Fn(&str) -> Option<String>) -> Reply {
    assert!([200, 429].contains(&status), "{status}");
    let field = |name: &str| field(name).unwrap_or_else(|| panic!("no {name}"));
    let policy = field("ratelimit-policy");
    assert!(policy.contains("\"per-user\";q=80;") && policy.contains("\"per-tenant\";q=96;"), "{policy}");
    let [limit, remaining] = ["x-ratelimit-limit", "x-ratelimit-remaining"]
        .map(|name| field(name).parse::<u64>().expect("a number"));
    let nearest = field("ratelimit");
    let rule = if limit == USER { "per-user" } else { "per-tenant" };
    assert!(nearest.starts_with(&format!("\"{rule}\";r={remaining};")), "{nearest}");
    Reply { is_allowed: status == 200, limits: vec![(limit, remaining)] }
}

fn by_response(response: &WebResponse) -> Reply {
    by_fields(response.status, |name| response.header(name).map(str::to_owned))
}

fn exchange(open: &mut WebConnection, request: &str) -> WebResponse {
    open.send(request.as_bytes()).expect("sent");
    open.response().expect("a response")
}

fn get(path: &str, user: &str, tenant: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nx-user: {user}\r\nx-tenant: {tenant}\r\n\r\n")
}

fn post(path: &str, body: &Value) -> String {
    let body = body.to_string();
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn over_http(gateway: &Gateway) {
    let open = || WebConnection::to(gateway.http).expect("a connection");
    let mut connection = open();
    assert_whole_limits("/v1/check", Reports::All, |user, tenant, count| {
        let request =
            post("/v1/check", &json!({"domain": "d", "attributes": {"user": user, "tenant": tenant}}));
        let reply = |_| {
            let response = exchange(&mut connection, &request);
            let body = response.json();
            let limits = body["limits"].as_array().expect("limits").iter();
            let limits = limits.map(|limit| (number(limit, "/limit"), number(limit, "/remaining")));
            Reply::new(body["allowed"] == true, limits)
        };
        (0..count).map(reply).collect()
    });
    let mut connection = open();
    assert_whole_limits("/check", Reports::Nearest, |user, tenant, count| {
        let request = get("/check", user, tenant);
        (0..count).map(|_| by_response(&exchange(&mut connection, &request))).collect()
    });
    let mut connection = open();
    assert_whole_limits("/json", Reports::All, |user, tenant, count| {
        let descriptors = [("user", user), ("tenant", tenant)]
            .map(|(key, value)| json!({"entries": [{"key": key, "value": value}]}));
        let request = post("/json", &json!({"domain": "d", "descriptors": descriptors}));
        let reply = |_| {
            let body = exchange(&mut connection, &request).json();
            let statuses = body["statuses"].as_array().expect("statuses").iter();
            let limits = statuses.map(|status| {
                // A number of 0 is left out.
                let remaining = status.get("limitRemaining").map_or(0, |_| number(status, "/limitRemaining"));
                (number(status, "/currentLimit/requestsPerUnit"), remaining)
            });
            Reply::new(body["overallCode"] == "OK", limits)
        };
        (0..count).map(reply).collect()
    });
}

/// Envoy's own call, without the metadata of the SDK.
async fn over_grpc(address: SocketAddr, user: &str, tenant: &str, count: usize) -> Vec<Reply> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let mut client = Grpc::new(endpoint.connect().await.expect("a connection"));
    let descriptor = |(key, value): (&str, &str)| RateLimitDescriptor {
        entries: vec![Entry { key: key.to_owned(), value: value.to_owned() }],
        ..RateLimitDescriptor::default()
    };
    let descriptors = [("user", user), ("tenant", tenant)].map(descriptor).to_vec();
    let request = RateLimitRequest { domain: "d".to_owned(), descriptors, ..RateLimitRequest::default() };
    let mut replies = Vec::new();
    for _ in 0..count {
        client.ready().await.expect("a connection");
        let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
        let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        let response = client.unary(tonic::Request::new(request.clone()), path, codec).await;
        let response = response.expect("a response").into_inner();
        let limits = response.statuses.iter().map(|status| {
            let limit = status.current_limit.as_ref().expect("a limit").requests_per_unit;
            (u64::from(limit), u64::from(status.limit_remaining))
        });
        replies.push(Reply::new(response.overall_code == 1, limits));
    }
    replies
}

fn over_resp(gateway: &Gateway) {
    let client = redis::Client::open(format!("redis://{}", gateway.listener("resp ").expect("RESP")))
        .expect("an address");
    let mut connection = client.get_connection().expect("a connection");
    let command = |user: &str, tenant: &str| {
        let mut command = redis::cmd("TG.CHECK");
        command.arg(&["d", "user", user, "tenant", tenant]);
        command
    };
    let reply = |reply: redis::Value| {
        let (denied, limit, remaining) = match reply {
            redis::Value::Array(fields) => match fields[..3] {
                [redis::Value::Int(denied), redis::Value::Int(limit), redis::Value::Int(remaining)] => {
                    (denied, limit, remaining)
                }
                _ => panic!("not a reply: {fields:?}"),
            },
            other => panic!("not a reply: {other:?}"),
        };
        let [limit, remaining] = [limit, remaining].map(|number| u64::try_from(number).expect("a limit"));
        Reply { is_allowed: denied == 0, limits: vec![(limit, remaining)] }
    };
    assert_whole_limits("TG.CHECK", Reports::Nearest, |user, tenant, count| {
        let one = |_| reply(command(user, tenant).query(&mut connection).expect("a reply"));
        (0..count).map(one).collect()
    });
    assert_whole_limits("TG.CHECK in a pipeline", Reports::NearestOfMany, |user, tenant, count| {
        let mut pipeline = redis::pipe();
        for _ in 0..count {
            pipeline.add_command(command(user, tenant));
        }
        let replies: Vec<redis::Value> = pipeline.query(&mut connection).expect("replies");
        let mut replies: Vec<Reply> = replies.into_iter().map(reply).collect();
        // The store decides many of them concurrently: any of them may get the last units.
        replies.sort_by_key(|reply| (!reply.is_allowed, Reverse(reply.limits[0].1)));
        replies
    });
}

fn through_the_gateway(gateway: &Gateway, runtime: &Runtime) {
    let mut connection = gateway.open();
    assert_whole_limits("the gateway over HTTP/1", Reports::Nearest, |user, tenant, count| {
        let request = get("/x", user, tenant);
        (0..count).map(|_| by_response(&exchange(&mut connection, &request))).collect()
    });
    assert_whole_limits("the gateway over HTTP/2", Reports::Nearest, |user, tenant, count| {
        runtime.block_on(over_http2(gateway.address(), user, tenant, count))
    });
}

async fn over_http2(address: SocketAddr, user: &str, tenant: &str, count: usize) -> Vec<Reply> {
    let stream = tokio::net::TcpStream::connect(address).await.expect("a connection");
    let (send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    let serving = tokio::spawn(connection);
    let mut replies = Vec::new();
    for _ in 0..count {
        let request =
            http::Request::get("http://localhost/x").header("x-user", user).header("x-tenant", tenant);
        let mut send = send.clone().ready().await.expect("a stream");
        let (response, _) = send.send_request(request.body(()).expect("a request"), true).expect("sent");
        let response = response.await.expect("a response");
        let field = |name: &str| response.headers().get(name)?.to_str().ok().map(str::to_owned);
        replies.push(by_fields(response.status().as_u16(), field));
    }
    serving.abort();
    replies
}

/// A program of its own over the same Redis.
fn by_the_layer(redis: &Redis, runtime: &Runtime) {
    let rules = Ruleset::load(&[Source::new("rules.yaml", RULES)], &Options::default()).expect("rules");
    let mut config = RedisConfig::parse(&redis.url()).expect("an address");
    config.deadline = LONG;
    let _entered = runtime.enter();
    let clock = Arc::new(SystemClock::new()) as Arc<dyn Clock>;
    let limiter = Arc::new(Limiter::new(Arc::new(rules), RedisStore::connect(config), clock));
    let layer = TollgateLayer::new(InProcess::new(limiter, "d"), |head: &http::request::Parts| {
        let attribute = |name: &str| head.headers[name].to_str().expect("text").to_owned();
        Some(CheckRequest::attributes([("user", attribute("x-user")), ("tenant", attribute("x-tenant"))]))
    });
    let service = layer.layer(service_fn(async |_: http::Request<Full<Bytes>>| {
        Ok::<_, Infallible>(http::Response::new(Full::new(Bytes::from("hello"))))
    }));
    assert_whole_limits("the tower layer", Reports::Nearest, |user, tenant, count| {
        let reply = |_| {
            let request = http::Request::get("/x").header("x-user", user).header("x-tenant", tenant);
            let request = request.body(Full::default()).expect("a request");
            let response = runtime.block_on(service.clone().oneshot(request)).expect("infallible");
            let field = |name: &str| response.headers().get(name)?.to_str().ok().map(str::to_owned);
            by_fields(response.status().as_u16(), field)
        };
        (0..count).map(reply).collect()
    });
}

/// Each plan of a request moves a split counter on to its next shard: planned twice, a request over Redis reached half of
/// the shards, and callers got half of what they pay for.
#[test]
fn every_protocol_admits_the_whole_of_split_limits() {
    let (redis, origin) = (Redis::start(), Origin::start());
    let settings = format!("store: {}\n{SETTINGS}", redis.url());
    let section = plain(origin.address, "");
    let gateway = Gateway::start_with(Folder::new(), RULES, &settings, &section, &[ONE_THREAD]);
    eventually("the node on Redis", || {
        let body = json!({"domain": "d", "attributes": {"user": "nobody"}, "cost": 0});
        let mut open = WebConnection::to(gateway.http).ok()?;
        (exchange(&mut open, &post("/v1/check", &body)).json()["origin"] == "store").then_some(())
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    over_http(&gateway);
    let grpc = gateway.listener("grpc ").expect("gRPC");
    assert_whole_limits("RLS", Reports::All, |user, tenant, count| {
        runtime.block_on(over_grpc(grpc, user, tenant, count))
    });
    over_resp(&gateway);
    through_the_gateway(&gateway, &runtime);
    by_the_layer(&redis, &runtime);
}
