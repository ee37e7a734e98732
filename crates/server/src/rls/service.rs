//! The gRPC server: the rate limit service, with the quota service and the standard health and reflection services.

use super::codec;
use super::health::NamedHealth;
use super::listener::{GrpcListener, Socket};
use super::proto::DESCRIPTORS;
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::{BadRequest, HealthNames, ResponseStyle, RlsError, sdk_extension};
use crate::grpc::{self, Unary};
use crate::rlqs::{QuotaServer, QuotaService, RlqsConfig};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tollgate_core::{CounterStore, Timestamp};
use tollgate_engine::{Limiter, TraceContext};
use tollgate_http::h2::Head;
use tollgate_http::response::ResponseConfig;
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::{Activity, ConnectionBudget, FIRST_REQUEST, PortLimits, WhenFull};
use tollgate_http::server::{Drain, GRACE_PERIOD};
use tollgate_http::tls::ServerTls;
use tollgate_http::traceparent;
use tonic::Status;
use tonic::metadata::MetadataMap;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;

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
    /// Settings of the fields and the body that callers get.
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
    /// Time for the requests in flight when the server shuts down.
    pub drain: Duration,
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
            drain: DRAIN,
            rlqs: RlqsConfig::default(),
        }
    }
}

/// Maximum size of a request in bytes, as of any server of gRPC's own libraries: less, and a caller whose header becomes
/// part of a message could have it rejected, which lets a request pass at proxies that fail open.
pub(crate) const MAX_MESSAGE: usize = 4 << 20;

/// Default of [`RlsConfig::drain`].
const DRAIN: Duration = Duration::from_secs(30);

/// Name of the rate limit service.
const NAME: &str = "envoy.service.ratelimit.v3.RateLimitService";

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

/// What is kept of a request's head.
struct Opening {
    began: Timestamp,
    trace: Option<TraceContext>,
    /// Of a request of the Rust SDK.
    metadata: Option<Box<MetadataMap>>,
}

impl<S: CounterStore + 'static> Unary for Service<S> {
    const PATH: &'static str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    type Opening = Opening;
    type Request = (Opening, RateLimitRequest);
    type Response = RateLimitResponse;

    fn open(&self, head: &Head) -> Opening {
        let began = self.0.clock().now();
        let trace = traceparent::from_headers(&self.0, head, || began);
        let is_extended = head.get(sdk_extension::METADATA_KEY.as_bytes()).is_some();
        let metadata =
            is_extended.then(|| Box::new(MetadataMap::from_headers(head.to_map_of(sdk_extension::KEYS))));
        Opening { began, trace, metadata }
    }

    fn kept(opening: &Opening) -> usize {
        /// What a field of a map takes beside its value, with room for others.
        const FIELD: usize = 200;
        let kept = |metadata: &MetadataMap| {
            metadata.as_ref().values().map(|value| FIELD + value.len()).sum::<usize>()
        };
        opening.metadata.as_deref().map_or(0, kept)
    }

    fn decode(&self, opening: Opening, message: &[u8]) -> Result<Self::Request, Status> {
        Ok((opening, codec::decode(message)?))
    }

    async fn call(&self, (opening, message): Self::Request) -> Result<RateLimitResponse, Status> {
        let Opening { began, trace, metadata } = opening;
        let response = match &metadata {
            // Boxed, so that the futures of all other checks have no room for it.
            Some(metadata) => {
                Box::pin(sdk_extension::handle(&self.0, &self.1, &message, metadata, trace.as_ref())).await
            }
            None => {
                let how = (&self.2, &self.1);
                super::handle(&self.0, &message, trace.as_ref(), how).await.map_err(Status::from)
            }
        };
        if response.is_ok() {
            self.0.record_latency("rls", 1, self.0.clock().now().since(began));
        }
        response
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
    let health = NamedHealth::new(config.health, &[NAME, QuotaServer::NAME]).await;
    let health_service = HealthServer::new(health.clone());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (stop, stopping) = watch::channel(false);
    let quotas = QuotaService::start(Arc::clone(&limiter), config.rlqs, stopping);
    let service = Arc::new(Service(limiter, config.responses, config.style));
    let drained = async move {
        tokio::select! {
            () = drain => {}
            () = health.follow() => {}
        }
        // Quota streams never end by themselves.
        stop.send_replace(true);
        health.end().await;
    };
    let slots = config.budget.port(PortLimits {
        guaranteed: config.guaranteed,
        first_request: config.first_request,
        ..PortLimits::new(config.connections, WhenFull::Wait)
    });
    let others = Routes::new(quotas)
        // Names of services are short.
        .add_service(health_service.max_decoding_message_size(64 << 10))
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .prepare();
    let settings = Arc::new(grpc::Settings {
        message_bytes: config.message_bytes,
        streams: config.streams,
        max_age: config.max_age,
        max_age_grace: config.max_age_grace,
    });
    let tls = config.tls;
    let connection = |stream: Socket, _, drain: Arc<Drain>, activity: Arc<Activity>| {
        let (service, others, settings) = (Arc::clone(&service), others.clone(), Arc::clone(&settings));
        let tls = tls.clone();
        async move {
            let Some(tls) = tls else {
                return grpc::serve(stream, &*service, others, &settings, &drain, &activity).await;
            };
            // A client that does not finish the handshake is silent, and ends as such; while the server drains, silent ones are not ended.
            let begun = drain.begun();
            let late = async {
                if !drain.has_begun() {
                    begun.await;
                }
                tokio::time::sleep(GRACE_PERIOD).await;
            };
            let accepted = tokio::select! {
                accepted = tls.acceptor().accept(stream) => accepted,
                () = late => return,
            };
            let Ok(stream) = accepted else { return };
            if tls.check_client(stream.get_ref().1.peer_certificates()).is_ok() {
                grpc::serve(stream, &*service, others, &settings, &drain, &activity).await;
            }
        }
    };
    let shutdown = Shutdown { timeout: config.drain, new_connections: NewConnections::Reject };
    tokio::select! {
        () = accept::serve(listener.into(), slots, shutdown, drained, connection) => {}
        () = tollgate_http::tls::watch(tls.as_deref()) => {}
    }
    Ok(())
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
            let opening = Opening { began: Timestamp::from_secs(1_000), trace: None, metadata: None };
            (opening, RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 })
        };
        service.call(request("")).await.expect_err("rejected");
        assert_eq!(timed.0.load(Ordering::Relaxed), 0);
        service.call(request("d")).await.expect("a response");
        assert_eq!(timed.0.load(Ordering::Relaxed), 1);
    }

    /// Opens a request whose head refers to the fields of the table again and again.
    #[tokio::test]
    async fn a_head_keeps_what_is_read_of_it() {
        use tollgate_http::h2::{Connection, PREFACE, Settings, encode_field};
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
        let limiter = Limiter::new(Arc::new(rules), store, clock);
        let service = Service(Arc::new(limiter), ResponseConfig::default(), ResponseStyle::default());
        let mut block = bytes::BytesMut::from(&b"\x83\x86\x84"[..]);
        encode_field(b"tollgate-ask", b"descriptors", &mut block);
        block.extend_from_slice(&[&b"\x40\x01z\0"[..], &[0xbe; 400]].concat());
        let length = u16::try_from(block.len()).expect("short").to_be_bytes();
        let head = [&[0, length[0], length[1], 1, 4, 0, 0, 0, 1][..], &block].concat();
        let bytes = [&PREFACE[..], b"\0\0\0\x04\0\0\0\0\0", &head].concat();
        let mut http2 = Connection::<()>::new(Settings::default());
        let mut read = 0;
        while http2.open() == 0 {
            read += http2.receive(&bytes[read..], || ()).expect("valid").consumed;
        }
        let opening = service.open(http2.head());
        let kept = opening.metadata.as_ref().expect("the SDK's");
        assert_eq!(
            (kept.len(), kept.get("tollgate-ask").expect("kept").as_bytes()),
            (1, &b"descriptors"[..])
        );
        assert!((11..1_000).contains(&Service::<MemoryStore<Arc<ManualClock>>>::kept(&opening)));
    }

    /// gRPC's C library sends the path of a Unix socket as the authority, which is none of a URI; a probe that fails for it
    /// takes the service down.
    #[tokio::test]
    async fn an_authority_that_is_none_is_served_at_a_unix_socket() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
        let limiter = Arc::new(Limiter::new(Arc::new(rules), store, clock));
        let path = std::env::temp_dir().join(format!("tollgate-authority-{}.sock", std::process::id()));
        let listener = GrpcListener::unix(path.clone()).expect("a socket");
        tokio::spawn(serve(listener, limiter, RlsConfig::default(), std::future::pending()));
        for authority in ["work%2Fa.sock", "outbound|8081||x", ""] {
            let mut client = tokio::net::UnixStream::connect(&path).await.expect("a connection");
            let mut block = bytes::BytesMut::from(&b"\x83\x86"[..]);
            for (name, value) in [
                (":path", "/grpc.health.v1.Health/Check"),
                (":authority", authority),
                ("content-type", "application/grpc"),
            ] {
                tollgate_http::h2::encode_field(name.as_bytes(), value.as_bytes(), &mut block);
            }
            let length = u8::try_from(block.len()).expect("short");
            let head = [&[0, 0, length, 1, 4, 0, 0, 0, 1][..], &block].concat();
            let call = [&head[..], b"\0\0\x05\0\x01\0\0\0\x01\0\0\0\0\0"].concat();
            let hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
            client.write_all(&[&hello[..], &call].concat()).await.expect("sent");
            loop {
                let mut header = [0; 9];
                client.read_exact(&mut header).await.expect("a frame");
                let mut payload = vec![0; usize::from(header[1]) << 8 | usize::from(header[2])];
                client.read_exact(&mut payload).await.expect("a frame");
                assert_ne!(header[3], 3, "it is reset: {authority}");
                if header[3] == 0 {
                    assert_eq!(payload, b"\0\0\0\0\x02\x08\x01", "it serves");
                    break;
                }
            }
        }
        let _ = std::fs::remove_file(path);
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
