//! OTLP messages for traces, reduced to the fields in use, with their protobuf tags. The binary sends them to a collector.
//!
//! Rejected: `opentelemetry-otlp`, because its processor and bridges inspect a stack of spans on every request, and it would
//! add some forty crates for one message.

use prost::Message;

/// `ExportTraceServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Export {
    #[prost(message, repeated, tag = "1")]
    pub(crate) resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub(crate) resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub(crate) attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub(crate) scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) spans: Vec<Span>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Scope {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Span {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub(crate) name: String,
    #[prost(int32, tag = "6")]
    pub(crate) kind: i32,
    /// Nanoseconds since the Unix epoch.
    #[prost(fixed64, tag = "7")]
    pub(crate) start: u64,
    #[prost(fixed64, tag = "8")]
    pub(crate) end: u64,
    #[prost(message, repeated, tag = "9")]
    pub(crate) attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    pub(crate) status: Option<Status>,
    /// Bits 0 to 7 are those of `traceparent`; then whether the parent is known to be remote or local, and whether it is remote.
    #[prost(fixed32, tag = "16")]
    pub(crate) flags: u32,
}

/// Span kinds.
pub(crate) const INTERNAL: i32 = 1;
pub(crate) const SERVER: i32 = 2;

/// Span flags: sampled; location of the parent known; parent is remote.
pub(crate) const SAMPLED: u32 = 1;
pub(crate) const KNOWN: u32 = 0x100;
pub(crate) const REMOTE: u32 = 0x200;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(int32, tag = "3")]
    pub(crate) code: i32,
}

/// Status code of a failed request.
pub(crate) const ERROR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 3")]
    pub(crate) value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Value {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Number(i64),
}

/// Returns a text attribute.
pub(crate) fn text(key: &str, value: &str) -> KeyValue {
    let value = Some(AnyValue { value: Some(Value::Text(value.to_owned())) });
    KeyValue { key: key.to_owned(), value }
}

/// Returns a number attribute.
pub(crate) fn number(key: &str, value: i64) -> KeyValue {
    let value = Some(AnyValue { value: Some(Value::Number(value)) });
    KeyValue { key: key.to_owned(), value }
}

/// `ExportTraceServiceResponse`.
#[derive(Clone, PartialEq, Message)]
struct Exported {
    #[prost(message, optional, tag = "1")]
    partial: Option<Partial>,
}

#[derive(Clone, PartialEq, Message)]
struct Partial {
    #[prost(int64, tag = "1")]
    rejected: i64,
}

/// Returns the number of spans that a collector's response rejects; 0 if the response cannot be decoded.
pub(crate) fn rejected(answer: &[u8]) -> u64 {
    let partial = Exported::decode(answer).ok().and_then(|answer| answer.partial);
    partial.map_or(0, |partial| u64::try_from(partial.rejected).unwrap_or(0))
}
