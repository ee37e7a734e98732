//! Spans on their way to a collector: OpenTelemetry's protocol over HTTP, by a task of its own that takes away what waits
//! once a second. Nobody waits for it: a collector that is slow or away costs spans, which are counted, and nothing else.

mod settings;

pub(crate) use settings::{Otlp, read};

use crate::admin_client::{Client, RequestBody};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, StatusCode, Uri};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tollgate_observe::{SpanBuffer, Telemetry};

/// How often what waits is taken away.
const INTERVAL: Duration = Duration::from_secs(1);
/// Spans in one message, and messages a round: with what may wait, that is all that one node ever sends in a second.
const BATCH: usize = 512;
const ROUND: usize = 16;
/// How long a collector may take for a message.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often a message is tried, and the longest wait before the next time.
const MAX_ATTEMPTS: u32 = 4;
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// How long the end waits for the last spans to be sent.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// What is read of an answer.
const MAX_RESPONSE: usize = 64 * 1024;

/// The task that sends, and how it is ended.
pub(crate) struct ExportTask {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

impl ExportTask {
    /// Begins to send, where that is asked for.
    pub(crate) fn start(otlp: Option<&Otlp>, observe: &Arc<Telemetry>) -> anyhow::Result<Option<Self>> {
        let Some(otlp) = otlp else { return Ok(None) };
        tracing::info!("sending traces to {}", otlp.uri);
        let (stop, stopped) = watch::channel(false);
        let (client, observe) = (otlp.client()?, Arc::clone(observe));
        let collector = Collector { otlp: otlp.clone(), client, connection: None, is_unavailable: false };
        Ok(Some(Self { task: tokio::spawn(collector.run(observe, stopped)), stop }))
    }

    /// Sends what still waits, and ends.
    pub(crate) async fn shutdown(self) {
        let _ = self.stop.send(true);
        let abort = self.task.abort_handle();
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.task).await.is_err() {
            tracing::warn!("spans lost at shutdown; the collector was too slow");
            abort.abort();
        }
    }
}

/// Who takes spans.
struct Collector {
    otlp: Otlp,
    client: Client,
    /// A connection that may still be good.
    connection: Option<SendRequest<RequestBody>>,
    is_unavailable: bool,
}

/// Why a message was not taken.
enum ExportError {
    /// Another time it may be.
    Retryable(anyhow::Error, Option<Duration>),
    Permanent(anyhow::Error),
}

impl Collector {
    async fn run(mut self, observe: Arc<Telemetry>, mut stop: watch::Receiver<bool>) {
        let Some(traces) = observe.spans() else { return };
        while !wait(INTERVAL, &mut stop).await {
            self.round(traces, &mut stop).await;
        }
        self.round(traces, &mut stop).await;
    }

    async fn round(&mut self, traces: &SpanBuffer, stop: &mut watch::Receiver<bool>) {
        for _ in 0..ROUND {
            let Some(batch) = traces.drain(BATCH) else { return };
            let message = Bytes::from(batch.message);
            match self.send(&message, stop).await {
                Ok(answer) => {
                    traces.record_sent(batch.spans, &answer);
                    if std::mem::take(&mut self.is_unavailable) {
                        tracing::info!("trace collector {} available again", self.otlp.uri);
                    }
                }
                Err(error) => {
                    traces.record_dropped(batch.spans);
                    if !std::mem::replace(&mut self.is_unavailable, true) {
                        let uri = &self.otlp.uri;
                        tracing::warn!("trace collector {uri} unavailable; dropping spans: {error:#}");
                    }
                }
            }
        }
    }

    /// Tries for a while; its answer.
    async fn send(&mut self, message: &Bytes, stop: &mut watch::Receiver<bool>) -> anyhow::Result<Bytes> {
        let (mut tries, mut pause) = (MAX_ATTEMPTS, INTERVAL);
        loop {
            let late = |_| {
                Err(ExportError::Retryable(anyhow::anyhow!("no answer in {} s", TIMEOUT.as_secs()), None))
            };
            let sent = tokio::time::timeout(TIMEOUT, self.post(message.clone())).await;
            let (error, after) = match sent.unwrap_or_else(late) {
                Ok(answer) => return Ok(answer),
                Err(ExportError::Permanent(error)) => return Err(error),
                Err(ExportError::Retryable(error, after)) => (error, after),
            };
            tries -= 1;
            let must_stop = *stop.borrow();
            if tries == 0 || must_stop || wait(after.unwrap_or(pause).min(MAX_BACKOFF), stop).await {
                return Err(error);
            }
            pause *= 2;
        }
    }

    async fn post(&mut self, message: Bytes) -> Result<Bytes, ExportError> {
        let later = |error: anyhow::Error| ExportError::Retryable(error, None);
        let mut sender = match self.connection.take().filter(|kept| !kept.is_closed()) {
            Some(kept) => kept,
            None => self.client.connect().await.map_err(later)?,
        };
        let body = Full::new(message).map_err(|never: Infallible| match never {}).boxed_unsync();
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.otlp.uri.path_and_query().cloned().map(Uri::from).unwrap_or_default();
        let own = request.headers_mut();
        own.insert(HOST, self.client.host().map_err(ExportError::Permanent)?);
        own.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        own.extend(self.otlp.headers.iter().cloned());
        sender.ready().await.map_err(|error| later(error.into()))?;
        let answer = sender.send_request(request).await.map_err(|error| later(error.into()))?;
        let status = answer.status();
        if !status.is_success() {
            let error = anyhow::anyhow!("it answers {status}");
            let after = answer.headers().get(RETRY_AFTER).and_then(|text| text.to_str().ok()?.parse().ok());
            return Err(match status {
                StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT => {
                    ExportError::Retryable(error, after.map(Duration::from_secs))
                }
                _ => ExportError::Permanent(error),
            });
        }
        let answer = Limited::new(answer.into_body(), MAX_RESPONSE).collect().await;
        // It has the spans, whatever becomes of the rest of its answer.
        let Ok(answer) = answer else { return Ok(Bytes::new()) };
        self.connection = Some(sender);
        Ok(answer.to_bytes())
    }
}

/// Waits; whether it is time to stop.
async fn wait(time: Duration, stop: &mut watch::Receiver<bool>) -> bool {
    let stopping = stop.wait_for(|stop| *stop);
    tokio::time::timeout(time, stopping).await.is_ok()
}
