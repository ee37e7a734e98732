//! The service over real streams: what one bucket is like must not matter to the others.

use super::*;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::BucketId;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_usage_reports::BucketQuotaUsage;
use bytes::{BufMut, Bytes};
use prost::Message;
use std::collections::HashSet;
use tollgate_core::Cost;
use tollgate_engine::Check;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Sends messages as they are.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = RateLimitQuotaResponse;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = RateLimitQuotaResponse;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        RateLimitQuotaResponse::decode(buffer).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

fn usage<'a>(entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> BucketQuotaUsage {
    let bucket = entries.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    BucketQuotaUsage { bucket_id: Some(BucketId { bucket }), ..BucketQuotaUsage::default() }
}

fn message(usages: Vec<BucketQuotaUsage>) -> Vec<u8> {
    let domain = "edge".to_owned();
    RateLimitQuotaUsageReports { domain, bucket_quota_usages: usages }.encode_to_vec()
}

/// A service, which ends with it.
pub(super) struct Running {
    server: Grpc<QuotaServer>,
    stats: RlqsStats,
    limiter: Arc<Limiter<Memory>>,
    _stop: watch::Sender<bool>,
}

impl Running {
    pub(super) fn start(config: RlqsConfig) -> Self {
        let limiter = limiter();
        let (stop, stopping) = watch::channel(false);
        let stats = config.stats.clone();
        let server = Grpc::new(QuotaService::start(Arc::clone(&limiter), config, stopping));
        Self { server, stats, limiter, _stop: stop }
    }

    /// Opens a stream, of the task that awaits it.
    pub(super) async fn open(&self) -> Result<Client, Status> {
        let (messages, mut waiting) = mpsc::channel(8);
        let sent = futures_util::stream::poll_fn(move |context| waiting.poll_recv(context));
        let path = http::uri::PathAndQuery::from_static(PATH);
        let responses = self.server.clone().streaming(Request::new(sent), path, Raw).await?.into_inner();
        Ok(Client { messages, responses })
    }
}

pub(super) const PATH: &str =
    "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas";

/// A limiter with one limit, of each tenant.
pub(super) fn limiter() -> Arc<Limiter<Memory>> {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let text = "domain: edge\ndescriptors:\n  - key: tenant\n    limit: {count: 600, period: minute}\n";
    let rules = Ruleset::load(&[Source::new("rules.yaml", text)], &Options::default()).expect("rules");
    let store = MemoryStore::new(&MemoryConfig::with_bytes(16 << 20), Arc::clone(&clock)).expect("memory");
    Arc::new(Limiter::new(Arc::new(rules), Arc::new(store), clock as Arc<dyn Clock>))
}

/// Returns a report of one tenant.
pub(super) fn report(tenant: &str) -> Vec<u8> {
    message(vec![usage([("tenant", tenant)])])
}

/// A stream of the service.
pub(super) struct Client {
    messages: mpsc::Sender<Bytes>,
    pub(super) responses: Streaming<RateLimitQuotaResponse>,
}

impl Client {
    pub(super) async fn send(&self, message: Vec<u8>) {
        self.messages.send(Bytes::from(message)).await.expect("an open stream");
    }

    /// Returns the tenants that have an action, when there are so many.
    pub(super) async fn answered(&mut self, count: usize) -> HashSet<String> {
        let mut tenants = HashSet::new();
        while tenants.len() < count {
            let response = self.responses.message().await.expect("an open stream").expect("a response");
            for action in response.bucket_action {
                assert!(action.bucket_action.is_some());
                let id = action.bucket_id.expect("a bucket");
                tenants.insert(id.bucket.get("tenant").expect("a tenant").clone());
            }
        }
        tenants
    }
}

fn names(names: &[&str]) -> HashSet<String> {
    names.iter().map(ToString::to_string).collect()
}

/// Callers choose the values of buckets by header fields: one of them would otherwise end the stream of a whole Envoy, for as
/// long as it lives, because it sends all buckets again.
#[tokio::test]
async fn a_bad_bucket_is_left_out_and_all_others_are_served() {
    let long = "v".repeat(1_025);
    let many: Vec<String> = (0..65).map(|at| at.to_string()).collect();
    let bad = [
        usage([("tenant", long.as_str())]),
        usage([(long.as_str(), "v")]),
        usage([("", "v")]),
        usage([]),
        usage(many.iter().map(|key| (key.as_str(), "v"))),
        usage([("tenant", "v".repeat(300_000).as_str())]),
        BucketQuotaUsage::default(),
    ];
    let service = Running::start(RlqsConfig::default());
    let mut client = service.open().await.expect("a stream");
    let mut rejected = 0;
    for (at, bad) in bad.into_iter().enumerate() {
        let (before, after) = (format!("{at}"), format!("{at} too"));
        client.send(message(vec![usage([("tenant", &*before)]), bad, usage([("tenant", &*after)])])).await;
        assert_eq!(client.answered(2).await, names(&[&before, &after]));
        rejected += 1;
        assert_eq!(service.stats.rejected(), (0, rejected), "bucket {at}");
    }
    // Not UTF-8: a header field is any bytes.
    let mut bytes =
        message(vec![usage([("tenant", "x")]), usage([("tenant", "AB")]), usage([("tenant", "y")])]);
    let at = bytes.windows(2).position(|pair| pair == b"AB").expect("the value");
    bytes[at..at + 2].copy_from_slice(b"\xff\xfe");
    client.send(bytes).await;
    assert_eq!(client.answered(2).await, names(&["x", "y"]));
    assert_eq!(service.stats.rejected(), (0, rejected + 1));
}

/// What Envoy sends again after a reconnect, however many buckets it has.
#[tokio::test]
async fn a_message_of_any_size_is_read() {
    let service = Running::start(RlqsConfig::default());
    let mut client = service.open().await.expect("a stream");
    let value = "v".repeat(1_000);
    let values: Vec<String> = (0..4_300).map(|at| format!("{at:04}{value}")).collect();
    let bytes = message(values.iter().map(|value| usage([("tenant", &**value)])).collect());
    assert!(bytes.len() > 4 << 20);
    client.send(bytes).await;
    let expected: HashSet<String> = values[..4_096].iter().cloned().collect();
    assert_eq!(client.answered(4_096).await, expected);
    // The last ones are read after that.
    while service.stats.rejected() != (4_300 - 4_096, 0) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An Envoy that fails open reports what it has let pass, and its stream may end at once.
#[tokio::test]
async fn what_passed_without_an_assignment_is_charged_after_the_stream_has_ended() {
    let service = Running::start(RlqsConfig::default());
    let Client { messages, responses } = service.open().await.expect("a stream");
    let reported = BucketQuotaUsage { num_requests_allowed: 1_000, ..usage([("tenant", "a")]) };
    messages.send(Bytes::from(message(vec![reported]))).await.expect("an open stream");
    drop((messages, responses));
    let check = Check::attributes("edge", &[("tenant", "a")]).with_cost(Cost::PEEK);
    while service.limiter.charge_ahead(&check, &[]).await.counters[0].remaining > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
