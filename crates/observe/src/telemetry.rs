//! The whole of it: what the fronts and the binary hold. The worker, a thread of its own, empties what decisions set aside,
//! ten times a second, and takes the figures of every second.

use crate::decision_log::buffer::{DecisionLog, DecisionQuery};
use crate::decision_log::cache::DescriptionCache;
use crate::decision_log::record::{DecisionRecord, NodeInfo};
use crate::mask::Mask;
use crate::metrics::labels::{LabelLayout, LabelRegistry, OTHER, RuleLabel};
use crate::metrics::series::{RuleRates, Series};
use crate::recorder::capture::{CaptureBuffer, LoggedVerdict};
use crate::recorder::stripe::Stripes;
use crate::sink::{Output, Sink};
use crate::top::{CallerSample, TopCallers};
use crate::trace::buffer::SpanBuffer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::broadcast;
use tollgate_core::{Clock, SystemClock, TimeDelta, Timestamp};
use tollgate_engine::{DecisionId, Origin};

/// How often what was set aside is looked through.
const INTERVAL: Duration = Duration::from_millis(100);
/// Events that one who listens may be behind before some are skipped.
const MAX_BACKLOG: usize = 16;
/// Domains without rules that are listed by name; requests of the others are counted all the same.
const MAX_UNKNOWN_DOMAINS: usize = 20;

/// What is to be observed, and how.
#[derive(Debug)]
pub struct TelemetryConfig {
    /// Where decisions are made.
    pub node: NodeInfo,
    /// The part of allowed decisions that is logged, from 0 to 1.
    pub allowed_sample: f64,
    /// Decisions that are kept in memory.
    pub max_records: usize,
    /// Where else they are written, if anywhere.
    pub output: Option<Output>,
    /// What is told of attributes.
    pub mask: Mask,
    /// The name of the service in traces; nothing, where nobody follows them.
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

/// What happened, for those who look on.
#[derive(Clone, Debug)]
pub struct Event {
    /// What kind of thing: `tick`, `rules`, `quota`, `emergency`.
    pub kind: &'static str,
    /// What there is to know.
    pub data: Arc<str>,
}

/// Watches decisions. Give it to a limiter ([`tollgate_engine::Limiter::with_observer`]) and ask it.
#[derive(Debug)]
pub struct Telemetry {
    pub(crate) stripes: Stripes,
    pub(crate) labels: LabelRegistry,
    pub(crate) clock: SystemClock,
    /// One in so many allowed decisions is logged; none, if zero.
    pub(crate) allows: u32,
    pub(crate) node: NodeInfo,
    pub(crate) mask: Mask,
    pub(crate) log: DecisionLog,
    pub(crate) top: Mutex<TopCallers>,
    pub(crate) series: Mutex<Series>,
    rates: Mutex<RuleRates>,
    pub(crate) started: Timestamp,
    pub(crate) spans: Option<SpanBuffer>,
    descriptions: Mutex<DescriptionCache>,
    /// Sampled requests of domains without rules, by the domain; at most [`MAX_UNKNOWN_DOMAINS`].
    unknown: Mutex<BTreeMap<Box<str>, u64>>,
    /// What rules without a number of their own are called.
    other: RuleLabel,
    events: Mutex<Option<broadcast::Sender<Event>>>,
    /// One at a time gathers: when it is over, all is where it belongs. How many samples each thread has shown since the worker
    /// last came, by the places of their stripes.
    worker_lock: Mutex<Vec<usize>>,
}

impl Telemetry {
    /// One that watches by these settings.
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
            started: clock.now(),
            descriptions: Mutex::default(),
            unknown: Mutex::default(),
            other: RuleLabel { domain: "other".into(), rule: "other".into() },
            events: Mutex::new(Some(broadcast::channel(MAX_BACKLOG).0)),
            worker_lock: Mutex::default(),
            clock,
        }))
    }

    /// Starts the worker; it ends when nobody holds the watcher any more.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let observe = Arc::downgrade(self);
        std::thread::Builder::new().name("observe".to_owned()).spawn(move || run(&observe)).map(|_| ())
    }

    /// Where decisions are made.
    #[must_use]
    pub const fn node_info(&self) -> &NodeInfo {
        &self.node
    }

    /// What is told of a value of a counter's name.
    #[must_use]
    pub fn mask_part(&self, part: &tollgate_core::KeyPart<'_>) -> String {
        self.mask.mask_part(part)
    }

    /// Spans that wait for a collector, where traces are followed.
    #[must_use]
    pub const fn spans(&self) -> Option<&SpanBuffer> {
        self.spans.as_ref()
    }

    /// The present time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Listens to what happens from now on; nothing, when the end has come.
    #[must_use]
    pub fn subscribe(&self) -> Option<broadcast::Receiver<Event>> {
        self.events().as_ref().map(broadcast::Sender::subscribe)
    }

    /// Tells all who listen.
    pub fn broadcast(&self, kind: &'static str, data: &Value) {
        if let Some(events) = &*self.events() {
            // Nobody may be listening.
            let _ = events.send(Event { kind, data: data.to_string().into() });
        }
    }

    /// Lets all go who listen: the process is about to end.
    pub fn close(&self) {
        self.events().take();
    }

    fn events(&self) -> MutexGuard<'_, Option<broadcast::Sender<Event>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The latest decisions of the log that match, the latest first, and the place to go on from.
    #[must_use]
    pub fn search(&self, search: &DecisionQuery) -> (Vec<Arc<DecisionRecord>>, Option<u64>) {
        self.log.search(search, |key| self.mask.id(key))
    }

    /// The API key of a caller who stands in the lists of top talkers or in the log, by its id. For acting on, never for telling.
    #[must_use]
    pub fn api_key(&self, id: u64) -> Option<String> {
        let listed = self.top().key(id).map(str::to_owned);
        listed.or_else(|| self.log.key(id))
    }

    /// One decision of the log.
    #[must_use]
    pub fn find(&self, id: DecisionId) -> Option<Arc<DecisionRecord>> {
        self.search(&DecisionQuery { id: Some(id), limit: 1, ..DecisionQuery::default() }).0.pop()
    }

    /// Writes what still waits for the output of the log, for at most so long, and closes it: how many decisions it lacks.
    /// For the end of the process, when nobody decides any more.
    pub fn flush(&self, patience: Duration) -> u64 {
        let before = self.dropped_lines();
        self.drain_buffers();
        let _gathering = self.lock_worker();
        let Some(sink) = &self.log.sink else { return 0 };
        let gathered = self.dropped_lines() - before;
        gathered + sink.flush(patience)
    }

    fn lock_worker(&self) -> MutexGuard<'_, Vec<usize>> {
        self.worker_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the worker does ten times a second: empties what decisions have set aside, and lets threads show more again that
    /// have shown little. It does so by itself.
    pub fn run_once(&self) {
        let mut found = self.drain_buffers_until(self.clock.now());
        for (stripe, found) in self.stripes.all().iter().zip(found.iter_mut()) {
            stripe.sample_rate.visit(std::mem::take(found));
        }
    }

    /// Empties what decisions have set aside, for whoever wants to know of all up to now.
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
        // Whoever hears of a line that was lost finds it in memory.
        let kept = self.log.push(entries);
        if let Some(sink) = &self.log.sink {
            let mut text = String::new();
            let mut lines = 0;
            for entry in &kept {
                text.push_str(&entry.json(&self.node).to_string());
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

    /// What one thread set aside: how many of it were samples.
    fn ingest(
        &self,
        buffer: &CaptureBuffer,
        names: &[RuleLabel],
        entries: &mut Vec<DecisionRecord>,
    ) -> usize {
        let mut samples = 0;
        let mut top = self.top();
        let mut recall = self.descriptions.lock().unwrap_or_else(PoisonError::into_inner);
        for capture in &buffer.captures {
            let asker = recall.caller(buffer, capture, &self.mask);
            let noted = &capture.meta;
            if noted.weight > 0 {
                samples += 1;
            }
            if noted.slot == OTHER && capture.origin == Origin::Unmatched {
                self.record_unknown_domain(&asker.domain, u64::from(noted.weight));
            }
            if let Some(caller) = &asker.caller {
                let name = |slot: u32| names.get(slot as usize).unwrap_or(&self.other);
                top.record(&CallerSample {
                    caller,
                    network: asker.network.as_deref(),
                    slot: noted.slot,
                    name: name(noted.slot),
                    denied: noted.verdict == LoggedVerdict::Deny,
                    utilization: noted.caller_utilization.map(|own| (own, name(own.slot))),
                    weight: noted.weight,
                });
            }
            if noted.log {
                let limit = recall.limit(buffer, capture);
                entries.push(DecisionRecord::from_capture(capture, buffer, names, asker, limit));
            }
        }
        samples
    }

    /// Counts sampled requests of a domain without rules. Names come from clients: only so many are kept.
    fn record_unknown_domain(&self, domain: &str, weight: u64) {
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        if unknown.len() < MAX_UNKNOWN_DOMAINS || unknown.contains_key(domain) {
            *unknown.entry(domain.into()).or_default() += weight;
        }
    }

    /// Returns the domains without rules that requests named, with the number of those requests, estimated.
    pub(crate) fn unknown_domains(&self) -> Vec<(Box<str>, u64)> {
        let unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = unknown.iter().map(|(domain, requests)| (domain.clone(), *requests)).collect();
        all.sort_by_key(|(_, requests)| std::cmp::Reverse(*requests));
        all
    }

    /// Takes the figures of a second. The worker does so by itself.
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

    /// Decisions that should have been logged and were not, for want of room.
    pub(crate) fn dropped(&self) -> u64 {
        self.stripes.all().iter().map(|stripe| stripe.dropped.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn layout_of(&self, rules: &Arc<tollgate_rules::Ruleset>) -> Arc<LabelLayout> {
        self.labels.layout(Arc::clone(rules))
    }
}

/// Works until the watcher has gone.
fn run(observe: &Weak<Telemetry>) {
    let mut second = Timestamp::ZERO;
    while let Some(observe) = observe.upgrade() {
        observe.run_once();
        let now = observe.clock.now();
        if now.since(second) >= TimeDelta::from_secs(1) {
            // On the second, whatever the rounds are.
            second = Timestamp::from_secs(now.as_secs());
            observe.tick();
        }
        drop(observe);
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests;
