//! OTLP span exporter: a background task that posts the buffered spans to a collector over HTTP once a second. Nothing
//! waits for it: with a slow or unavailable collector spans are dropped and counted, without any other effect.

mod settings;

pub(crate) use settings::{Otlp, read};

use crate::server::http_post::{PostClient, PostError};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
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
/// Maximum attempts per message, and the longest pause between two of them.
const MAX_ATTEMPTS: u32 = 4;
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Maximum time that shutdown waits for the last spans to be sent.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

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
        let mut headers = vec![(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"))];
        headers.extend(otlp.headers.iter().cloned());
        let client = PostClient::new(otlp.uri.clone(), client);
        let collector = Collector { otlp: otlp.clone(), client, headers, is_unavailable: false };
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
    client: PostClient,
    headers: Vec<(HeaderName, HeaderValue)>,
    is_unavailable: bool,
}

/// Returns whether a later attempt may succeed.
fn is_retryable(error: &PostError) -> bool {
    match error {
        PostError::Failed(_) => true,
        PostError::Refused(status, _) => matches!(
            *status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        ),
    }
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
                        tracing::warn!("trace collector {uri} unavailable; dropping spans: {error}");
                    }
                }
            }
        }
    }

    /// Sends a message, with retries. Returns the body of the response.
    async fn send(&mut self, message: &Bytes, stop: &mut watch::Receiver<bool>) -> Result<Bytes, PostError> {
        let (mut tries, mut pause) = (MAX_ATTEMPTS, INTERVAL);
        loop {
            let error = match self.client.post(&self.headers, message.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let after = match &error {
                PostError::Refused(_, after) => *after,
                PostError::Failed(_) => None,
            };
            tries -= 1;
            let must_stop = tries == 0 || !is_retryable(&error) || *stop.borrow();
            if must_stop || wait(after.unwrap_or(pause).min(MAX_BACKOFF), stop).await {
                return Err(error);
            }
            pause *= 2;
        }
    }
}

/// Waits for `time`. Returns early with true if the task must stop.
async fn wait(time: Duration, stop: &mut watch::Receiver<bool>) -> bool {
    let stopping = stop.wait_for(|stop| *stop);
    tokio::time::timeout(time, stopping).await.is_ok()
}
