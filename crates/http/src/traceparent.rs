//! W3C TraceContext Context: parses and formats `traceparent`. Only sampled traces are followed; any other value is ignored,
//! and a proxy forwards it unchanged.

use crate::headers::HeaderLookup;
use crate::hex;
use http::header::{HeaderName, HeaderValue};
use tollgate_core::Timestamp;
use tollgate_engine::{Limiter, TraceContext};

/// The field name, in HTTP and in gRPC metadata.
pub static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Returns the trace of a request if an observer of `limiter` follows traces and the request's only `traceparent` is
/// sampled.
#[inline]
pub fn from_headers<S>(
    limiter: &Limiter<S>,
    fields: &impl HeaderLookup,
    now: impl FnOnce() -> Timestamp,
) -> Option<TraceContext> {
    if !limiter.is_traced() {
        return None;
    }
    let mut all = fields.all(&TRACEPARENT);
    let (only, None) = (all.next()?, all.next()) else { return None };
    sampled(only, now)
}

/// Parses a `traceparent`. Returns a new span of its trace if the value is valid and the trace is sampled.
pub fn sampled(text: &[u8], now: impl FnOnce() -> Timestamp) -> Option<TraceContext> {
    // Version 00 has exactly these fields; later versions start with them.
    let (first, rest) = text.split_at_checked(55)?;
    if !(rest.is_empty() || rest[0] == b'-' && &first[..2] != b"00") {
        return None;
    }
    if first[2] != b'-' || first[35] != b'-' || first[52] != b'-' {
        return None;
    }
    let [version] = parse::<1>(&first[..2])?;
    let (id, parent) = (parse::<16>(&first[3..35])?, parse::<8>(&first[36..52])?);
    let [flags] = parse::<1>(&first[53..])?;
    let valid = version != 0xff && id != [0; 16] && parent != [0; 8];
    (valid && flags & 1 == 1).then(|| TraceContext::new(id, parent, now()))
}

/// Decodes hexadecimal digits, in lower case only as the standard requires.
fn parse<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

/// Formats the `traceparent` for the next hop, with this span as the parent.
#[must_use]
pub fn format(trace: &TraceContext) -> HeaderValue {
    let mut text = Vec::with_capacity(55);
    text.extend_from_slice(b"00-");
    hex::put(&mut text, &trace.id);
    text.push(b'-');
    hex::put(&mut text, &trace.span);
    text.extend_from_slice(b"-01");
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}
