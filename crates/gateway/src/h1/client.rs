//! One exchange on an upstream's connection: the request goes out while the answer may already come in.

use super::body::{BodyError, Reader, Source};
use super::write::{self, Frames};
use crate::body::Incoming;
use crate::io::{Io, ReadHalf, WriteHalf};
use crate::pool::{InFlight, Place};
use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_edge::h1::head::{self, HeadError, HeadLimits, ResponseHead};
use tollgate_front::serving::alarm::Alarm;

/// Upstreams are ours: they may say more than strangers.
const LIMITS: HeadLimits = HeadLimits { bytes: 64 * 1024, target: 0, fields: 200 };
/// How long an upstream that has stopped reading may take to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A connection to an upstream, between two exchanges.
pub(crate) struct Connection {
    read: ReadHalf,
    write: Option<WriteHalf>,
    buffer: BytesMut,
    out: BytesMut,
    alarm: Alarm,
    /// Since when it waits.
    pub(crate) idle_since: Instant,
    /// Whether it has, at least once.
    pub(crate) has_waited: bool,
    /// Its request's place among those that may have one open.
    pub(crate) place: Place,
}

impl Connection {
    pub(crate) fn new(io: Io, place: Place) -> Self {
        let (read, write) = io.split();
        Self {
            read,
            write: Some(write),
            buffer: BytesMut::new(),
            out: BytesMut::new(),
            alarm: Alarm::after(Duration::from_secs(60)),
            idle_since: Instant::now(),
            has_waited: false,
            place,
        }
    }

    /// Where a request's head is written, to be sent.
    pub(crate) fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// Sends what it has taken.
    pub(crate) fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExchangeError>> {
        let Some(write) = &mut self.write else {
            return Poll::Ready(Err(ExchangeError::Reset(std::io::ErrorKind::NotConnected.into())));
        };
        write.poll_write_both(cx, &mut self.out, &mut Bytes::new()).map_err(ExchangeError::Reset)
    }

    /// An answer's head, and where it ends among the bytes that have come. What an upstream says before is passed over.
    pub(crate) fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        asked: &Method,
    ) -> Poll<Result<(usize, ResponseHead), ExchangeError>> {
        let mut seen = 0;
        loop {
            if let Some(end) = head::end_of_head(&self.buffer, &mut seen, &LIMITS)? {
                let head = head::response(&self.buffer[..end], &LIMITS, asked)?;
                if head.status.is_informational() && head.status != StatusCode::SWITCHING_PROTOCOLS {
                    self.buffer.advance(end);
                    seen = 0;
                    continue;
                }
                return Poll::Ready(Ok((end, head)));
            }
            self.buffer.reserve(4096);
            let read = ready!(self.read.poll_fill(cx, &mut self.buffer));
            let nothing = self.buffer.is_empty();
            match read {
                Ok(0) if nothing => {
                    return Poll::Ready(Err(ExchangeError::Reset(std::io::ErrorKind::UnexpectedEof.into())));
                }
                Err(error) if nothing => return Poll::Ready(Err(ExchangeError::Reset(error))),
                Ok(0) | Err(_) => return Poll::Ready(Err(ExchangeError::Cut)),
                Ok(_) => {}
            }
        }
    }

    /// What has come, from the head of an answer on.
    pub(crate) fn came(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Whether nobody has spoken or hung up since the last exchange.
    pub(crate) fn is_quiet(&self) -> bool {
        self.read.is_quiet()
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    /// Not a byte of an answer came: the request may be sent to another, if it is of the kind that can.
    #[error("the upstream closed the connection without an answer: {0}")]
    Reset(std::io::Error),
    #[error("the upstream closed the connection in the middle of its answer's head")]
    Cut,
    #[error("the upstream did not answer in time")]
    Timeout,
    #[error("the upstream's answer is malformed: {0}")]
    Malformed(#[from] HeadError),
    #[error("the upstream switched protocols unasked")]
    Unasked,
    /// The caller's fault, not the upstream's.
    #[error("the request's body could not be read: {0}")]
    Body(BodyError),
}

/// What is sent.
#[derive(Clone, Copy)]
pub(crate) struct Outbound<'a> {
    pub(crate) method: &'a Method,
    /// Its whole head.
    pub(crate) head: &'a [u8],
    /// How its body is sent.
    pub(crate) frames: Frames,
    /// Whether it asks to switch protocols.
    pub(crate) upgrades: bool,
    /// The longest wait for an answer's head.
    pub(crate) response: Duration,
    /// The longest wait for more of a body.
    pub(crate) idle: Duration,
}

pub(crate) enum PumpError {
    Body(BodyError),
    Io,
}

pub(crate) type Pump = Pin<Box<dyn Future<Output = Result<WriteHalf, PumpError>> + Send>>;

/// Sends a request's head and body as it comes.
async fn pump(
    mut write: WriteHalf,
    mut out: BytesMut,
    mut body: Incoming,
    frames: Frames,
    idle: Duration,
) -> Result<WriteHalf, PumpError> {
    let mut ended = false;
    // What the first frame is known by the time the head is written goes with it.
    loop {
        let next = std::future::poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
            Poll::Pending if !out.is_empty() => Poll::Ready(None),
            other => other.map(Some),
        });
        let mut large = Bytes::new();
        match next.await {
            None => {}
            Some(Some(Ok(next))) => {
                ended |= next.is_trailers();
                large = write::frame(&mut out, next, frames);
            }
            Some(Some(Err(error))) => return Err(PumpError::Body(error)),
            Some(None) => {
                if frames == Frames::Chunked && !ended {
                    write::last_chunk(&mut out);
                }
                ended = true;
            }
        }
        let writing = std::future::poll_fn(|cx| write.poll_write_both(cx, &mut out, &mut large));
        match tokio::time::timeout(idle, writing).await {
            Ok(Ok(())) => {}
            _ => return Err(PumpError::Io),
        }
        if ended {
            return Ok(write);
        }
    }
}

/// What came back.
pub(crate) enum Answered {
    Response(StatusCode, HeaderMap, UpstreamBody),
    Switched(HeaderMap, Source, WriteHalf, Place),
}

/// Sends a request and waits for the head of its answer.
pub(crate) async fn exchange(
    mut connection: Box<Connection>,
    in_flight: InFlight,
    request: Outbound<'_>,
    body: Option<Incoming>,
) -> Result<Answered, ExchangeError> {
    connection.out.extend_from_slice(request.head);
    connection.alarm.set(request.response);
    let mut pumping: Option<Pump> = None;
    let Some(write) = connection.write.take() else {
        return Err(ExchangeError::Reset(std::io::ErrorKind::NotConnected.into()));
    };
    match body {
        None => {
            connection.write = Some(write);
            std::future::poll_fn(|cx| match connection.poll_sent(cx) {
                Poll::Pending => connection.alarm.poll(cx).map(|()| Err(ExchangeError::Timeout)),
                done => done,
            })
            .await?;
        }
        Some(body) => {
            let out = std::mem::take(&mut connection.out);
            pumping = Some(Box::pin(pump(write, out, body, request.frames, request.idle)));
        }
    }
    let (end, head) =
        std::future::poll_fn(|cx| poll_head(cx, &mut connection, &mut pumping, &request)).await?;
    let bytes = connection.buffer.split_to(end).freeze();
    let (status, headers) = (head.status, head.headers(&bytes)?);
    if status == StatusCode::SWITCHING_PROTOCOLS {
        let Connection { read, write, buffer, place, .. } = *connection;
        let Some(write) = write.filter(|_| request.upgrades) else {
            return Err(ExchangeError::Unasked);
        };
        let source = Source { read, buffer };
        return Ok(Answered::Switched(headers, source, write, place));
    }
    let mut body = UpstreamBody::new(connection, in_flight, &head, pumping, request.idle);
    if body.reader.is_done() {
        body.finish();
    } else if let Some(connection) = &mut body.connection {
        connection.alarm.set(request.idle);
    }
    Ok(Answered::Response(status, headers, body))
}

fn poll_head(
    cx: &mut Context<'_>,
    connection: &mut Connection,
    pumping: &mut Option<Pump>,
    request: &Outbound<'_>,
) -> Poll<Result<(usize, ResponseHead), ExchangeError>> {
    if let Some(pump) = pumping {
        match pump.as_mut().poll(cx) {
            Poll::Pending => {}
            Poll::Ready(Ok(write)) => {
                connection.write = Some(write);
                *pumping = None;
                connection.alarm.set(request.response);
            }
            Poll::Ready(Err(PumpError::Body(error))) => return Poll::Ready(Err(ExchangeError::Body(error))),
            Poll::Ready(Err(PumpError::Io)) => {
                *pumping = None;
                connection.alarm.set(LAST_WORDS);
            }
        }
    }
    let head = connection.poll_head(cx, request.method);
    if head.is_pending() && pumping.is_none() && connection.alarm.poll(cx).is_ready() {
        return Poll::Ready(Err(ExchangeError::Timeout));
    }
    head
}

/// An answer's body. The connection goes back to its pool at the last byte, before the caller has read it.
pub(crate) struct UpstreamBody {
    connection: Option<Box<Connection>>,
    in_flight: Option<InFlight>,
    reader: Reader,
    /// The request, as far as it is still being sent.
    pumping: Option<Pump>,
    keep: bool,
    idle: Duration,
}

impl UpstreamBody {
    /// The body of an answer whose head has been taken from its connection.
    pub(crate) fn new(
        connection: Box<Connection>,
        in_flight: InFlight,
        head: &ResponseHead,
        pumping: Option<Pump>,
        idle: Duration,
    ) -> Self {
        Self {
            connection: Some(connection),
            in_flight: Some(in_flight),
            reader: Reader::new(head.framing),
            pumping,
            keep: head.keep_alive,
            idle,
        }
    }

    /// All of it, where it is short and has come already: `take` gets it. If not, more of it must come in time.
    pub(crate) fn take_short(&mut self, longest: usize, take: impl FnOnce(&[u8])) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        let length = self.reader.length().unwrap_or(usize::MAX);
        if length > longest || length > connection.buffer.len() {
            connection.alarm.set(self.idle);
            return false;
        }
        take(&connection.buffer[..length]);
        connection.buffer.advance(length);
        self.reader = Reader::Done;
        self.finish();
        true
    }

    fn finish(&mut self) {
        let (Some(connection), Some(in_flight)) = (self.connection.take(), self.in_flight.take()) else {
            return;
        };
        // Bytes behind the answer belong to nothing: such a connection is not used again.
        let whole = self.pumping.take().is_none() && connection.write.is_some();
        if self.keep && whole && connection.buffer.is_empty() {
            in_flight.endpoint().put_back(connection);
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(connection) = &mut self.connection else { return Poll::Ready(None) };
        if let Some(pump) = &mut self.pumping
            && let Poll::Ready(pumped) = pump.as_mut().poll(cx)
        {
            self.pumping = None;
            match pumped {
                Ok(write) => connection.write = Some(write),
                Err(PumpError::Body(error)) => return Poll::Ready(Some(Err(error))),
                Err(PumpError::Io) => {}
            }
        }
        match self.reader.poll(cx, &mut connection.read, &mut connection.buffer) {
            Poll::Pending => {
                if connection.alarm.poll(cx).is_ready() {
                    return Poll::Ready(Some(Err(BodyError::TooSlow)));
                }
                Poll::Pending
            }
            Poll::Ready(frame) => {
                if self.reader.is_done() {
                    self.finish();
                } else {
                    connection.alarm.set(self.idle);
                }
                Poll::Ready(frame)
            }
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.reader.is_done()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.reader.size_hint()
    }
}
