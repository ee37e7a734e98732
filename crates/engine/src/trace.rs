//! Trace context of a request, and the record of a forwarded request.
//!
//! The trace is set only if the client sends one and an observer records traces. Protocol servers parse it from the
//! request; observers turn it into spans. A request without a trace carries a null pointer and no other cost.

use crate::decision_id::DecisionId;
use tollgate_core::Timestamp;

/// A span in progress, in the terms of W3C Trace Context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Trace ID.
    pub id: [u8; 16],
    /// Span ID of the parent, in the client.
    pub parent: [u8; 8],
    /// Span ID of this span.
    pub span: [u8; 8],
    /// Start time of this span.
    pub started_at: Timestamp,
}

impl TraceContext {
    /// Creates a new span of this trace under `parent`.
    #[must_use]
    pub fn new(id: [u8; 16], parent: [u8; 8], began: Timestamp) -> Self {
        Self { id, parent, span: random_id(), started_at: began }
    }

    /// Creates a new span under this one.
    #[must_use]
    pub fn child(&self, began: Timestamp) -> Self {
        Self::new(self.id, self.span, began)
    }
}

/// Returns an ID as random as decision IDs. Those count upwards; multiplying by the golden ratio hides that without
/// collisions.
fn random_id() -> [u8; 8] {
    let DecisionId(name) = DecisionId::generate();
    let (thread, count) = ((name >> 64) as u64, name as u64);
    thread.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1).to_be_bytes()
}

/// A proxied request whose response is complete, for observers that record its trace.
#[derive(Clone, Copy, Debug)]
pub struct ForwardedRequest<'a> {
    /// Span of the request.
    pub trace: TraceContext,
    /// Request method, as sent.
    pub method: &'a str,
    /// Route template.
    pub route: &'a str,
    /// Response status; `None` if the client disconnected before there was one.
    pub status: Option<u16>,
}
