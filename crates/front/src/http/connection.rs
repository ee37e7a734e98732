//! The life of one connection: read, answer everything that came, one write.
//!
//! Heads are read in place by the gateway's strict filter ([`tollgate_edge::h1`]), and handlers borrow what they need
//! from the connection's buffer. hyper was rejected: bodies in frames, maps of fields and boxed futures cost more than the
//! decision. An idle connection holds no buffers; who sends many requests at once is answered in one write.

use super::listen::Service;
use super::problem::Problem;
use super::request::Request;
use super::unread::{Piece, Unread};
use crate::serving::alarm::Alarm;
use crate::serving::drain::{Drain, LAST_CHANCE};
use http::{StatusCode, Version};
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate_core::{Clock, SystemClock};
use tollgate_edge::h1::head::{self, Framing, HeadError, HeadLimits};
use tollgate_edge::h1::{After, Answer, Scan, Wants};

/// The largest body that is read.
const LARGEST: usize = 64 * 1024;
const SLOWEST: Duration = Duration::from_secs(10);
/// How much of a body that nobody wants is still read. A connection closed over bytes that nobody has read takes the
/// answer with it, and the caller would never learn what was wrong.
const DISCARDED: usize = 1024 * 1024;
/// How long an ended connection is still read from, for the same reason.
const LINGER: Duration = Duration::from_secs(2);
const HEAD: HeadLimits = HeadLimits { bytes: 64 * 1024, target: 16 * 1024, fields: 100 };
/// Answers that wait for those to requests which came with theirs.
const MOST_UNSENT: usize = 64 * 1024;
/// What most answers have room in.
const UNSENT: usize = 1024;
/// What is read at once: most requests are far smaller.
const ROOM: usize = 8 * 1024;
/// What is read ahead of a request that is being worked on.
const AHEAD: usize = 16 * 1024;

/// A connection, and where it stands.
pub(super) struct Connection<V> {
    service: Arc<V>,
    stream: TcpStream,
    peer: IpAddr,
    input: Vec<u8>,
    /// So much of the input has been dealt with.
    done: usize,
    /// What came while a request was being worked on.
    ahead: Vec<u8>,
    out: Vec<u8>,
    alarm: Alarm,
    drain: Arc<Drain>,
    /// Nothing has been asked yet.
    is_fresh: bool,
    header_timeout: Duration,
    clock: SystemClock,
}

/// Why a connection is not served any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// One side has ended it, or it has failed.
    Ended,
    /// Whatever was waited for did not come.
    Slow,
    Malformed(HeadError),
    BadChunks,
    /// The caller goes on sending what nobody wants.
    Unwanted,
}

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A request. There may be none.
    Request,
    /// More of what has begun.
    Rest,
}

/// The answer to a request, at once where it can be. What has to wait does so in a box: it takes room that most
/// connections do not need, and a function's future would be moved about for nothing.
macro_rules! answered {
    ($connection:expr, $request:expr) => {
        match $connection.service.answer_now($request) {
            Ok(answer) => answer,
            Err(rest) => {
                let answering = Box::pin($connection.service.answer($request, rest));

                unless_gone(&mut $connection.stream, &mut $connection.ahead, &mut $connection.out, answering)
                    .await?
            }
        }
    };
}

impl<V: Service> Connection<V> {
    pub(super) fn new(
        service: Arc<V>,
        stream: TcpStream,
        peer: IpAddr,
        header_timeout: Duration,
        drain: Arc<Drain>,
    ) -> Self {
        Self {
            service,
            stream,
            peer,
            input: Vec::new(),
            done: 0,
            ahead: Vec::new(),
            out: Vec::new(),
            alarm: Alarm::after(header_timeout),
            drain,
            is_fresh: true,
            header_timeout,
            clock: SystemClock::new(),
        }
    }

    /// Serves until either side has enough.
    pub(super) async fn run(mut self) {
        let drain = Arc::clone(&self.drain);
        let mut begun = pin!(drain.begin().notified());
        // Once is enough: the task is woken, and asks.
        poll_fn(|cx| {
            let _ = begun.as_mut().poll(cx);
            Poll::Ready(())
        })
        .await;
        loop {
            let served = match self.head().await {
                Ok(end) => self.serve_one(end).await,
                Err(stop) => Err(stop),
            };
            if let Err(stop) = served {
                return Box::pin(self.end(stop)).await;
            }
        }
    }

    /// Waits for a head; where it ends.
    async fn head(&mut self) -> Result<usize, Stop> {
        let (mut seen, mut waits) = (0, false);
        loop {
            // Some old clients end a body with an empty line that belongs to nothing.
            if seen == 0 && self.input[self.done..].starts_with(b"\r\n") {
                self.done += 2;
            }
            let found = head::end_of_head(&self.input[self.done..], &mut seen, &HEAD);
            if let Some(length) = found.map_err(Stop::Malformed)? {
                self.is_fresh = false;
                return Ok(self.done + length);
            }
            if self.done == self.input.len() {
                self.input.clear();
            } else {
                self.input.drain(..self.done);
            }
            self.done = 0;
            if !waits {
                waits = true;
                self.alarm.set(self.header_timeout);
            }
            self.fill(Next::Request).await?;
        }
    }

    /// Answers the request whose head ends at `end`.
    async fn serve_one(&mut self, end: usize) -> Result<(), Stop> {
        let head = &self.input[self.done..end];
        let scan = Scan::new(head, &HEAD).map_err(Stop::Malformed)?;
        let asked = Request::new(self.peer, &scan, head, b"");
        let answer = match scan.framing {
            Framing::None => answered!(self, &asked),
            Framing::Length(length) if length <= LARGEST as u64 && self.service.wants_body(&asked) => {
                let whole = end + length as usize;
                if self.input.len() < whole {
                    self.body(&scan, whole).await?;
                }
                let (head, body) = (&self.input[self.done..end], &self.input[end..whole]);
                let request = Request::new(self.peer, &scan, head, body);
                let answer = answered!(self, &request);
                self.done = whole;
                self.reply(&scan, &answer);
                return self.go_on(&scan).await;
            }
            _ => return Box::pin(self.serve_unusual(&scan, end)).await,
        };
        self.done = end;
        self.reply(&scan, &answer);
        self.go_on(&scan).await
    }

    /// Waits until the input is as long as the body in it needs.
    async fn body(&mut self, scan: &Scan, whole: usize) -> Result<(), Stop> {
        self.begin_body(scan);
        while self.input.len() < whole {
            self.fill(Next::Rest).await?;
        }
        Ok(())
    }

    /// Bodies that come in chunks, are too large, or are not wanted.
    async fn serve_unusual(&mut self, scan: &Scan, end: usize) -> Result<(), Stop> {
        // Nothing may stand behind the head that is the request's: the body is taken from where it is put next.
        let mut rest = Unread::new(scan.framing, &self.input.split_off(end));
        let asked = Request::new(self.peer, scan, &self.input[self.done..], b"");
        let answer = if !self.service.wants_body(&asked) {
            answered!(self, &asked)
        } else if let Framing::Length(_) = scan.framing {
            too_large()
        } else {
            self.begin_body(scan);
            let mut body = Vec::new();
            let is_whole = loop {
                match rest.next().map_err(|_| Stop::BadChunks)? {
                    Piece::Data(data) if body.len() + data.len() > LARGEST => break false,
                    Piece::Data(data) => body.extend_from_slice(&data),
                    Piece::End => break true,
                    Piece::Wait => self.more_of(&mut rest).await?,
                }
            };
            if is_whole {
                let request = Request::new(self.peer, scan, &self.input[self.done..], &body);
                answered!(self, &request)
            } else {
                too_large()
            }
        };
        rest.add(&std::mem::take(&mut self.ahead));
        self.reply(scan, &answer);
        self.alarm.set(SLOWEST);
        let mut left = DISCARDED;
        loop {
            match rest.next().map_err(|_| Stop::Unwanted)? {
                Piece::End => break,
                Piece::Data(data) if data.len() > left => return Err(Stop::Unwanted),
                Piece::Data(data) => left -= data.len(),
                // Who waits to be told to send it never will be.
                Piece::Wait if scan.expects_continue && left == DISCARDED => return Err(Stop::Unwanted),
                Piece::Wait => self.more_of(&mut rest).await.map_err(|_| Stop::Unwanted)?,
            }
        }
        self.input = rest.into_bytes();
        self.done = 0;
        self.go_on(scan).await
    }

    fn begin_body(&mut self, scan: &Scan) {
        self.alarm.set(SLOWEST);
        if scan.expects_continue {
            self.out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
    }

    /// Reads on behind the head, and moves what came to where the body is read from.
    async fn more_of(&mut self, rest: &mut Unread) -> Result<(), Stop> {
        let end = self.input.len();
        self.fill(Next::Rest).await?;
        rest.add(&self.input[end..]);
        self.input.truncate(end);
        Ok(())
    }

    fn is_kept(&self, scan: &Scan) -> bool {
        let is_endless = matches!(scan.framing, Framing::Length(length) if length > DISCARDED as u64);
        scan.keep_alive && !is_endless && !self.drain.has_begun()
    }

    /// Whether another request may follow.
    async fn go_on(&mut self, scan: &Scan) -> Result<(), Stop> {
        if !self.ahead.is_empty() {
            self.input.append(&mut self.ahead);
            self.ahead = Vec::new();
        }
        if !self.is_kept(scan) {
            return Err(Stop::Ended);
        }
        if self.out.len() > MOST_UNSENT {
            self.alarm.set(SLOWEST);
            poll_fn(|cx| self.poll_flush(cx)).await?;
        }
        Ok(())
    }

    fn reply(&mut self, scan: &Scan, answer: &Answer) {
        let after = match scan.version {
            _ if !self.is_kept(scan) => After::Close,
            Version::HTTP_10 => After::KeepOld,
            _ => After::Keep,
        };
        self.out.reserve(UNSENT);
        answer.write(
            &mut self.out,
            if scan.asks_head { Wants::Head } else { Wants::All },
            after,
            self.clock.now(),
        );
    }

    /// Sends what is to be sent, and reads. Nothing is read while answers wait to be taken, so a caller that does not read
    /// holds up only itself.
    async fn fill(&mut self, next: Next) -> Result<(), Stop> {
        let mut has_waited = false;
        poll_fn(|cx| {
            if self.poll_flush(cx)?.is_pending() {
                return Poll::Pending;
            }
            let is_idle = next == Next::Request && self.input.is_empty();
            if self.input.capacity() - self.input.len() < ROOM / 4 {
                self.input.reserve(ROOM);
            }
            match pin!(self.stream.read_buf(&mut self.input)).poll(cx) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(Stop::Ended)),
                Poll::Ready(Ok(_)) => return Poll::Ready(Ok(())),
                Poll::Pending => {}
            }
            if is_idle {
                // A hundred thousand idle connections must not hold buffers.
                (self.input, self.out) = (Vec::new(), Vec::new());
            }
            if is_idle && self.drain.has_begun() {
                if !std::mem::take(&mut self.is_fresh) {
                    return Poll::Ready(Err(Stop::Ended));
                }
                self.alarm.set(LAST_CHANCE);
            }
            let alarm = if has_waited { self.alarm.poll(cx) } else { self.alarm.watch(cx) };
            has_waited = true;
            alarm.map(|()| Err(if is_idle { Stop::Ended } else { Stop::Slow }))
        })
        .await
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Stop>> {
        let mut sent = 0;
        while sent < self.out.len() {
            match Pin::new(&mut self.stream).poll_write(cx, &self.out[sent..]) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(Stop::Ended)),
                Poll::Ready(Ok(more)) => sent += more,
                Poll::Pending => {
                    self.out.drain(..sent);
                    return self.alarm.poll(cx).map(|()| Err(Stop::Ended));
                }
            }
        }
        self.out.clear();
        Poll::Ready(Ok(()))
    }

    /// Says what was wrong, and ends the connection so that it can be read: one that is closed over bytes that nobody has
    /// read is reset, and takes the answer along.
    async fn end(mut self, stop: Stop) {
        let problem = match stop {
            Stop::Ended | Stop::Unwanted => None,
            Stop::Slow => {
                let detail = "the rest of the request did not arrive in time";
                Some(Problem::new(StatusCode::REQUEST_TIMEOUT, "Too slow", detail))
            }
            Stop::Malformed(error) => {
                // What is not spoken here is still the caller's mistake.
                let status = Some(error.status()).filter(StatusCode::is_client_error);
                let status = status.unwrap_or(StatusCode::BAD_REQUEST);
                Some(Problem::new(status, "Bad request", error.to_string()))
            }
            Stop::BadChunks => Some(Problem::bad("the body could not be read: its chunks are malformed")),
        };
        if let Some(problem) = problem {
            problem.told().write(&mut self.out, Wants::All, After::Close, self.clock.now());
        }
        self.alarm.set(SLOWEST);
        if poll_fn(|cx| self.poll_flush(cx)).await.is_err() || self.stream.shutdown().await.is_err() {
            return;
        }
        if stop == Stop::Ended && self.done >= self.input.len() {
            return;
        }
        let discarding = async {
            let mut left = DISCARDED;
            while left > 0 {
                self.input.clear();
                self.input.reserve(ROOM);
                match self.stream.read_buf(&mut self.input).await {
                    Ok(0) | Err(_) => return,
                    Ok(read) => left = left.saturating_sub(read),
                }
            }
        };
        let _ = tokio::time::timeout(LINGER, discarding).await;
    }
}

/// Works on an answer for as long as its caller is there. Who leaves gives back what the request holds, by its being
/// dropped; what comes meanwhile is read ahead, within bounds.
async fn unless_gone<T>(
    stream: &mut TcpStream,
    ahead: &mut Vec<u8>,
    out: &mut Vec<u8>,
    answering: impl Future<Output = T>,
) -> Result<T, Stop> {
    let mut answering = pin!(answering);
    poll_fn(|cx| {
        if let Poll::Ready(answer) = answering.as_mut().poll(cx) {
            return Poll::Ready(Ok(answer));
        }
        // Those before it need not wait for this one.
        while !out.is_empty() {
            match Pin::new(&mut *stream).poll_write(cx, out) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(Stop::Ended)),
                Poll::Ready(Ok(sent)) => drop(out.drain(..sent)),
                Poll::Pending => break,
            }
        }
        while ahead.len() < AHEAD {
            ahead.reserve(ROOM / 8);
            match pin!(stream.read_buf(ahead)).poll(cx) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(Stop::Ended)),
                Poll::Ready(Ok(_)) => {}
                Poll::Pending => break,
            }
        }
        Poll::Pending
    })
    .await
}

fn too_large() -> Answer {
    let detail = format!("a body has at most {LARGEST} bytes");
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", detail).told()
}
