//! A gRPC connection. Each turn of its task reads what has arrived, begins the calls in it, polls those that can go on, and
//! writes all that there is to send at once. While the client does not read, nothing more is read from it.

use super::calls::Calls;
use super::exchange::{self, Ending, Exchange, Inbox, Progress};
use super::{Unary, message};
use bytes::{Buf, BytesMut};
use pin_project_lite::pin_project;
use std::cell::Cell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tollgate_http::h2::{self, Connection, Event, Reason};
use tollgate_http::server::connections::Activity;
use tollgate_http::server::{Drain, LazyTimeout};
use tonic::codegen::Service as _;
use tonic::service::Routes;
use tonic::{Code, Status};

/// A client that has been quiet for this long is asked whether it is there, and has as long to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a client may take to answer the announcement of a shutdown.
const SHUTDOWN_ANSWER: Duration = Duration::from_secs(1);
/// How long the client may take to read the last bytes and to close the connection.
const LINGER: Duration = Duration::from_secs(1);
/// A timeout that is not in use.
const NEVER: Duration = Duration::from_secs(86_400 * 365);
/// How many bytes are read at a time.
const READ: usize = 64 << 10;
/// While so many bytes are not sent, nothing is read.
const MAX_UNSENT: usize = 64 << 10;
/// How many bytes of incomplete messages a connection collects before it lets their clients go on one at a time. Beyond it each
/// stream has sent at most its first window. No call is rejected for it: a proxy that fails open would let its request pass.
const MAX_PARTIAL: usize = 8 << 20;
/// How often a connection reads before other tasks get a turn, and how many beginnings and ends of requests it handles before it
/// sends what there is.
const MAX_READS: usize = 4;
const MAX_EVENTS: usize = 256;
/// After as many resets as there may be streams, nothing is read for this long. A reset call is over for the connection and not
/// for the store, where it may still be under way, so resets must not be a way around the maximum number of streams.
const RESETS_PAUSE: Duration = Duration::from_millis(20);

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
    /// Bytes of messages that have not arrived completely.
    partial: usize,
    /// The stream that may go on although these are too many, and those that may not.
    favored: Option<u32>,
    held: VecDeque<u32>,
    /// Resets that were paused for.
    resets: u64,
    /// Since when the next ones are counted.
    resets_since: Instant,
    /// Calls that were given up at their deadline, which are like resets for the store.
    overdue: u64,
    /// Something was read since the last time that the client was asked whether it is there.
    has_read: bool,
    timers: Timers,
}

struct Timers {
    idle: LazyTimeout,
    age: Option<LazyTimeout>,
    /// When the connection ends whatever goes on.
    end: Option<LazyTimeout>,
    /// When the shutdown no longer waits for the client.
    shutdown: Option<LazyTimeout>,
    /// Until when nothing is read.
    pause: Option<LazyTimeout>,
    /// The earliest deadline of a call, or an earlier time.
    deadline: Option<(LazyTimeout, Instant)>,
}

/// Returns whether a timer has passed, and registers it if it has not.
fn has_passed(timer: &mut Option<LazyTimeout>, cx: &mut Context<'_>) -> bool {
    timer.as_mut().is_some_and(|timer| timer.poll_registered(cx).is_ready())
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
    /// A call of the method whose message has not arrived completely; `held` bytes of it are not released.
    Receiving { opening: O, deadline: Option<Instant>, body: Vec<u8>, held: usize },
    /// A call in a place.
    Running(u32),
    /// A call of another service, and the body of its request.
    Exchange(u32, Inbox),
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
            partial: 0,
            favored: None,
            held: VecDeque::new(),
            resets: 0,
            resets_since: Instant::now(),
            overdue: 0,
            has_read: false,
            timers: Timers {
                idle: LazyTimeout::new(KEEP_ALIVE),
                age: settings.max_age.map(LazyTimeout::new),
                end: None,
                shutdown: None,
                pause: None,
                deadline: None,
            },
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
            self.http2.send_waiting();
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
                // The client broke the protocol, which it is told.
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
        if !self.http2.is_used() {
            // It stays silent.
        } else if is_sent && self.calls.any(is_calling) {
            self.activity.busy();
        } else {
            self.activity.waiting();
        }
        if is_sent && self.calls.running() == 0 {
            // An idle connection keeps no buffer.
            *self.http2.unsent() = BytesMut::new();
        }
        self.poll_timers(cx).map_or(Poll::Ready(Err(Lost)), |()| Poll::Pending)
    }

    /// Does what it is time for, and registers the timers.
    fn poll_timers(&mut self, cx: &mut Context<'_>) -> Result<(), Lost> {
        let mut acts = false;
        if has_passed(&mut self.timers.age, cx) {
            self.timers.age = None;
            self.timers.end = self.settings.max_age_grace.map(LazyTimeout::new);
            self.begin_shutdown();
            acts = true;
        }
        if has_passed(&mut self.timers.end, cx) {
            return Err(Lost);
        }
        if has_passed(&mut self.timers.shutdown, cx) {
            self.timers.shutdown = None;
            self.http2.finish_shutdown();
            acts = true;
        }
        while self.timers.idle.poll_registered(cx).is_ready() {
            if !std::mem::take(&mut self.has_read) && !self.http2.ping() {
                return Err(Lost);
            }
            self.timers.idle.set(KEEP_ALIVE);
            if self.http2.open() == 0 {
                // An idle connection keeps little of what a busy one has needed.
                self.calls = Calls::new(self.settings.streams as usize);
                self.held.shrink_to_fit();
                self.http2.shrink();
            }
            acts = true;
        }
        while self.timers.deadline.as_mut().is_some_and(|(timer, _)| timer.poll_registered(cx).is_ready()) {
            self.end_overdue();
            acts = true;
        }
        if acts {
            // There may be something to send.
            cx.waker().wake_by_ref();
        }
        Ok(())
    }

    fn begin_shutdown(&mut self) {
        self.http2.begin_shutdown();
        if self.http2.is_shutdown_announced() && self.timers.shutdown.is_none() {
            self.timers.shutdown = Some(LazyTimeout::new(SHUTDOWN_ANSWER));
        }
    }

    /// Returns whether nothing is to be read for a while.
    fn is_paused(&mut self, cx: &mut Context<'_>) -> bool {
        let timers = &mut self.timers;
        let resets = self.http2.resets() + self.overdue;
        if resets - self.resets >= u64::from(self.settings.streams.max(1)) {
            let now = Instant::now();
            let passed = now - std::mem::replace(&mut self.resets_since, now);
            self.resets = resets;
            // As many in a longer time are those of a busy proxy.
            if let Some(left) = RESETS_PAUSE.checked_sub(passed) {
                timers.pause = Some(LazyTimeout::new(left));
            }
        }
        if has_passed(&mut timers.pause, cx) {
            timers.pause = None;
        }
        timers.pause.is_some()
    }

    /// Writes what there is to send. Ready when all of it is sent.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Result<Poll<()>, Lost> {
        loop {
            let out = self.http2.unsent();
            while !out.is_empty() {
                match Pin::new(&mut self.io).poll_write(cx, out) {
                    Poll::Ready(Ok(0)) | Poll::Ready(Err(_)) => return Err(Lost),
                    Poll::Ready(Ok(written)) => out.advance(written),
                    Poll::Pending => return Ok(Poll::Pending),
                }
            }
            out.clear();
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
            if self.http2.unsent().is_empty() {
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

    /// Begins what has arrived. Returns false if the client broke the protocol.
    fn on_bytes(&mut self, bytes: &[u8]) -> bool {
        if self.unread.is_empty() {
            let Some(read) = self.on_frames(bytes) else { return false };
            self.unread.extend_from_slice(&bytes[read..]);
            return true;
        }
        let mut unread = std::mem::take(&mut self.unread);
        unread.extend_from_slice(bytes);
        let Some(read) = self.on_frames(&unread) else { return false };
        unread.advance(read);
        // An idle connection keeps no buffer.
        self.unread = if unread.is_empty() { BytesMut::new() } else { BytesMut::from(&unread[..]) };
        true
    }

    /// Handles complete frames, as many as one step may. Returns how many bytes they are; `None` if the client broke the
    /// protocol.
    fn on_frames(&mut self, bytes: &[u8]) -> Option<usize> {
        let (mut read, mut events) = (0, 0);
        loop {
            self.has_unread_frames = events >= MAX_EVENTS || self.http2.unsent().len() > MAX_UNSENT;
            if self.has_unread_frames {
                return Some(read);
            }
            let step = self.http2.receive(&bytes[read..], || Call::New).ok()?;
            match step.event {
                None => {}
                Some(Event::Request { stream, is_end }) => {
                    events += 1;
                    self.on_request(stream, is_end);
                }
                Some(Event::Data { stream, bytes, is_end }) => {
                    events += usize::from(is_end);
                    self.on_data(stream, bytes, is_end);
                }
                Some(Event::End { stream }) => {
                    events += 1;
                    self.on_data(stream, &[], true);
                }
                Some(Event::Reset { stream, data }) => self.drop_call(stream, data),
            }
            if step.consumed == 0 {
                return Some(read);
            }
            read += step.consumed;
        }
    }

    fn on_request(&mut self, stream: u32, is_end: bool) {
        let head = self.http2.head();
        let timeout = head.get(b"grpc-timeout").and_then(message::timeout);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if head.path() == U::PATH.as_bytes() && head.method() == b"POST" {
            let Some(opening) = exchange::catch_panic(|| self.unary.open(head)) else {
                return self.send_status(stream, failed());
            };
            self.set_call(stream, Call::Receiving { opening, deadline, body: Vec::new(), held: 0 });
            if is_end {
                self.on_data(stream, &[], true);
            }
            return;
        }
        let inbox = Inbox::new();
        if is_end {
            inbox.end(Ending::Complete);
        }
        let Some(request) = exchange::request(head, inbox.body()) else {
            drop(self.http2.reset(stream, Reason::Protocol));
            return;
        };
        let Some(response) = exchange::catch_panic(|| self.others.call(request)) else {
            return self.send_status(stream, failed());
        };
        let task = Task::Exchange { exchange: Exchange::new(Box::pin(response), inbox.clone()) };
        let Some(place) = self.calls.insert(stream, task) else { return self.refuse(stream) };
        if let Some((_, waker, _)) = self.calls.get(place) {
            inbox.set_exchange(waker);
        }
        self.set_call(stream, Call::Exchange(place, inbox));
        self.set_deadline(place, deadline);
        self.poll_place(place);
    }

    fn on_data(&mut self, stream: u32, bytes: &[u8], is_end: bool) {
        let max = self.settings.message_bytes;
        let Some(call) = self.http2.data(stream) else { return };
        match call {
            Call::Exchange(_, inbox) => {
                inbox.push(bytes);
                if is_end {
                    inbox.end(Ending::Complete);
                }
            }
            Call::Receiving { body, .. } => {
                // What is known not to be a message is not collected.
                let refused = if body.is_empty() { message::begun(bytes, max).err() } else { None };
                if let Some(status) = refused {
                    return self.send_status(stream, status);
                }
                if is_end {
                    return self.start(stream, bytes);
                }
                body.extend_from_slice(bytes);
                if let Err(status) = message::begun(body, max) {
                    self.partial += bytes.len();
                    return self.send_status(stream, status);
                }
                self.collect(stream, bytes.len());
            }
            Call::New | Call::Running(_) => {}
        }
    }

    /// Counts a part of a message that was collected, and lets the client send more of it, if there is room.
    fn collect(&mut self, stream: u32, bytes: usize) {
        self.partial += bytes;
        if let Some(Call::Receiving { deadline: Some(deadline), .. }) = self.http2.data(stream) {
            let deadline = *deadline;
            self.wake_at(deadline);
        }
        if self.partial <= MAX_PARTIAL || *self.favored.get_or_insert(stream) == stream {
            return self.http2.release(stream, bytes);
        }
        if let Some(Call::Receiving { held, .. }) = self.http2.data(stream) {
            if *held == 0 && bytes > 0 {
                self.held.push_back(stream);
            }
            *held += bytes;
        }
        // Those that were given up would be remembered until the favored one ends.
        if self.held.len() > 2 * self.settings.streams as usize {
            let is_held =
                |call: Option<&mut Call<U::Opening>>| matches!(call, Some(Call::Receiving { held: 1.., .. }));
            self.held.retain(|stream| is_held(self.http2.data(*stream)));
        }
    }

    /// Counts a message off that is complete or given up, and lets others go on.
    fn forget(&mut self, stream: u32, bytes: usize) {
        self.partial -= bytes;
        if self.favored == Some(stream) {
            self.favored = None;
        }
        while self.partial <= MAX_PARTIAL || self.favored.is_none() {
            let Some(next) = self.held.pop_front() else { return };
            let Some(Call::Receiving { held, .. }) = self.http2.data(next) else { continue };
            let bytes = std::mem::take(held);
            self.http2.release(next, bytes);
            if self.partial > MAX_PARTIAL {
                self.favored = Some(next);
            }
        }
    }

    /// Begins a call of the method, with the last part of its body.
    fn start(&mut self, stream: u32, last: &[u8]) {
        let Some(call) = self.http2.data(stream) else { return };
        let receiving = std::mem::replace(call, Call::New);
        let Call::Receiving { opening, deadline, mut body, .. } = receiving else { return };
        self.forget(stream, body.len());
        let whole = if body.is_empty() {
            last
        } else {
            body.extend_from_slice(last);
            &body
        };
        let decoded = message::only(whole, self.settings.message_bytes);
        let request = decoded.and_then(|message| {
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(overdue());
            }
            exchange::catch_panic(|| self.unary.decode(opening, message)).unwrap_or_else(|| Err(failed()))
        });
        match request {
            Err(status) => self.send_status(stream, status),
            Ok(request) => {
                let task = Task::Unary { response: (self.start)(request) };
                let Some(place) = self.calls.insert(stream, task) else { return self.refuse(stream) };
                if self.poll_place(place) {
                    self.set_call(stream, Call::Running(place));
                    self.set_deadline(place, deadline);
                }
            }
        }
    }

    /// Refuses a call for which there is no place, which its client may repeat.
    fn refuse(&mut self, stream: u32) {
        drop(self.http2.reset(stream, Reason::RefusedStream));
    }

    fn set_call(&mut self, stream: u32, call: Call<U::Opening>) {
        if let Some(data) = self.http2.data(stream) {
            *data = call;
        }
    }

    /// Ends a call with a status.
    fn send_status(&mut self, stream: u32, status: Status) {
        if let Some(Call::Receiving { body, .. }) = self.http2.data(stream) {
            let length = std::mem::take(body).len();
            self.forget(stream, length);
        }
        self.http2.send_only_head(stream, &message::status_head(status));
    }

    /// Drops a call that its client has given up.
    fn drop_call(&mut self, stream: u32, call: Call<U::Opening>) {
        match call {
            Call::New => {}
            Call::Receiving { body, .. } => self.forget(stream, body.len()),
            Call::Running(place) | Call::Exchange(place, _) => self.calls.remove(place),
        }
    }

    /// Polls the calls that were woken.
    fn poll_woken(&mut self) {
        for word in 0..self.calls.words() {
            let mut woken = self.calls.take_woken(word);
            while woken != 0 {
                let bit = woken.trailing_zeros();
                woken &= woken - 1;
                self.poll_place(word as u32 * 64 + bit);
            }
        }
    }

    /// Polls the call at a place, and sends its response. Returns whether it goes on.
    fn poll_place(&mut self, place: u32) -> bool {
        let Some((task, waker, stream)) = self.calls.get(place) else { return false };
        let cx = &mut Context::from_waker(waker);
        match task.project() {
            TaskProjection::Unary { response } => {
                let polled = exchange::catch_panic(|| response.poll(cx));
                let failed = || Poll::Ready(Err(failed()));
                let Poll::Ready(result) = polled.unwrap_or_else(failed) else { return true };
                match result {
                    Ok(response) => {
                        let body = |out: &mut BytesMut| message::put(&response, out);
                        self.http2.respond(stream, message::RESPONSE_HEAD, body, message::OK_TRAILERS);
                    }
                    Err(status) => self.http2.send_only_head(stream, &message::status_head(status)),
                }
            }
            TaskProjection::Exchange { exchange } => match exchange.poll(cx, &mut self.http2, stream) {
                Progress::Done => {}
                Progress::Service => return true,
                Progress::Client => {
                    if !std::mem::replace(&mut exchange.is_blocked, true) {
                        self.blocked.push(place);
                    }
                    return true;
                }
            },
        }
        self.calls.remove(place);
        // The response may wait for the client, and the place is free for another call.
        self.set_call(stream, Call::New);
        false
    }

    fn set_deadline(&mut self, place: u32, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        self.calls.set_deadline(place, deadline);
        self.wake_at(deadline);
    }

    /// Makes the timer of deadlines fire then, if it would later.
    fn wake_at(&mut self, deadline: Instant) {
        let (timer, at) = self.timers.deadline.get_or_insert_with(|| {
            let timer = LazyTimeout::new(NEVER);
            (timer, Instant::now() + NEVER)
        });
        if deadline < *at {
            timer.set(deadline.saturating_duration_since(Instant::now()));
            *at = deadline;
        }
    }

    /// Ends the calls whose deadline has passed.
    fn end_overdue(&mut self) {
        let now = Instant::now();
        let (called, mut next) = self.calls.take_overdue(now);
        let mut incomplete = Vec::new();
        for (stream, call) in self.http2.each_data() {
            match call {
                Call::Receiving { deadline: Some(deadline), .. } if *deadline <= now => {
                    incomplete.push(stream);
                }
                Call::Receiving { deadline: Some(deadline), .. } => {
                    next = Some(next.map_or(*deadline, |next| next.min(*deadline)));
                }
                _ => {}
            }
        }
        self.timers.deadline = None;
        if let Some(next) = next {
            self.wake_at(next);
        }
        for stream in incomplete {
            self.send_status(stream, overdue());
        }
        for (place, stream) in called {
            // What a stream has begun goes on.
            let is_begun = self.calls.get(place).is_some_and(|(task, ..)| match task.project() {
                TaskProjection::Unary { .. } => false,
                TaskProjection::Exchange { exchange } => !exchange.is_calling(),
            });
            if !is_begun {
                self.overdue += 1;
                self.calls.remove(place);
                self.send_status(stream, overdue());
            }
        }
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
