//! Telemetry: the entry point that servers and the binary hold. A worker thread drains the capture buffers ten times per
//! second and records the stats of every second.

use crate::decision_log::buffer::{DecisionLog, DecisionQuery};
use crate::decision_log::cache::DescriptionCache;
use crate::decision_log::record::{DecisionRecord, NodeInfo};
use crate::escape;
use crate::mask::Mask;
use crate::metrics::labels::{LabelLayout, LabelRegistry, OTHER, RuleLabel};
use crate::metrics::minute::MinuteStart;
use crate::metrics::series::{RuleRates, Series};
use crate::recorder::capture::{CaptureBuffer, LoggedVerdict};
use crate::recorder::stripe::Stripes;
use crate::sink::{Output, Sink};
use crate::top::{CallerSample, TopCallers};
use crate::trace::buffer::SpanBuffer;
use crate::unknown_domains::UnknownDomains;
use serde_json::Value;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::broadcast;
use tollgate_core::{Clock, RegionStatus, SystemClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, DecisionId, LimitStatus, Origin, RegionView};

/// Interval at which the worker drains the capture buffers.
const INTERVAL: Duration = Duration::from_millis(100);
/// Events that a subscriber may lag behind before some are skipped.
const MAX_BACKLOG: usize = 16;

/// Telemetry settings.
#[derive(Debug)]
pub struct TelemetryConfig {
    /// This node.
    pub node: NodeInfo,
    /// Share of allowed decisions to log, from 0 to 1.
    pub allowed_sample: f64,
    /// Maximum number of decisions in memory.
    pub max_records: usize,
    /// Additional output of the decision log.
    pub output: Option<Output>,
    /// Masking of attributes.
    pub mask: Mask,
    /// Service name in traces; `None` disables tracing.
    pub service_name: Option<String>,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            node: NodeInfo::default(),
            allowed_sample: 0.001,
            max_records: 20_000,
            output: None,
            mask: Mask::random(),
            service_name: None,
        }
    }
}

/// An event for subscribers of the event stream.
#[derive(Clone, Debug)]
pub struct Event {
    /// Kind: `tick`, `rules`, `quota` or `emergency`.
    pub kind: &'static str,
    /// Payload as JSON.
    pub data: Arc<str>,
}

/// Telemetry of one node. Pass it to a limiter ([`tollgate_engine::Limiter::with_observer`]).
#[derive(Debug)]
pub struct Telemetry {
    pub(crate) stripes: Stripes,
    pub(crate) labels: LabelRegistry,
    pub(crate) clock: SystemClock,
    /// One in this many allowed decisions is logged; 0 for none.
    pub(crate) allows: u32,
    pub(crate) node: NodeInfo,
    pub(crate) mask: Mask,
    pub(crate) log: DecisionLog,
    pub(crate) top: Mutex<TopCallers>,
    pub(crate) series: Mutex<Series>,
    rates: Mutex<RuleRates>,
    /// Counts at the end of the last minute that was taken.
    pub(crate) minute: Mutex<MinuteStart>,
    pub(crate) started: Timestamp,
    pub(crate) spans: Option<SpanBuffer>,
    /// How cells share limits, where there are several.
    regions: OnceLock<Weak<dyn RegionView>>,
    descriptions: Mutex<DescriptionCache>,
    /// Domains without rules that requests named.
    unknown: Mutex<UnknownDomains>,
    /// Label of rules without a slot of their own.
    other: RuleLabel,
    events: Mutex<Option<broadcast::Sender<Event>>>,
    /// Held while draining, so that a completed drain has processed everything. Counts the samples of each thread since the
    /// worker's last visit, by stripe index.
    worker_lock: Mutex<Vec<usize>>,
}

impl Telemetry {
    /// Creates telemetry with these settings.
    ///
    /// # Errors
    /// If the output cannot be opened.
    pub fn new(settings: TelemetryConfig) -> std::io::Result<Arc<Self>> {
        let clock = SystemClock::new();
        let share = settings.allowed_sample.clamp(0.0, 1.0);
        let allows = if share > 0.0 { (1.0 / share).round().min(1e9) as u32 } else { 0 };
        let sink = settings.output.map(|output| Sink::open("decision log", output)).transpose()?;
        Ok(Arc::new(Self {
            stripes: Stripes::new(),
            labels: LabelRegistry::new(),
            allows,
            spans: settings.service_name.map(|service| SpanBuffer::new(service, settings.node.clone())),
            node: settings.node,
            mask: settings.mask,
            log: DecisionLog::new(settings.max_records, sink),
            top: Mutex::default(),
            series: Mutex::default(),
            rates: Mutex::default(),
            minute: Mutex::default(),
            started: clock.now(),
            regions: OnceLock::new(),
            descriptions: Mutex::default(),
            unknown: Mutex::default(),
            other: RuleLabel { domain: "other".into(), rule: "other".into() },
            events: Mutex::new(Some(broadcast::channel(MAX_BACKLOG).0)),
            worker_lock: Mutex::default(),
            clock,
        }))
    }

    /// Starts the worker; it ends when the telemetry is dropped.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let observe = Arc::downgrade(self);
        std::thread::Builder::new().name("observe".to_owned()).spawn(move || run(&observe)).map(|_| ())
    }

    /// Records with each logged decision how cells share its limit.
    pub fn set_region_view(&self, view: Weak<dyn RegionView>) {
        let _ = self.regions.set(view);
    }

    /// Returns how cells share a limit of a decision; `None` if there is one cell.
    pub(crate) fn region_of(
        &self,
        check: &Check<'_>,
        decision: &Decision,
        status: &LimitStatus,
    ) -> Option<Box<RegionStatus>> {
        let view = self.regions.get()?.upgrade()?;
        view.region_of_limit(check, decision, status).map(Box::new)
    }

    /// Returns the identity of this node.
    #[must_use]
    pub const fn node_info(&self) -> &NodeInfo {
        &self.node
    }

    /// Returns a caller as the decision log shows it, from its key and value.
    #[must_use]
    pub fn display_caller(&self, key: &str, value: &str) -> String {
        let (mut shown, _) = self.mask.display(&[(key, value)], |_| false);
        shown.pop().map(|(_, value)| value).unwrap_or_default()
    }

    /// Masks one part of a counter key.
    #[must_use]
    pub fn mask_part(&self, part: &tollgate_core::KeyPart<'_>) -> String {
        self.mask.mask_part(part)
    }

    /// Returns the buffer of spans to export, if tracing is enabled.
    #[must_use]
    pub const fn spans(&self) -> Option<&SpanBuffer> {
        self.spans.as_ref()
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Subscribes to events from now on; `None` after [`Self::close`].
    #[must_use]
    pub fn subscribe(&self) -> Option<broadcast::Receiver<Event>> {
        self.events().as_ref().map(broadcast::Sender::subscribe)
    }

    /// Sends an event to all subscribers.
    pub fn broadcast(&self, kind: &'static str, data: &Value) {
        if let Some(events) = &*self.events() {
            // Fails if there are no subscribers.
            let _ = events.send(Event { kind, data: data.to_string().into() });
        }
    }

    /// Closes all subscriptions, for shutdown.
    pub fn close(&self) {
        self.events().take();
    }

    fn events(&self) -> MutexGuard<'_, Option<broadcast::Sender<Event>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the latest matching decisions, newest first, and the sequence number to continue from.
    #[must_use]
    pub fn search(&self, search: &DecisionQuery) -> (Vec<Arc<DecisionRecord>>, Option<u64>) {
        self.log.search(search, |key| self.mask.id(key))
    }

    /// Returns the API key of a caller in the top lists or the log, by id. For operator actions; must never be shown.
    #[must_use]
    pub fn api_key(&self, id: u64) -> Option<String> {
        let listed = self.top().key(id).flatten().map(str::to_owned);
        listed.or_else(|| self.log.key(id))
    }

    /// Returns whether the caller with this id is listed and known by something else than an API key, such as its
    /// address: its id is the hash of that value, which may be the API key of another caller.
    #[must_use]
    pub fn is_listed_without_key(&self, id: u64) -> bool {
        self.top().key(id) == Some(None)
    }

    /// Returns one decision from the log.
    #[must_use]
    pub fn find(&self, id: DecisionId) -> Option<Arc<DecisionRecord>> {
        self.search(&DecisionQuery { id: Some(id), limit: 1, ..DecisionQuery::default() }).0.pop()
    }

    /// Writes pending records to the log's output, waiting up to `timeout`, and closes it. Returns how many decisions were
    /// lost. For shutdown, when no more decisions are made.
    pub fn flush(&self, timeout: Duration) -> u64 {
        let before = self.dropped_lines();
        self.drain_buffers();
        let _gathering = self.lock_worker();
        let Some(sink) = &self.log.sink else { return 0 };
        let gathered = self.dropped_lines() - before;
        gathered + sink.flush(timeout)
    }

    fn lock_worker(&self) -> MutexGuard<'_, Vec<usize>> {
        self.worker_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drains the capture buffers and adjusts the sampling intervals. The worker calls this ten times per second.
    pub fn run_once(&self) {
        let mut found = self.drain_buffers_until(self.clock.now());
        for (stripe, found) in self.stripes.all().iter().zip(found.iter_mut()) {
            stripe.sample_rate.visit(std::mem::take(found));
        }
        drop(found);
        self.log_unknown_domains(self.clock.now());
    }

    /// Drains the capture buffers, for readers that need all decisions up to now.
    pub fn drain_buffers(&self) {
        drop(self.drain_buffers_until(self.clock.now()));
    }

    fn drain_buffers_until(&self, now: Timestamp) -> MutexGuard<'_, Vec<usize>> {
        let mut found = self.lock_worker();
        let stripes = self.stripes.all().clone();
        found.resize(stripes.len(), 0);
        let names = self.labels.rules();
        let mut spare = CaptureBuffer::default();
        let mut entries = Vec::new();
        self.top().rotate(now);
        for (stripe, found) in stripes.iter().zip(found.iter_mut()) {
            for buffer in &stripe.buffers {
                std::mem::swap(&mut *buffer.lock().unwrap_or_else(PoisonError::into_inner), &mut spare);
                *found += self.ingest(&spare, &names, &mut entries);
                spare.clear();
            }
        }
        entries.sort_by_key(|entry: &DecisionRecord| entry.at);
        // Stored first: a decision whose line is dropped is still in memory.
        let stored = self.log.push(entries);
        if let Some(sink) = &self.log.sink {
            let mut text = String::new();
            let mut lines = 0;
            for entry in &stored {
                text.push_str(&escape::json(&entry.json(&self.node).to_string()));
                text.push('\n');
                lines += 1;
                if text.len() > 256 * 1024 {
                    sink.write(std::mem::take(&mut text), std::mem::take(&mut lines));
                }
            }
            if lines > 0 {
                sink.write(text, lines);
            }
        }
        found
    }

    /// Processes the captures of one thread and returns how many were samples.
    fn ingest(
        &self,
        buffer: &CaptureBuffer,
        names: &[RuleLabel],
        entries: &mut Vec<DecisionRecord>,
    ) -> usize {
        let mut samples = 0;
        let mut top = self.top();
        let mut cache = self.descriptions.lock().unwrap_or_else(PoisonError::into_inner);
        for capture in &buffer.captures {
            let description = cache.caller(buffer, capture, &self.mask);
            let noted = &capture.meta;
            if noted.weight > 0 {
                samples += 1;
            }
            if noted.slot == OTHER && capture.origin == Origin::Unmatched {
                let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
                unknown.record(&description.domain, u64::from(noted.weight));
            }
            if let Some(caller) = &description.caller {
                let name = |slot: u32| names.get(slot as usize).unwrap_or(&self.other);
                let other = capture.other_cause().map(|cause| RuleLabel {
                    domain: Arc::clone(&name(noted.slot).domain),
                    rule: cause.into(),
                });
                top.record(&CallerSample {
                    caller,
                    network: description.network.as_deref(),
                    name: other.as_ref().unwrap_or_else(|| name(noted.slot)),
                    denied: noted.verdict == LoggedVerdict::Deny,
                    utilization: noted.caller_utilization.map(|own| (own, name(own.slot))),
                    weight: noted.weight,
                });
            }
            if noted.log {
                let limit = cache.limit(buffer, capture);
                entries.push(DecisionRecord::from_capture(capture, buffer, names, description, limit));
            }
        }
        samples
    }

    /// Logs requests of domains without rules, once a minute while there are any.
    fn log_unknown_domains(&self, now: Timestamp) {
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        let names = unknown.list();
        if names.is_empty() {
            return;
        }
        let (allowed, denied) = self.unknown_domain_counts();
        let Some(requests) = unknown.due(now, allowed + denied) else { return };
        let domains: Vec<&str> = names.iter().map(|(name, _)| &**name).collect();
        tracing::warn!(
            requests,
            denied_since_start = denied,
            ?domains,
            "requests name domains that have no rules; add a rule file for them, or correct the clients"
        );
    }

    /// Returns the domains without rules that requests named, with the estimated number of requests.
    pub(crate) fn unknown_domains(&self) -> Vec<(Box<str>, u64)> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner).list()
    }

    /// Records the stats of one second. The worker calls this every second.
    pub fn tick(&self) {
        let totals = self.totals();
        self.rates().tick(self.clock.now(), self.rule_results());
        let step = self.series().tick(self.clock.now(), &totals);
        self.broadcast("tick", &step.json());
    }

    pub(crate) fn top(&self) -> MutexGuard<'_, TopCallers> {
        self.top.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn series(&self) -> MutexGuard<'_, Series> {
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rates(&self) -> MutexGuard<'_, RuleRates> {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dropped_lines(&self) -> u64 {
        self.log.sink.as_ref().map_or(0, |sink| sink.counts().1)
    }

    /// Returns the number of decisions not logged because a buffer was full.
    pub(crate) fn dropped(&self) -> u64 {
        self.stripes.all().iter().map(|stripe| stripe.dropped.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn layout_of(&self, rules: &Arc<tollgate_rules::Ruleset>) -> Arc<LabelLayout> {
        self.labels.layout(Arc::clone(rules))
    }
}

/// Runs the worker until the telemetry is dropped.
fn run(observe: &Weak<Telemetry>) {
    let mut second = Timestamp::ZERO;
    while let Some(observe) = observe.upgrade() {
        observe.run_once();
        let now = observe.clock.now();
        if now.since(second) >= TimeDelta::from_secs(1) {
            // Aligned to whole seconds.
            second = Timestamp::from_secs(now.as_secs());
            observe.tick();
        }
        drop(observe);
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests;
