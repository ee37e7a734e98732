//! One HTTP/1 exchange on an upstream connection: sends the request while the response may already arrive.

use crate::body::{BodyError, ClientBody};
use crate::pool::{ConnectionPermit, InFlight};
use bytes::{Buf, Bytes, BytesMut};
use http::{Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_http::h1::head::{self, HeadError, HeadLimits, ResponseHead};
use tollgate_http::server::write::{self, Frames};
use tollgate_http::server::{self, BodyReader, BufferedRead, Io, LazyTimeout, ReadHalf, WriteHalf};

/// Limits for response heads. Upstreams are trusted, so these are wider than those for clients.
const LIMITS: HeadLimits = HeadLimits { bytes: 64 * 1024, target: 0, fields: 200 };
/// Time for an upstream that has stopped reading to send its response.
const FINAL_READ_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection to an upstream, between two exchanges.
pub(crate) struct UpstreamConnection {
    read: ReadHalf,
    write: Option<WriteHalf>,
    buffer: BytesMut,
    out: BytesMut,
    /// Timeout for the response body. The wait for the head uses another, because connections move between tasks.
    timeout: LazyTimeout,
    /// Time since which it is idle.
    pub(crate) idle_since: Instant,
    /// Whether it has been idle at least once.
    pub(crate) is_reused: bool,
    /// Permit under `max_connections`.
    pub(crate) permit: ConnectionPermit,
}

impl UpstreamConnection {
    pub(crate) fn new(io: Io, permit: ConnectionPermit) -> Self {
        let (read, write) = io.split();
        Self {
            read,
            write: Some(write),
            buffer: BytesMut::new(),
            out: BytesMut::new(),
            timeout: LazyTimeout::new(Duration::from_secs(60)),
            idle_since: Instant::now(),
            is_reused: false,
            permit,
        }
    }

    /// Returns the buffer for the request head to send.
    pub(crate) fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExchangeError>> {
        let Some(write) = &mut self.write else {
            return Poll::Ready(Err(ExchangeError::Reset(std::io::ErrorKind::NotConnected.into())));
        };
        write.poll_write_both(cx, &mut self.out, &mut Bytes::new()).map_err(ExchangeError::Reset)
    }

    /// Reads a response head; returns its end in the received bytes and the head. Skips informational responses.
    fn poll_head(
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

    /// Returns the received bytes, which start with the response head.
    pub(crate) fn received(&self) -> &[u8] {
        &self.buffer
    }

    /// Splits the connection after the head of a response that switches protocols.
    pub(crate) fn into_tunnel(mut self, end: usize) -> Option<(BufferedRead, WriteHalf, ConnectionPermit)> {
        self.buffer.advance(end);
        let Self { read, write, buffer, permit, .. } = self;
        Some((BufferedRead { read, buffer }, write?, permit))
    }

    /// Returns whether the upstream has neither sent data nor closed the connection since the last exchange.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.read.is_quiet()
    }
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    /// Not a byte of a response arrived: the request may be retried if it is idempotent.
    #[error("the upstream closed the connection without a response: {0}")]
    Reset(std::io::Error),
    #[error("the upstream closed the connection in the middle of the response head")]
    Cut,
    #[error("the upstream response timed out")]
    Timeout,
    #[error("malformed upstream response: {0}")]
    Malformed(#[from] HeadError),
    #[error("the upstream switched protocols without an upgrade request")]
    Unsolicited,
    /// A failure of the client, not of the upstream.
    #[error("cannot read the request body: {0}")]
    Body(BodyError),
}

/// Parameters of one exchange.
#[derive(Clone, Copy)]
pub(crate) struct ExchangeOptions<'a> {
    pub(crate) method: &'a Method,
    /// Framing of the request body.
    pub(crate) frames: Frames,
    /// Whether the request asks for a protocol switch.
    pub(crate) upgrades: bool,
    /// Timeout for the response head.
    pub(crate) response: Duration,
    /// Maximum idle time within a body.
    pub(crate) idle: Duration,
}

pub(crate) enum PumpError {
    Body(BodyError),
    Io,
}

pub(crate) type Pump = Pin<Box<dyn Future<Output = Result<WriteHalf, PumpError>> + Send>>;

/// Sends a request's head, and its body as it arrives.
async fn pump(
    mut write: WriteHalf,
    mut out: BytesMut,
    mut body: ClientBody,
    frames: Frames,
    idle: Duration,
) -> Result<WriteHalf, PumpError> {
    let mut ended = false;
    // Data of the first frame that is ready when the head is written goes out with it.
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

/// Sends the head in the connection's buffer and the body, and waits for the response head. Returns the head and its end
/// in the received bytes; `pumping` holds the rest of the body to send.
pub(crate) async fn exchange(
    connection: &mut UpstreamConnection,
    terms: &ExchangeOptions<'_>,
    body: Option<ClientBody>,
    pumping: &mut Option<Pump>,
    timeout: &mut LazyTimeout,
) -> Result<(usize, ResponseHead), ExchangeError> {
    if let Some(body) = body
        && let Some(write) = connection.write.take()
    {
        let out = std::mem::take(&mut connection.out);
        *pumping = Some(Box::pin(pump(write, out, body, terms.frames, terms.idle)));
    }
    timeout.set(terms.response);
    let mut has_waited = false;
    let (end, head) = std::future::poll_fn(|cx| {
        if let Some(pump) = pumping {
            match pump.as_mut().poll(cx) {
                Poll::Pending => {}
                Poll::Ready(Ok(write)) => {
                    connection.write = Some(write);
                    *pumping = None;
                    timeout.set(terms.response);
                }
                Poll::Ready(Err(PumpError::Body(error))) => {
                    return Poll::Ready(Err(ExchangeError::Body(error)));
                }
                Poll::Ready(Err(PumpError::Io)) => {
                    *pumping = None;
                    timeout.set(FINAL_READ_TIMEOUT);
                }
            }
        }
        let sent = match connection.out.is_empty() {
            true => Poll::Ready(()),
            false => connection.poll_sent(cx)?,
        };
        if sent.is_ready()
            && let Poll::Ready(head) = connection.poll_head(cx, terms.method)
        {
            return Poll::Ready(head);
        }
        if pumping.is_some() {
            return Poll::Pending;
        }
        let late = if has_waited { timeout.poll(cx) } else { timeout.poll_registered(cx) };
        has_waited = true;
        late.map(|()| Err(ExchangeError::Timeout))
    })
    .await?;
    let switches = head.status == StatusCode::SWITCHING_PROTOCOLS;
    if switches && (!terms.upgrades || connection.write.is_none()) {
        return Err(ExchangeError::Unsolicited);
    }
    Ok((end, head))
}

/// A response body. The connection returns to its pool at the last byte, before the client has read it.
pub(crate) struct UpstreamBody {
    connection: Option<Box<UpstreamConnection>>,
    in_flight: Option<InFlight>,
    reader: BodyReader,
    /// The rest of the request while it is still being sent.
    pumping: Option<Pump>,
    is_reusable: bool,
    idle: Duration,
}

impl UpstreamBody {
    /// Creates the body after a response head, which ends at `end`.
    pub(crate) fn new(
        mut connection: Box<UpstreamConnection>,
        in_flight: InFlight,
        (end, head): (usize, &ResponseHead),
        pumping: Option<Pump>,
        idle: Duration,
    ) -> Self {
        connection.buffer.advance(end);
        let mut body = Self {
            connection: Some(connection),
            in_flight: Some(in_flight),
            reader: BodyReader::new(head.framing),
            pumping,
            is_reusable: head.keep_alive,
            idle,
        };
        if body.reader.is_done() {
            body.finish();
        }
        body
    }

    /// Appends the whole body to `out` if it is short and already received; otherwise starts the idle timeout.
    pub(crate) fn take_short(&mut self, max: usize, out: &mut BytesMut) -> bool {
        let Some(connection) = &mut self.connection else { return self.reader.is_done() };
        let length = self.reader.length().unwrap_or(usize::MAX);
        if length > max || length > connection.buffer.len() {
            connection.timeout.set(self.idle);
            return false;
        }
        out.extend_from_slice(&connection.buffer[..length]);
        connection.buffer.advance(length);
        self.reader = BodyReader::Done;
        self.finish();
        true
    }

    /// Starts the idle timeout, for a reader that polls frame by frame.
    pub(crate) fn start(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.timeout.set(self.idle);
        }
    }

    fn finish(&mut self) {
        let (Some(connection), Some(in_flight)) = (self.connection.take(), self.in_flight.take()) else {
            return;
        };
        // Bytes after the response belong to no exchange, so such a connection is not reused.
        let whole = self.pumping.take().is_none() && connection.write.is_some();
        if self.is_reusable && whole && connection.buffer.is_empty() {
            in_flight.backend().put_back(connection);
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
                if connection.timeout.poll(cx).is_ready() {
                    return Poll::Ready(Some(Err(server::BodyError::TooSlow.into())));
                }
                Poll::Pending
            }
            Poll::Ready(frame) => {
                let frame = frame.map(|frame| frame.map_err(BodyError::Message));
                if self.reader.is_done() {
                    self.finish();
                } else {
                    connection.timeout.set(self.idle);
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
