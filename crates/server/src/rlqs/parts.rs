//! Reads messages of any size in bounded memory: cuts each one between its buckets into messages of at most
//! [`MAX_PART`] bytes.
//!
//! Envoy reports all buckets that it has in one message, and again after each reconnect, so a message that is too large
//! once is too large for ever, and its callers decide how large it becomes. In protobuf a list may be cut anywhere: the
//! parts mean what the whole does. Rejected: a larger maximum, because a stream of the largest buckets would need half a
//! gigabyte for each message.

use super::stats::RlqsStats;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body::{Body, Frame};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tonic::Status;

/// Maximum size of a part in bytes: almost twice that of the largest valid bucket.
pub(super) const MAX_PART: usize = 256 << 10;
/// Compression flag and length, before each message.
const HEADER: usize = 5;
/// Numbers of the fields of `RateLimitQuotaUsageReports`.
const DOMAIN: u64 = 1;
const USAGES: u64 = 2;

/// Where the reader is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before a message.
    Header,
    /// Between two fields of a message that has so many bytes left.
    Fields(usize),
    /// In a field that is left out, with so many bytes left of it and of its message.
    Skip { field: usize, message: usize },
    /// In a compressed message, which is left to tonic to reject.
    Verbatim,
}

/// Cuts messages.
#[derive(Debug)]
struct Parts {
    state: State,
    unread: BytesMut,
    /// Fields of the next part.
    part: BytesMut,
    /// Whether the current message has been cut.
    is_cut: bool,
    stats: RlqsStats,
}

impl Parts {
    fn new(stats: RlqsStats) -> Self {
        let (unread, part) = (BytesMut::new(), BytesMut::new());
        Self { state: State::Header, unread, part, is_cut: false, stats }
    }

    /// Takes what has arrived, and returns the parts that are complete.
    fn push(&mut self, data: &[u8]) -> Result<Bytes, Status> {
        let mut out = BytesMut::new();
        self.unread.extend_from_slice(data);
        while self.step(&mut out)? {}
        Ok(out.freeze())
    }

    /// Reads one header, field or part of one. Returns whether there may be more to read.
    fn step(&mut self, out: &mut BytesMut) -> Result<bool, Status> {
        match self.state {
            State::Header if self.unread.len() < HEADER => return Ok(false),
            State::Header if self.unread[0] != 0 => self.state = State::Verbatim,
            State::Header => {
                self.unread.advance(1);
                self.state = State::Fields(self.unread.get_u32() as usize);
            }
            State::Fields(0) => {
                if !self.part.is_empty() || !self.is_cut {
                    self.flush(out);
                }
                (self.state, self.is_cut) = (State::Header, false);
            }
            State::Fields(left) => return self.field(left, out),
            State::Skip { field: 0, message } => self.state = State::Fields(message),
            State::Skip { field, message } => {
                let skipped = self.unread.len().min(field);
                self.unread.advance(skipped);
                self.state = State::Skip { field: field - skipped, message: message - skipped };
                return Ok(skipped > 0);
            }
            State::Verbatim => {
                out.unsplit(self.unread.split());
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a field of a message that has `left` bytes left.
    fn field(&mut self, left: usize, out: &mut BytesMut) -> Result<bool, Status> {
        let read = &self.unread[..self.unread.len().min(left)];
        let Some(Field { number, size }) = Field::read(read)? else {
            return if read.len() == left { Err(malformed()) } else { Ok(false) };
        };
        if size > left {
            return Err(malformed());
        }
        let is_known = number == DOMAIN || number == USAGES;
        if !is_known || size > MAX_PART {
            if number == DOMAIN {
                return Err(Status::invalid_argument("domain: too long"));
            }
            if number == USAGES {
                self.stats.reject_invalid(1);
            }
            self.state = State::Skip { field: size, message: left };
            return Ok(true);
        }
        if read.len() < size {
            return Ok(false);
        }
        if self.part.len() + size > MAX_PART {
            self.flush(out);
            self.is_cut = true;
        }
        self.part.extend_from_slice(&self.unread[..size]);
        self.unread.advance(size);
        self.state = State::Fields(left - size);
        Ok(true)
    }

    /// Writes the part as a message.
    fn flush(&mut self, out: &mut BytesMut) {
        out.reserve(HEADER + self.part.len());
        out.put_u8(0);
        // At most `MAX_PART`.
        out.put_u32(u32::try_from(self.part.len()).unwrap_or(u32::MAX));
        out.put_slice(&self.part);
        self.part.clear();
    }
}

fn malformed() -> Status {
    Status::invalid_argument("malformed message")
}

/// A field, with its size in bytes, tag included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    number: u64,
    size: usize,
}

impl Field {
    /// Reads the beginning of a field. `None` if that is not complete.
    fn read(bytes: &[u8]) -> Result<Option<Self>, Status> {
        let Some((tag, at)) = varint(bytes)? else { return Ok(None) };
        let content = match tag & 7 {
            0 => varint(&bytes[at..])?.map(|(_, size)| size),
            1 => Some(8),
            2 => match varint(&bytes[at..])? {
                Some((length, size)) => {
                    let length = usize::try_from(length).map_err(|_| malformed())?;
                    Some(length.checked_add(size).ok_or_else(malformed)?)
                }
                None => None,
            },
            5 => Some(4),
            // Groups, which no message of today has.
            _ => return Err(malformed()),
        };
        let Some(content) = content else { return Ok(None) };
        let size = content.checked_add(at).ok_or_else(malformed)?;
        Ok(Some(Self { number: tag >> 3, size }))
    }
}

/// Returns a number and its size in bytes. `None` if it is not complete.
fn varint(bytes: &[u8]) -> Result<Option<(u64, usize)>, Status> {
    let (mut value, mut shift) = (0_u64, 0);
    for (size, byte) in (1..=10).zip(bytes) {
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(Some((value, size)));
        }
        shift += 7;
    }
    if bytes.len() < 10 { Ok(None) } else { Err(malformed()) }
}

/// The body of a stream, cut into parts.
#[derive(Debug)]
pub(super) struct PartedBody {
    body: tonic::body::Body,
    parts: Parts,
}

impl PartedBody {
    pub(super) fn new(body: tonic::body::Body, stats: RlqsStats) -> Self {
        Self { body, parts: Parts::new(stats) }
    }
}

impl Body for PartedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) else {
                return Poll::Ready(None);
            };
            let data = match frame.map(Frame::into_data) {
                Ok(Ok(data)) => data,
                Ok(Err(other)) => return Poll::Ready(Some(Ok(other))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            match self.parts.push(&data) {
                Ok(parts) if parts.is_empty() => {}
                parts => return Poll::Ready(Some(parts.map(Frame::data))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_usage_reports::BucketQuotaUsage;
    use crate::rls::proto::envoy::service::rate_limit_quota::v3::{BucketId, RateLimitQuotaUsageReports};
    use proptest::prelude::*;
    use prost::Message;

    fn usage(size: usize) -> BucketQuotaUsage {
        let bucket = [("tenant".to_owned(), "v".repeat(size))].into_iter().collect();
        BucketQuotaUsage {
            bucket_id: Some(BucketId { bucket }),
            num_requests_allowed: 7,
            ..BucketQuotaUsage::default()
        }
    }

    fn reports(sizes: &[usize]) -> RateLimitQuotaUsageReports {
        let bucket_quota_usages = sizes.iter().map(|size| usage(*size)).collect();
        RateLimitQuotaUsageReports { domain: "edge".to_owned(), bucket_quota_usages }
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.put_u32(u32::try_from(message.len()).expect("short"));
        bytes.extend(message);
        bytes
    }

    /// Sends the bytes in pieces, and returns the messages that come out, with the most bytes that were kept.
    fn cut(
        bytes: &[u8],
        piece: usize,
        stats: &RlqsStats,
    ) -> Result<(Vec<RateLimitQuotaUsageReports>, usize), Status> {
        let (mut parts, mut out, mut most) = (Parts::new(stats.clone()), Vec::new(), 0);
        for piece in bytes.chunks(piece) {
            out.extend(parts.push(piece)?);
            most = most.max(parts.unread.len() + parts.part.len());
        }
        let (mut out, mut messages) = (Bytes::from(out), Vec::new());
        while out.has_remaining() {
            assert_eq!(out.get_u8(), 0);
            let length = out.get_u32() as usize;
            assert!(length <= MAX_PART);
            messages.push(RateLimitQuotaUsageReports::decode(out.split_to(length)).expect("a message"));
        }
        Ok((messages, most))
    }

    proptest! {
        /// No bucket is lost, doubled or moved by a cut, wherever packets end.
        #[test]
        fn parts_mean_what_the_whole_does(
            sizes in prop::collection::vec(prop_oneof![0_usize..200, 0_usize..70_000], 0..30),
            piece in 1_usize..40_000,
        ) {
            let (message, stats) = (reports(&sizes), RlqsStats::default());
            let mut bytes = framed(&message.encode_to_vec());
            bytes.extend(framed(&[]));
            let (messages, most) = cut(&bytes, piece, &stats).expect("parts");
            prop_assert!(most <= 2 * MAX_PART + piece);
            prop_assert_eq!(messages.last(), Some(&RateLimitQuotaUsageReports::default()));
            let usages: Vec<_> = messages.iter().flat_map(|part| part.bucket_quota_usages.clone()).collect();
            prop_assert_eq!(&messages[0].domain, "edge");
            prop_assert!(usages == message.bucket_quota_usages);
        }

        /// Strangers send what they like.
        #[test]
        fn any_bytes_are_cut_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50) {
            let mut parts = Parts::new(RlqsStats::default());
            for piece in framed(&bytes).chunks(piece) {
                if parts.push(piece).is_err() {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_bucket_that_fits_no_part_is_left_out_and_counted() {
        let stats = RlqsStats::default();
        let bytes = framed(&reports(&[1, 3 * MAX_PART, 2]).encode_to_vec());
        let (messages, most) = cut(&bytes, 16_384, &stats).expect("parts");
        assert_eq!(messages, [reports(&[1, 2])]);
        assert_eq!(stats.rejected(), (0, 1));
        assert!(most < 2 * MAX_PART, "{most}");
    }

    /// A field that a newer version of the protocol has is not a reason to end a stream.
    #[test]
    fn unknown_fields_are_left_out() {
        let mut message = b"\x18\x96\x01\x21\0\0\0\0\0\0\0\0\x2a\x03abc\x35\0\0\0\0".to_vec();
        message.extend(reports(&[3]).encode_to_vec());
        let (messages, _) = cut(&framed(&message), 7, &RlqsStats::default()).expect("parts");
        assert_eq!(messages, [reports(&[3])]);
    }

    #[test]
    fn malformed_messages_are_rejected() {
        for message in [
            &b"\x12\x05\x0a"[..],
            b"\x13",
            b"\x12",
            &[0xff; 11],
            b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        ] {
            let error = cut(&framed(message), 3, &RlqsStats::default()).expect_err("malformed");
            assert_eq!(error.code(), tonic::Code::InvalidArgument, "{message:?}");
        }
    }
}
