//! The frames that a server sends.

use super::frame::{self, MAX_PAYLOAD, Reason, put_header};
use super::hpack::encode_field;
use bytes::{BufMut, BytesMut};

/// Whether the client knows that our header blocks use no table. A decoder that allows a smaller one than the default must be
/// told before the next field (RFC 7541, section 4.2), and nghttp2 and QUICHE end the connection if it is not. Told once, it
/// knows that the size is 0, whatever it allows later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableUpdate {
    NotDue,
    Due,
    Sent,
}

/// What is to be sent.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) bytes: BytesMut,
    pub(super) table_update: TableUpdate,
}

impl Output {
    /// Creates an output with the settings of a server, and a larger window than a connection has at first.
    pub(super) fn new(settings: &[(u16, u32)], more_window: u32) -> Self {
        let mut bytes = BytesMut::with_capacity(128);
        put_header(&mut bytes, 6 * settings.len(), frame::SETTINGS, 0, 0);
        for (name, value) in settings {
            bytes.put_u16(*name);
            bytes.put_u32(*value);
        }
        let mut out = Self { bytes, table_update: TableUpdate::NotDue };
        out.put_window_update(0, more_window);
        out
    }

    pub(super) fn put_ping(&mut self, flags: u8, payload: [u8; 8]) {
        put_header(&mut self.bytes, payload.len(), frame::PING, flags, 0);
        self.bytes.put_slice(&payload);
    }

    pub(super) fn put_reset(&mut self, stream: u32, reason: Reason) {
        put_header(&mut self.bytes, 4, frame::RST_STREAM, 0, stream);
        self.bytes.put_u32(reason as u32);
    }

    pub(super) fn put_window_update(&mut self, stream: u32, bytes: u32) {
        put_header(&mut self.bytes, 4, frame::WINDOW_UPDATE, 0, stream);
        self.bytes.put_u32(bytes);
    }

    /// Sends a response of nothing but a status.
    pub(super) fn put_status(&mut self, stream: u32, status: &[u8]) {
        let mut block = BytesMut::new();
        encode_field(b":status", status, &mut block);
        self.put_block(stream, &block, frame::END_STREAM);
    }

    /// Sends a header block, in several frames if it is long.
    pub(super) fn put_block(&mut self, stream: u32, block: &[u8], flags: u8) {
        if self.table_update == TableUpdate::Due {
            self.table_update = TableUpdate::Sent;
            // The size of the table is 0 from now on.
            return self.put_block(stream, &[&[0x20], block].concat(), flags);
        }
        let mut parts = block.chunks(MAX_PAYLOAD);
        let first = parts.next().unwrap_or_default();
        let end_if = |is_last| if is_last { frame::END_HEADERS } else { 0 };
        put_header(&mut self.bytes, first.len(), frame::HEADERS, flags | end_if(parts.len() == 0), stream);
        self.bytes.put_slice(first);
        while let Some(part) = parts.next() {
            put_header(&mut self.bytes, part.len(), frame::CONTINUATION, end_if(parts.len() == 0), stream);
            self.bytes.put_slice(part);
        }
    }

    pub(super) fn go_away(&mut self, last: u32, reason: Reason, text: &str) {
        put_header(&mut self.bytes, 8 + text.len(), frame::GOAWAY, 0, 0);
        self.bytes.put_u32(last);
        self.bytes.put_u32(reason as u32);
        self.bytes.put_slice(text.as_bytes());
    }
}
