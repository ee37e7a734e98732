//! Reads rate limit requests with keys or values that are not UTF-8.
//!
//! Envoy copies header fields into descriptors as they are, so a caller can make a message that no strict reader takes;
//! with a proxy that fails open the request would pass without any limit.

use super::codec::Readable;
use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use super::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use super::{BadRequest, bounds};
use bytes::Bytes;
use prost::Message;
use tollgate_http::value;

/// A [`RateLimitRequest`] with bytes where callers decide on them.
#[derive(Clone, PartialEq, Message)]
struct RawRequest {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(message, repeated, tag = "2")]
    descriptors: Vec<RawDescriptor>,
    #[prost(uint32, tag = "3")]
    hits_addend: u32,
}

#[derive(Clone, PartialEq, Message)]
struct RawDescriptor {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<RawEntry>,
    #[prost(message, optional, tag = "2")]
    limit: Option<RateLimitOverride>,
    #[prost(message, optional, tag = "3")]
    hits_addend: Option<u64>,
    #[prost(bool, tag = "4")]
    is_negative_hits: bool,
}

#[derive(Clone, PartialEq, Message)]
struct RawEntry {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

impl Readable for RateLimitRequest {
    fn check(message: &[u8]) -> Result<(), BadRequest> {
        bounds::check(message)
    }

    fn repair(message: Bytes) -> Option<Self> {
        let RawRequest { domain, descriptors, hits_addend } = RawRequest::decode(message).ok()?;
        let descriptors = descriptors.into_iter().map(RateLimitDescriptor::from).collect();
        Some(Self { domain, descriptors, hits_addend })
    }
}

impl From<RawDescriptor> for RateLimitDescriptor {
    fn from(raw: RawDescriptor) -> Self {
        let text = |bytes: &Bytes| value::from_bytes(bytes).into_owned();
        let entry = |entry: &RawEntry| Entry { key: text(&entry.key), value: text(&entry.value) };
        Self {
            entries: raw.entries.iter().map(entry).collect(),
            limit: raw.limit,
            hits_addend: raw.hits_addend,
            is_negative_hits: raw.is_negative_hits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(value: &'static [u8]) -> RawRequest {
        let entry = RawEntry { key: Bytes::from_static(b"k"), value: Bytes::from_static(value) };
        let limit = RateLimitOverride { requests_per_unit: 5, unit: 3 };
        let descriptor = RawDescriptor {
            entries: vec![entry],
            limit: Some(limit),
            hits_addend: Some(7),
            is_negative_hits: true,
        };
        RawRequest { domain: "d".to_owned(), descriptors: vec![descriptor], hits_addend: 9 }
    }

    /// The two messages must not drift apart.
    #[test]
    fn both_readers_agree_on_text() {
        let bytes = Bytes::from(raw("café".as_bytes()).encode_to_vec());
        let strict = RateLimitRequest::decode(bytes.clone()).expect("valid");
        assert_eq!(strict.encode_to_vec(), bytes);
        assert_eq!(RateLimitRequest::repair(bytes), Some(strict));
    }

    #[test]
    fn other_bytes_become_distinct_text_and_no_other_error_is_repaired() {
        let read = |value| {
            let bytes = Bytes::from(raw(value).encode_to_vec());
            RateLimitRequest::decode(bytes.clone()).expect_err("not UTF-8");
            RateLimitRequest::repair(bytes).expect("a request").descriptors[0].entries[0].value.clone()
        };
        assert!(read(b"caf\xe9").starts_with("caf…sha256:"));
        assert_ne!(read(b"caf\xe9"), read(b"caf\xe8"));
        assert_eq!(RateLimitRequest::repair(Bytes::from_static(b"\x12\x05\x0a")), None, "truncated");
    }
}
