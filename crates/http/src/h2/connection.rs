//! The state of an HTTP/2 connection, for a server. [`Connection::receive`] reads one frame and returns what it means;
//! the other functions append what is sent to the output, or keep it until the client's windows allow it.
//!
//! The window of the connection is given back as bytes arrive, and that of a stream when they are released, so that a body
//! that the server does not read delays no other.

mod ending;
mod frames;
mod requests;
mod responses;

use super::PREFACE;
use super::frame::{self, FrameHeader, MAX_PAYLOAD, Reason};
use super::head::Head;
use super::hpack::Decoder;
use super::output::Output;
use super::stream::Stream;
use bytes::BytesMut;
use foldhash::fast::RandomState;
use requests::Block;
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
/// How many bytes of responses may wait for the client's windows. Beyond it streams are refused, and responses that cannot be
/// queued are reset; what arrives is still read, because it may be a larger window.
const MAX_QUEUED: usize = 8 << 20;
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
        Self { max_streams: 1024, max_head: 64 << 10 }
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

/// A rule that the client broke, for the whole connection.
type Violation = (Reason, &'static str);

const PROTOCOL: Reason = Reason::Protocol;

/// The state of a connection, with data of type `T` for each stream.
#[derive(Debug)]
pub struct Connection<T> {
    settings: Settings,
    out: Output,
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
    /// Streams with a queue, which wait for a window, and the bytes in all queues.
    waiting: VecDeque<u32>,
    queued: usize,
    /// What waits may be sent: a window has grown, or there was no room in the output.
    may_send: bool,
    /// Streams that were reset by us, the oldest first.
    reset: VecDeque<u32>,
    /// How many requests were reset before they were answered.
    resets: u64,
    shutdown: Shutdown,
    /// The client ends the connection with its last request.
    is_client_leaving: bool,
    awaits_pong: bool,
}

impl<T> Connection<T> {
    /// Creates the state of a new connection, whose settings are in its output.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let ours = [
            (frame::MAX_CONCURRENT_STREAMS, settings.max_streams),
            (frame::MAX_HEADER_LIST_SIZE, u32::try_from(settings.max_head).unwrap_or(u32::MAX)),
        ];
        Self {
            settings,
            out: Output::new(&ours, CONNECTION_WINDOW - STREAM_WINDOW),
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
            queued: 0,
            may_send: false,
            reset: VecDeque::new(),
            resets: 0,
            shutdown: Shutdown::No,
            is_client_leaving: false,
            awaits_pong: false,
        }
    }

    /// Returns the bytes to send. Who sends them takes them away.
    pub const fn unsent(&mut self) -> &mut BytesMut {
        &mut self.out.bytes
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

    #[cfg(test)]
    pub(super) fn queue_taken(&self, stream: u32) -> usize {
        self.streams[&stream].queue.as_ref().map_or(0, |queue| queue.taken())
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
            self.out.go_away(last, reason, text);
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
