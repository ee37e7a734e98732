//! Billing of the process: settings, the task that writes consumption, and the webhook that it is sent to.
//!
//! The webhook gets every row of an hour that has ended, and again when a row changes. A post counts only when the
//! receiver answers with success; anything else is repeated, with pauses that grow, for as long as it takes. Nothing is
//! skipped: rows that a receiver refuses today are those that are missing from an invoice tomorrow.

use crate::admin_client::{self, Client};
use crate::cli::{BillingFlags, BillingSection};
use crate::server::http_post::{PostClient, PostError};
use anyhow::Context;
use bytes::Bytes;
use hyper::Uri;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tollgate_control::{Billing, BillingRetention, ControlPlane, Delivery};
use tollgate_observe::{MetricsWriter, escape};

/// Interval between two looks for rows to send.
const POLL: Duration = Duration::from_secs(5);
/// First pause after a post that was not accepted, and the longest.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// Maximum time that shutdown waits for a post.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Minimum length of the secret, in bytes.
const MIN_SECRET: usize = 16;
const SIGNATURE: HeaderName = HeaderName::from_static("tollgate-signature");

/// Settings of billing.
#[derive(Clone, Debug)]
pub(crate) struct BillingSettings {
    pub(crate) retention: BillingRetention,
    pub(crate) webhook: Option<Webhook>,
}

/// Receiver of consumption.
#[derive(Clone)]
pub(crate) struct Webhook {
    uri: Uri,
    secret: hmac::Key,
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A path or a query may be a secret; a hash tells whether it has changed.
        let mut hasher = tollgate_core::StableHasher::default();
        hasher.bytes(self.uri.to_string().as_bytes());
        write!(f, "{}#{:016x}", self.host(), hasher.finish())
    }
}

impl Webhook {
    fn host(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }
}

/// Reads the settings. Errors do not repeat the address, which may contain a secret.
pub(crate) fn read(
    flags: &BillingFlags,
    file: &BillingSection,
    has_db: bool,
) -> anyhow::Result<BillingSettings> {
    let retention = flags.retention(file);
    let address = flags.billing_webhook.as_ref().or(file.webhook.as_ref());
    let secret = flags.billing_webhook_secret_file.as_ref().or(file.webhook_secret_file.as_ref());
    let webhook = match (address, secret) {
        (None, None) => None,
        (Some(address), Some(path)) => {
            anyhow::ensure!(has_db, "--billing-webhook requires --db: consumption is stored in the database");
            let uri = endpoint(address)
                .context("--billing-webhook: write a URL such as https://billing.example.com/tollgate")?;
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("--billing-webhook-secret-file: cannot read {}", path.display()))?;
            let secret = text.trim();
            anyhow::ensure!(
                secret.len() >= MIN_SECRET,
                "--billing-webhook-secret-file: the secret is too short; write at least {MIN_SECRET} random characters"
            );
            Some(Webhook { uri, secret: hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()) })
        }
        _ => anyhow::bail!("--billing-webhook and --billing-webhook-secret-file must be set together"),
    };
    Ok(BillingSettings { retention, webhook })
}

fn endpoint(address: &str) -> anyhow::Result<Uri> {
    let uri: Uri = address.parse()?;
    let (Some("http" | "https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        anyhow::bail!("not an http:// or https:// address");
    };
    anyhow::ensure!(!authority.as_str().contains('@'), "an address holds no user or password");
    Ok(uri)
}

/// Numbers of the webhook, for metrics.
#[derive(Debug, Default)]
struct WebhookStats {
    rows: AtomicU64,
    failures: AtomicU64,
}

/// Billing of a process with a database.
#[derive(Clone)]
pub(crate) struct BillingServer {
    billing: Arc<Billing>,
    webhook: Option<Webhook>,
    stats: Arc<WebhookStats>,
}

/// Running tasks of billing.
pub(crate) struct BillingTasks {
    writing: JoinHandle<()>,
    stop_writing: oneshot::Sender<()>,
    sending: Option<JoinHandle<()>>,
    stop_sending: watch::Sender<bool>,
}

impl BillingServer {
    pub(crate) fn new(billing: Arc<Billing>, settings: &BillingSettings) -> Self {
        Self { billing, webhook: settings.webhook.clone(), stats: Arc::default() }
    }

    /// Starts to write, and to send if there is a webhook.
    pub(crate) fn start(&self, control: &Arc<ControlPlane>) -> anyhow::Result<BillingTasks> {
        let (stop_writing, stopped) = oneshot::channel();
        let writing = tokio::spawn(Arc::clone(&self.billing).run(async {
            let _ = stopped.await;
        }));
        let (stop_sending, stopping) = watch::channel(false);
        let sending = match &self.webhook {
            None => None,
            Some(webhook) => {
                tracing::info!("sending consumption to {}", webhook.host());
                let sender = Sender {
                    control: Arc::clone(control),
                    client: PostClient::new(webhook.uri.clone(), client(&webhook.uri)?),
                    webhook: webhook.clone(),
                    stats: Arc::clone(&self.stats),
                    backoff: MIN_BACKOFF,
                    is_failing: false,
                };
                Some(tokio::spawn(sender.run(stopping)))
            }
        };
        Ok(BillingTasks { writing, stop_writing, sending, stop_sending })
    }

    /// Writes the metrics of billing.
    pub(crate) fn metrics(&self, page: &mut MetricsWriter) {
        let stats = self.billing.stats();
        let help = "Number of rows of consumption that are not in the database yet.";
        page.gauge("ratelimit_billing_pending_rows", help, stats.pending_rows);
        let help = "Seconds since all consumption was in the database; 0 if it is.";
        page.gauge("ratelimit_billing_behind_seconds", help, stats.behind_millis as f64 / 1_000.0);
        let help = "Number of failed writes of consumption; they are repeated.";
        page.counter("ratelimit_billing_write_failures_total", help, stats.failures);
        let help =
            "Number of consumed units counted for `(others)`, because there were too many callers at once.";
        page.counter("ratelimit_billing_unattributed_units_total", help, stats.unattributed_units);
        let help =
            "Number of consumed units that were dropped, because the database was unavailable for too long.";
        page.counter("ratelimit_billing_dropped_units_total", help, stats.dropped_units);
        if self.webhook.is_some() {
            let help = "Number of rows of consumption that the webhook has accepted from this node.";
            page.counter(
                "ratelimit_billing_webhook_rows_total",
                help,
                self.stats.rows.load(Ordering::Relaxed),
            );
            let help = "Number of posts that the webhook has not accepted from this node; they are repeated.";
            let failures = self.stats.failures.load(Ordering::Relaxed);
            page.counter("ratelimit_billing_webhook_failures_total", help, failures);
        }
    }
}

fn client(uri: &Uri) -> anyhow::Result<Client> {
    Client::connect_to(uri, || admin_client::trusting(None, None)).context("--billing-webhook")
}

impl BillingTasks {
    /// Writes what has been counted, and stops.
    pub(crate) async fn shutdown(self) {
        let _ = self.stop_sending.send(true);
        drop(self.stop_writing);
        let _ = self.writing.await;
        if let Some(sending) = self.sending {
            let abort = sending.abort_handle();
            if tokio::time::timeout(SHUTDOWN_TIMEOUT, sending).await.is_err() {
                abort.abort();
            }
        }
    }
}

/// Sender of consumption to the webhook.
struct Sender {
    control: Arc<ControlPlane>,
    client: PostClient,
    webhook: Webhook,
    stats: Arc<WebhookStats>,
    /// Next pause after a post that is not accepted.
    backoff: Duration,
    is_failing: bool,
}

impl Sender {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        loop {
            let pause = match self.control.next_delivery().await {
                Ok(Some(delivery)) => self.send(&delivery).await,
                Ok(None) => Some(POLL),
                Err(error) => {
                    tracing::debug!(%error, "cannot read consumption for the webhook");
                    Some(POLL)
                }
            };
            let stopping = stop.wait_for(|stop| *stop);
            if tokio::time::timeout(pause.unwrap_or_default(), stopping).await.is_ok() {
                break;
            }
        }
        let _ = self.control.release_delivery_lease().await;
    }

    /// Sends rows once. Returns the pause before the next post, if any.
    async fn send(&mut self, delivery: &Delivery) -> Option<Duration> {
        let rows = serde_json::json!({
            "installation": self.control.installation_id(),
            "rows": delivery.rows,
        });
        let body = escape::json(&rows.to_string()).into_owned();
        let seconds = self.control.now().as_micros() / 1_000_000;
        let signature = signature(&self.webhook.secret, seconds, &body);
        let headers = [
            (CONTENT_TYPE, HeaderValue::from_static("application/json")),
            (SIGNATURE, HeaderValue::from_str(&signature).ok()?),
        ];
        match self.client.post(&headers, Bytes::from(body)).await {
            Ok(_) => {
                self.stats.rows.fetch_add(delivery.rows.len() as u64, Ordering::Relaxed);
                self.backoff = MIN_BACKOFF;
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!("the billing webhook accepts consumption again");
                }
                match self.control.record_delivered(delivery).await {
                    Ok(()) => None,
                    Err(error) => {
                        tracing::debug!(%error, "accepted consumption is sent again");
                        Some(POLL)
                    }
                }
            }
            Err(error) => {
                self.stats.failures.fetch_add(1, Ordering::Relaxed);
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!("the billing webhook does not accept consumption; repeating: {error}");
                }
                let asked = match error {
                    PostError::Refused(_, after) => after.unwrap_or_default(),
                    PostError::Failed(_) => Duration::ZERO,
                };
                let pause = jittered(self.backoff).max(asked).min(MAX_BACKOFF);
                self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
                Some(pause)
            }
        }
    }
}

/// Signs a time and a body: `t=SECONDS,v1=HEX`. The receiver computes the same over `SECONDS.BODY`, and refuses old
/// times.
fn signature(secret: &hmac::Key, seconds: u64, body: &str) -> String {
    let mut signing = hmac::Context::with_key(secret);
    signing.update(seconds.to_string().as_bytes());
    signing.update(b".");
    signing.update(body.as_bytes());
    let digits: String = signing.sign().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t={seconds},v1={digits}")
}

/// Returns between half of a pause and all of it, so that several senders do not come together.
fn jittered(pause: Duration) -> Duration {
    let mut byte = [0_u8];
    let _ = SystemRandom::new().fill(&mut byte);
    pause / 2 + pause / 2 * u32::from(byte[0]) / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the documentation, computed by another program.
    #[test]
    fn a_signature_is_what_receivers_compute() {
        let secret = hmac::Key::new(hmac::HMAC_SHA256, b"0123456789abcdef");
        let expected = "t=1767225600,v1=de433c0cdf511632e9c5398c23b72071261f78a1dbf6eef9beeb5d35c4878fde";
        assert_eq!(signature(&secret, 1_767_225_600, r#"{"rows":[]}"#), expected);
    }

    #[test]
    fn pauses_differ_and_stay_in_bounds() {
        for _ in 0..100 {
            let pause = jittered(Duration::from_secs(8));
            assert!((4_000..=8_000).contains(&pause.as_millis()), "{pause:?}");
        }
    }

    #[test]
    fn no_error_repeats_the_address() {
        for wrong in ["billing.example.com/hunter2", "ftp://h/hunter2", "https://u:hunter2@h/", "https://"] {
            let error = format!("{:#}", endpoint(wrong).expect_err("wrong"));
            assert!(!error.contains("hunter2"), "{error}");
        }
        assert!(endpoint("https://h/path?key=hunter2").is_ok());
    }
}
