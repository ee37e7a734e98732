//! An answer of our own until it is written: its fields are bytes already, so that writing it is copying.

use crate::date;
use crate::h1::head::are_values;
use crate::headers::HeaderSink;
use crate::response::{DecisionSummary, ResponseConfig};
use bytes::BufMut;
use http::StatusCode;
use http::header::HeaderName;
use tollgate_core::Timestamp;

/// What is sent back.
#[derive(Debug)]
pub struct RawResponse {
    /// The status.
    pub status: StatusCode,
    /// The type of the body, where there is one.
    kind: Option<&'static str>,
    /// Whole lines.
    fields: Vec<u8>,
    body: Vec<u8>,
}

/// What the request wants of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseBodyMode {
    /// Everything.
    All,
    /// The head of what would be the answer (`HEAD`).
    Head,
}

/// What becomes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionMode {
    /// It is kept.
    KeepAlive,
    /// Kept for a caller who speaks HTTP/1.0 and must be told.
    KeepAliveHttp10,
    /// It is closed.
    Close,
}

impl RawResponse {
    /// One without a body.
    #[must_use]
    pub const fn empty(status: StatusCode) -> Self {
        Self { status, kind: None, fields: Vec::new(), body: Vec::new() }
    }

    /// One with a body of this type.
    #[must_use]
    pub fn new(status: StatusCode, kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, kind: Some(kind), fields: Vec::new(), body: body.into() }
    }

    /// One with a body of JSON.
    #[must_use]
    pub fn json(status: StatusCode, body: impl Into<Vec<u8>>) -> Self {
        Self::new(status, "application/json", body)
    }

    /// What callers of the edge are told of a decision: 200 without a body, or the denial with its own.
    #[must_use]
    pub fn decision(settings: &ResponseConfig, facts: &DecisionSummary<'_>, now: Timestamp) -> Self {
        let mut body = Vec::new();
        let kind = settings.write_body(facts, &mut body);
        let mut answer = Self { status: settings.status(facts.disposition), kind, fields: Vec::new(), body };
        settings.write(facts, now, &mut answer);
        answer
    }

    /// Bytes of its body.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.body.len()
    }

    /// Writes it after what is in `out`.
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
        // What ends a line would begin another field.
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

    fn text(answer: &RawResponse, wants: ResponseBodyMode, after: ConnectionMode) -> String {
        let mut out = Vec::new();
        answer.write(&mut out, wants, after, Timestamp::from_secs(784_111_777));
        String::from_utf8(out).expect("text")
    }

    /// A value with a line's end would be a field of its maker's choice.
    #[test]
    fn a_value_cannot_begin_another_field() {
        let mut answer = RawResponse::json(StatusCode::OK, "{}");
        answer.put(&HeaderName::from_static("x-a"), b"a\r\nx-b: c");
        answer.put(&HeaderName::from_static("x-c"), b"d");
        let text = text(&answer, ResponseBodyMode::All, ConnectionMode::KeepAlive);
        assert_eq!(
            text,
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\
             date: Sun, 06 Nov 1994 08:49:37 GMT\r\nx-c: d\r\n\r\n{}"
        );
    }

    /// Whoever asks for a head alone reads the next answer where this one's body would be.
    #[test]
    fn a_head_has_the_length_and_not_the_body() {
        let text = text(
            &RawResponse::json(StatusCode::NOT_FOUND, "{}"),
            ResponseBodyMode::Head,
            ConnectionMode::Close,
        );
        assert!(text.starts_with("HTTP/1.1 404 Not Found\r\n"), "{text}");
        assert!(text.contains("content-length: 2\r\nconnection: close\r\n") && text.ends_with("\r\n\r\n"));
    }
}
