//! A response that Tollgate generates itself. Its fields are stored as bytes, so that writing it is a copy.

use crate::date;
use crate::h1::head::are_values;
use crate::headers::HeaderSink;
use crate::response::{DecisionSummary, ResponseConfig};
use bytes::BufMut;
use http::StatusCode;
use http::header::HeaderName;
use tollgate_core::Timestamp;

/// A response with its fields already encoded.
#[derive(Debug)]
pub struct RawResponse {
    /// The status.
    pub status: StatusCode,
    /// The media type of the body, if there is one.
    kind: Option<&'static str>,
    /// Encoded field lines, each with its CR LF.
    fields: Vec<u8>,
    body: Vec<u8>,
}

/// The parts of the response that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseBodyMode {
    /// Head and body.
    All,
    /// The head only (`HEAD`).
    Head,
}

/// What happens to the connection after the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionMode {
    /// It stays open.
    KeepAlive,
    /// It stays open for an HTTP/1.0 client, which needs `connection: keep-alive` in the response.
    KeepAliveHttp10,
    /// It is closed.
    Close,
}

impl RawResponse {
    /// Creates a response without a body.
    #[must_use]
    pub const fn empty(status: StatusCode) -> Self {
        Self { status, kind: None, fields: Vec::new(), body: Vec::new() }
    }

    /// Creates a response with a body of the media type `kind`.
    #[must_use]
    pub fn new(status: StatusCode, kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, kind: Some(kind), fields: Vec::new(), body: body.into() }
    }

    /// Creates a response with a JSON body.
    #[must_use]
    pub fn json(status: StatusCode, body: impl Into<Vec<u8>>) -> Self {
        Self::new(status, "application/json", body)
    }

    /// Creates the response to a decision: 200 without a body, or a denial with its body.
    #[must_use]
    pub fn decision(settings: &ResponseConfig, facts: &DecisionSummary<'_>, now: Timestamp) -> Self {
        let mut body = Vec::new();
        let kind = settings.write_body(facts, &mut body);
        let mut response = Self { status: settings.status(facts), kind, fields: Vec::new(), body };
        settings.write(facts, now, &mut response);
        response
    }

    /// Returns the length of the body in bytes.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.body.len()
    }

    /// Appends the response to `out`.
    pub fn write(
        &self,
        out: &mut impl BufMut,
        wants: ResponseBodyMode,
        after: ConnectionMode,
        now: Timestamp,
    ) {
        match self.status {
            StatusCode::OK => out.put_slice(b"HTTP/1.1 200 OK\r\n"),
            status => {
                out.put_slice(b"HTTP/1.1 ");
                out.put_slice(status.as_str().as_bytes());
                out.put_u8(b' ');
                out.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
                out.put_slice(b"\r\n");
            }
        }
        if let Some(kind) = self.kind {
            line(out, b"content-type", kind.as_bytes());
        }
        if self.status != StatusCode::NO_CONTENT {
            line(out, b"content-length", itoa::Buffer::new().format(self.body.len()).as_bytes());
        }
        match after {
            ConnectionMode::KeepAlive => {}
            ConnectionMode::KeepAliveHttp10 => line(out, b"connection", b"keep-alive"),
            ConnectionMode::Close => line(out, b"connection", b"close"),
        }
        out.put_slice(b"date: ");
        date::write(now, out);
        out.put_slice(b"\r\n");
        out.put_slice(&self.fields);
        out.put_slice(b"\r\n");
        if wants == ResponseBodyMode::All {
            out.put_slice(&self.body);
        }
    }
}

impl HeaderSink for RawResponse {
    fn put(&mut self, name: &HeaderName, value: &[u8]) {
        // A line break in the value would start another field.
        if are_values(value) {
            if self.fields.is_empty() {
                self.fields.reserve(384);
            }
            line(&mut self.fields, name.as_str().as_bytes(), value);
        }
    }
}

fn line(out: &mut impl BufMut, name: &[u8], value: &[u8]) {
    out.put_slice(name);
    out.put_slice(b": ");
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(response: &RawResponse, wants: ResponseBodyMode, after: ConnectionMode) -> String {
        let mut out = Vec::new();
        response.write(&mut out, wants, after, Timestamp::from_secs(784_111_777));
        String::from_utf8(out).expect("text")
    }

    /// Otherwise a value with a line break would inject a field.
    #[test]
    fn a_value_cannot_start_another_field() {
        let mut response = RawResponse::json(StatusCode::OK, "{}");
        response.put(&HeaderName::from_static("x-a"), b"a\r\nx-b: c");
        response.put(&HeaderName::from_static("x-c"), b"d");
        let text = text(&response, ResponseBodyMode::All, ConnectionMode::KeepAlive);
        assert_eq!(
            text,
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\
             date: Sun, 06 Nov 1994 08:49:37 GMT\r\nx-c: d\r\n\r\n{}"
        );
    }

    /// A client that sent `HEAD` would read the body as the next response.
    #[test]
    fn a_response_to_head_has_the_length_and_no_body() {
        let text = text(
            &RawResponse::json(StatusCode::NOT_FOUND, "{}"),
            ResponseBodyMode::Head,
            ConnectionMode::Close,
        );
        assert!(text.starts_with("HTTP/1.1 404 Not Found\r\n"), "{text}");
        assert!(text.contains("content-length: 2\r\nconnection: close\r\n") && text.ends_with("\r\n\r\n"));
    }
}
