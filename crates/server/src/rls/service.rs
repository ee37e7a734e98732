//! The gRPC server: the rate limit service on tonic, with the standard health and reflection services.

use super::incoming::incoming;
use super::proto::DESCRIPTORS;
use super::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::{BadRequest, sdk_extension};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_http::response::ResponseConfig;
use tollgate_http::server::connections::{ConnectionBudget, FIRST_REQUEST, PortLimits, WhenFull};
use tollgate_http::traceparent;
use tonic::server::NamedService;
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
}

impl Default for RlsConfig {
    fn default() -> Self {
        let responses = ResponseConfig::default();
        Self {
            connections: 65_536,
            guaranteed: 0,
            budget: ConnectionBudget::default(),
            first_request: FIRST_REQUEST,
            message_bytes: 256 * 1024,
            streams: 1024,
            responses,
        }
    }
}

/// A client that has been quiet for this long is asked whether it is there, and has as long to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

struct Service<S>(Arc<Limiter<S>>, ResponseConfig);

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
            sdk_extension::handle(&self.0, &self.1, message, metadata, trace.as_ref()).await
        } else {
            super::handle(&self.0, message, trace.as_ref()).await.map_err(Status::from)
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
    listener: TcpListener,
    limiter: Arc<Limiter<S>>,
    config: RlsConfig,
    drain: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (mut health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<RateLimitServiceServer<Service<S>>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let service = RateLimitServiceServer::new(Service(limiter, config.responses))
        .max_decoding_message_size(config.message_bytes);
    let drained = async move {
        drain.await;
        for name in [<RateLimitServiceServer<Service<S>> as NamedService>::NAME, ""] {
            health.set_service_status(name, tonic_health::ServingStatus::NotServing).await;
            // Ends the `Watch` streams after the update; they would otherwise keep the server from shutting down.
            health.clear_service_status(name).await;
        }
    };
    let slots = config.budget.port(PortLimits {
        guaranteed: config.guaranteed,
        first_request: config.first_request,
        ..PortLimits::new(config.connections, WhenFull::Wait)
    });
    let incoming = pin!(incoming(listener, slots));
    Server::builder()
        .max_concurrent_streams(config.streams)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .add_service(service)
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .serve_with_incoming_shutdown(incoming, drained)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tollgate_core::{ManualClock, TimeDelta, Timestamp};
    use tollgate_rules::{Options, Ruleset};
    use tollgate_store::{MemoryConfig, MemoryStore};

    #[derive(Default)]
    struct Timed(AtomicU64);

    impl tollgate_engine::Observer for Timed {
        fn on_decision(&self, _: &tollgate_engine::Check<'_>, _: &tollgate_engine::Decision) {}

        fn on_latency(&self, front: &'static str, requests: u64, _: TimeDelta) {
            assert_eq!(front, "rls");
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
        let service = Service(Arc::new(limiter), ResponseConfig::default());
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
}
