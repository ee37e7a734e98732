//! Frames of a client other than header blocks: bodies, priorities, resets, settings, pings and windows.

use super::{CONNECTION_WINDOW, Connection, Event, MAX_WINDOW, PROTOCOL, SHUTDOWN_PING, Violation};
use super::{dependency, unpadded};
use crate::h2::frame::{self, FrameHeader, MAX_PAYLOAD, Reason, put_header};
use crate::h2::hpack::TABLE_SIZE;
use crate::h2::output::TableUpdate;

impl<T> Connection<T> {
    pub(super) fn on_data<'a>(
        &mut self,
        header: FrameHeader,
        payload: &'a [u8],
    ) -> Result<Option<Event<'a, T>>, Violation> {
        let id = self.opened(header.stream)?;
        // Padding counts too.
        let length = header.length as u32;
        let Some(left) = self.receive_window.checked_sub(length) else {
            return Err((Reason::FlowControl, "more data than the window of the connection"));
        };
        (self.receive_window, self.received) = (left, self.received + length);
        if self.received >= CONNECTION_WINDOW / 2 {
            let returned = std::mem::take(&mut self.received);
            self.receive_window += returned;
            self.out.put_window_update(0, returned);
        }
        let bytes = unpadded(header, payload)?;
        let Some(stream) = self.streams.get_mut(&id) else {
            if !self.reset.contains(&id) {
                self.out.put_reset(id, Reason::StreamClosed);
            }
            return Ok(None);
        };
        if stream.is_received {
            return Ok(self.end_stream(id, Reason::StreamClosed));
        }
        let Some(left) = stream.receive_window.checked_sub(length) else {
            return Ok(self.end_stream(id, Reason::FlowControl));
        };
        stream.receive_window = left;
        let is_end = header.has(frame::END_STREAM);
        let is_right = match &mut stream.content_left {
            None => true,
            Some(left) => match left.checked_sub(bytes.len() as u64) {
                Some(after) => {
                    *left = after;
                    after == 0 || !is_end
                }
                None => false,
            },
        };
        if !is_right {
            return Ok(self.end_stream(id, PROTOCOL));
        }
        stream.is_received = is_end;
        // What was padding is not seen by anyone who could release it.
        self.release(id, header.length - bytes.len());
        Ok(Some(Event::Data { stream: id, bytes, is_end }))
    }

    pub(super) fn on_priority(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<Option<Event<'static, T>>, Violation> {
        if header.stream == 0 {
            return Err((PROTOCOL, "PRIORITY of the connection"));
        }
        let reason = match payload.try_into() {
            Err(_) => Reason::FrameSize,
            Ok(priority) if dependency(priority) == header.stream => PROTOCOL,
            // Priorities are deprecated: responses are short and sent in their order.
            Ok(_) => return Ok(None),
        };
        // A stream that was not opened cannot be reset.
        if header.stream > self.last || header.stream.is_multiple_of(2) {
            return Err((reason, "an invalid PRIORITY"));
        }
        Ok(self.end_stream(header.stream, reason))
    }

    pub(super) fn on_reset(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<Option<Event<'static, T>>, Violation> {
        let id = self.opened(header.stream)?;
        if payload.len() != 4 {
            return Err((Reason::FrameSize, "RST_STREAM has four bytes"));
        }
        let stream = self.remove(id);
        self.resets += u64::from(stream.is_some());
        Ok(stream.map(|stream| Event::Reset { stream: id, data: stream.data }))
    }

    pub(super) fn on_settings(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<Option<Event<'static, T>>, Violation> {
        if header.stream != 0 {
            return Err((PROTOCOL, "SETTINGS of a stream"));
        }
        let (settings, rest) = payload.as_chunks::<6>();
        if !rest.is_empty() || header.has(frame::ACK) && !payload.is_empty() {
            return Err((Reason::FrameSize, "SETTINGS have a wrong length"));
        }
        if header.has(frame::ACK) {
            return Ok(None);
        }
        for [n0, n1, v0, v1, v2, v3] in settings {
            let value = u32::from_be_bytes([*v0, *v1, *v2, *v3]);
            match u16::from_be_bytes([*n0, *n1]) {
                frame::INITIAL_WINDOW_SIZE if i64::from(value) > MAX_WINDOW => {
                    return Err((Reason::FlowControl, "the initial window is too large"));
                }
                frame::INITIAL_WINDOW_SIZE => {
                    self.initial_send_window = value.into();
                    self.may_send = true;
                }
                frame::MAX_FRAME_SIZE if !(MAX_PAYLOAD as u32..1 << 24).contains(&value) => {
                    return Err((PROTOCOL, "the maximum frame size is invalid"));
                }
                frame::ENABLE_PUSH if value > 1 => return Err((PROTOCOL, "ENABLE_PUSH is 0 or 1")),
                frame::HEADER_TABLE_SIZE
                    if (value as usize) < TABLE_SIZE && self.out.table_update == TableUpdate::NotDue =>
                {
                    self.out.table_update = TableUpdate::Due;
                }
                // No frame of ours is larger than any peer allows.
                _ => {}
            }
        }
        self.has_settings = true;
        put_header(&mut self.out.bytes, 0, frame::SETTINGS, frame::ACK, 0);
        Ok(None)
    }

    pub(super) fn on_ping(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<Option<Event<'static, T>>, Violation> {
        if header.stream != 0 {
            return Err((PROTOCOL, "PING on a stream"));
        }
        let Ok(payload) = <[u8; 8]>::try_from(payload) else {
            return Err((Reason::FrameSize, "PING has eight bytes"));
        };
        if !header.has(frame::ACK) {
            self.out.put_ping(frame::ACK, payload);
        } else if payload == SHUTDOWN_PING {
            self.finish_shutdown();
        } else {
            self.awaits_pong = false;
        }
        Ok(None)
    }

    pub(super) fn on_window_update(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<Option<Event<'static, T>>, Violation> {
        let Ok(payload) = <[u8; 4]>::try_from(payload) else {
            return Err((Reason::FrameSize, "WINDOW_UPDATE has four bytes"));
        };
        let more = i64::from(u32::from_be_bytes(payload)) & MAX_WINDOW;
        self.may_send = true;
        if header.stream == 0 {
            self.send_window += more;
            if more == 0 {
                return Err((PROTOCOL, "WINDOW_UPDATE of 0"));
            }
            if self.send_window > MAX_WINDOW {
                return Err((Reason::FlowControl, "the window of the connection is too large"));
            }
            return Ok(None);
        }
        let id = self.opened(header.stream)?;
        // One for a stream that has just ended is usual.
        let Some(stream) = self.streams.get_mut(&id) else { return Ok(None) };
        stream.send_credit += more;
        if more == 0 {
            return Ok(self.end_stream(id, PROTOCOL));
        }
        if stream.send_credit + self.initial_send_window > MAX_WINDOW {
            return Ok(self.end_stream(id, Reason::FlowControl));
        }
        Ok(None)
    }

    /// Returns a stream that the client has opened before.
    pub(super) fn opened(&self, id: u32) -> Result<u32, Violation> {
        if id == 0 || id > self.last || id.is_multiple_of(2) {
            return Err((PROTOCOL, "a frame of a stream that was not opened"));
        }
        Ok(id)
    }
}
