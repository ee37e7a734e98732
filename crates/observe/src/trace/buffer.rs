//! Traces: a span for each decision whose caller has sent a trace that is sampled, and one for each such request that was
//! passed on; for nobody else. They wait, in bounded room, until somebody takes them away to a collector.
//!
//! What a caller has sent is in no span: neither attributes nor paths, and no method or domain that it has made up.

use crate::decision_log::record::Place;
use crate::metrics::exposition::Page;
use crate::recorder::capture::Ruled;
use crate::trace::otlp::{self, Export, Resource, ResourceSpans, Scope, ScopeSpans, Span, number, text};
use prost::Message;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::Timestamp;
use tollgate_engine::{Check, Decision, DecisionId, Passed, Trace};

/// The most spans that wait to be taken; more are dropped, and counted.
const WAITING: usize = 8_192;

/// Methods that are told by their names, as OpenTelemetry has it; others are `_OTHER`.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// Spans that wait, and how many there were.
#[derive(Debug)]
pub struct Traces {
    service: String,
    place: Place,
    waiting: Mutex<VecDeque<Noted>>,
    /// How many wait, for those who would have to wait to look.
    length: AtomicUsize,
    made: AtomicU64,
    sent: AtomicU64,
    crowded: AtomicU64,
    refused: AtomicU64,
}

/// A span as it is kept: what it says is written when it is taken.
#[derive(Debug)]
struct Noted {
    trace: Trace,
    ended: Timestamp,
    what: What,
}

#[derive(Debug)]
enum What {
    Decided {
        id: DecisionId,
        front: &'static str,
        ruled: Ruled,
        origin: &'static str,
        domain: Box<str>,
        rule: Box<str>,
        revision: Box<str>,
    },
    Passed {
        method: &'static str,
        route: Box<str>,
        status: Option<u16>,
    },
}

/// Spans as one message for a collector.
#[derive(Debug)]
pub struct Batch {
    /// The message: `ExportTraceServiceRequest`.
    pub message: Vec<u8>,
    /// How many spans there are in it.
    pub spans: u64,
}

impl Traces {
    pub(crate) fn new(service: String, place: Place) -> Self {
        Self {
            service,
            place,
            waiting: Mutex::default(),
            length: AtomicUsize::new(0),
            made: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            crowded: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    #[cold]
    pub(crate) fn decided(&self, trace: &Trace, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.note(*trace, now, || {
            // A domain that no rule file has is whatever its caller made up.
            let domain = decision.rules().domain(check.domain).map_or("other", tollgate_rules::Domain::name);
            What::Decided {
                id: decision.id,
                front: check.front,
                ruled: Ruled::of(decision),
                origin: decision.origin.name(),
                domain: domain.into(),
                rule: rule(decision).into(),
                revision: decision.revision().into(),
            }
        });
    }

    pub(crate) fn passed(&self, passed: &Passed<'_>, now: Timestamp) {
        self.note(passed.trace, now, || {
            let method = METHODS.into_iter().find(|method| *method == passed.method);
            What::Passed {
                method: method.unwrap_or("_OTHER"),
                route: passed.route.into(),
                status: passed.status,
            }
        });
    }

    fn note(&self, trace: Trace, now: Timestamp, what: impl FnOnce() -> What) {
        self.made.fetch_add(1, Ordering::Relaxed);
        // Looked at before anything is copied: with the collector away, this is all that a span costs.
        if self.length.load(Ordering::Relaxed) >= WAITING {
            self.crowded.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let noted = Noted { trace, ended: now.max(trace.began), what: what() };
        // Held for the time of a move, by those who add and by the one who takes.
        let mut waiting = self.waiting();
        if waiting.len() < WAITING {
            waiting.push_back(noted);
            self.length.store(waiting.len(), Ordering::Relaxed);
        } else {
            drop(waiting);
            self.crowded.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Noted>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes away those that wait, the first `most` of them; nothing, if none do.
    #[must_use]
    pub fn take(&self, most: usize) -> Option<Batch> {
        let mut waiting = self.waiting();
        let taken = waiting.len().min(most);
        // Few at a time, so that whoever adds one waits for few moves.
        let noted: Vec<Noted> = waiting.drain(..taken).collect();
        self.length.store(waiting.len(), Ordering::Relaxed);
        drop(waiting);
        if noted.is_empty() {
            return None;
        }
        let mut about = vec![
            text("service.name", &self.service),
            text("service.instance.id", &self.place.node),
            text("service.version", env!("CARGO_PKG_VERSION")),
        ];
        about.extend(self.place.region.as_deref().map(|region| text("cloud.region", region)));
        let scope = Scope { name: "tollgate".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
        let spans = noted.iter().map(Noted::span).collect();
        let of_scope = ScopeSpans { scope: Some(scope), spans };
        let all =
            ResourceSpans { resource: Some(Resource { attributes: about }), scope_spans: vec![of_scope] };
        let message = Export { resource_spans: vec![all] }.encode_to_vec();
        Some(Batch { message, spans: taken as u64 })
    }

    /// So many spans have been taken by the collector, which answered this.
    pub fn sent(&self, spans: u64, answer: &[u8]) {
        let rejected = otlp::rejected(answer).min(spans);
        self.sent.fetch_add(spans - rejected, Ordering::Relaxed);
        self.refused.fetch_add(rejected, Ordering::Relaxed);
    }

    /// So many could not be sent, and are gone.
    pub fn lost(&self, spans: u64) {
        self.refused.fetch_add(spans, Ordering::Relaxed);
    }

    pub(crate) fn write(&self, page: &mut Page) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let help = "Spans that were made of requests whose trace is sampled.";
        page.counter("ratelimit_trace_spans_total", help, count(&self.made));
        let help = "Spans that the collector has taken.";
        page.counter("ratelimit_trace_spans_sent_total", help, count(&self.sent));
        let help =
            "Spans that nobody will see: for want of room in memory, or of a collector that takes them.";
        let mut family = page.counters("ratelimit_trace_spans_dropped_total", help);
        family.add(&[("where", "memory")], count(&self.crowded));
        family.add(&[("where", "collector")], count(&self.refused));
    }
}

/// The rule that a decision is owed to: the one that denied, else that of the limit with the least left.
fn rule(decision: &Decision) -> &str {
    let tightest = || {
        let all = (0..decision.descriptors.len()).filter_map(|at| decision.tightest(at));
        all.min_by_key(|status| status.outcome.remaining).map_or("", |status| decision.limit_name(status))
    };
    decision.denied_by_name().unwrap_or_else(tightest)
}

impl Noted {
    fn span(&self) -> Span {
        let nanos = |at: Timestamp| at.as_micros().saturating_mul(1_000);
        let (name, kind, attributes) = self.what.told();
        let failed = matches!(self.what, What::Passed { status: Some(500..), .. });
        let remote = if kind == otlp::SERVER { otlp::REMOTE } else { 0 };
        Span {
            trace_id: self.trace.id.to_vec(),
            span_id: self.trace.span.to_vec(),
            parent_span_id: self.trace.parent.to_vec(),
            name,
            kind,
            start: nanos(self.trace.began),
            end: nanos(self.ended),
            attributes,
            status: failed.then_some(otlp::Status { code: otlp::ERROR }),
            flags: otlp::SAMPLED | otlp::KNOWN | remote,
        }
    }
}

impl What {
    /// A name, a kind and attributes.
    fn told(&self) -> (String, i32, Vec<otlp::KeyValue>) {
        match self {
            Self::Decided { id, front, ruled, origin, domain, rule, revision } => {
                // In the gateway and in programs it is a part of something larger.
                let kind = if matches!(*front, "rls" | "http") { otlp::SERVER } else { otlp::INTERNAL };
                let mut attributes = vec![
                    text("ratelimit.domain", domain),
                    text("ratelimit.verdict", ruled.name()),
                    text("ratelimit.origin", origin),
                    text("ratelimit.revision", revision),
                    text("ratelimit.decision_id", &id.to_string()),
                ];
                for (key, value) in [("ratelimit.rule", &**rule), ("ratelimit.front", front)] {
                    attributes.extend((!value.is_empty()).then(|| text(key, value)));
                }
                ("ratelimit check".to_owned(), kind, attributes)
            }
            Self::Passed { method, route, status } => {
                let mut attributes = vec![text("http.request.method", method), text("http.route", route)];
                attributes
                    .extend(status.map(|status| number("http.response.status_code", i64::from(status))));
                // Only what there are few of makes a good name.
                let method = if *method == "_OTHER" { "HTTP" } else { method };
                (format!("{method} {route}"), otlp::SERVER, attributes)
            }
        }
    }
}
