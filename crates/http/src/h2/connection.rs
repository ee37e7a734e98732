//! The state of an HTTP/2 connection, for a server. [`Connection::receive`] reads one frame and returns what it means;
//! the other functions append what is sent to the output, or keep it until the client's windows allow it.
//!
//! The window of the connection is given back as bytes arrive, and that of a stream when they are released, so that a body
//! that the server does not read delays no other.

use super::PREFACE;
use super::frame::{self, FrameHeader, MAX_PAYLOAD, Reason, put_header};
use super::head::Head;
use super::hpack::{Decoder, TABLE_SIZE, Undecodable};
use super::stream::{End, Queue, Stream};
use bytes::{BufMut, BytesMut};
use foldhash::fast::RandomState;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

/// The window of a new stream, which clients assume before they read any settings.
const STREAM_WINDOW: u32 = 65_535;
/// The window of the connection: of all streams that are received at a time.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// The largest window that a peer may allow.
const MAX_WINDOW: i64 = (1 << 31) - 1;
/// The stream that every stream precedes.
const LAST_STREAM: u32 = u32::MAX >> 1;
/// What is sent with the ping that follows the announcement of a shutdown.
const SHUTDOWN_PING: [u8; 8] = *b"shutdown";
/// What is sent with other pings.
const KEEP_ALIVE_PING: [u8; 8] = *b"are you?";
/// Maximum length of a compressed header block. A longer one would have to be decompressed to keep the connection's state.
const MAX_BLOCK: usize = 64 << 10;
/// Maximum number of frames that a header block is cut into.
const MAX_BLOCK_FRAMES: u32 = 64;
/// How many streams that were reset are remembered: their clients may have sent more before they learn of it.
const REMEMBERED: usize = 256;

/// What a connection allows.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Maximum number of streams that are open at a time; more are refused.
    pub max_streams: u32,
    /// Maximum size of a request's head: of each field its name, its value and 32 bytes.
    pub max_head: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_streams: 1024, max_head: 16 << 10 }
    }
}

/// What was read from the beginning of the input.
#[derive(Debug)]
pub struct Step<'a, T> {
    /// How many bytes were read; 0 if the next frame is not complete.
    pub consumed: usize,
    /// What they mean, if it concerns a request.
    pub event: Option<Event<'a, T>>,
}

/// Something that happened to a request.
#[derive(Debug)]
pub enum Event<'a, T> {
    /// A request begins. Its head is [`Connection::head`] until the next event.
    Request {
        /// Its stream.
        stream: u32,
        /// It has no body.
        is_end: bool,
    },
    /// A part of a request's body.
    Data {
        /// Its stream.
        stream: u32,
        /// The bytes.
        bytes: &'a [u8],
        /// They are the last ones.
        is_end: bool,
    },
    /// A request's body ended with trailers, which are ignored.
    End {
        /// Its stream.
        stream: u32,
    },
    /// A request is over: its client does not want it any more, or broke a rule.
    Reset {
        /// Its stream.
        stream: u32,
        /// The data of the stream.
        data: T,
    },
}

/// How far a shutdown has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shutdown {
    No,
    /// GOAWAY and a ping were sent: what arrives before the ping's answer was sent without knowledge of them.
    Announced,
    /// Later streams than this one are refused.
    After(u32),
}

/// Whether the client knows that our header blocks use no table. A decoder that allows a smaller one than the default must be
/// told before the next field (RFC 7541, section 4.2), and nghttp2 and QUICHE end the connection if it is not. Told once, it
/// knows that the size is 0, whatever it allows later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableUpdate {
    NotDue,
    Due,
    Sent,
}

/// A header block of which more frames must follow.
#[derive(Debug)]
struct Block {
    stream: u32,
    is_end: bool,
    bytes: Vec<u8>,
    frames: u32,
}

/// A rule that the client broke, for the whole connection.
type Violation = (Reason, &'static str);

const PROTOCOL: Reason = Reason::Protocol;

/// The state of a connection, with data of type `T` for each stream.
#[derive(Debug)]
pub struct Connection<T> {
    settings: Settings,
    out: BytesMut,
    decoder: Decoder,
    head: Head,
    streams: HashMap<u32, Stream<T>, RandomState>,
    /// The client's preface and its first settings were read.
    has_preface: bool,
    has_settings: bool,
    /// The last stream that the client opened.
    last: u32,
    block: Option<Block>,
    /// What may be sent on the connection, and what a new stream may send.
    send_window: i64,
    initial_send_window: i64,
    /// What the client may still send on the connection, and what was received and not returned to it.
    receive_window: u32,
    received: u32,
    /// Streams with a queue, which wait for a window.
    waiting: VecDeque<u32>,
    /// A window has grown since what waits was sent.
    may_send: bool,
    /// Streams that were reset by us, the oldest first.
    reset: VecDeque<u32>,
    /// How many requests were reset before they were answered.
    resets: u64,
    shutdown: Shutdown,
    /// The client ends the connection with its last request.
    is_client_leaving: bool,
    awaits_pong: bool,
    table_update: TableUpdate,
}

impl<T> Connection<T> {
    /// Creates the state of a new connection, whose settings are in its output.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let mut out = BytesMut::with_capacity(128);
        let ours = [
            (frame::MAX_CONCURRENT_STREAMS, settings.max_streams),
            (frame::MAX_HEADER_LIST_SIZE, u32::try_from(settings.max_head).unwrap_or(u32::MAX)),
        ];
        put_header(&mut out, 6 * ours.len(), frame::SETTINGS, 0, 0);
        for (name, value) in ours {
            out.put_u16(name);
            out.put_u32(value);
        }
        put_header(&mut out, 4, frame::WINDOW_UPDATE, 0, 0);
        out.put_u32(CONNECTION_WINDOW - STREAM_WINDOW);
        Self {
            settings,
            out,
            decoder: Decoder::default(),
            head: Head::new(settings.max_head),
            streams: HashMap::default(),
            has_preface: false,
            has_settings: false,
            last: 0,
            block: None,
            send_window: i64::from(STREAM_WINDOW),
            initial_send_window: i64::from(STREAM_WINDOW),
            receive_window: CONNECTION_WINDOW,
            received: 0,
            waiting: VecDeque::new(),
            may_send: false,
            reset: VecDeque::new(),
            resets: 0,
            shutdown: Shutdown::No,
            is_client_leaving: false,
            awaits_pong: false,
            table_update: TableUpdate::NotDue,
        }
    }

    /// Returns the bytes to send. Who sends them takes them away.
    pub const fn unsent(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// Returns the head of the request that the last event began.
    #[must_use]
    pub const fn head(&self) -> &Head {
        &self.head
    }

    /// Returns the data of an open stream.
    pub fn data(&mut self, stream: u32) -> Option<&mut T> {
        self.streams.get_mut(&stream).map(|stream| &mut stream.data)
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Frees memory that earlier requests have needed.
    pub fn shrink(&mut self) {
        self.streams.shrink_to_fit();
        self.waiting.shrink_to_fit();
        self.head.shrink();
        self.decoder.shrink();
    }

    /// Returns the data of all open streams.
    pub fn each_data(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.streams.iter_mut().map(|(stream, state)| (*stream, &mut state.data))
    }

    /// Returns the number of open streams.
    #[must_use]
    pub fn open(&self) -> usize {
        self.streams.len()
    }

    /// Returns whether the client has opened any stream.
    #[must_use]
    pub const fn is_used(&self) -> bool {
        self.last != 0
    }

    /// Returns how many requests were reset before they were answered, since the connection began.
    #[must_use]
    pub const fn resets(&self) -> u64 {
        self.resets
    }

    /// Returns whether the connection has nothing more to do, once its output is sent.
    #[must_use]
    pub fn is_done(&self) -> bool {
        (matches!(self.shutdown, Shutdown::After(_)) || self.is_client_leaving) && self.streams.is_empty()
    }

    /// Reads one frame from the beginning of `input`. `data` makes the data of a new stream.
    ///
    /// # Errors
    /// The client broke a rule of the connection, which the output says. Nothing more is to be read.
    pub fn receive<'a>(
        &mut self,
        input: &'a [u8],
        data: impl FnOnce() -> T,
    ) -> Result<Step<'a, T>, &'static str> {
        self.step(input, data).map_err(|(reason, text)| {
            // What was said once to be the last stream stays it.
            let last = if let Shutdown::After(last) = self.shutdown { last } else { self.last };
            self.go_away(last, reason, text);
            text
        })
    }

    fn step<'a>(&mut self, input: &'a [u8], data: impl FnOnce() -> T) -> Result<Step<'a, T>, Violation> {
        const MORE: usize = 0;
        if !self.has_preface {
            let known = input.len().min(PREFACE.len());
            if input[..known] != PREFACE[..known] {
                return Err((PROTOCOL, "this is not HTTP/2"));
            }
            self.has_preface = known == PREFACE.len();
            return Ok(Step { consumed: if self.has_preface { known } else { MORE }, event: None });
        }
        let Some(header) = FrameHeader::parse(input) else { return Ok(Step { consumed: MORE, event: None }) };
        if header.length > MAX_PAYLOAD {
            return Err((Reason::FrameSize, "a frame is larger than 16384 bytes"));
        }
        let consumed = frame::HEADER + header.length;
        let Some(payload) = input.get(frame::HEADER..consumed) else {
            return Ok(Step { consumed: MORE, event: None });
        };
        if !self.has_settings && (header.kind != frame::SETTINGS || header.has(frame::ACK)) {
            return Err((PROTOCOL, "the first frame is not SETTINGS"));
        }
        if let Some(block) = &self.block
            && (header.kind != frame::CONTINUATION || header.stream != block.stream)
        {
            return Err((PROTOCOL, "a header block is not continued"));
        }
        let event = match header.kind {
            frame::DATA => self.on_data(header, payload)?,
            frame::HEADERS => self.on_headers(header, payload, data)?,
            frame::PRIORITY => self.on_priority(header, payload)?,
            frame::RST_STREAM => self.on_reset(header, payload)?,
            frame::SETTINGS => self.on_settings(header, payload)?,
            frame::PUSH_PROMISE => return Err((PROTOCOL, "a client cannot promise a push")),
            frame::PING => self.on_ping(header, payload)?,
            frame::GOAWAY => {
                if header.stream != 0 {
                    return Err((PROTOCOL, "GOAWAY on a stream"));
                }
                if payload.len() < 8 {
                    return Err((Reason::FrameSize, "GOAWAY is too short"));
                }
                self.is_client_leaving = true;
                None
            }
            frame::WINDOW_UPDATE => self.on_window_update(header, payload)?,
            frame::CONTINUATION => self.on_continuation(header, payload, data)?,
            // Extensions that we do not know.
            _ => None,
        };
        Ok(Step { consumed, event })
    }

    fn on_data<'a>(
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
            self.put_window_update(0, returned);
        }
        let bytes = unpadded(header, payload)?;
        let Some(stream) = self.streams.get_mut(&id) else {
            if !self.reset.contains(&id) {
                self.put_reset(id, Reason::StreamClosed);
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

    fn on_headers(
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

    fn on_continuation(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
        data: impl FnOnce() -> T,
    ) -> Result<Option<Event<'static, T>>, Violation> {
        let Some(mut block) = self.block.take() else {
            return Err((PROTOCOL, "CONTINUATION of nothing"));
        };
        block.frames += 1;
        if block.bytes.len() + payload.len() > MAX_BLOCK || block.frames > MAX_BLOCK_FRAMES {
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
        {
            self.forget(id, Reason::RefusedStream);
            return Ok(None);
        }
        if self.head.is_too_large() {
            self.put_status(id, b"431");
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

    fn on_priority(
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

    fn on_reset(
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

    fn on_settings(
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
                    if (value as usize) < TABLE_SIZE && self.table_update == TableUpdate::NotDue =>
                {
                    self.table_update = TableUpdate::Due;
                }
                // No frame of ours is larger than any peer allows.
                _ => {}
            }
        }
        self.has_settings = true;
        put_header(&mut self.out, 0, frame::SETTINGS, frame::ACK, 0);
        Ok(None)
    }

    fn on_ping(
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
            self.put_ping(frame::ACK, payload);
        } else if payload == SHUTDOWN_PING {
            self.finish_shutdown();
        } else {
            self.awaits_pong = false;
        }
        Ok(None)
    }

    fn on_window_update(
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
    fn opened(&self, id: u32) -> Result<u32, Violation> {
        if id == 0 || id > self.last || id.is_multiple_of(2) {
            return Err((PROTOCOL, "a frame of a stream that was not opened"));
        }
        Ok(id)
    }

    /// Removes a stream that is reset.
    fn remove(&mut self, id: u32) -> Option<Stream<T>> {
        let stream = self.streams.remove(&id)?;
        // Those that wait for a window and are reset would be remembered until one grows.
        if self.waiting.len() > 2 * self.settings.max_streams as usize {
            self.waiting.retain(|id| self.streams.contains_key(id));
        }
        Some(stream)
    }

    /// Ends a stream whose client broke a rule.
    fn end_stream<'a>(&mut self, id: u32, reason: Reason) -> Option<Event<'a, T>> {
        self.resets += 1;
        let stream = self.remove(id);
        self.forget(id, reason);
        stream.map(|stream| Event::Reset { stream: id, data: stream.data })
    }

    /// Resets a stream that is not open, and ignores what its client has sent meanwhile.
    fn forget(&mut self, id: u32, reason: Reason) {
        self.put_reset(id, reason);
        if self.reset.len() == REMEMBERED {
            self.reset.pop_front();
        }
        self.reset.push_back(id);
    }

    /// Resets a stream. Returns its data, if it was open.
    pub fn reset(&mut self, stream: u32, reason: Reason) -> Option<T> {
        let removed = self.remove(stream)?;
        self.forget(stream, reason);
        Some(removed.data)
    }

    /// Allows the client to send so many more bytes of a body, because these were read.
    pub fn release(&mut self, stream: u32, bytes: usize) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        state.released += bytes as u32;
        if !state.is_received && state.released >= STREAM_WINDOW / 2 {
            let returned = std::mem::take(&mut state.released);
            state.receive_window += returned;
            self.put_window_update(stream, returned);
        }
    }

    /// Sends the head of a response, which `block` has encoded.
    pub fn send_head(&mut self, stream: u32, block: &[u8]) {
        if self.streams.contains_key(&stream) {
            self.put_block(stream, block, 0);
        }
    }

    /// Sends a part of a response's body, or queues it.
    pub fn send_data(&mut self, stream: u32, bytes: &[u8]) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        state.queue.get_or_insert_default().body.extend_from_slice(bytes);
        self.send_queue(stream);
    }

    /// Ends a response, with trailers if there are any, once what is queued is sent.
    pub fn send_end(&mut self, stream: u32, trailers: Option<&[u8]>) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let end = trailers.map_or(End::Data, |block| End::Trailers(block.into()));
        state.queue.get_or_insert_default().end = Some(end);
        self.send_queue(stream);
    }

    /// Sends a response that has no body: a head that is the end as well.
    pub fn send_only_head(&mut self, stream: u32, block: &[u8]) {
        if self.streams.contains_key(&stream) {
            self.put_block(stream, block, frame::END_STREAM);
            self.close(stream);
        }
    }

    /// Sends a whole response: a head, a body that `body` appends, and trailers. It is written where it is sent from, unless
    /// the client's windows have no room for it.
    pub fn respond(&mut self, stream: u32, head: &[u8], body: impl FnOnce(&mut BytesMut), trailers: &[u8]) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let window = self.send_window.min(self.initial_send_window + state.send_credit);
        self.put_block(stream, head, 0);
        let begin = self.out.len();
        put_header(&mut self.out, 0, frame::DATA, 0, stream);
        body(&mut self.out);
        let length = self.out.len() - begin - frame::HEADER;
        if length as i64 <= window.min(MAX_PAYLOAD as i64) {
            self.out[begin..begin + 3].copy_from_slice(&(length as u32).to_be_bytes()[1..]);
            self.send_window -= length as i64;
            self.put_block(stream, trailers, frame::END_STREAM);
            return self.close(stream);
        }
        let mut body = BytesMut::with_capacity(length);
        body.extend_from_slice(&self.out[begin + frame::HEADER..]);
        self.out.truncate(begin);
        let queue = Queue { body, end: Some(End::Trailers(trailers.into())) };
        if let Some(state) = self.streams.get_mut(&stream) {
            state.queue = Some(Box::new(queue));
        }
        self.send_queue(stream);
    }

    /// Returns how many bytes of a response wait for the client's windows; `None` if the stream is not open.
    #[must_use]
    pub fn queued(&self, stream: u32) -> Option<usize> {
        let state = self.streams.get(&stream)?;
        Some(state.queue.as_ref().map_or(0, |queue| queue.body.len()))
    }

    /// Sends what has waited for a window, if one has grown since the last call. Returns whether it had.
    pub fn send_waiting(&mut self) -> bool {
        if !std::mem::take(&mut self.may_send) {
            return false;
        }
        for _ in 0..self.waiting.len() {
            let Some(stream) = self.waiting.pop_front() else { break };
            if let Some(state) = self.streams.get_mut(&stream) {
                state.is_waiting = false;
                self.send_queue(stream);
            }
        }
        true
    }

    /// Sends as much of a queue as the windows allow.
    fn send_queue(&mut self, id: u32) {
        let Some(state) = self.streams.get_mut(&id) else { return };
        let Some(queue) = &mut state.queue else { return };
        while !queue.body.is_empty() {
            let window = self.send_window.min(self.initial_send_window + state.send_credit);
            let length = (queue.body.len() as i64).min(window).min(MAX_PAYLOAD as i64);
            if length <= 0 {
                if !std::mem::replace(&mut state.is_waiting, true) {
                    self.waiting.push_back(id);
                }
                return;
            }
            let part = queue.body.split_to(length as usize);
            let is_last = queue.body.is_empty() && matches!(queue.end, Some(End::Data));
            let flags = if is_last { frame::END_STREAM } else { 0 };
            put_header(&mut self.out, part.len(), frame::DATA, flags, id);
            self.out.extend_from_slice(&part);
            self.send_window -= length;
            state.send_credit -= length;
            if is_last {
                return self.close(id);
            }
        }
        let end = queue.end.take();
        state.queue = None;
        match end {
            None => {}
            Some(End::Data) => {
                put_header(&mut self.out, 0, frame::DATA, frame::END_STREAM, id);
                self.close(id);
            }
            Some(End::Trailers(block)) => {
                self.put_block(id, &block, frame::END_STREAM);
                self.close(id);
            }
        }
    }

    /// Forgets a stream whose response was sent. If the client still sends its request, the stream is reset.
    fn close(&mut self, id: u32) {
        if let Entry::Occupied(stream) = self.streams.entry(id)
            && !stream.remove().is_received
        {
            self.forget(id, Reason::None);
        }
    }

    /// Begins a graceful shutdown: GOAWAY asks the client to open no more streams. It is complete when the client has answered, or
    /// by [`Self::finish_shutdown`].
    pub fn begin_shutdown(&mut self) {
        if self.shutdown == Shutdown::No {
            self.shutdown = Shutdown::Announced;
            self.go_away(LAST_STREAM, Reason::None, "");
            self.put_ping(0, SHUTDOWN_PING);
        }
    }

    /// Returns whether a shutdown was announced, and the client has not answered yet.
    #[must_use]
    pub fn is_shutdown_announced(&self) -> bool {
        self.shutdown == Shutdown::Announced
    }

    /// Refuses streams from now on, after the announcement.
    pub fn finish_shutdown(&mut self) {
        if self.shutdown == Shutdown::Announced {
            self.shutdown = Shutdown::After(self.last);
            let last = self.last;
            self.go_away(last, Reason::None, "");
        }
    }

    /// Asks whether the client is there. Returns false if it has not answered the last time.
    pub fn ping(&mut self) -> bool {
        if std::mem::replace(&mut self.awaits_pong, true) {
            return false;
        }
        self.put_ping(0, KEEP_ALIVE_PING);
        true
    }

    fn put_ping(&mut self, flags: u8, payload: [u8; 8]) {
        put_header(&mut self.out, payload.len(), frame::PING, flags, 0);
        self.out.put_slice(&payload);
    }

    fn put_reset(&mut self, stream: u32, reason: Reason) {
        put_header(&mut self.out, 4, frame::RST_STREAM, 0, stream);
        self.out.put_u32(reason as u32);
    }

    fn put_window_update(&mut self, stream: u32, bytes: u32) {
        put_header(&mut self.out, 4, frame::WINDOW_UPDATE, 0, stream);
        self.out.put_u32(bytes);
    }

    /// Sends a response of nothing but a status.
    fn put_status(&mut self, stream: u32, status: &[u8]) {
        let mut block = BytesMut::new();
        super::encode_field(b":status", status, &mut block);
        self.put_block(stream, &block, frame::END_STREAM);
    }

    /// Sends a header block, in several frames if it is long.
    fn put_block(&mut self, stream: u32, block: &[u8], flags: u8) {
        if self.table_update == TableUpdate::Due {
            self.table_update = TableUpdate::Sent;
            // The size of the table is 0 from now on.
            return self.put_block(stream, &[&[0x20], block].concat(), flags);
        }
        let mut parts = block.chunks(MAX_PAYLOAD);
        let first = parts.next().unwrap_or_default();
        let end_if = |is_last| if is_last { frame::END_HEADERS } else { 0 };
        put_header(&mut self.out, first.len(), frame::HEADERS, flags | end_if(parts.len() == 0), stream);
        self.out.put_slice(first);
        while let Some(part) = parts.next() {
            put_header(&mut self.out, part.len(), frame::CONTINUATION, end_if(parts.len() == 0), stream);
            self.out.put_slice(part);
        }
    }

    fn go_away(&mut self, last: u32, reason: Reason, text: &str) {
        put_header(&mut self.out, 8 + text.len(), frame::GOAWAY, 0, 0);
        self.out.put_u32(last);
        self.out.put_u32(reason as u32);
        self.out.put_slice(text.as_bytes());
    }
}

/// Returns the stream that a priority depends on.
const fn dependency([s0, s1, s2, s3, _]: &[u8; 5]) -> u32 {
    u32::from_be_bytes([*s0, *s1, *s2, *s3]) & (u32::MAX >> 1)
}

/// Returns a frame's payload without its padding.
fn unpadded(header: FrameHeader, payload: &[u8]) -> Result<&[u8], Violation> {
    if !header.has(frame::PADDED) {
        return Ok(payload);
    }
    let unpadded = payload.split_first().and_then(|(length, rest)| {
        let length = rest.len().checked_sub(usize::from(*length))?;
        Some(&rest[..length])
    });
    unpadded.ok_or((PROTOCOL, "a frame has more padding than bytes"))
}
