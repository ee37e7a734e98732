//! Tracing: spans of decisions that are part of a sampled trace, and their OTLP encoding.

pub(crate) mod buffer;
pub(crate) mod otlp;
