//! A driver for each door: it starts what serves the door in front of a limiter, sends the request of a case, and returns what
//! the answer says, as [`Facts`].

use crate::apps;
use crate::facts::{Facts, from_fields, put};
use crate::features::{ADDRESS, Case, DOMAIN, KEY, USER};
use crate::world::World;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tollgate_core::Timestamp;
use tollgate_gateway::{Gateway, GatewayConfig};
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_sdk::{
    CheckRequest, Decider, FailPolicy, HttpRemote, HttpRemoteConfig, IdentityResolver, InProcess,
    LimitedBody, Remote, RemoteConfig, TollgateLayer,
};
use tollgate_server::http::{ForwardAuth, ForwardAuthConfig, HttpConfig};
use tollgate_server::resp::RespConfig;
use tollgate_server::rls::RlsConfig;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_server::{http as http_server, resp, rls};
use tollgate_testing::wait::LONG;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;
use tower::util::BoxCloneService;
use tower::{Layer, ServiceExt, service_fn};

/// How a door describes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// By attributes, or by a head from which they follow.
    Attributes,
    /// By a descriptor for each rule.
    Each,
    /// By one descriptor of all entries, under `match: all`.
    All,
}

/// A door, by its name in the table of the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    Check,
    CheckHead,
    Json,
    RlsOne,
    RlsAll,
    Nginx,
    Caddy,
    HaProxy,
    Traefik,
    ExtAuthz,
    TgCheck,
    Gateway1,
    Gateway2,
    Layer,
    Remote,
    HttpRemote,
    Throttle,
    Python,
    TypeScript,
    Go,
}

impl Door {
    pub(crate) const ALL: &[(Self, &str)] = &[
        (Self::Check, "`/v1/check`"),
        (Self::CheckHead, "`/v1/check` with a head"),
        (Self::Json, "`/json`"),
        (Self::RlsOne, "RLS, `match: one`"),
        (Self::RlsAll, "RLS, `match: all`"),
        (Self::Nginx, "`/check` by nginx"),
        (Self::Caddy, "`/check` by Caddy"),
        (Self::HaProxy, "`/check` by HAProxy"),
        (Self::Traefik, "`/check` by Traefik"),
        (Self::ExtAuthz, "`/check` by Envoy's ext_authz"),
        (Self::TgCheck, "`TG.CHECK`"),
        (Self::Gateway1, "gateway, HTTP/1"),
        (Self::Gateway2, "gateway, HTTP/2"),
        (Self::Layer, "Rust layer"),
        (Self::Remote, "Rust layer by gRPC"),
        (Self::HttpRemote, "Rust layer by HTTP"),
        (Self::Throttle, "`CL.THROTTLE`"),
        (Self::Python, "Python middleware"),
        (Self::TypeScript, "TypeScript middleware"),
        (Self::Go, "Go middleware"),
    ];

    pub(crate) fn form(self) -> Form {
        match self {
            Self::Json | Self::RlsOne => Form::Each,
            Self::RlsAll => Form::All,
            _ => Form::Attributes,
        }
    }

    /// Returns the group of doors that share their code.
    pub(crate) fn group(self) -> usize {
        match self {
            Self::Check | Self::CheckHead => 0,
            Self::Json | Self::RlsOne | Self::RlsAll => 1,
            Self::Nginx | Self::Caddy | Self::HaProxy | Self::Traefik | Self::ExtAuthz => 2,
            Self::TgCheck | Self::Throttle => 3,
            Self::Gateway1 | Self::Gateway2 => 4,
            Self::Layer | Self::Remote | Self::HttpRemote => 5,
            Self::Python | Self::TypeScript | Self::Go => 6,
        }
    }

    /// Returns whether the end of a request releases its permits.
    pub(crate) fn releases(self) -> bool {
        matches!(self, Self::Gateway1 | Self::Gateway2 | Self::Layer)
    }
}

/// The settings that make heads say what attributes say.
fn identity() -> IdentityConfig {
    let text = "{routes: ['GET /orders/{id}'], headers: {user: x-user, tokens: x-tokens}, trusted_headers: {tier: x-tier}}";
    serde_saphyr::from_str(text).expect("settings")
}

/// The fields of the request of a case as its client sends them, beside its host.
fn fields(case: &Case) -> Vec<(String, String)> {
    let mut fields = vec![("x-api-key".to_owned(), KEY.to_owned()), ("x-user".to_owned(), USER.to_owned())];
    let more = case.attributes.iter().filter(|(name, _)| matches!(*name, "tier" | "tokens"));
    fields.extend(more.map(|(name, value)| (format!("x-{name}"), (*value).to_owned())));
    fields
}

/// An open door.
pub(crate) struct Open {
    door: Door,
    client: Client,
    /// Ends the servers.
    stop: watch::Sender<bool>,
}

enum Client {
    Web(Web, Vec<u8>),
    Grpc(Grpc<Channel>, RateLimitRequest),
    Resp(BufReader<TcpStream>, Vec<u8>),
    Http2(h2::client::SendRequest<Bytes>, Vec<(String, String)>),
    Layer(Service, Vec<(String, String)>),
    App(SocketAddr, Vec<u8>),
}

/// A service behind the Rust layer.
type Service = BoxCloneService<Request<Empty<Bytes>>, Response<LimitedBody<Full<Bytes>>>, Infallible>;

fn layered(decider: impl Decider) -> Service {
    let resolver = IdentityResolver::new(&identity()).expect("settings");
    let layer = TollgateLayer::new(decider, move |head: &http::request::Parts| {
        CheckRequest::identified(&resolver, Ipv4Addr::LOCALHOST.into(), head, Timestamp::ZERO)
    });
    let service = service_fn(async |_: Request<Empty<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello"))))
    });
    BoxCloneService::new(layer.layer(service))
}

impl Drop for Open {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

impl Open {
    pub(crate) async fn new(door: Door, case: &Case, world: &World) -> Self {
        let (stop, stopping) = watch::channel(false);
        let drain = move || {
            let mut stopping = stopping.clone();
            async move {
                let _ = stopping.wait_for(|stop| *stop).await;
            }
        };
        let limiter = Arc::clone(&world.limiter);
        let (listener, address) = listener().await;
        let client = match door {
            Door::RlsOne | Door::RlsAll => {
                let serve = rls::serve(listener, limiter, RlsConfig::default(), drain());
                tokio::spawn(async { serve.await.expect("gRPC is served") });
                let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
                let channel = endpoint.connect().await.expect("a connection");
                Client::Grpc(Grpc::new(channel), rls_request(door, case))
            }
            Door::TgCheck | Door::Throttle => {
                tokio::spawn(resp::serve(listener, limiter, RespConfig::default(), drain()));
                let words: Vec<&str> = if door == Door::Throttle {
                    // The limit of the first rule.
                    vec!["CL.THROTTLE", KEY, "2", "3", "60"]
                } else {
                    let words = ["TG.CHECK", DOMAIN].into_iter();
                    words.chain(case.attributes.iter().flat_map(|(key, value)| [*key, *value])).collect()
                };
                let mut command = format!("*{}\r\n", words.len());
                words.iter().for_each(|word| command += &format!("${}\r\n{word}\r\n", word.len()));
                let stream = TcpStream::connect(address).await.expect("a connection");
                Client::Resp(BufReader::new(stream), command.into_bytes())
            }
            Door::Gateway1 | Door::Gateway2 => {
                let upstream = origin(drain()).await;
                let section = format!(
                    "{{listeners: [{{address: '127.0.0.1:0'}}], upstreams: {{api: {{addresses: ['{upstream}']}}}}, \
                     routes: [{{path: '/{{*rest}}', upstream: api, domain: {DOMAIN}}}, \
                     {{path: '/orders/{{id}}', upstream: api, domain: {DOMAIN}}}]}}"
                );
                let gateway = serde_saphyr::from_str(&section).expect("a section");
                let config =
                    GatewayConfig { gateway, identity: identity(), responses: ResponseConfig::default() };
                let gateway = Gateway::bind(&config, limiter).expect("a gateway");
                let address = gateway.addresses()[0].0;
                tokio::spawn(gateway.serve(drain()));
                let mut all = fields(case);
                all.push(("x-forwarded-for".to_owned(), ADDRESS.to_owned()));
                if door == Door::Gateway1 {
                    Client::Web(Web::to(address).await, head("GET /orders/7", &all, ""))
                } else {
                    let stream = TcpStream::connect(address).await.expect("a connection");
                    let (client, connection) = h2::client::handshake(stream).await.expect("a handshake");
                    tokio::spawn(async { drop(connection.await) });
                    Client::Http2(client, all)
                }
            }
            Door::Layer => Client::Layer(layered(InProcess::new(limiter, DOMAIN)), fields(case)),
            Door::Remote => {
                let serve = rls::serve(listener, limiter, RlsConfig::default(), drain());
                tokio::spawn(async { serve.await.expect("gRPC is served") });
                let config = RemoteConfig {
                    deadline: LONG,
                    deny_cache: 0,
                    fail_policy: FailPolicy::Closed,
                    ..RemoteConfig::new(format!("http://{address}"), DOMAIN)
                };
                Client::Layer(layered(Remote::new(config).expect("an address")), fields(case))
            }
            _ => {
                let forward = ForwardAuth::new(&ForwardAuthConfig::default(), &identity()).expect("settings");
                let config = HttpConfig { forward_auth: forward, ..HttpConfig::default() };
                let status = Arc::clone(&world.status) as _;
                tokio::spawn(http_server::serve(listener, limiter, status, config, drain()));
                if door == Door::HttpRemote {
                    let config = HttpRemoteConfig {
                        deadline: LONG,
                        deny_cache: 0,
                        fail_policy: FailPolicy::Closed,
                        ..HttpRemoteConfig::new(format!("http://{address}"), DOMAIN)
                    };
                    Client::Layer(layered(HttpRemote::new(config).expect("an address")), fields(case))
                } else if let Some(app) = apps::address(door) {
                    let mut all = fields(case);
                    all.push(("x-forwarded-for".to_owned(), ADDRESS.to_owned()));
                    all.push(("x-matrix-server".to_owned(), format!("http://{address}")));
                    all.push(("connection".to_owned(), "close".to_owned()));
                    Client::App(app, head("GET /orders/7", &all, ""))
                } else {
                    Client::Web(Web::to(address).await, web_request(door, case))
                }
            }
        };
        Self { door, client, stop }
    }

    /// Sends the request, and returns what the answer says.
    pub(crate) async fn ask(&mut self) -> Facts {
        let mut facts = Facts::new();
        match &mut self.client {
            Client::Web(web, request) => {
                let (status, fields, body) = web.exchange(request).await;
                // nginx passes on a 403 alone; its page turns it into the 429.
                let status = if self.door == Door::Nginx && status == 403 { 429 } else { status };
                from_fields(&mut facts, status, &fields);
                match self.door {
                    Door::Check | Door::CheckHead => check_body(&mut facts, &body),
                    Door::Json => json_body(&mut facts, &body),
                    _ => {}
                }
                denial_body(&mut facts, status, &body);
            }
            Client::App(address, request) => {
                let (status, fields, body) = Web::to(*address).await.exchange(request).await;
                from_fields(&mut facts, status, &fields);
                denial_body(&mut facts, status, &body);
            }
            Client::Grpc(client, request) => {
                client.ready().await.expect("a connection");
                let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
                let path =
                    PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
                let response = client.unary(tonic::Request::new(request.clone()), path, codec).await;
                rls_response(&mut facts, &response.expect("a response").into_inner());
            }
            Client::Resp(stream, command) => {
                stream.get_mut().write_all(command).await.expect("sent");
                let reply = resp_list(stream).await;
                if self.door == Door::Throttle {
                    throttle(&mut facts, &reply);
                } else {
                    tg_check(&mut facts, &reply);
                }
            }
            Client::Http2(client, fields) => {
                let client = client.clone().ready().await.expect("a connection");
                let mut request = Request::get("http://api.example/orders/7");
                for (name, value) in fields {
                    request = request.header(name.as_str(), value.as_str());
                }
                let mut client = client;
                let (response, _) =
                    client.send_request(request.body(()).expect("a request"), true).expect("sent");
                let (head, mut stream) = response.await.expect("a response").into_parts();
                let mut body = Vec::new();
                while let Some(part) = stream.data().await {
                    let part = part.expect("a body");
                    let _ = stream.flow_control().release_capacity(part.len());
                    body.extend(part);
                }
                from_fields(&mut facts, head.status.as_u16(), &pairs(&head.headers));
                denial_body(&mut facts, head.status.as_u16(), &body);
            }
            Client::Layer(service, fields) => {
                let mut request = Request::get("/orders/7").header("x-forwarded-for", ADDRESS);
                for (name, value) in fields {
                    request = request.header(name.as_str(), value.as_str());
                }
                let request = request.body(Empty::new()).expect("a request");
                let (head, body) = service.clone().oneshot(request).await.expect("infallible").into_parts();
                let body = body.collect().await.expect("a body").to_bytes();
                from_fields(&mut facts, head.status.as_u16(), &pairs(&head.headers));
                denial_body(&mut facts, head.status.as_u16(), &body);
            }
        }
        facts
    }
}

fn pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let pairs =
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap_or("?").to_owned()));
    pairs.collect()
}

/// The service behind a gateway.
async fn origin(stop: impl Future<Output = ()> + Send + 'static) -> SocketAddr {
    let (listener, address) = listener().await;
    let accept = async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                let mut line = String::new();
                while stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {
                    if line == "\r\n" {
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
                        if stream.get_mut().write_all(answer).await.is_err() {
                            return;
                        }
                    }
                    line.clear();
                }
            });
        }
    };
    tokio::spawn(async {
        tokio::select! {
            () = accept => {}
            () = stop => {}
        }
    });
    address
}

/// Returns a request of HTTP/1.1.
fn head(line: &str, fields: &[(String, String)], body: &str) -> Vec<u8> {
    let mut text = format!("{line} HTTP/1.1\r\nhost: localhost\r\n");
    fields.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
    if !body.is_empty() {
        text += &format!("content-length: {}\r\n", body.len());
    }
    format!("{text}\r\n{body}").into_bytes()
}

/// Returns what a client or a proxy sends to the HTTP listener.
fn web_request(door: Door, case: &Case) -> Vec<u8> {
    let mut all = fields(case);
    let mut describe = |pairs: &[(&str, &str)]| {
        all.extend(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    };
    let entries = |pairs: &[(&str, &str)]| {
        let entry = |(key, value): &(&str, &str)| json!({"key": key, "value": value});
        json!({"entries": pairs.iter().map(entry).collect::<Vec<_>>()})
    };
    match door {
        Door::Check => {
            let attributes: serde_json::Map<String, Value> =
                case.attributes.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
            let body = json!({"domain": DOMAIN, "attributes": attributes});
            return head("POST /v1/check", &[], &body.to_string());
        }
        Door::CheckHead => {
            describe(&[("x-forwarded-for", ADDRESS), ("host", "api.example")]);
            let request =
                json!({"method": "GET", "target": "/orders/7", "peer": "127.0.0.1", "headers": all});
            let body = json!({"domain": DOMAIN, "request": request});
            return head("POST /v1/check", &[], &body.to_string());
        }
        Door::Json => {
            let descriptors: Vec<Value> = case.descriptors.iter().map(|one| entries(one)).collect();
            let body = json!({"domain": DOMAIN, "descriptors": descriptors});
            return head("POST /json", &[], &body.to_string());
        }
        Door::Nginx => describe(&[
            ("x-original-uri", "/orders/7"),
            ("x-original-method", "GET"),
            ("x-original-host", "api.example"),
            ("x-forwarded-for", ADDRESS),
        ]),
        Door::Caddy => describe(&[
            ("x-forwarded-for", ADDRESS),
            ("x-forwarded-host", "api.example"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-method", "GET"),
            ("x-forwarded-uri", "/orders/7"),
        ]),
        Door::HaProxy => describe(&[
            ("x-forwarded-for", ADDRESS),
            ("x-forwarded-method", "GET"),
            ("x-forwarded-uri", "/orders/7"),
            ("x-forwarded-host", "api.example"),
        ]),
        Door::Traefik => describe(&[
            ("x-forwarded-for", ADDRESS),
            ("x-forwarded-host", "api.example"),
            ("x-forwarded-method", "GET"),
            ("x-forwarded-port", "80"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-uri", "/orders/7"),
            ("x-real-ip", ADDRESS),
        ]),
        _ => describe(&[("x-forwarded-for", ADDRESS)]),
    }
    let line = match door {
        Door::Nginx => "GET /check?deny_status=403",
        Door::ExtAuthz => "GET /check/orders/7",
        _ => "GET /check",
    };
    head(line, &all, "")
}

fn rls_request(door: Door, case: &Case) -> RateLimitRequest {
    let descriptor = |pairs: &[(&str, &str)]| RateLimitDescriptor {
        entries: pairs
            .iter()
            .map(|(key, value)| Entry { key: (*key).into(), value: (*value).into() })
            .collect(),
        ..RateLimitDescriptor::default()
    };
    let descriptors = match door {
        Door::RlsAll => vec![descriptor(&case.attributes)],
        _ => case.descriptors.iter().map(|one| descriptor(one)).collect(),
    };
    RateLimitRequest { domain: DOMAIN.to_owned(), descriptors, ..RateLimitRequest::default() }
}

fn rls_response(facts: &mut Facts, response: &RateLimitResponse) {
    let fields: Vec<(String, String)> = response
        .response_headers_to_add
        .iter()
        .map(|field| (field.key.clone(), field.value.clone()))
        .collect();
    let is_denied = response.overall_code == 2;
    let metadata = response.dynamic_metadata.as_ref();
    let origin = metadata.and_then(|all| match all.fields.get("origin")?.kind.as_ref()? {
        prost_types::value::Kind::StringValue(text) => Some(text.clone()),
        _ => None,
    });
    let status = match origin.as_deref() {
        Some("fail_closed") if is_denied => 503,
        _ if is_denied => 429,
        _ => 200,
    };
    from_fields(facts, status, &fields);
    put(
        facts,
        "statuses",
        status_list(response.statuses.iter().map(|status| {
            let limit = status.current_limit.as_ref().map(|limit| u64::from(limit.requests_per_unit));
            let reset = status.duration_until_reset.as_ref().map_or(0, |reset| reset.seconds.unsigned_abs());
            (status.code == 2, limit, u64::from(status.limit_remaining), reset)
        })),
    );
    denial_body(facts, status, &response.raw_body);
}

fn json_body(facts: &mut Facts, body: &[u8]) {
    let body: Value = serde_json::from_slice(body).expect("JSON");
    let all = body["statuses"].as_array().cloned().unwrap_or_default();
    put(
        facts,
        "statuses",
        status_list(all.iter().map(|status| {
            let limit = status["currentLimit"]["requestsPerUnit"].as_u64();
            let limit = limit.or_else(|| status["currentLimit"].is_object().then_some(0));
            let reset = status["durationUntilReset"]
                .as_str()
                .and_then(|text| text.trim_end_matches('s').parse().ok());
            (
                status["code"] == "OVER_LIMIT",
                limit,
                status["limitRemaining"].as_u64().unwrap_or(0),
                reset.unwrap_or(0),
            )
        })),
    );
}

/// Writes the statuses of descriptors: whether it denies, limit, remaining and reset.
pub(crate) fn status_list(all: impl Iterator<Item = (bool, Option<u64>, u64, u64)>) -> String {
    let show = |(over, limit, remaining, reset): (bool, Option<u64>, u64, u64)| match limit {
        Some(limit) => format!("{}{remaining} of {limit}, {reset} s", if over { "over: " } else { "" }),
        None => format!("{}no limit", if over { "over: " } else { "" }),
    };
    all.map(show).collect::<Vec<_>>().join("; ")
}

fn check_body(facts: &mut Facts, body: &[u8]) {
    let body: Value = serde_json::from_slice(body).expect("JSON");
    let limit = |one: &Value| {
        let flag = |name: &str| if one[name] == true { format!(" {name}") } else { String::new() };
        let role = one["role"].as_str().unwrap_or("live");
        format!(
            "{} {} of {}, {} ms, {role}{}{}",
            one["rule"].as_str().unwrap_or("?"),
            one["remaining"],
            one["limit"],
            one["reset_ms"],
            flag("over"),
            flag("unread")
        )
    };
    let all = body["limits"].as_array().cloned().unwrap_or_default();
    put(facts, "limits", all.iter().map(limit).collect::<Vec<_>>().join("; "));
    let text = |name: &str| body[name].as_str().unwrap_or("-").to_owned();
    put(facts, "origin", text("origin"));
    put(facts, "body.denied_by", text("denied_by"));
    put(facts, "body.degraded_by", text("degraded_by"));
    put(facts, "body.warned_by", text("warned_by"));
    put(
        facts,
        "retry_after_ms",
        body["retry_after_ms"].as_u64().map_or("-".to_owned(), |wait| wait.to_string()),
    );
    put(facts, "delay_ms", body["delay_ms"].to_string());
    put(facts, "body.verdict", if body["allowed"] == true { "allow" } else { "deny" }.to_owned());
    put(facts, "decision_id", text("decision_id"));
}

/// Reads the `problem+json` of a denial.
fn denial_body(facts: &mut Facts, status: u16, body: &[u8]) {
    if status == 200 {
        return;
    }
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return };
    if body.get("type").is_some() {
        put(
            facts,
            "body.retry_after",
            body["retry_after"].as_u64().map_or("-".to_owned(), |wait| wait.to_string()),
        );
        put(facts, "decision_id", body["decision_id"].as_str().unwrap_or("-").to_owned());
    }
}

fn tg_check(facts: &mut Facts, reply: &[Option<String>]) {
    let text = |at: usize| reply.get(at).cloned().flatten().unwrap_or_else(|| "-".to_owned());
    put(
        facts,
        "verdict",
        match (&*text(0), &*text(7)) {
            ("0", _) => "allow".to_owned(),
            (_, "fail_closed") => "unavailable".to_owned(),
            _ => "deny".to_owned(),
        },
    );
    let known = |text: String| if text == "-1" { "-".to_owned() } else { text };
    put(
        facts,
        "nearest",
        match &*text(1) {
            "-1" => "-".to_owned(),
            limit => format!("{} {} of {limit}, {} s", text(5), text(2), text(4)),
        },
    );
    put(facts, "retry_after", known(text(3)));
    put(facts, "delay_ms", text(6));
    put(facts, "origin", text(7));
    if text(0) == "1" {
        put(facts, "denied_by", text(5));
        put(facts, "decision_id", text(8));
    }
}

fn throttle(facts: &mut Facts, reply: &[Option<String>]) {
    let text = |at: usize| reply.get(at).cloned().flatten().unwrap_or_else(|| "-".to_owned());
    put(facts, "verdict", if text(0) == "0" { "allow" } else { "deny" }.to_owned());
    put(facts, "units", format!("{} of {}, {} s", text(2), text(1), text(4)));
    put(facts, "retry_after", if text(3) == "-1" { "-".to_owned() } else { text(3) });
}

/// Reads a list of RESP2.
async fn resp_list(stream: &mut BufReader<TcpStream>) -> Vec<Option<String>> {
    let mut all = Vec::new();
    let mut line = String::new();
    stream.read_line(&mut line).await.expect("a reply");
    let count = line.trim().strip_prefix('*').unwrap_or_else(|| panic!("not a list: {line}"));
    for _ in 0..count.parse::<usize>().expect("a number") {
        line.clear();
        stream.read_line(&mut line).await.expect("a reply");
        all.push(match line.trim().split_at(1) {
            ("$", "-1") | ("_", _) => None,
            ("$", length) => {
                let mut text = vec![0; length.parse::<usize>().expect("a length") + 2];
                stream.read_exact(&mut text).await.expect("a reply");
                text.truncate(text.len() - 2);
                Some(String::from_utf8_lossy(&text).into_owned())
            }
            (_, value) => Some(value.to_owned()),
        });
    }
    all
}

/// A connection of HTTP/1.1.
struct Web(BufReader<TcpStream>);

impl Web {
    async fn to(address: SocketAddr) -> Self {
        Self(BufReader::new(TcpStream::connect(address).await.expect("a connection")))
    }

    async fn exchange(&mut self, request: &[u8]) -> (u16, Vec<(String, String)>, Vec<u8>) {
        self.0.get_mut().write_all(request).await.expect("sent");
        let mut line = String::new();
        self.0.read_line(&mut line).await.expect("a response");
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status: {line:?}"));
        let mut fields = Vec::new();
        loop {
            line.clear();
            self.0.read_line(&mut line).await.expect("a field");
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let length = fields
            .iter()
            .find(|(name, _)| name == "content-length")
            .map_or(0, |(_, length)| length.parse::<usize>().expect("a length"));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).await.expect("a body");
        (status, fields, body)
    }
}
