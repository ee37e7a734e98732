//! Signals from a Prometheus: the active rules' queries are asked twice in each step of the limits that follow them.
//!
//! One query after the other, each with a deadline. A server that does not answer is asked again after pauses that grow; its
//! signals are no longer reported meanwhile, and calm for the limits. A query that it refuses does not delay the others.

use super::answer;
use crate::admin_client::{self, Client, encoded};
use crate::cli::{PrometheusFlags, PrometheusSection};
use crate::server::http_post::{PostClient, PostError};
use crate::server::store::Store;
use anyhow::Context;
use bytes::Bytes;
use hyper::Uri;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::{Limiter, SignalQuery};
use tollgate_observe::MetricsWriter;

/// Deadline of one query.
const DEADLINE: Duration = Duration::from_secs(5);
/// Time between two looks for queries that are due: half of the shortest step there is.
const TICK: Duration = Duration::from_millis(500);
/// First pause after a failure, and the longest.
const MIN_PAUSE: TimeDelta = TimeDelta::from_secs(1);
const MAX_PAUSE: TimeDelta = TimeDelta::from_secs(60);

/// The server that is asked.
#[derive(Clone)]
pub(crate) struct Prometheus {
    uri: Uri,
    token: Option<HeaderValue>,
    ca: Option<PathBuf>,
}

impl fmt::Debug for Prometheus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {}", self.uri, self.ca, self.token.is_some())
    }
}

/// Reads the settings. Errors do not repeat the address, which may contain a password.
pub(crate) fn read(flags: &PrometheusFlags, file: &PrometheusSection) -> anyhow::Result<Option<Prometheus>> {
    let address = flags.prometheus.as_ref().or(file.url.as_ref());
    let token = flags.prometheus_token_file.as_ref().or(file.token_file.as_ref());
    let ca = flags.prometheus_ca.as_ref().or(file.ca.as_ref());
    let Some(address) = address else {
        anyhow::ensure!(
            token.is_none() && ca.is_none(),
            "--prometheus-token-file and --prometheus-ca require --prometheus"
        );
        return Ok(None);
    };
    let uri = endpoint(address).context("--prometheus: write a URL such as http://127.0.0.1:9090")?;
    let token = token.map(|path| {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("--prometheus-token-file: cannot read {}", path.display()))?;
        let mut header = HeaderValue::from_str(&format!("Bearer {}", text.trim()))
            .context("--prometheus-token-file: not a token")?;
        header.set_sensitive(true);
        anyhow::Ok(header)
    });
    let prometheus = Prometheus { uri, token: token.transpose()?, ca: ca.cloned() };
    prometheus.client()?;
    Ok(Some(prometheus))
}

/// Returns the URL that queries are posted to.
fn endpoint(address: &str) -> anyhow::Result<Uri> {
    let uri: Uri = address.parse()?;
    let (Some("http" | "https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        anyhow::bail!("not an http:// or https:// address");
    };
    anyhow::ensure!(
        !authority.as_str().contains('@'),
        "an address holds no user or password; --prometheus-token-file may hold a token"
    );
    anyhow::ensure!(uri.query().is_none(), "an address has no query");
    let path = uri.path().trim_end_matches('/');
    let path = path.strip_suffix("/api/v1/query").unwrap_or(path);
    let scheme = uri.scheme_str().unwrap_or("http");
    let path = format!("{path}/api/v1/query");
    Ok(Uri::builder().scheme(scheme).authority(authority.clone()).path_and_query(path).build()?)
}

impl Prometheus {
    fn client(&self) -> anyhow::Result<Client> {
        let ca = self.ca.as_deref().map(|path| ("--prometheus-ca", path));
        Client::connect_to(&self.uri, || admin_client::trusting(ca, None))
    }
}

/// Numbers of queries by result, for metrics.
#[derive(Debug, Default)]
pub(super) struct QueryStats {
    answered: AtomicU64,
    empty: AtomicU64,
    failed: AtomicU64,
}

impl QueryStats {
    pub(super) fn metrics(&self, page: &mut MetricsWriter) {
        let help = "Number of queries for signals by result: answered, empty (no series), failed.";
        let mut family = page.counters("ratelimit_signal_queries_total", help);
        for (result, count) in
            [("answered", &self.answered), ("empty", &self.empty), ("failed", &self.failed)]
        {
            family.add(&[("result", result)], count.load(Ordering::Relaxed));
        }
    }
}

/// When a query is asked next.
#[derive(Clone, Copy)]
struct Schedule {
    due: Timestamp,
    /// Pause after the last failure; zero if there was none.
    pause: TimeDelta,
}

/// Asks for the signals of the active rules.
pub(super) struct Queries {
    limiter: Arc<Limiter<Store>>,
    client: PostClient,
    host: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    schedule: HashMap<SignalQuery, Schedule>,
    /// Of the server itself.
    server: Schedule,
    /// Queries that were not answered in time, one after the other.
    timed_out: u32,
    stats: Arc<QueryStats>,
}

impl Queries {
    pub(super) fn new(limiter: Arc<Limiter<Store>>, prometheus: &Prometheus) -> anyhow::Result<Self> {
        let form = HeaderValue::from_static("application/x-www-form-urlencoded");
        let mut headers = vec![(CONTENT_TYPE, form)];
        headers.extend(prometheus.token.iter().map(|token| (AUTHORIZATION, token.clone())));
        Ok(Self {
            limiter,
            client: PostClient::new(prometheus.uri.clone(), prometheus.client()?),
            host: prometheus.uri.authority().map(ToString::to_string).unwrap_or_default(),
            headers,
            schedule: HashMap::new(),
            server: Schedule { due: Timestamp::ZERO, pause: TimeDelta::ZERO },
            timed_out: 0,
            stats: Arc::default(),
        })
    }

    pub(super) fn stats(&self) -> Arc<QueryStats> {
        Arc::clone(&self.stats)
    }

    pub(super) async fn run(mut self) {
        loop {
            self.round().await;
            tokio::time::sleep(TICK).await;
        }
    }

    /// Asks the queries that are due.
    async fn round(&mut self) {
        let queries = self.limiter.signal_queries();
        self.schedule.retain(|known, _| queries.contains(known));
        for query in queries {
            let now = self.limiter.clock().now();
            let known = self.schedule.get(&query).copied();
            let known = known.unwrap_or(Schedule { due: Timestamp::ZERO, pause: TimeDelta::ZERO });
            if now < self.server.due {
                return;
            }
            if now < known.due {
                continue;
            }
            let next = self.ask(&query, known.pause).await;
            self.schedule.insert(query, next);
        }
    }

    /// Asks one query and records its value. Returns when it is due again. One query may be too much for the server, by its answer or
    /// because there is none: that puts off this one alone, and all only if the next one is not answered either.
    async fn ask(&mut self, query: &SignalQuery, paused: TimeDelta) -> Schedule {
        let body = format!("query={}&timeout={}s", encoded(&query.query), DEADLINE.as_secs());
        let posted = tokio::time::timeout(DEADLINE, self.client.post(&self.headers, Bytes::from(body))).await;
        let now = self.limiter.clock().now();
        let half = TimeDelta::from_micros(query.step.as_micros() / 2);
        let posted_in_time = posted.is_ok();
        let answer = match posted {
            Ok(Ok(answer)) => answer::value(&answer),
            Ok(Err(PostError::Refused(status, _))) if status.is_client_error() => {
                Err(format!("it answers {status}; check the query, and --prometheus-token-file"))
            }
            Ok(Err(PostError::Refused(status, _))) => Err(format!("it answers {status}")),
            Ok(Err(error)) => {
                self.stats.failed.fetch_add(1, Ordering::Relaxed);
                self.server_failed(&error.to_string(), now);
                // It stays due.
                return Schedule { due: now, pause: TimeDelta::ZERO };
            }
            Err(_) => Err(format!("no answer in {} s", DEADLINE.as_secs())),
        };
        self.timed_out = if posted_in_time { 0 } else { self.timed_out.saturating_add(1) };
        match (&answer, posted_in_time) {
            (Err(error), false) if self.timed_out > 1 => self.server_failed(error, now),
            (_, true) if std::mem::replace(&mut self.server.pause, TimeDelta::ZERO) > TimeDelta::ZERO => {
                tracing::info!("Prometheus {} answers again", self.host);
            }
            _ => {}
        }
        let recorded = answer.and_then(|value| match value {
            Some(value) => {
                let recorded = self.limiter.record_query(&query.domain, &query.signal, value);
                recorded.map(|()| true).map_err(|error| error.to_string())
            }
            None => Ok(false),
        });
        match recorded {
            Ok(has_value) => {
                let counter = if has_value { &self.stats.answered } else { &self.stats.empty };
                counter.fetch_add(1, Ordering::Relaxed);
                Schedule { due: now + half, pause: TimeDelta::ZERO }
            }
            Err(error) => {
                self.stats.failed.fetch_add(1, Ordering::Relaxed);
                let SignalQuery { domain, signal, .. } = query;
                if paused == TimeDelta::ZERO {
                    tracing::warn!(
                        domain,
                        signal,
                        "no value of a signal from Prometheus {}: {error}",
                        self.host
                    );
                }
                let pause = longer(paused);
                Schedule { due: now + pause.max(half), pause }
            }
        }
    }

    /// Puts all queries off.
    fn server_failed(&mut self, error: &str, now: Timestamp) {
        if self.server.pause == TimeDelta::ZERO {
            tracing::warn!("Prometheus {} unavailable; its signals expire: {error}", self.host);
        }
        self.server.pause = longer(self.server.pause);
        self.server.due = now + self.server.pause;
    }
}

/// Returns the pause after one more failure.
fn longer(pause: TimeDelta) -> TimeDelta {
    TimeDelta::from_micros(pause.as_micros() * 2).clamp(MIN_PAUSE, MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_prometheus_and_of_what_speaks_its_api() {
        let url = |address| endpoint(address).map(|uri| uri.to_string()).ok();
        assert_eq!(url("http://p:9090").as_deref(), Some("http://p:9090/api/v1/query"));
        assert_eq!(
            url("https://mimir/prometheus/").as_deref(),
            Some("https://mimir/prometheus/api/v1/query")
        );
        assert_eq!(url("http://p/api/v1/query").as_deref(), Some("http://p/api/v1/query"));
        for wrong in ["p:9090", "", "ftp://p", "http://u:hunter2@p", "http://p/?x=hunter2"] {
            let error = format!("{:#}", endpoint(wrong).expect_err("wrong"));
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn pauses_grow_and_are_bounded() {
        let mut pause = TimeDelta::ZERO;
        let all: Vec<u64> = std::iter::repeat_with(|| {
            pause = longer(pause);
            pause.as_micros() / 1_000_000
        })
        .take(8)
        .collect();
        assert_eq!(all, [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
