//! One RESP connection: reads, runs all received commands, and sends the replies in one write.
//!
//! An idle connection has no buffers: each thread has one buffer for input and one for replies. The input is copied
//! once, so that commands that wait for the store can borrow it. Rejected: a buffer per connection, because a hundred
//! thousand idle connections would take gigabytes.
//!
//! Nothing is read while replies are unsent, so a client that does not read delays only itself. Slow clients are
//! detected by a periodic tick instead of a timer that each command resets: see [`Connection::tick`].

use super::App;
use super::batch::{self, Stop};
use super::frame::MAX_COMMAND;
use super::session::Session;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tollgate_core::{CounterStore, Timestamp};
use tollgate_http::server::connections::Activity;

/// Number of consecutive reads after which other connections are served.
const MAX_CONSECUTIVE_READS: usize = 8;
/// Maximum time and bytes that are read from a client after a protocol error. Closing a connection with unread bytes
/// resets it, and the client may lose the reply.
const LINGER: Duration = Duration::from_secs(1);
const MAX_DISCARDED: usize = 1024 * 1024;

thread_local! {
    /// The input buffer; its content is copied to the connection after each read.
    static INPUT: RefCell<Vec<u8>> = RefCell::new(vec![0; MAX_COMMAND]);
    /// The reply buffer. A connection that waits for the store takes it, and others allocate a new one.
    static REPLIES: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

pub(super) struct Connection<S> {
    app: Arc<App<S>>,
    stream: TcpStream,
    activity: Arc<Activity>,
    session: Session,
    /// Input that is not consumed yet.
    rest: Vec<u8>,
    /// Replies that are not sent yet.
    unsent: Vec<u8>,
    /// The next action.
    next: Next,
    /// Number of reads since other connections were served.
    turns: usize,
    tick: Pin<Box<Sleep>>,
    /// The task is registered to be woken by a shutdown and by the next tick.
    is_watching: bool,
    /// The last input completed a command.
    made_progress: bool,
    /// A command was answered since the last tick.
    is_busy: bool,
    idle_ticks: u32,
    stopping: watch::Receiver<bool>,
}

/// The next action of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Read,
    /// Run the commands that were read.
    Answer,
    Close,
}

impl<S: CounterStore> Connection<S> {
    pub(super) fn new(
        app: Arc<App<S>>,
        stream: TcpStream,
        activity: Arc<Activity>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let id = app.connections.fetch_add(1, Ordering::Relaxed) + 1;
        let session = Session::new(id, &app.config);
        let tick = Box::pin(tokio::time::sleep(app.config.tick));
        Self {
            app,
            stream,
            activity,
            session,
            rest: Vec::new(),
            unsent: Vec::new(),
            next: Next::Read,
            turns: 0,
            tick,
            is_watching: false,
            made_progress: true,
            is_busy: false,
            idle_ticks: 0,
            stopping,
        }
    }

    /// Serves the connection until either side closes it.
    pub(super) async fn run(mut self) {
        let mut stopping = self.stopping.clone();
        let mut stop = std::pin::pin!(async move {
            let _ = stopping.wait_for(|stop| *stop).await;
        });
        loop {
            // A failed connection needs no report.
            if poll_fn(|cx| self.poll(cx, stop.as_mut())).await.is_err() {
                return;
            }
            match self.next {
                // Boxed, because it is large and there are many idle connections.
                Next::Answer => Box::pin(self.run_commands()).await,
                Next::Close => return Box::pin(self.close()).await,
                Next::Read => {}
            }
        }
    }

    /// Sends unsent replies and reads, until there is input or the connection ends.
    fn poll(&mut self, cx: &mut Context<'_>, stop: Pin<&mut impl Future>) -> Poll<io::Result<()>> {
        let has_answered = self.turns > 0 && self.made_progress;
        if !self.unsent.is_empty() && self.poll_send(cx)?.is_pending() {
            self.turns = 0;
            return self.watch(cx, stop);
        }
        let is_idle = self.rest.is_empty() && self.app.draining.load(Ordering::Relaxed);
        if is_idle && self.next == Next::Read {
            self.next = Next::Close;
        }
        // Input that completes no command must not prevent the timer from being polled.
        if !self.made_progress
            && let Poll::Ready(result) = self.tick(cx)
        {
            return Poll::Ready(result);
        }
        if self.turns >= MAX_CONSECUTIVE_READS && self.next != Next::Close {
            self.turns = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.next == Next::Read && self.poll_read(cx)?.is_pending() {
            self.turns = 0;
            // Polling the timer and the shutdown signal costs as much as a command: once they are registered, they are
            // only polled if a command was not what woke the task.
            if has_answered && self.is_watching && !self.tick.is_elapsed() {
                return Poll::Pending;
            }
            return self.watch(cx, stop);
        }
        Poll::Ready(Ok(()))
    }

    /// Registers the task to be woken by a shutdown and by the next tick.
    fn watch(&mut self, cx: &mut Context<'_>, stop: Pin<&mut impl Future>) -> Poll<io::Result<()>> {
        self.is_watching = true;
        // Once the signal has fired, `draining` is set, so the signal is not polled again.
        if !self.app.draining.load(Ordering::Relaxed) && stop.poll(cx).is_ready() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.tick(cx)
    }

    /// Reads once and appends the input to the rest of the last read.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        INPUT.with_borrow_mut(|input| {
            let mut buffer = ReadBuf::new(input);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
            self.next = if buffer.filled().is_empty() { Next::Close } else { Next::Answer };
            self.rest.extend_from_slice(buffer.filled());
            Poll::Ready(Ok(()))
        })
    }

    /// Runs the commands that were read, and sends as much of the replies as the socket accepts without waiting.
    async fn run_commands(&mut self) {
        let input = std::mem::take(&mut self.rest);
        let mut out = REPLIES.take();
        let began = self.app.limiter.clock().now();
        let is_silent = self.activity.is_silent();
        if !is_silent {
            self.activity.busy();
        }
        let (done, stop) = batch::run(&self.app, &mut self.session, &input, &mut out).await;
        self.report_latency(began);
        self.turns += 1;
        self.made_progress = done > 0;
        self.is_busy |= self.made_progress;
        if !is_silent || (self.made_progress && self.session.is_authenticated) {
            self.activity.waiting();
        }
        self.rest = if done == 0 { input } else { input[done..].to_vec() };
        self.next = match stop {
            Stop::Rest => Next::Read,
            Stop::Full => Next::Answer,
            Stop::Close => Next::Close,
        };
        let sent = if out.is_empty() { 0 } else { self.stream.try_write(&out).unwrap_or(0) };
        self.unsent.extend_from_slice(&out[sent..]);
        // A buffer that has grown beyond the usual size is dropped.
        if out.capacity() <= MAX_COMMAND {
            out.clear();
            REPLIES.set(out);
        }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut sent = 0;
        while sent < self.unsent.len() {
            match Pin::new(&mut self.stream).poll_write(cx, &self.unsent[sent..])? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(more) => sent += more,
                Poll::Pending => {
                    self.unsent.drain(..sent);
                    return Poll::Pending;
                }
            }
        }
        self.unsent = Vec::new();
        Poll::Ready(Ok(()))
    }

    /// Records the time from the read to the replies, which every decision of the batch waited for.
    fn report_latency(&mut self, began: Timestamp) {
        let decided = std::mem::take(&mut self.session.decided);
        if decided > 0 {
            let limiter = &self.app.limiter;
            limiter.record_latency("resp", decided, limiter.clock().now().since(began));
        }
    }

    /// Detects a slow client: two ticks without an answered command while an incomplete command, unsent replies or
    /// authentication are pending; otherwise `idle_ticks`.
    fn tick(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.tick.as_mut().poll(cx).is_ready() {
            let config = &self.app.config;
            let now = Instant::now();
            self.tick.as_mut().reset(now + config.tick);
            if std::mem::take(&mut self.is_busy) {
                self.idle_ticks = 0;
                continue;
            }
            self.idle_ticks += 1;
            let is_pending =
                !self.rest.is_empty() || !self.unsent.is_empty() || !self.session.is_authenticated;
            if self.idle_ticks >= if is_pending { 2 } else { config.idle_ticks } {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        Poll::Pending
    }

    /// Closes the connection without losing the last reply.
    async fn close(mut self) {
        let ended = async {
            self.stream.shutdown().await?;
            let (mut read, mut buffer) = (0, [0; 4096]);
            while read < MAX_DISCARDED {
                match self.stream.read(&mut buffer).await? {
                    0 => break,
                    more => read += more,
                }
            }
            io::Result::Ok(())
        };
        let _ = tokio::time::timeout(LINGER, ended).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RespConfig, throttle};
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use tollgate_core::{ManualClock, Timestamp};
    use tollgate_engine::Limiter;
    use tollgate_rules::{Options, Ruleset};
    use tollgate_store::{MemoryConfig, MemoryStore};

    /// A hundred thousand idle connections must not take the memory intended for counters.
    #[tokio::test]
    async fn an_idle_connection_is_small() {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
        let app = Arc::new(App {
            limiter: Arc::new(Limiter::new(Arc::new(rules), store, clock)),
            config: RespConfig::default(),
            scope: throttle::scope(),
            connections: AtomicU64::new(0),
            draining: AtomicBool::new(false),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("it has one")).await.expect("connected");
        let (_stop, stopping) = watch::channel(false);
        let connection = Connection::new(app, stream, Arc::default(), stopping).run();
        let size = std::mem::size_of_val(&connection);
        assert!(size <= 1024, "{size} bytes");
    }
}
