//! The xDS client: opens streams one after the other, hands what arrives to the rule loader, and answers.
//!
//! Rules stay in effect while the server is unavailable, rejects the connection or sends resources that cannot be
//! loaded. The log has the reason at once, and then once a minute.

use super::backoff::{Backoff, Ended};
use super::connection;
use super::proto::envoy::config::core::v3::Node;
use super::proto::envoy::service::discovery::v3::DiscoveryRequest;
use super::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use super::rule_text;
use super::settings::XdsSettings;
use super::status::XdsStatus;
use super::subscription::{Offer, Subscription};
use crate::config::wording::Wording;
use futures_util::stream;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use std::error::Error as _;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollgate_core::{Clock, SystemClock, TimeDelta, Timestamp};
use tollgate_rules::{Diagnostics, Source};
use tonic::Status;

/// Time without a first response after which the log says so.
const PATIENCE: Duration = Duration::from_secs(15);
/// Minimum time between two messages with the same reason.
const LOG_INTERVAL: TimeDelta = TimeDelta::from_secs(60);
/// Pauses before a refusal of what was refused just before: some servers send it again at once.
const FIRST_REFUSAL_PAUSE: Duration = Duration::from_millis(50);
const MAX_REFUSAL_PAUSE: Duration = Duration::from_secs(1);

/// Where rules from xDS go.
pub(crate) trait RuleSink: Send + Sync + 'static {
    /// Makes these rule files active in place of those applied before.
    ///
    /// # Errors
    /// Why they are refused; the rules are as before.
    fn apply(&self, sources: &[Source]) -> Result<(), RefusedRules>;

    /// Records that a response was refused before there were rule files to apply.
    fn refuse(&self, refused: &RefusedRules);

    /// Returns a receiver of changes, from now on, of the files beside which rules are loaded: what was refused because of
    /// them may fit then.
    fn file_changes(&self) -> watch::Receiver<()>;
}

/// Why rules are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RefusedRules {
    /// One line, for the management server.
    pub(crate) summary: String,
    /// All errors with their places, for the log.
    pub(crate) details: String,
}

impl RefusedRules {
    /// Describes the errors of rules in these words.
    pub(crate) fn new(errors: &Diagnostics, wording: Wording) -> Self {
        let first = errors.all().first().map(|first| format!("{}: {}", first.file, wording.reason(first)));
        let more = match errors.all().len() {
            0 | 1 => String::new(),
            many => format!(" (and {} more errors)", many - 1),
        };
        Self { summary: first.unwrap_or_default() + &more, details: errors.to_string() }
    }
}

/// The task that receives rules.
pub(crate) struct XdsClient {
    settings: XdsSettings,
    sink: Arc<dyn RuleSink>,
    status: Arc<XdsStatus>,
    /// The rule files in effect; `None` before any were.
    applied: Option<Arc<Vec<Source>>>,
    refusals: Repeated,
    failures: Repeated,
    /// Whether the log has that the server was reached, and that it answers, since the last failure there.
    is_announced: bool,
    is_answering: bool,
}

/// A reason that may come again and again.
#[derive(Default)]
struct Repeated {
    last: Option<(String, Timestamp)>,
    /// Number of times that it came since it was another.
    count: u32,
}

impl Repeated {
    /// Returns whether the log should have this reason now.
    fn is_due(&mut self, reason: &str, now: Timestamp) -> bool {
        let same = self.last.as_ref().filter(|(last, _)| last == reason);
        self.count = if same.is_some() { self.count.saturating_add(1) } else { 0 };
        if same.is_some_and(|(_, logged)| now.since(*logged) < LOG_INTERVAL) {
            return false;
        }
        self.last = Some((reason.to_owned(), now));
        true
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

impl XdsClient {
    /// Starts the task, which never ends by itself.
    pub(crate) fn start(
        settings: XdsSettings,
        sink: Arc<dyn RuleSink>,
        status: Arc<XdsStatus>,
    ) -> JoinHandle<()> {
        let (refusals, failures) = Default::default();
        let client = Self {
            settings,
            sink,
            status,
            applied: None,
            refusals,
            failures,
            is_announced: false,
            is_answering: true,
        };
        tokio::spawn(client.run())
    }

    async fn run(mut self) {
        let mut backoff = Backoff::new(self.settings.backoff);
        loop {
            let began = Instant::now();
            let (ended, why) = self.stream().await;
            let lasted = began.elapsed();
            if backoff.has_served(ended, lasted) {
                self.failures.clear();
            }
            if ended == Ended::Asked {
                tracing::debug!("xDS stream ended: {why}");
            } else {
                self.record_failure(&why);
            }
            tokio::time::sleep(backoff.pause(ended, lasted, random())).await;
        }
    }

    fn record_failure(&mut self, why: &str) {
        self.status.record_ended(why);
        if self.failures.is_due(why, SystemClock::new().now()) {
            (self.is_announced, self.is_answering) = (false, false);
            tracing::warn!(
                "Failed to receive configuration from xDS Management Server: {why}; keeping the current rules"
            );
        }
    }

    /// Runs one stream to its end. Returns how and why it ended.
    async fn stream(&mut self) -> (Ended, String) {
        let (connection, origin) = match connection::connect(&self.settings).await {
            Ok(connected) => connected,
            Err(error) => return (Ended::Dial, error),
        };
        self.status.record_connected();
        if !std::mem::replace(&mut self.is_announced, true) {
            tracing::info!(
                server = %self.settings.server,
                node_id = self.settings.node_id,
                "Connection to xDS Management Server is successful"
            );
        }
        let mut subscription = Subscription::new(self.node());
        // One request is open at a time: the next response follows the answer to the last one.
        let (answers, requests) = mpsc::channel::<DiscoveryRequest>(1);
        let _ = answers.try_send(subscription.open());
        let requests = stream::unfold(requests, |mut requests| async move {
            let request = requests.recv().await?;
            Some((request, requests))
        });
        let mut request = tonic::Request::new(requests);
        for (name, value) in &self.settings.headers {
            request.metadata_mut().insert(name.clone(), value.clone());
        }
        let mut client = AggregatedDiscoveryServiceClient::with_origin(connection, origin)
            .max_decoding_message_size(self.settings.max_message);
        let call = self.wait(client.stream_aggregated_resources(request)).await;
        let mut responses = match call {
            Ok(responses) => responses.into_inner(),
            Err(status) => return (Ended::Silent, self.explain(&status)),
        };
        let mut ended = Ended::Silent;
        let mut files = self.sink.file_changes();
        loop {
            let is_refused = self.refusals.last.is_some();
            let response = tokio::select! {
                response = self.wait(responses.message()) => response,
                Ok(()) = files.changed(), if is_refused => {
                    // A server sends what was refused only to a new stream.
                    return (Ended::Asked, "rule files changed; asking for the refused rules again".to_owned());
                }
            };
            let response = match response {
                Ok(Some(response)) => response,
                Ok(None) => return (ended, "the server closed the stream".to_owned()),
                Err(status) => return (ended, self.explain(&status)),
            };
            let Some(offer) = subscription.receive(response) else {
                tracing::debug!("xDS response with resources of another type ignored");
                continue;
            };
            ended = Ended::Served;
            if !std::mem::replace(&mut self.is_answering, true) {
                tracing::info!(server = %self.settings.server, "xDS Management Server answers again");
            }
            files = self.sink.file_changes();
            let answer = match self.apply(&offer).await {
                Ok(()) => subscription.accept(offer),
                Err(reason) => {
                    tokio::time::sleep(self.refusal_pause()).await;
                    subscription.refuse(offer, &reason)
                }
            };
            if answers.send(answer).await.is_err() {
                return (ended, "the server closed the stream".to_owned());
            }
        }
    }

    /// Applies an offer. Returns why it is refused.
    async fn apply(&mut self, offer: &Offer) -> Result<(), String> {
        let applied = match &offer.resources {
            Ok(resources) => {
                let sources = Arc::new(rule_text::sources(resources));
                // After a refusal the sink has to know that the rules in effect are the server's again.
                let is_known = self.refusals.last.is_none() && self.applied.as_ref() == Some(&sources);
                let applied = if is_known { Ok(()) } else { self.apply_new(&sources).await };
                applied.map(|()| (resources.len(), sources, is_known))
            }
            Err(error) => {
                let refused = RefusedRules { summary: error.clone(), details: error.clone() };
                self.sink.refuse(&refused);
                Err(refused)
            }
        };
        let version = &offer.version;
        match applied {
            Ok((resources, sources, is_known)) => {
                self.applied = Some(sources);
                self.refusals.clear();
                self.status.record_accepted(version, resources);
                if !is_known {
                    tracing::info!(version, resources, "Successfully loaded new configuration");
                }
                Ok(())
            }
            Err(refused) => {
                self.status.record_refused(&refused.summary);
                if self.refusals.is_due(&refused.summary, SystemClock::new().now()) {
                    let RefusedRules { summary, details } = &refused;
                    let more = if summary == details { String::new() } else { format!("\n{details}") };
                    tracing::error!(
                        version,
                        "Error loading new configuration: {summary}; keeping the current rules{more}"
                    );
                }
                Err(refused.summary)
            }
        }
    }

    /// Compiles and applies rule files beside the traffic.
    async fn apply_new(&self, sources: &Arc<Vec<Source>>) -> Result<(), RefusedRules> {
        let (sink, sources) = (Arc::clone(&self.sink), Arc::clone(sources));
        let applied = tokio::task::spawn_blocking(move || sink.apply(&sources)).await;
        applied.unwrap_or_else(|error| {
            let error = error.to_string();
            Err(RefusedRules { summary: error.clone(), details: error })
        })
    }

    fn refusal_pause(&self) -> Duration {
        match self.refusals.count {
            0 => Duration::ZERO,
            count => (FIRST_REFUSAL_PAUSE * (1 << (count - 1).min(10))).min(MAX_REFUSAL_PAUSE),
        }
    }

    /// Awaits the server. If it has nothing for this node, the log says so once.
    async fn wait<T>(&self, response: impl Future<Output = T>) -> T {
        let mut response = pin!(response);
        if let Ok(response) = tokio::time::timeout(PATIENCE, &mut response).await {
            return response;
        }
        if !self.status.has_config() {
            tracing::warn!(
                node_id = self.settings.node_id,
                "no configuration from xDS Management Server yet; it has none for this node ID, or is not ready"
            );
        }
        response.await
    }

    fn node(&self) -> Node {
        let text = |value: &String| Value { kind: Some(Kind::StringValue(value.clone())) };
        let fields = self.settings.node_metadata.iter().map(|(key, value)| (key.clone(), text(value)));
        let metadata = (!self.settings.node_metadata.is_empty()).then(|| Struct { fields: fields.collect() });
        Node { id: self.settings.node_id.clone(), metadata }
    }

    /// Returns the reason of a failed call, with its causes and what to do about it.
    fn explain(&self, status: &Status) -> String {
        let mut text = format!("{:?}: {}", status.code(), status.message());
        let mut cause = status.source();
        while let Some(error) = cause {
            let error_text = error.to_string();
            if !text.contains(&error_text) {
                text = format!("{text}: {error_text}");
            }
            cause = error.source();
        }
        if status.code() == tonic::Code::OutOfRange {
            text = format!("{text}; raise the maximum message size, {} bytes", self.settings.max_message);
        }
        text
    }
}

/// Returns a number from 0 to 1.
pub(crate) fn random() -> f64 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    random as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_a_reason_at_once_and_then_rarely() {
        let mut repeated = Repeated::default();
        let at = |seconds: u64| Timestamp::from_secs(1_000 + seconds);
        assert!(repeated.is_due("a", at(0)));
        assert!(!repeated.is_due("a", at(59)));
        assert!(repeated.is_due("a", at(60)));
        assert!(repeated.is_due("b", at(61)), "another reason");
        assert_eq!(repeated.count, 0);
        assert!(!repeated.is_due("b", at(62)));
        assert_eq!(repeated.count, 1);
    }
}
