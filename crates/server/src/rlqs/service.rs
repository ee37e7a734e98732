//! Quota streams on tonic, bounded in number and size, and the task that owns all accounts.

use super::admission::{Admission, Admittance};
use super::parts::{MAX_PART, PartedBody};
use super::places::{Amount, Place, Places, StreamPlaces};
use super::stats::RlqsStats;
use super::table::{Report, StreamId, Table};
use super::wire::{self, Usage};
use crate::rls::BadRequest;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_service_server::{
    RateLimitQuotaService, RateLimitQuotaServiceServer,
};
use crate::rls::proto::envoy::service::rate_limit_quota::v3::{
    RateLimitQuotaResponse, RateLimitQuotaUsageReports,
};
use futures_util::Stream;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tollgate_core::{CounterStore, TimeDelta, Timestamp};
use tollgate_engine::Limiter;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};

/// Time for the first report of a stream. Envoy opens one to send it.
const FIRST_REPORT: Duration = Duration::from_secs(30);
/// Silence after which a stream ends. Envoy reports every five seconds whatever it is assigned; one whose buckets were all
/// abandoned reports nothing, and opens another stream for the next.
const SILENCE: Duration = Duration::from_secs(300);
/// Shortest time between two passes when reports arrive.
const MIN_PASS: Duration = Duration::from_millis(100);
/// Messages that wait for a client; one that does not read them loses its stream.
const WAITING: usize = 32;
/// Events that wait for the task.
const EVENTS: usize = 1024;
/// Time between two messages in the log about rejected buckets.
const REJECTED_LOGGED: TimeDelta = TimeDelta::from_secs(60);
/// Actions per message.
const MAX_ACTIONS: usize = 1000;

/// Settings of the quota service.
#[derive(Clone, Debug)]
pub struct RlqsConfig {
    /// Maximum number of streams that have reported, and of those that have not; more displace others or are rejected, so that
    /// no connection shuts out another.
    pub streams: usize,
    /// Maximum number of buckets per stream; more get no assignment.
    pub buckets_per_stream: usize,
    /// Maximum number of buckets of all streams; more get no assignment. An eighth is kept for the first 16 of each stream.
    pub buckets: u64,
    /// Maximum size of the entries of all buckets in bytes, in the same way.
    pub bucket_bytes: u64,
    /// Where the service writes its figures.
    pub stats: RlqsStats,
}

impl Default for RlqsConfig {
    fn default() -> Self {
        Self {
            streams: 4_096,
            buckets_per_stream: 4_096,
            buckets: 262_144,
            bucket_bytes: 128 << 20,
            stats: RlqsStats::default(),
        }
    }
}

/// A connection of the gRPC server is one task, in which its calls run.
type Connection = Option<tokio::task::Id>;

type Outgoing = mpsc::Sender<Result<RateLimitQuotaResponse, Status>>;

enum Event {
    Opened(StreamId, Outgoing, oneshot::Sender<()>),
    /// Reports of a stream, which reads the next ones when it learns that these were taken.
    Reported(StreamId, Vec<Report>, oneshot::Sender<()>),
    Closed(StreamId),
}

/// The tonic server of the service, which reads messages in parts.
#[derive(Clone)]
pub(crate) struct QuotaServer {
    server: RateLimitQuotaServiceServer<QuotaService>,
    stats: RlqsStats,
}

impl NamedService for QuotaServer {
    const NAME: &'static str = RateLimitQuotaServiceServer::<QuotaService>::NAME;
}

impl Service<http::Request<Body>> for QuotaServer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.server.call(request.map(|body| PartedBody::new(body, self.stats.clone())))
    }
}

/// The service: a handle of the task that owns all accounts.
pub(crate) struct QuotaService {
    events: mpsc::Sender<Event>,
    /// Streams that have not reported anything yet.
    opened: Arc<Admission<Connection>>,
    /// Those that have.
    streams: Arc<Admission<Connection>>,
    places: Arc<Places>,
    next: AtomicU64,
    config: RlqsConfig,
}

impl QuotaService {
    /// Starts the task, which ends all streams when `stop` becomes true.
    pub(crate) fn start<S: CounterStore + 'static>(
        limiter: Arc<Limiter<S>>,
        config: RlqsConfig,
        stop: watch::Receiver<bool>,
    ) -> QuotaServer {
        let (events, received) = mpsc::channel(EVENTS);
        let keeper = Keeper {
            table: Table::new(Arc::clone(&limiter)),
            open: HashMap::new(),
            stats: config.stats.clone(),
            logged: (0, 0),
            quiet_until: Timestamp::from_micros(0),
        };
        tokio::spawn(keeper.run(limiter, received, stop));
        let [opened, streams] = [(); 2].map(|()| Admission::new(config.streams));
        let stats = config.stats.clone();
        let places = Places::new(Amount { buckets: config.buckets, bytes: config.bucket_bytes });
        let service = Self { events, opened, streams, places, next: AtomicU64::new(0), config };
        QuotaServer {
            server: RateLimitQuotaServiceServer::new(service).max_decoding_message_size(MAX_PART),
            stats,
        }
    }
}

#[tonic::async_trait]
impl RateLimitQuotaService for QuotaService {
    type StreamRateLimitQuotasStream =
        Pin<Box<dyn Stream<Item = Result<RateLimitQuotaResponse, Status>> + Send>>;

    async fn stream_rate_limit_quotas(
        &self,
        request: Request<Streaming<RateLimitQuotaUsageReports>>,
    ) -> Result<Response<Self::StreamRateLimitQuotasStream>, Status> {
        if self.events.is_closed() {
            return Err(Status::unavailable(SHUTTING_DOWN));
        }
        let connection = tokio::task::try_id();
        let opened = self.opened.admit(connection, Instant::now());
        let opened = opened.ok_or_else(|| no_room(self.config.streams))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (outgoing, mut waiting) = mpsc::channel(WAITING);
        let reader = Reader {
            id,
            connection,
            events: self.events.clone(),
            streams: Arc::clone(&self.streams),
            most: self.config.streams,
            places: self.places.stream(self.config.buckets_per_stream as u64),
            stats: self.config.stats.clone(),
            domain: None,
        };
        tokio::spawn(reader.run(request.into_inner(), outgoing, opened));
        let stream = futures_util::stream::poll_fn(move |context| waiting.poll_recv(context));
        Ok(Response::new(Box::pin(stream)))
    }
}

const SHUTTING_DOWN: &str = "shutting down";

fn no_room(most: usize) -> Status {
    Status::resource_exhausted(format!(
        "at most {most} quota streams, and others have fewer on their connection or report; connect to another node"
    ))
}

/// Reads one stream.
struct Reader {
    id: StreamId,
    connection: Connection,
    events: mpsc::Sender<Event>,
    streams: Arc<Admission<Connection>>,
    most: usize,
    places: Arc<StreamPlaces>,
    stats: RlqsStats,
    domain: Option<Arc<str>>,
}

impl Reader {
    async fn run(
        mut self,
        mut messages: Streaming<RateLimitQuotaUsageReports>,
        outgoing: Outgoing,
        opened: Admittance<Connection>,
    ) {
        // The task owns the stream from its first report on.
        let responses = outgoing.downgrade();
        let mut opening = Some((outgoing, opened));
        let ended = self.read_all(&mut messages, &mut opening).await;
        if let (Err(error), Some(outgoing)) = (ended, responses.upgrade()) {
            let _ = outgoing.try_send(Err(error));
        }
        let _ = self.events.send(Event::Closed(self.id)).await;
    }

    /// Reads until the stream ends.
    async fn read_all(
        &mut self,
        messages: &mut Streaming<RateLimitQuotaUsageReports>,
        opening: &mut Option<(Outgoing, Admittance<Connection>)>,
    ) -> Result<(), Status> {
        let Some((outgoing, opened)) = opening else { return Ok(()) };
        let events = self.events.clone();
        let message = next(messages, opened, FIRST_REPORT, self.most, events.closed()).await?;
        let Some(message) = message else { return Ok(()) };
        let mut reports = self.reports(message)?;
        let admitted = self.streams.admit(self.connection, Instant::now());
        let mut admitted = admitted.ok_or_else(|| no_room(self.most))?;
        let (ended, mut gone) = oneshot::channel();
        let unavailable = |_| Status::unavailable(SHUTTING_DOWN);
        events.send(Event::Opened(self.id, outgoing.clone(), ended)).await.map_err(unavailable)?;
        *opening = None;
        loop {
            // One message of each stream waits at most, so that what waits is as small as the places are few.
            let (taken, is_taken) = oneshot::channel();
            let event = Event::Reported(self.id, reports, taken);
            if events.send(event).await.is_err() || is_taken.await.is_err() {
                return Ok(());
            }
            let gone = async { drop((&mut gone).await) };
            let message = next(messages, &mut admitted, SILENCE, self.most, gone).await?;
            let Some(message) = message else { return Ok(()) };
            reports = self.reports(message)?;
            admitted.record_report(Instant::now());
        }
    }

    fn reports(&mut self, message: RateLimitQuotaUsageReports) -> Result<Vec<Report>, BadRequest> {
        let domain = wire::domain(&message, self.domain.as_ref())?;
        let (usages, invalid) = wire::usages(message, &domain);
        self.stats.reject_invalid(invalid);
        self.domain = Some(domain);
        Ok(reports(usages, &self.places, &self.stats))
    }
}

/// Reads the next message of a stream; `None` if there is none, or the stream is `gone`.
async fn next(
    messages: &mut Streaming<RateLimitQuotaUsageReports>,
    place: &mut Admittance<Connection>,
    timeout: Duration,
    most: usize,
    gone: impl Future<Output = ()>,
) -> Result<Option<RateLimitQuotaUsageReports>, Status> {
    tokio::select! {
        message = messages.message() => message,
        () = place.displaced() => Err(no_room(most)),
        () = tokio::time::sleep(timeout) => {
            Err(Status::deadline_exceeded(format!("no report in {} s", timeout.as_secs())))
        }
        () = gone => Ok(None),
    }
}

/// Returns one report for each bucket that has a place.
fn reports(usages: Vec<Usage>, places: &Arc<StreamPlaces>, stats: &RlqsStats) -> Vec<Report> {
    let mut known: HashMap<*const Place, usize> = HashMap::new();
    let mut reports: Vec<Report> = Vec::new();
    for Usage { bucket, allowed, denied } in usages {
        let Some(place) = places.take(bucket) else {
            stats.reject_bucket();
            continue;
        };
        match known.entry(Arc::as_ptr(&place)) {
            Entry::Occupied(at) => {
                let report = &mut reports[*at.get()];
                report.allowed = report.allowed.saturating_add(allowed);
                report.denied = report.denied.saturating_add(denied);
            }
            Entry::Vacant(at) => {
                at.insert(reports.len());
                reports.push(Report { place, allowed, denied });
            }
        }
    }
    reports
}

/// The task that owns all accounts.
struct Keeper<S> {
    table: Table<S>,
    open: HashMap<StreamId, (Outgoing, oneshot::Sender<()>)>,
    stats: RlqsStats,
    /// Rejected buckets that have been logged.
    logged: (u64, u64),
    /// Instant until which none are logged.
    quiet_until: Timestamp,
}

impl<S: CounterStore> Keeper<S> {
    async fn run(
        mut self,
        limiter: Arc<Limiter<S>>,
        mut events: mpsc::Receiver<Event>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut has_news = false;
        loop {
            let wait = match (self.table.has_more(), has_news) {
                (true, _) => Duration::ZERO,
                (false, true) => MIN_PASS,
                (false, false) => Duration::from_micros(self.table.interval().as_micros()),
            };
            let is_active = has_news || !self.table.is_idle();
            let pass = tokio::time::sleep(wait);
            tokio::pin!(pass);
            // Takes all events that come before the next pass is due.
            loop {
                tokio::select! {
                    event = events.recv() => match event {
                        Some(event) => {
                            let was_quiet = !std::mem::replace(&mut has_news, true);
                            self.handle(event, &limiter);
                            if was_quiet {
                                break;
                            }
                        }
                        None => return,
                    },
                    () = &mut pass, if is_active => {
                        // What has come while the last pass ran.
                        for _ in 0..EVENTS {
                            let Ok(event) = events.try_recv() else { break };
                            self.handle(event, &limiter);
                        }
                        has_news = false;
                        self.pass().await;
                        self.log_rejected(limiter.clock().now());
                        break;
                    }
                    _ = stop.changed() => return,
                }
            }
        }
    }

    fn handle(&mut self, event: Event, limiter: &Limiter<S>) {
        match event {
            Event::Opened(id, outgoing, ended) => {
                self.open.insert(id, (outgoing, ended));
            }
            Event::Reported(id, reports, taken) => {
                let now = limiter.clock().now();
                if self.open.contains_key(&id) {
                    reports.into_iter().for_each(|report| self.table.report(id, report, now));
                }
                let _ = taken.send(());
            }
            Event::Closed(id) => self.close(id),
        }
        self.stats.set_streams(self.open.len());
    }

    fn close(&mut self, id: StreamId) {
        if self.open.remove(&id).is_some() {
            self.table.lose(id);
        }
        self.stats.set_streams(self.open.len());
    }

    /// Logs rejected buckets, once a minute while there are any. Not their entries: callers choose them.
    fn log_rejected(&mut self, now: Timestamp) {
        let rejected = self.stats.rejected();
        if rejected == self.logged || now < self.quiet_until {
            return;
        }
        let (full, invalid) = (rejected.0 - self.logged.0, rejected.1 - self.logged.1);
        (self.logged, self.quiet_until) = (rejected, now + REJECTED_LOGGED);
        tracing::warn!(
            beyond_maximum = full,
            invalid,
            "quota streams reported buckets that get no assignment, so their requests have the filter's no_assignment_behavior; \
             invalid are ids that are empty, not UTF-8, of more than 64 entries, or with a key or value above 1,024 bytes"
        );
    }

    async fn pass(&mut self) {
        let mut messages: HashMap<StreamId, Vec<_>> = HashMap::new();
        for (id, bucket, action) in self.table.pass().await {
            messages.entry(id).or_default().push(wire::action(&bucket, action));
        }
        for (id, mut actions) in messages {
            while !actions.is_empty() {
                let rest = actions.split_off(actions.len().min(MAX_ACTIONS));
                let message = RateLimitQuotaResponse { bucket_action: std::mem::replace(&mut actions, rest) };
                let sent =
                    self.open.get(&id).is_some_and(|(outgoing, _)| outgoing.try_send(Ok(message)).is_ok());
                if !sent {
                    self.close(id);
                    break;
                }
            }
        }
        self.stats.set(self.table.stats());
    }
}

#[cfg(test)]
mod tests;
