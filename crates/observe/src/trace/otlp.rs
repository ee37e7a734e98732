//! OpenTelemetry's messages for traces, as far as they are used here, by their numbers; how they get to a collector is the
//! binary's affair.
//!
//! Our own few messages and not `opentelemetry-otlp`: its processor and its bridges cost every request a look at a stack of
//! spans, and would bring some forty crates for what is one message.

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
    /// Nanoseconds since 1970.
    #[prost(fixed64, tag = "7")]
    pub(crate) start: u64,
    #[prost(fixed64, tag = "8")]
    pub(crate) end: u64,
    #[prost(message, repeated, tag = "9")]
    pub(crate) attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    pub(crate) status: Option<Status>,
    /// The lower eight bits are those of `traceparent`; then whether the parent is elsewhere, and whether that is known.
    #[prost(fixed32, tag = "16")]
    pub(crate) flags: u32,
}

/// Kinds of spans.
pub(crate) const INTERNAL: i32 = 1;
pub(crate) const SERVER: i32 = 2;

/// Sampled; it is known where the parent is; it is elsewhere.
pub(crate) const SAMPLED: u32 = 1;
pub(crate) const KNOWN: u32 = 0x100;
pub(crate) const REMOTE: u32 = 0x200;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(int32, tag = "3")]
    pub(crate) code: i32,
}

/// Something went wrong.
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

/// An attribute that is text.
pub(crate) fn text(key: &str, value: &str) -> KeyValue {
    let value = Some(AnyValue { value: Some(Value::Text(value.to_owned())) });
    KeyValue { key: key.to_owned(), value }
}

/// An attribute that is a number.
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

/// How many spans a collector has refused of those it took, by its answer. What is no such answer refuses none.
pub(crate) fn rejected(answer: &[u8]) -> u64 {
    let partial = Exported::decode(answer).ok().and_then(|answer| answer.partial);
    partial.map_or(0, |partial| u64::try_from(partial.rejected).unwrap_or(0))
}
