//! The gRPC server: the rate limit service on tonic, with the quota service and the standard health and reflection
//! services.

use super::dispatch::Dispatch;
use super::incoming::incoming;
use super::listener::GrpcListener;
use super::proto::DESCRIPTORS;
use super::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::{BadRequest, HealthNames, ResponseStyle, RlsError, sdk_extension};
use crate::rlqs::{QuotaServer, QuotaService, RlqsConfig};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_http::response::ResponseConfig;
use tollgate_http::server::connections::{ConnectionBudget, FIRST_REQUEST, PortLimits, WhenFull};
use tollgate_http::tls::ServerTls;
use tollgate_http::traceparent;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Settings of the gRPC server.
#[derive(Clone, Debug)]
pub struct RlsConfig {
    /// Maximum number of open connections; more wait, or displace silent ones.
    pub connections: usize,
    /// Number of connections that no other listener can take.
    pub guaranteed: usize,
    /// The files that all listeners of the process share.
    pub budget: ConnectionBudget,
    /// Maximum time for the first request of a connection.
    pub first_request: Duration,
    /// Maximum size of a message in bytes.
    pub message_bytes: usize,
    /// Maximum number of concurrent requests per connection.
    pub streams: u32,
    /// Settings of the HTTP responses that the Rust SDK requests.
    pub responses: ResponseConfig,
    /// What responses contain beside their statuses.
    pub style: ResponseStyle,
    /// Names of the health service.
    pub health: HealthNames,
    /// TLS, if connections are encrypted.
    pub tls: Option<Arc<ServerTls>>,
    /// Age at which a connection is asked to end: it takes no new requests, and ends with its last one.
    pub max_age: Option<Duration>,
    /// Time after that in which it ends whatever goes on: streams need not end by themselves.
    pub max_age_grace: Option<Duration>,
    /// Settings of the quota service.
    pub rlqs: RlqsConfig,
}

impl Default for RlsConfig {
    fn default() -> Self {
        let responses = ResponseConfig::default();
        Self {
            connections: 65_536,
            guaranteed: 0,
            budget: ConnectionBudget::default(),
            first_request: FIRST_REQUEST,
            message_bytes: MAX_MESSAGE,
            streams: 1024,
            responses,
            style: ResponseStyle::default(),
            health: HealthNames::default(),
            tls: None,
            max_age: None,
            max_age_grace: None,
            rlqs: RlqsConfig::default(),
        }
    }
}

/// Maximum size of a request in bytes, as of any server of gRPC's own libraries: less, and a caller whose header becomes
/// part of a message could have it rejected, which lets a request pass at proxies that fail open.
pub(crate) const MAX_MESSAGE: usize = 4 << 20;

/// A client that has been quiet for this long is asked whether it is there, and has as long to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Protocols that the listener offers with TLS.
pub const ALPN: &[&[u8]] = &[b"h2"];

struct Service<S>(Arc<Limiter<S>>, ResponseConfig, ResponseStyle);

impl From<RlsError> for Status {
    fn from(error: RlsError) -> Self {
        match error {
            RlsError::BadRequest(bad) => bad.into(),
            RlsError::NoRules => Self::unavailable(error.to_string()),
        }
    }
}

impl From<BadRequest> for Status {
    fn from(bad: BadRequest) -> Self {
        Self::invalid_argument(bad.to_string())
    }
}

#[tonic::async_trait]
impl<S: CounterStore + 'static> RateLimitService for Service<S> {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let began = self.0.clock().now();
        let trace = traceparent::from_headers(&self.0, request.metadata().as_ref(), || began);
        let (message, metadata) = (request.get_ref(), request.metadata());
        let response = if metadata.contains_key(sdk_extension::METADATA_KEY) {
            // Boxed, so that the futures of all other checks have no room for it.
            Box::pin(sdk_extension::handle(&self.0, &self.1, message, metadata, trace.as_ref())).await
        } else {
            super::handle(&self.0, message, trace.as_ref(), &self.2).await.map_err(Status::from)
        };
        if response.is_ok() {
            self.0.record_latency("rls", 1, self.0.clock().now().since(began));
        }
        response.map(Response::new)
    }
}

/// Serves until `drain` resolves; then reports `NOT_SERVING` to health checks, accepts no new connections, and returns
/// when the requests in flight have finished. A client's deadline (`grpc-timeout`) ends its request.
///
/// # Errors
/// The transport failed.
pub async fn serve<S: CounterStore + 'static>(
    listener: impl Into<GrpcListener>,
    limiter: Arc<Limiter<S>>,
    config: RlsConfig,
    drain: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (health, health_service) = tonic_health::server::health_reporter();
    let names = config.health;
    let services = [<RateLimitServiceServer<Service<S>> as NamedService>::NAME, QuotaServer::NAME];
    names.begin(&health, &services).await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (stop, stopping) = watch::channel(false);
    let quotas = QuotaService::start(Arc::clone(&limiter), config.rlqs, stopping);
    let service = RateLimitServiceServer::new(Service(limiter, config.responses, config.style))
        .max_decoding_message_size(config.message_bytes);
    let drained = async move {
        tokio::select! {
            () = drain => {}
            () = names.follow(&health) => {}
        }
        // Quota streams never end by themselves.
        stop.send_replace(true);
        names.end(&health, &services).await;
    };
    let slots = config.budget.port(PortLimits {
        guaranteed: config.guaranteed,
        first_request: config.first_request,
        ..PortLimits::new(config.connections, WhenFull::Wait)
    });
    let tls = config.tls;
    let lifetime = config.max_age.zip(config.max_age_grace).and_then(|(age, grace)| age.checked_add(grace));
    let incoming = pin!(incoming(listener.into(), slots, tls.clone(), lifetime));
    let mut server = Server::builder();
    if let Some(age) = config.max_age {
        // With a grace too, tonic never asks and cuts the connection after both: the stream beneath it does that.
        server = server.max_connection_age(age);
    }
    let others = Routes::new(quotas)
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .prepare();
    let serving = server
        .max_concurrent_streams(config.streams)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .serve_with_incoming_shutdown(Dispatch { first: service, others }, incoming, drained);
    tokio::select! {
        served = serving => Ok(served?),
        () = tollgate_http::tls::watch(tls.as_deref()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tokio::net::TcpListener;
    use tollgate_core::{ManualClock, TimeDelta, Timestamp};
    use tollgate_rules::{Options, Ruleset};
    use tollgate_store::{MemoryConfig, MemoryStore};

    #[derive(Default)]
    struct Timed(AtomicU64);

    impl tollgate_engine::Observer for Timed {
        fn on_decision(&self, _: &tollgate_engine::Check<'_>, _: &tollgate_engine::Decision) {}

        fn on_latency(&self, protocol: &'static str, requests: u64, _: TimeDelta) {
            assert_eq!(protocol, "rls");
            self.0.fetch_add(requests, Ordering::Relaxed);
        }
    }

    /// An alert on check latency must not include malformed requests.
    #[tokio::test]
    async fn rejected_requests_are_not_recorded_as_checks() {
        let (timed, clock) =
            (Arc::new(Timed::default()), Arc::new(ManualClock::at(Timestamp::from_secs(1_000))));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
        let limiter = Limiter::new(Arc::new(rules), store, clock).with_observer(Arc::clone(&timed) as _);
        let service = Service(Arc::new(limiter), ResponseConfig::default(), ResponseStyle::default());
        let request = |domain: &str| {
            use super::super::proto::envoy::extensions::common::ratelimit::v3::{
                RateLimitDescriptor, rate_limit_descriptor::Entry,
            };
            let entries = vec![Entry { key: "k".to_owned(), value: "v".to_owned() }];
            let descriptors = vec![RateLimitDescriptor { entries, ..Default::default() }];
            Request::new(RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 })
        };
        service.should_rate_limit(request("")).await.expect_err("rejected");
        assert_eq!(timed.0.load(Ordering::Relaxed), 0);
        service.should_rate_limit(request("d")).await.expect("a response");
        assert_eq!(timed.0.load(Ordering::Relaxed), 1);
    }

    const GOAWAY: u8 = 7;

    /// Opens an HTTP/2 connection to a server whose connections end.
    async fn connect(config: RlsConfig) -> tokio::net::TcpStream {
        use tokio::io::AsyncWriteExt;
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
        let limiter = Arc::new(Limiter::new(Arc::new(rules), store, clock));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        // Ends with the test's runtime.
        tokio::spawn(serve(listener, limiter, config, std::future::pending()));
        let mut client = tokio::net::TcpStream::connect(address).await.expect("a connection");
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("sent");
        client
    }

    /// Reads a frame. Returns its type and its stream; `None` at the end of the connection.
    async fn frame(client: &mut tokio::net::TcpStream) -> Option<(u8, u8)> {
        use tokio::io::AsyncReadExt;
        let mut header = [0; 9];
        client.read_exact(&mut header).await.ok()?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        client.read_exact(&mut vec![0; length as usize]).await.ok()?;
        Some((header[3], header[8]))
    }

    /// A client that is not asked loses the requests in flight.
    #[tokio::test]
    async fn an_old_connection_is_asked_to_end() {
        let age = Some(Duration::from_millis(50));
        let mut client = connect(RlsConfig { max_age: age, ..RlsConfig::default() }).await;
        while frame(&mut client).await.expect("a frame, and not the end").0 != GOAWAY {}
    }

    /// A stream that never ends by itself would keep its connection, and what is behind it, for ever.
    #[tokio::test]
    async fn an_old_connection_with_an_open_stream_ends_after_the_grace() {
        use tokio::io::AsyncWriteExt;
        const PATH: &[u8] = b"/grpc.health.v1.Health/Watch";
        // `:method: POST`, `:scheme: http`, `:path`, `:authority: x`, `content-type: application/grpc`.
        let path_length = u8::try_from(PATH.len()).expect("short");
        let fields =
            [b"\x83\x86\x04", &[path_length][..], PATH, b"\x01\x01x\x0f\x10\x10application/grpc"].concat();
        let length = u8::try_from(fields.len()).expect("short");
        let message = [0, 0, 5, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0];
        let call = [&[0, 0, length, 1, 4, 0, 0, 0, 1], &fields[..], &message].concat();
        // A busy machine may need longer until the stream is open.
        for wait in [50, 500, 5_000] {
            let wait = Some(Duration::from_millis(wait));
            let mut client =
                connect(RlsConfig { max_age: wait, max_age_grace: wait, ..RlsConfig::default() }).await;
            let _ = client.write_all(&call).await;
            let mut frames = Vec::new();
            while let Some(frame) = frame(&mut client).await {
                frames.push(frame);
            }
            if frames.contains(&(0, 1)) {
                assert!(frames.iter().any(|(kind, _)| *kind == GOAWAY), "it was asked: {frames:?}");
                return;
            }
        }
        panic!("the stream was never open");
    }

    /// A client that is asked to read and never does must not keep its place.
    #[tokio::test]
    async fn an_old_connection_whose_client_never_reads_ends() {
        use tokio::io::AsyncWriteExt;
        let wait = Some(Duration::from_millis(50));
        let mut client =
            connect(RlsConfig { max_age: wait, max_age_grace: wait, ..RlsConfig::default() }).await;
        let pings = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8].repeat(1_000);
        let ended = async { while client.write_all(&pings).await.is_ok() {} };
        tokio::time::timeout(Duration::from_secs(30), ended).await.expect("the connection ends");
    }
}
