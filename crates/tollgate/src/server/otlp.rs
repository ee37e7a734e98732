//! OTLP span exporter: a background task that posts the buffered spans to a collector over HTTP once a second. Nothing
//! waits for it: with a slow or unavailable collector spans are dropped and counted, without any other effect.

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

/// Interval between two rounds of sending.
const INTERVAL: Duration = Duration::from_secs(1);
/// Spans per message, and messages per round: together with the buffer size they bound what a node sends per second.
const BATCH: usize = 512;
const ROUND: usize = 16;
/// Timeout of one message.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum attempts per message, and the longest pause between two of them.
const MAX_ATTEMPTS: u32 = 4;
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Maximum time that shutdown waits for the last spans to be sent.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of a response, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;

/// Background task that sends spans, and its stop signal.
pub(crate) struct ExportTask {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

impl ExportTask {
    /// Starts the task if a collector is configured.
    pub(crate) fn start(otlp: Option<&Otlp>, observe: &Arc<Telemetry>) -> anyhow::Result<Option<Self>> {
        let Some(otlp) = otlp else { return Ok(None) };
        tracing::info!("sending traces to {}", otlp.uri);
        let (stop, stopped) = watch::channel(false);
        let (client, observe) = (otlp.client()?, Arc::clone(observe));
        let collector = Collector { otlp: otlp.clone(), client, connection: None, is_unavailable: false };
        Ok(Some(Self { task: tokio::spawn(collector.run(observe, stopped)), stop }))
    }

    /// Sends the buffered spans and stops the task.
    pub(crate) async fn shutdown(self) {
        let _ = self.stop.send(true);
        let abort = self.task.abort_handle();
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.task).await.is_err() {
            tracing::warn!("spans lost at shutdown; the collector was too slow");
            abort.abort();
        }
    }
}

/// Collector with its client and connection state.
struct Collector {
    otlp: Otlp,
    client: Client,
    /// Idle connection from the last message; the collector may have closed it.
    connection: Option<SendRequest<RequestBody>>,
    is_unavailable: bool,
}

/// Reason that a message was not accepted.
enum ExportError {
    /// A later attempt may succeed; with the collector's `Retry-After`, if any.
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

    /// Sends a message, with retries. Returns the body of the response.
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
        // The collector has accepted the spans, even if the rest of its response is lost.
        let Ok(answer) = answer else { return Ok(Bytes::new()) };
        self.connection = Some(sender);
        Ok(answer.to_bytes())
    }
}

/// Waits for `time`. Returns early with true if the task must stop.
async fn wait(time: Duration, stop: &mut watch::Receiver<bool>) -> bool {
    let stopping = stop.wait_for(|stop| *stop);
    tokio::time::timeout(time, stopping).await.is_ok()
}
