//! Frame headers of HTTP/2 (RFC 9113, section 4), with the types, flags and error codes that they carry.

use bytes::{BufMut, BytesMut};

/// Length of a frame's header.
pub(super) const HEADER: usize = 9;
/// Maximum payload of a frame, both of clients and of ours: the one that every peer accepts.
pub(super) const MAX_PAYLOAD: usize = 16_384;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const PRIORITY: u8 = 2;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PUSH_PROMISE: u8 = 5;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const ACK: u8 = 1;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;
pub(super) const HAS_PRIORITY: u8 = 32;

pub(super) const HEADER_TABLE_SIZE: u16 = 1;
pub(super) const ENABLE_PUSH: u16 = 2;
pub(super) const MAX_CONCURRENT_STREAMS: u16 = 3;
pub(super) const INITIAL_WINDOW_SIZE: u16 = 4;
pub(super) const MAX_FRAME_SIZE: u16 = 5;
pub(super) const MAX_HEADER_LIST_SIZE: u16 = 6;

/// Why a stream or a connection ends (RFC 9113, section 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// It has ended as it should.
    None = 0,
    /// The client broke a rule of the protocol.
    Protocol = 1,
    /// The server failed.
    Internal = 2,
    /// The client sent more than its window.
    FlowControl = 3,
    /// The client sent on a stream that it had ended.
    StreamClosed = 5,
    /// A frame has a wrong length.
    FrameSize = 6,
    /// The request was not begun; the client may repeat it.
    RefusedStream = 7,
    /// The response is not wanted any more.
    Cancel = 8,
    /// A header block cannot be decompressed.
    Compression = 9,
    /// The client causes too much work.
    EnhanceYourCalm = 11,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameHeader {
    pub(super) length: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl FrameHeader {
    /// Parses the header at the beginning of `input`, if all of it is there.
    pub(super) fn parse(input: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, s0, s1, s2, s3] = *input.first_chunk::<HEADER>()?;
        Some(Self {
            length: u32::from_be_bytes([0, a, b, c]) as usize,
            kind,
            flags,
            stream: u32::from_be_bytes([s0, s1, s2, s3]) & (u32::MAX >> 1),
        })
    }

    pub(super) const fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Appends the header of a frame.
pub(super) fn put_header(out: &mut BytesMut, length: usize, kind: u8, flags: u8, stream: u32) {
    out.put_uint(length as u64, 3);
    out.put_u8(kind);
    out.put_u8(flags);
    out.put_u32(stream);
}
