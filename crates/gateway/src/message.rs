//! Requests and responses as the proxy handles them, independent of protocol: heads are HTTP/1 bytes or HTTP/2 header maps.
//! The same code reads and writes both, so that the fast path, from bytes to bytes, is not a second proxy.

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

/// A request head: HTTP/1 bytes or an HTTP/2 header map.
pub(crate) struct Forwarded<'r, F> {
    pub(crate) asked: RequestView<'r, F>,
    pub(crate) method: &'r Method,
    /// Path and query.
    pub(crate) target: &'r str,
}

/// Representation of a request head.
pub(crate) trait HeadForm: HeaderLookup + Sync {
    /// Whether the head is read from the received bytes, without a header map.
    const ARE_BYTES: bool;
}

impl HeadForm for HeadHeaders<'_> {
    const ARE_BYTES: bool = true;
}

impl HeadForm for HeaderMap {
    const ARE_BYTES: bool = false;
}

/// Destination of a response head.
pub(crate) trait ResponseSink: HeaderAppend + Send {
    /// Whether the connection can switch protocols.
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

/// Result of a request; the response headers have already been written.
pub(crate) enum Proxied {
    Response {
        status: StatusCode,
        /// Length that the upstream declared.
        stated_length: Option<u64>,
        body: ProxiedBody,
    },
    /// The connection switched protocols; no more HTTP follows.
    Tunnel(Box<Tunnel>, Option<Box<Completion>>),
}

/// The fields of a request as forwarded to its upstream.
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

/// Returns whether a decision has a degrade or warning marker.
fn is_marked(decision: &Decision) -> bool {
    decision.degraded_by.is_some() || decision.warned_by.is_some()
}
