//! Trace context of a request, and the record of a forwarded request.
//!
//! The trace that a request is part of, where its caller follows one and somebody here does too. Fronts read it from their
//! wire; who watches decisions makes spans of it. A request without one carries an empty pointer, and nothing else.

use crate::decision_id::DecisionId;
use tollgate_core::Timestamp;

/// A span in the making, by the terms of W3C Trace Context: whose trace, under which span, which one it is, since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace.
    pub id: [u8; 16],
    /// The caller's span.
    pub parent: [u8; 8],
    /// Ours.
    pub span: [u8; 8],
    /// When ours began.
    pub started_at: Timestamp,
}

impl TraceContext {
    /// A new span of this trace, under `parent`.
    #[must_use]
    pub fn new(id: [u8; 16], parent: [u8; 8], began: Timestamp) -> Self {
        Self { id, parent, span: random_id(), started_at: began }
    }

    /// A new span under this one.
    #[must_use]
    pub fn child(&self, began: Timestamp) -> Self {
        Self::new(self.id, self.span, began)
    }
}

/// An id as random as decisions' names are. Those count upwards; steps of the golden ratio hide that, and never meet.
fn random_id() -> [u8; 8] {
    let DecisionId(name) = DecisionId::generate();
    let (thread, count) = ((name >> 64) as u64, name as u64);
    thread.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1).to_be_bytes()
}

/// A request that a proxy has passed on and whose answer is over, for those who follow its trace.
#[derive(Clone, Copy, Debug)]
pub struct ForwardedRequest<'a> {
    /// Its span.
    pub trace: TraceContext,
    /// The method as it was sent.
    pub method: &'a str,
    /// The route, as a template.
    pub route: &'a str,
    /// The status of the answer; none, if its caller left before there was one.
    pub status: Option<u16>,
}
