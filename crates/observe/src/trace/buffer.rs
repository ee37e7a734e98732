//! Span buffer: one span for each decision of a sampled trace, and one for each such request that the gateway forwarded.
//! Spans stay in bounded memory until an exporter drains them.
//!
//! No span contains client input: no attributes, no paths, and no unknown method or domain.

use crate::decision_log::record::NodeInfo;
use crate::metrics::exposition::MetricsWriter;
use crate::recorder::capture::LoggedVerdict;
use crate::trace::otlp::{self, Export, Resource, ResourceSpans, Scope, ScopeSpans, Span, number, text};
use prost::Message;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::Timestamp;
use tollgate_engine::{Check, Decision, DecisionId, ForwardedRequest, TraceContext};

/// Maximum number of pending spans; more are dropped and counted.
const MAX_PENDING: usize = 8_192;

/// Methods that OpenTelemetry reports by name; others are `_OTHER`.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// Pending spans, and counts of spans created, sent and dropped.
#[derive(Debug)]
pub struct SpanBuffer {
    service: String,
    node: NodeInfo,
    pending: Mutex<VecDeque<PendingSpan>>,
    /// Number of pending spans, readable without the lock.
    length: AtomicUsize,
    made: AtomicU64,
    sent: AtomicU64,
    dropped_full: AtomicU64,
    rejected: AtomicU64,
}

/// A span before encoding, which happens when it is drained.
#[derive(Debug)]
struct PendingSpan {
    trace: TraceContext,
    ended: Timestamp,
    detail: SpanDetail,
}

#[derive(Debug)]
enum SpanDetail {
    Decision {
        id: DecisionId,
        protocol: &'static str,
        ruled: LoggedVerdict,
        origin: &'static str,
        domain: Box<str>,
        rule: Box<str>,
        revision: Box<str>,
    },
    Forwarded {
        method: &'static str,
        route: Box<str>,
        status: Option<u16>,
    },
}

/// Encoded spans for a collector.
#[derive(Debug)]
pub struct SpanBatch {
    /// `ExportTraceServiceRequest`, encoded.
    pub message: Vec<u8>,
    /// Number of spans in it.
    pub spans: u64,
}

impl SpanBuffer {
    pub(crate) fn new(service: String, node: NodeInfo) -> Self {
        Self {
            service,
            node,
            pending: Mutex::default(),
            length: AtomicUsize::new(0),
            made: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            dropped_full: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
        }
    }

    #[cold]
    pub(crate) fn record_decision(
        &self,
        trace: &TraceContext,
        now: Timestamp,
        check: &Check<'_>,
        decision: &Decision,
    ) {
        self.push(*trace, now, || {
            // A domain without rules is client input.
            let domain = decision.rules().domain(check.domain).map_or("other", tollgate_rules::Domain::name);
            SpanDetail::Decision {
                id: decision.id(),
                protocol: check.protocol,
                ruled: LoggedVerdict::from_decision(decision),
                origin: decision.origin.name(),
                domain: domain.into(),
                rule: rule(decision).into(),
                revision: decision.revision().into(),
            }
        });
    }

    pub(crate) fn record_forwarded(&self, passed: &ForwardedRequest<'_>, now: Timestamp) {
        self.push(passed.trace, now, || {
            let method = METHODS.into_iter().find(|method| *method == passed.method);
            SpanDetail::Forwarded {
                method: method.unwrap_or("_OTHER"),
                route: passed.route.into(),
                status: passed.status,
            }
        });
    }

    fn push(&self, trace: TraceContext, now: Timestamp, what: impl FnOnce() -> SpanDetail) {
        self.made.fetch_add(1, Ordering::Relaxed);
        // Checked before anything is copied: while the collector is unavailable, this is all that a span costs.
        if self.length.load(Ordering::Relaxed) >= MAX_PENDING {
            self.dropped_full.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let noted = PendingSpan { trace, ended: now.max(trace.started_at), detail: what() };
        // The lock is held only to move a span, here and while draining.
        let mut pending = self.pending();
        if pending.len() < MAX_PENDING {
            pending.push_back(noted);
            self.length.store(pending.len(), Ordering::Relaxed);
        } else {
            drop(pending);
            self.dropped_full.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<PendingSpan>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and encodes up to `max` pending spans; `None` if there are none.
    #[must_use]
    pub fn drain(&self, max: usize) -> Option<SpanBatch> {
        let mut pending = self.pending();
        let taken = pending.len().min(max);
        // Few at a time, so that a recording thread waits for few moves.
        let noted: Vec<PendingSpan> = pending.drain(..taken).collect();
        self.length.store(pending.len(), Ordering::Relaxed);
        drop(pending);
        if noted.is_empty() {
            return None;
        }
        let mut resource = vec![
            text("service.name", &self.service),
            text("service.instance.id", &self.node.node),
            text("service.version", env!("CARGO_PKG_VERSION")),
        ];
        resource.extend(self.node.region.as_deref().map(|region| text("cloud.region", region)));
        let scope = Scope { name: "tollgate".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
        let spans = noted.iter().map(PendingSpan::span).collect();
        let of_scope = ScopeSpans { scope: Some(scope), spans };
        let all =
            ResourceSpans { resource: Some(Resource { attributes: resource }), scope_spans: vec![of_scope] };
        let message = Export { resource_spans: vec![all] }.encode_to_vec();
        Some(SpanBatch { message, spans: taken as u64 })
    }

    /// Records that the collector accepted `spans`, except those that its response rejects.
    pub fn record_sent(&self, spans: u64, response: &[u8]) {
        let rejected = otlp::rejected(response).min(spans);
        self.sent.fetch_add(spans - rejected, Ordering::Relaxed);
        self.rejected.fetch_add(rejected, Ordering::Relaxed);
    }

    /// Records spans that could not be sent.
    pub fn record_dropped(&self, spans: u64) {
        self.rejected.fetch_add(spans, Ordering::Relaxed);
    }

    pub(crate) fn write(&self, page: &mut MetricsWriter) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let help = "Number of spans created for requests in sampled traces.";
        page.counter("ratelimit_trace_spans_total", help, count(&self.made));
        let help = "Number of spans accepted by the collector.";
        page.counter("ratelimit_trace_spans_sent_total", help, count(&self.sent));
        let help =
            "Number of spans dropped: buffer full (memory), or not accepted by the collector (collector).";
        let mut family = page.counters("ratelimit_trace_spans_dropped_total", help);
        family.add(&[("where", "memory")], count(&self.dropped_full));
        family.add(&[("where", "collector")], count(&self.rejected));
    }
}

/// Returns the rule that a decision is attributed to: the one that denied, else that of the limit with the least remaining.
fn rule(decision: &Decision) -> &str {
    let tightest = || {
        let all = (0..decision.descriptors.len()).filter_map(|at| decision.tightest(at));
        all.min_by_key(|status| status.outcome.remaining).map_or("", |status| decision.limit_name(status))
    };
    decision.denied_by_name().unwrap_or_else(tightest)
}

impl PendingSpan {
    fn span(&self) -> Span {
        let nanos = |at: Timestamp| at.as_micros().saturating_mul(1_000);
        let (name, kind, attributes) = self.detail.attributes();
        let failed = matches!(self.detail, SpanDetail::Forwarded { status: Some(500..), .. });
        let remote = if kind == otlp::SERVER { otlp::REMOTE } else { 0 };
        Span {
            trace_id: self.trace.id.to_vec(),
            span_id: self.trace.span.to_vec(),
            parent_span_id: self.trace.parent.to_vec(),
            name,
            kind,
            start: nanos(self.trace.started_at),
            end: nanos(self.ended),
            attributes,
            status: failed.then_some(otlp::Status { code: otlp::ERROR }),
            flags: otlp::SAMPLED | otlp::KNOWN | remote,
        }
    }
}

impl SpanDetail {
    /// Returns the span's name, kind and attributes.
    fn attributes(&self) -> (String, i32, Vec<otlp::KeyValue>) {
        match self {
            Self::Decision { id, protocol, ruled, origin, domain, rule, revision } => {
                // In the gateway and in-process the decision is part of another span.
                let kind = if matches!(*protocol, "rls" | "http") { otlp::SERVER } else { otlp::INTERNAL };
                let mut attributes = vec![
                    text("ratelimit.domain", domain),
                    text("ratelimit.verdict", ruled.name()),
                    text("ratelimit.origin", origin),
                    text("ratelimit.revision", revision),
                    text("ratelimit.decision_id", &id.to_string()),
                ];
                for (key, value) in [("ratelimit.rule", &**rule), ("ratelimit.protocol", protocol)] {
                    attributes.extend((!value.is_empty()).then(|| text(key, value)));
                }
                ("ratelimit check".to_owned(), kind, attributes)
            }
            Self::Forwarded { method, route, status } => {
                let mut attributes = vec![text("http.request.method", method), text("http.route", route)];
                attributes
                    .extend(status.map(|status| number("http.response.status_code", i64::from(status))));
                // A span name must have low cardinality.
                let method = if *method == "_OTHER" { "HTTP" } else { method };
                (format!("{method} {route}"), otlp::SERVER, attributes)
            }
        }
    }
}
