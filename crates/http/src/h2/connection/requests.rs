//! Header blocks of a client: its requests and their trailers.

use super::{Connection, Event, PROTOCOL, STREAM_WINDOW, Shutdown, Violation, dependency, unpadded};
use crate::h2::frame::{self, FrameHeader, Reason};
use crate::h2::head::FLOOD;
use crate::h2::hpack::Undecodable;
use crate::h2::stream::Stream;

/// Maximum number of frames that a header block is cut into.
const MAX_BLOCK_FRAMES: u32 = 64;

/// A header block of which more frames must follow.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) stream: u32,
    is_end: bool,
    bytes: Vec<u8>,
    frames: u32,
}

impl<T> Connection<T> {
    pub(super) fn on_headers(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
        data: impl FnOnce() -> T,
    ) -> Result<Option<Event<'static, T>>, Violation> {
        if header.stream.is_multiple_of(2) {
            return Err((PROTOCOL, "a request on a stream that is not a client's"));
        }
        let mut bytes = unpadded(header, payload)?;
        let mut depends_on_itself = false;
        if header.has(frame::HAS_PRIORITY) {
            let Some((priority, rest)) = bytes.split_first_chunk::<5>() else {
                return Err((Reason::FrameSize, "HEADERS are too short"));
            };
            depends_on_itself = dependency(priority) == header.stream;
            bytes = rest;
        }
        let is_end = header.has(frame::END_STREAM);
        if !header.has(frame::END_HEADERS) {
            self.block = Some(Block { stream: header.stream, is_end, bytes: bytes.to_vec(), frames: 1 });
            return Ok(None);
        }
        let event = self.on_block(header.stream, is_end, bytes, data)?;
        if depends_on_itself && self.streams.contains_key(&header.stream) {
            return Ok(self.end_stream(header.stream, PROTOCOL));
        }
        Ok(event)
    }

    pub(super) fn on_continuation(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
        data: impl FnOnce() -> T,
    ) -> Result<Option<Event<'static, T>>, Violation> {
        let Some(mut block) = self.block.take() else {
            return Err((PROTOCOL, "CONTINUATION of nothing"));
        };
        block.frames += 1;
        // A longer one would have to be decompressed to keep the connection's state.
        let max = FLOOD * self.settings.max_head;
        if block.bytes.len() + payload.len() > max || block.frames > MAX_BLOCK_FRAMES {
            return Err((Reason::EnhanceYourCalm, "the head of a request is too large"));
        }
        block.bytes.extend_from_slice(payload);
        if !header.has(frame::END_HEADERS) {
            self.block = Some(block);
            return Ok(None);
        }
        self.on_block(block.stream, block.is_end, &block.bytes, data)
    }

    /// Decodes a complete header block, which is a request or the trailers of one.
    fn on_block(
        &mut self,
        id: u32,
        is_end: bool,
        bytes: &[u8],
        data: impl FnOnce() -> T,
    ) -> Result<Option<Event<'static, T>>, Violation> {
        self.head.clear();
        self.decoder.decode(bytes, &mut self.head).map_err(|error| match error {
            Undecodable::Malformed => (Reason::Compression, "a header block cannot be decompressed"),
            Undecodable::Flood => (Reason::EnhanceYourCalm, "a header block takes too much room"),
        })?;
        if id <= self.last {
            return self.on_trailers(id, is_end);
        }
        self.last = id;
        if matches!(self.shutdown, Shutdown::After(_))
            || self.streams.len() >= self.settings.max_streams as usize
            || self.is_queue_full()
        {
            self.forget(id, Reason::RefusedStream);
            return Ok(None);
        }
        if self.head.is_too_large() {
            self.out.put_status(id, b"431");
            if !is_end {
                self.forget(id, Reason::None);
            }
            return Ok(None);
        }
        let length = self.head.content_length();
        if !self.head.is_request() || is_end && length.is_some_and(|length| length > 0) {
            self.forget(id, PROTOCOL);
            return Ok(None);
        }
        let mut stream = Stream::new(data(), STREAM_WINDOW, length);
        stream.is_received = is_end;
        self.streams.insert(id, stream);
        Ok(Some(Event::Request { stream: id, is_end }))
    }

    fn on_trailers(&mut self, id: u32, is_end: bool) -> Result<Option<Event<'static, T>>, Violation> {
        let Some(stream) = self.streams.get_mut(&id) else {
            if self.reset.contains(&id) {
                return Ok(None);
            }
            return Err((Reason::StreamClosed, "HEADERS on a closed stream"));
        };
        if stream.is_received {
            return Ok(self.end_stream(id, Reason::StreamClosed));
        }
        let is_whole = stream.content_left.is_none_or(|left| left == 0);
        if !is_end || !is_whole || !self.head.is_trailers() || self.head.is_too_large() {
            return Ok(self.end_stream(id, PROTOCOL));
        }
        stream.is_received = true;
        Ok(Some(Event::End { stream: id }))
    }
}
