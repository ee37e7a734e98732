//! What gRPC adds to HTTP/2: messages with a flag and a length, deadlines, and statuses.

use bytes::{BufMut, BytesMut};
use prost::Message;
use std::time::Duration;
use tollgate_http::h2::encode_field;
use tonic::Status;
use tonic::codegen::http::{HeaderMap, Response};
use tonic::metadata::MetadataValue;

/// Length of what precedes a message.
pub(super) const PREFIX: usize = 5;

/// `:status: 200` and `content-type: application/grpc`.
pub(super) const RESPONSE_HEAD: &[u8] = b"\x88\x0f\x10\x10application/grpc";
/// `grpc-status: 0`.
pub(super) const OK_TRAILERS: &[u8] = b"\x00\x0bgrpc-status\x010";

/// Returns the length of the message that `body` begins with, if it is long enough to say.
///
/// # Errors
/// The message is compressed, which is not supported, or longer than `max`.
pub(super) fn length(body: &[u8], max: usize) -> Result<Option<usize>, Status> {
    let Some([flag, l0, l1, l2, l3]) = body.first_chunk::<PREFIX>() else { return Ok(None) };
    if *flag != 0 {
        let mut status =
            Status::unimplemented("compressed messages are not supported; send them as they are");
        status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
        return Err(status);
    }
    let length = u32::from_be_bytes([*l0, *l1, *l2, *l3]) as usize;
    if length > max {
        return Err(Status::out_of_range(format!(
            "a message has at most {max} bytes; this one has {length}"
        )));
    }
    Ok(Some(length))
}

/// Examines the beginning of a body. What is behind a message would otherwise be collected without end.
///
/// # Errors
/// It does not begin with one message, or has more behind it.
pub(super) fn begun(body: &[u8], max: usize) -> Result<(), Status> {
    match length(body, max)? {
        Some(length) if body.len() > PREFIX + length => {
            Err(Status::internal("more than one request message"))
        }
        _ => Ok(()),
    }
}

/// Returns the only message of a complete body.
///
/// # Errors
/// There is none, or more than one.
pub(super) fn only(body: &[u8], max: usize) -> Result<&[u8], Status> {
    match length(body, max)? {
        Some(length) if body.len() == PREFIX + length => Ok(&body[PREFIX..]),
        Some(length) if body.len() > PREFIX + length => {
            Err(Status::internal("more than one request message"))
        }
        _ => Err(Status::internal("the request message is missing or not complete")),
    }
}

/// Finds the ends of messages in a body that arrives in parts.
#[derive(Debug, Default)]
pub(super) struct MessageEnds {
    prefix: [u8; PREFIX],
    known: usize,
    left: usize,
}

impl MessageEnds {
    /// Returns whether a message ends in the next part.
    pub(super) fn push(&mut self, mut part: &[u8]) -> bool {
        let mut has_ended = false;
        while !part.is_empty() {
            if self.known < PREFIX {
                let (prefix, rest) = part.split_at(part.len().min(PREFIX - self.known));
                self.prefix[self.known..self.known + prefix.len()].copy_from_slice(prefix);
                (self.known, part) = (self.known + prefix.len(), rest);
                if self.known < PREFIX {
                    break;
                }
                let [_, l0, l1, l2, l3] = self.prefix;
                self.left = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
            }
            let length = part.len().min(self.left);
            (self.left, part) = (self.left - length, &part[length..]);
            if self.left == 0 {
                (self.known, has_ended) = (0, true);
            }
        }
        has_ended
    }
}

/// Appends a message with its length.
pub(super) fn put(message: &impl Message, out: &mut BytesMut) {
    let length = message.encoded_len();
    out.reserve(PREFIX + length);
    out.put_u8(0);
    out.put_u32(length as u32);
    // It fails only without room.
    let _ = message.encode(out);
}

/// Returns the head of a response that is only a status.
pub(super) fn status_head(status: Status) -> BytesMut {
    head(&status.into_http::<()>())
}

/// Returns the head of a response as a header block.
pub(super) fn head<B>(response: &Response<B>) -> BytesMut {
    let mut block = BytesMut::new();
    encode_field(b":status", response.status().as_str().as_bytes(), &mut block);
    put_fields(response.headers(), &mut block);
    block
}

/// Returns trailers as a header block.
pub(super) fn trailers(fields: &HeaderMap) -> BytesMut {
    let mut block = BytesMut::new();
    put_fields(fields, &mut block);
    block
}

fn put_fields(fields: &HeaderMap, block: &mut BytesMut) {
    for (name, value) in fields {
        encode_field(name.as_str().as_bytes(), value.as_bytes(), block);
    }
}

/// Parses a `grpc-timeout`: up to eight digits and a unit. Anything else is no deadline.
pub(super) fn timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    #[test]
    fn a_body_is_one_message() {
        let only = |body: &[u8]| only(body, 3).map(<[u8]>::to_vec).map_err(|status| status.code());
        assert_eq!(only(b"\0\0\0\0\x03abc"), Ok(b"abc".to_vec()));
        assert_eq!(only(b"\0\0\0\0\0"), Ok(Vec::new()));
        for (body, code) in [
            (&b""[..], Code::Internal),
            (b"\0\0\0\0", Code::Internal),
            (b"\0\0\0\0\x03ab", Code::Internal),
            (b"\0\0\0\0\x01ab", Code::Internal),
            (b"\x01\0\0\0\x01a", Code::Unimplemented),
            (b"\0\0\0\0\x04abcd", Code::OutOfRange),
            (b"\0\xff\xff\xff\xff", Code::OutOfRange),
        ] {
            assert_eq!(only(body), Err(code), "{body:?}");
        }
    }

    #[test]
    fn messages_end_however_they_are_cut() {
        let body = b"\0\0\0\0\x03abc\0\0\0\0\0\0\0\0\0\x01d\0\0\0\0\x02e";
        for size in 1..body.len() {
            let mut ends = MessageEnds::default();
            let mut expected = [8, 13, 19].iter().peekable();
            for (at, part) in body.chunks(size).enumerate() {
                let read = at * size + part.len();
                let mut has_ended = false;
                while expected.next_if(|end| **end <= read).is_some() {
                    has_ended = true;
                }
                assert_eq!(ends.push(part), has_ended, "{size}, {read}");
            }
        }
    }

    #[test]
    fn deadlines_are_digits_and_a_unit() {
        for (value, expected) in [
            ("20m", Some(Duration::from_millis(20))),
            ("1H", Some(Duration::from_secs(3600))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("0S", Some(Duration::ZERO)),
            ("7u", Some(Duration::from_micros(7))),
            ("7n", Some(Duration::from_nanos(7))),
            ("2M", Some(Duration::from_secs(120))),
            ("", None),
            ("m", None),
            ("20", None),
            ("20s", None),
            ("123456789m", None),
            ("-1m", None),
        ] {
            assert_eq!(timeout(value.as_bytes()), expected, "{value}");
        }
    }

    /// The blocks that are constants say what the encoder would.
    #[test]
    fn constant_blocks_are_what_they_say() {
        let mut block = BytesMut::from(&b"\x88"[..]);
        encode_field(b"content-type", b"application/grpc", &mut block);
        assert_eq!(block, RESPONSE_HEAD);
        let mut block = BytesMut::new();
        encode_field(b"grpc-status", b"0", &mut block);
        assert_eq!(block, OK_TRAILERS);
    }
}
