//! A request and its response as the proxy sees them, whichever protocol they come by and go by: heads in the bytes of HTTP/1,
//! or in maps of HTTP/2. The same rules read and write both, so that the fast path, from bytes to bytes, is no second proxy.

use crate::body::ProxiedBody;
use crate::completion::Completion;
use crate::h1::tunnel::Tunnel;
use crate::headers::{self, ForwardRules, OwnHeaders};
use crate::upstream::WriteFields;
use bytes::BytesMut;
use http::{HeaderMap, Method, StatusCode};
use tollgate_engine::Decision;
use tollgate_http::h1::HeadHeaders;
use tollgate_http::headers::{HeaderAppend, HeaderLookup};
use tollgate_http::identity::RequestView;
use tollgate_http::response::{self, DecisionSummary};
use tollgate_http::server::write;

/// A request's head, wherever it lies: in the bytes of HTTP/1, or in a map of HTTP/2.
pub(crate) struct Forwarded<'r, F> {
    pub(crate) asked: RequestView<'r, F>,
    pub(crate) method: &'r Method,
    /// Path and query.
    pub(crate) target: &'r str,
}

/// Whether a map of fields was built of a request's head.
pub(crate) trait HeadForm: HeaderLookup + Sync {
    /// It lies in the bytes that came.
    const ARE_BYTES: bool;
}

impl HeadForm for HeadHeaders<'_> {
    const ARE_BYTES: bool = true;
}

impl HeadForm for HeaderMap {
    const ARE_BYTES: bool = false;
}

/// What a response's head is written to.
pub(crate) trait ResponseSink: HeaderAppend + Send {
    /// Whether its connection can switch protocols.
    const CAN_SWITCH: bool;

    fn begin(&mut self, status: StatusCode);
}

impl ResponseSink for BytesMut {
    const CAN_SWITCH: bool = true;

    fn begin(&mut self, status: StatusCode) {
        write::status_line(self, status);
    }
}

impl ResponseSink for HeaderMap {
    const CAN_SWITCH: bool = false;

    fn begin(&mut self, _: StatusCode) {}
}

/// What became of a request; the fields of its response were written where they go.
pub(crate) enum Proxied {
    Response {
        status: StatusCode,
        /// The length that the upstream stated.
        stated_length: Option<u64>,
        body: ProxiedBody,
    },
    /// No more HTTP follows.
    Tunnel(Box<Tunnel>, Option<Box<Completion>>),
}

/// The fields of a request on their way to its upstream.
pub(crate) struct UpstreamFields<'a, F> {
    pub(crate) fields: &'a F,
    pub(crate) passing: &'a ForwardRules<'a>,
    pub(crate) decision: Option<&'a Decision>,
    pub(crate) upgrade: Option<&'a [u8]>,
}

impl<F: HeadForm> WriteFields for UpstreamFields<'_, F> {
    const ARE_BYTES: bool = F::ARE_BYTES;

    fn write(&self, out: &mut impl HeaderAppend) {
        headers::write_upstream_headers(self.fields, self.passing, out);
        if let Some(decision) = self.decision.filter(|decision| is_marked(decision)) {
            response::write_markers(&DecisionSummary::from_decision(decision), &mut OwnHeaders::new(out));
        }
        if let Some(upgrade) = self.upgrade {
            out.add(b"connection", b"upgrade");
            out.add(b"upgrade", upgrade);
        }
    }
}

/// Whether a decision says more than yes or no.
fn is_marked(decision: &Decision) -> bool {
    decision.degraded_by.is_some() || decision.warned_by.is_some()
}
