//! The time of a connection: pings, its age, its shutdown, pauses, and the deadlines of its calls.

use super::incomplete::STALL;
use super::{Call, GrpcConnection, Lost, Settings, TaskProjection, overdue};
use crate::grpc::Unary;
use crate::grpc::calls::Calls;
use std::future::Future;
use std::task::Context;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tollgate_http::h2::Reason;
use tollgate_http::server::LazyTimeout;
use tonic::Status;

/// A client that has been quiet for this long is sent a ping, and has as long to answer.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a client may take to answer the announcement of a shutdown.
const SHUTDOWN_ANSWER: Duration = Duration::from_secs(1);
/// How long a client may take then to complete its requests, and without reading any of a response. What the store decides is
/// still waited for.
pub(super) const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);
/// How often messages that do not arrive are looked for, and which time ends one: it has had 20 to 30 s. Reading
/// the time for each request would cost as much as a small one does.
pub(super) const RECEIVE_INTERVAL: Duration = Duration::from_secs(10);
const RECEIVE_GENERATIONS: u32 = 3;
/// A timeout that is not in use.
const NEVER: Duration = Duration::from_secs(86_400 * 365);
/// After as many resets as there may be streams, nothing is read for this long. A reset call is over for the connection and not
/// for the store, where it may still be under way, so resets must not be a way around the maximum number of streams.
const RESETS_PAUSE: Duration = Duration::from_millis(20);

pub(super) struct Timers {
    pub(super) idle: LazyTimeout,
    pub(super) age: Option<LazyTimeout>,
    /// When the connection ends whatever goes on.
    pub(super) end: Option<LazyTimeout>,
    /// When the shutdown no longer waits for the client.
    pub(super) shutdown: Option<LazyTimeout>,
    /// When what clients do not complete or read is ended in a shutdown.
    pub(super) grace: Option<LazyTimeout>,
    /// When messages that do not arrive are looked for again.
    pub(super) receive: Option<LazyTimeout>,
    /// When streams have waited for each other for too long.
    pub(super) stall: Option<LazyTimeout>,
    /// Until when nothing is read.
    pub(super) pause: Option<LazyTimeout>,
    /// The earliest deadline of a call, or an earlier time.
    pub(super) deadline: Option<(LazyTimeout, Instant)>,
}

impl Timers {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            idle: LazyTimeout::new(KEEP_ALIVE),
            age: settings.max_age.map(LazyTimeout::new),
            end: None,
            shutdown: None,
            grace: None,
            receive: None,
            stall: None,
            pause: None,
            deadline: None,
        }
    }
}

/// Returns whether a timer has passed, and registers it if it has not.
fn has_passed(timer: &mut Option<LazyTimeout>, cx: &mut Context<'_>) -> bool {
    timer.as_mut().is_some_and(|timer| timer.poll_registered(cx).is_ready())
}

impl<I, U, S, F> GrpcConnection<'_, I, U, S, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    U: Unary,
    S: Fn(U::Request) -> F,
    F: Future<Output = Result<U::Response, Status>>,
{
    /// Does what it is time for, and registers the timers.
    pub(super) fn poll_timers(&mut self, cx: &mut Context<'_>) -> Result<(), Lost> {
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
                self.incomplete.shrink();
                self.http2.shrink();
            }
            acts = true;
        }
        while self.timers.deadline.as_mut().is_some_and(|(timer, _)| timer.poll_registered(cx).is_ready()) {
            self.end_overdue();
            acts = true;
        }
        if self.http2.is_shutting_down() {
            self.timers.grace.get_or_insert_with(|| LazyTimeout::new(SHUTDOWN_GRACE));
        }
        if has_passed(&mut self.timers.grace, cx) {
            self.timers.grace = None;
            self.end_unfinished();
            acts = true;
        }
        if self.http2.open() > 0 {
            self.timers.receive.get_or_insert_with(|| LazyTimeout::new(RECEIVE_INTERVAL));
        }
        if has_passed(&mut self.timers.receive, cx) {
            self.timers.receive = None;
            self.end_late();
            acts = true;
        }
        if self.incomplete.is_waiting() {
            self.timers.stall.get_or_insert_with(|| LazyTimeout::new(STALL));
        }
        if has_passed(&mut self.timers.stall, cx) {
            self.timers.stall = None;
            self.incomplete.on_stall();
            self.release_next();
            acts = true;
        }
        if acts {
            // There may be something to send.
            cx.waker().wake_by_ref();
        }
        Ok(())
    }

    pub(super) fn begin_shutdown(&mut self) {
        self.http2.begin_shutdown();
        if self.http2.is_shutdown_announced() && self.timers.shutdown.is_none() {
            self.timers.shutdown = Some(LazyTimeout::new(SHUTDOWN_ANSWER));
        }
    }

    /// Returns whether nothing is to be read for a while.
    pub(super) fn is_paused(&mut self, cx: &mut Context<'_>) -> bool {
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

    pub(super) fn set_deadline(&mut self, place: u32, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        self.calls.set_deadline(place, deadline);
        self.wake_at(deadline);
    }

    /// Makes the timer of deadlines fire then, if it would later.
    pub(super) fn wake_at(&mut self, deadline: Instant) {
        let (timer, at) = self.timers.deadline.get_or_insert_with(|| {
            let timer = LazyTimeout::new(NEVER);
            (timer, Instant::now() + NEVER)
        });
        if deadline < *at {
            timer.set(deadline.saturating_duration_since(Instant::now()));
            *at = deadline;
        }
    }

    /// Ends the calls whose messages do not arrive. Those of streams that go on have sent one.
    fn end_late(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        let now = self.generation;
        let is_late = |begun: u32| now.wrapping_sub(begun) >= RECEIVE_GENERATIONS;
        let late: Vec<_> = self
            .http2
            .each_data()
            .filter_map(|(stream, call)| match call {
                Call::Receiving { generation, .. } if is_late(*generation) => Some((stream, None)),
                Call::Exchange { place, inbox, generation }
                    if is_late(*generation) && !inbox.has_message() && !inbox.is_complete() =>
                {
                    Some((stream, Some(*place)))
                }
                _ => None,
            })
            .collect();
        let status = || Status::deadline_exceeded("the message has not arrived");
        for (stream, place) in late {
            match place {
                None => self.send_status(stream, status()),
                Some(place) => self.end_exchange(stream, place, status()),
            }
        }
    }

    /// Ends, in a shutdown, the calls that their clients do not complete, and the responses of which nothing was read since the
    /// last time.
    fn end_unfinished(&mut self) {
        enum Unfinished {
            Message,
            Exchange(u32),
            Response,
        }
        let open: Vec<_> = self
            .http2
            .each_data()
            .filter_map(|(stream, call)| match call {
                Call::Receiving { .. } => Some((stream, Unfinished::Message)),
                Call::Exchange { place, inbox, .. } if !inbox.is_complete() => {
                    Some((stream, Unfinished::Exchange(*place)))
                }
                Call::New | Call::Exchange { .. } => Some((stream, Unfinished::Response)),
                Call::Running(_) => None,
            })
            .collect();
        let status = || Status::unavailable("the server shuts down");
        let waited = std::mem::take(&mut self.unread_responses);
        for (stream, what) in open {
            match what {
                Unfinished::Message => self.send_status(stream, status()),
                Unfinished::Exchange(place) => self.end_exchange(stream, place, status()),
                Unfinished::Response => {
                    let Some(queued) = self.http2.queued(stream).filter(|queued| *queued > 0) else {
                        continue;
                    };
                    if !waited.contains(&(stream, queued)) {
                        self.unread_responses.push((stream, queued));
                    } else if let Some(call) = self.http2.reset(stream, Reason::Cancel) {
                        self.drop_call(stream, call);
                    }
                }
            }
        }
    }

    /// Ends the calls whose deadline has passed.
    pub(super) fn end_overdue(&mut self) {
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
}
