//! A gRPC connection. Each turn of its task reads what has arrived, begins the calls in it, polls those that can go on, and
//! writes all that there is to send at once. While the client does not read, nothing more is read from it.

mod incomplete;
mod requests;
mod responses;
mod timers;

use super::Unary;
use super::calls::Calls;
use super::exchange::{Exchange, Inbox};
use bytes::{Buf, BytesMut};
use incomplete::Incomplete;
use pin_project_lite::pin_project;
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use timers::Timers;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tollgate_http::h2::{self, Connection};
use tollgate_http::server::Drain;
use tollgate_http::server::connections::Activity;
use tonic::service::Routes;
use tonic::{Code, Status};

/// How long the client may take to read the last bytes and to close the connection.
const LINGER: Duration = Duration::from_secs(1);
/// How many bytes are read at a time.
const READ: usize = 64 << 10;
/// While so many bytes are not sent, nothing is read.
const MAX_UNSENT: usize = 64 << 10;
/// How often a connection reads before other tasks get a turn, and how many beginnings and ends of requests it handles before it
/// sends what there is.
const MAX_READS: usize = 4;
const MAX_EVENTS: usize = 256;

/// Settings of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Maximum size of a message in bytes.
    pub(crate) message_bytes: usize,
    /// Maximum number of concurrent calls.
    pub(crate) streams: u32,
    /// Age at which the client is asked to end the connection.
    pub(crate) max_age: Option<Duration>,
    /// Time after that at which it ends.
    pub(crate) max_age_grace: Option<Duration>,
}

/// Serves a connection until it ends. `unary` serves its method, `others` all other services.
pub(crate) async fn serve<U: Unary>(
    io: impl AsyncRead + AsyncWrite + Unpin,
    unary: &U,
    others: Routes,
    settings: &Settings,
    drain: &Drain,
    activity: &Activity,
) {
    let begun = drain.begun();
    let mut begun = pin!(begun);
    Drain::wake_on_begin(begun.as_mut()).await;
    let start = |request| unary.call(request);
    let mut connection = GrpcConnection::new(io, unary, start, others, settings, drain, activity);
    if poll_fn(|cx| connection.poll(cx)).await.is_ok() {
        connection.close().await;
    }
}

/// The connection ends at once: it is lost, or its time is over.
struct Lost;

impl From<io::Error> for Lost {
    fn from(_: io::Error) -> Self {
        Self
    }
}

struct GrpcConnection<'s, I, U: Unary, S, F> {
    io: I,
    unary: &'s U,
    start: S,
    others: Routes,
    settings: &'s Settings,
    drain: &'s Drain,
    activity: &'s Activity,
    http2: Connection<Call<U::Opening>>,
    /// The beginning of a frame, or frames that another turn is for.
    unread: BytesMut,
    has_unread_frames: bool,
    calls: Calls<Task<F>>,
    /// Places of the exchanges that wait for the client.
    blocked: Vec<u32>,
    incomplete: Incomplete,
    /// A complete request has begun in this turn.
    has_begun: bool,
    /// The earliest deadline of those that have begun in this turn, complete or not.
    earliest: Option<Instant>,
    /// Number of times that messages which do not arrive were looked for.
    generation: u32,
    /// In a shutdown, streams whose responses wait for the client, and how many bytes of each.
    unread_responses: Vec<(u32, usize)>,
    /// More was sent at a time than a buffer is kept for.
    is_output_large: bool,
    /// Resets that were paused for.
    resets: u64,
    /// Since when the next ones are counted.
    resets_since: Instant,
    /// Calls that were given up at their deadline, which are like resets for the store.
    overdue: u64,
    /// Something was read since the last ping was due.
    has_read: bool,
    timers: Timers,
}

fn overdue() -> Status {
    Status::new(Code::DeadlineExceeded, "the deadline of the call has passed")
}

/// The status of a call that panicked.
fn failed() -> Status {
    Status::internal("the request could not be handled")
}

/// What a stream keeps.
enum Call<O> {
    /// Nothing: its head has not been read, or its call is over and the response waits for the client.
    New,
    /// A call of the method whose message has not arrived completely, with the generation in which it began.
    Receiving { opening: O, deadline: Option<Instant>, body: Vec<u8>, generation: u32 },
    /// A call in a place.
    Running(u32),
    /// A call of another service, and the body of its request.
    Exchange { place: u32, inbox: Inbox, generation: u32 },
}

pin_project! {
    /// A call in progress.
    #[project = TaskProjection]
    enum Task<F> {
        Unary { #[pin] response: F },
        Exchange { exchange: Exchange },
    }
}

thread_local! {
    /// Where connections read to; what is left of an incomplete frame is copied.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl<'s, I, U, S, F> GrpcConnection<'s, I, U, S, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    U: Unary,
    S: Fn(U::Request) -> F,
    F: Future<Output = Result<U::Response, Status>>,
{
    fn new(
        io: I,
        unary: &'s U,
        start: S,
        others: Routes,
        settings: &'s Settings,
        drain: &'s Drain,
        activity: &'s Activity,
    ) -> Self {
        let limits = h2::Settings { max_streams: settings.streams, ..h2::Settings::default() };
        Self {
            io,
            unary,
            start,
            others,
            settings,
            drain,
            activity,
            http2: Connection::new(limits),
            unread: BytesMut::new(),
            has_unread_frames: false,
            calls: Calls::new(settings.streams as usize),
            blocked: Vec::new(),
            incomplete: Incomplete::new(),
            has_begun: false,
            earliest: None,
            generation: 0,
            unread_responses: Vec::new(),
            is_output_large: false,
            resets: 0,
            resets_since: Instant::now(),
            overdue: 0,
            has_read: false,
            timers: Timers::new(settings),
        }
    }

    /// Ready when the connection is to be closed.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Lost>> {
        self.calls.register(cx);
        if self.drain.has_begun() {
            self.begin_shutdown();
        }
        for _ in 0..MAX_READS {
            self.poll_woken();
            let is_sent = self.poll_send(cx)?.is_ready();
            if is_sent && self.http2.is_done() {
                return Poll::Ready(Ok(()));
            }
            let is_full = self.http2.unsent().len() > MAX_UNSENT;
            if is_full || self.is_paused(cx) {
                return self.wait(cx, is_sent);
            }
            match self.poll_read(cx) {
                Poll::Pending => return self.wait(cx, is_sent),
                Poll::Ready(Err(Lost)) => return Poll::Ready(Err(Lost)),
                // The client broke the protocol; the output says so.
                Poll::Ready(Ok(false)) => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(true)) => {}
            }
        }
        let is_sent = self.poll_send(cx)?.is_ready();
        cx.waker().wake_by_ref();
        self.wait(cx, is_sent)
    }

    /// Reports what the connection waits for, and sets its timers.
    fn wait(&mut self, cx: &mut Context<'_>, is_sent: bool) -> Poll<Result<(), Lost>> {
        let is_calling = |task: Pin<&mut Task<F>>| match task.project() {
            TaskProjection::Unary { .. } => true,
            TaskProjection::Exchange { exchange } => exchange.is_calling() && exchange.has_request(),
        };
        // Only complete requests count: any other frame costs a client nothing, and would keep its place as well.
        let has_begun = std::mem::take(&mut self.has_begun);
        if is_sent && self.calls.any(is_calling) {
            self.activity.busy();
        } else if has_begun || self.activity.is_busy() {
            self.activity.waiting();
        }
        if is_sent && self.calls.running() == 0 {
            // An idle connection keeps no buffer.
            *self.http2.unsent() = BytesMut::new();
        }
        if let Some(earliest) = self.earliest.take()
            && self.http2.open() > 0
        {
            self.wake_at(earliest);
        }
        self.poll_timers(cx).map_or(Poll::Ready(Err(Lost)), |()| Poll::Pending)
    }

    /// Writes what there is to send. Ready when all of it is sent.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Result<Poll<()>, Lost> {
        loop {
            self.http2.send_waiting(MAX_UNSENT);
            let out = self.http2.unsent();
            self.is_output_large |= out.len() > 2 * MAX_UNSENT;
            while !out.is_empty() {
                match Pin::new(&mut self.io).poll_write(cx, out) {
                    Poll::Ready(Ok(0)) | Poll::Ready(Err(_)) => return Err(Lost),
                    Poll::Ready(Ok(written)) => out.advance(written),
                    Poll::Pending => return Ok(Poll::Pending),
                }
            }
            if std::mem::take(&mut self.is_output_large) {
                *out = BytesMut::new();
            } else {
                out.clear();
            }
            if Pin::new(&mut self.io).poll_flush(cx)?.is_pending() {
                return Ok(Poll::Pending);
            }
            // Exchanges have waited for room, and may fill it again.
            for place in std::mem::take(&mut self.blocked) {
                if let Some((task, ..)) = self.calls.get(place)
                    && let TaskProjection::Exchange { exchange } = task.project()
                {
                    exchange.is_blocked = false;
                    self.poll_place(place);
                }
            }
            if self.http2.unsent().is_empty() && !self.http2.may_send() {
                return Ok(Poll::Ready(()));
            }
        }
    }

    /// Reads once, and begins what has arrived. Ready with false if the client broke the protocol.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Lost>> {
        if self.has_unread_frames {
            return Poll::Ready(Ok(self.on_bytes(&[])));
        }
        let mut buffer = BUFFER.take();
        buffer.resize(READ, 0);
        let mut read = ReadBuf::new(&mut buffer);
        let polled = Pin::new(&mut self.io).poll_read(cx, &mut read);
        let length = read.filled().len();
        let result = match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Err(_)) => Poll::Ready(Err(Lost)),
            Poll::Ready(Ok(())) if length == 0 => Poll::Ready(Err(Lost)),
            Poll::Ready(Ok(())) => {
                self.has_read = true;
                Poll::Ready(Ok(self.on_bytes(&buffer[..length])))
            }
        };
        BUFFER.set(buffer);
        result
    }

    /// Sends what is left and closes the connection, so that the client reads all of it: what a client sends to a closed
    /// socket has the rest of what was sent to it discarded.
    async fn close(&mut self) {
        self.calls = Calls::new(0);
        let closing = async {
            poll_fn(|cx| {
                loop {
                    let out = self.http2.unsent();
                    if out.is_empty() {
                        return Pin::new(&mut self.io).poll_shutdown(cx);
                    }
                    match ready!(Pin::new(&mut self.io).poll_write(cx, out))? {
                        0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                        written => out.advance(written),
                    }
                }
            })
            .await?;
            let mut buffer = [0; 1024];
            let mut left = 1 << 20;
            while left > 0 {
                let mut read = ReadBuf::new(&mut buffer);
                poll_fn(|cx| Pin::new(&mut self.io).poll_read(cx, &mut read)).await?;
                match read.filled().len() {
                    0 => break,
                    length => left -= length.min(left),
                }
            }
            Ok::<(), io::Error>(())
        };
        // The client has had its time, or has gone.
        let _ = tokio::time::timeout(LINGER, closing).await;
    }
}

#[cfg(test)]
mod tests;
