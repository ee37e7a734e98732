//! Tasks of a client's HTTP/2 streams. A running stream keeps its connection from being idle; it is reset, and its permits are
//! released, when the client does not read the response.

use crate::stall::{BodyProgress, TrackedBody};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_http::server::{LazyTimeout, connections};

tokio::task_local! {
    /// Progress of the response on this task's stream.
    static FLOW: Arc<BodyProgress>;
}

/// Wraps a response body so that its stream's task sees its progress, and the request's body its end.
pub(super) fn tracked<B>(body: B, request: Option<Arc<RequestProgress>>) -> TrackedBody<B> {
    let flow = FLOW.try_with(Arc::clone).unwrap_or_default();
    TrackedBody::new(Some(body), flow).until(request.map(Responding))
}

/// Marks the response as ended when it is dropped.
pub(crate) struct Responding(Arc<RequestProgress>);

impl Drop for Responding {
    fn drop(&mut self) {
        self.0.set(RequestState::Ended);
    }
}

/// Runs the streams of one connection.
#[derive(Clone)]
pub(super) struct StreamExecutor {
    pub(super) activity: Arc<Activity>,
    /// Maximum time that a client may read nothing of a response.
    pub(super) timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let (busy, limit) = (StreamGuard::new(&self.activity), self.timeout);
        let flow = Arc::new(BodyProgress::default());
        tokio::spawn(FLOW.scope(Arc::clone(&flow), async move {
            let _busy = busy;
            run(stream, &flow, limit).await;
        }));
    }
}

/// Runs a stream until it ends or its client has read nothing for too long; dropping it resets the stream.
async fn run(stream: impl Future<Output = ()>, flow: &BodyProgress, limit: Duration) {
    let mut stream = pin!(stream);
    let mut timeout: Option<LazyTimeout> = None;
    let mut seen = None;
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let stalled = flow.stalled_by_reader();
        let has_moved = stalled != seen;
        seen = stalled;
        if stalled.is_none() {
            return Poll::Pending;
        }
        let timeout = timeout.get_or_insert_with(|| LazyTimeout::new(limit));
        if has_moved {
            timeout.set(limit);
        }
        timeout.poll(cx)
    })
    .await;
}

/// Activity on a connection.
pub(super) struct Activity {
    /// What the accept loop knows of the connection.
    connection: Arc<connections::Activity>,
    streams: Mutex<Streams>,
}

struct Streams {
    running: usize,
    /// How many of them wait for the rest of their request.
    awaiting: usize,
    /// When the last stream ended.
    quiet_since: Instant,
}

impl Activity {
    pub(super) fn new(connection: Arc<connections::Activity>) -> Arc<Self> {
        let streams = Streams { running: 0, awaiting: 0, quiet_since: Instant::now() };
        Arc::new(Self { connection, streams: Mutex::new(streams) })
    }

    /// Returns since when there has been no stream; `None` while there is one.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        (streams.running == 0).then_some(streams.quiet_since)
    }

    fn change(&self, change: impl FnOnce(&mut Streams)) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut streams);
        if streams.running > streams.awaiting {
            self.connection.busy();
        } else {
            self.connection.waiting();
        }
    }
}

/// A running stream on a connection.
struct StreamGuard(Arc<Activity>);

impl StreamGuard {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.change(|streams| streams.running += 1);
        Self(Arc::clone(activity))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.change(|streams| {
            streams.running -= 1;
            streams.quiet_since = Instant::now();
        });
    }
}

/// Whether a request waits for the rest of its body. A connection whose requests all do waits for its client.
pub(crate) struct RequestProgress {
    activity: Arc<Activity>,
    state: Mutex<RequestState>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestState {
    InProgress,
    Awaited,
    /// The response has begun: a client may wait for it before it sends more.
    Answered,
    /// The response has ended.
    Ended,
}

impl RequestProgress {
    pub(super) fn new(activity: &Arc<Activity>) -> Arc<Self> {
        Arc::new(Self { activity: Arc::clone(activity), state: Mutex::new(RequestState::InProgress) })
    }

    /// The rest of the body is missing.
    pub(crate) fn awaited(&self) {
        self.set(RequestState::Awaited);
    }

    /// More of the body has arrived.
    pub(crate) fn arrived(&self) {
        self.set(RequestState::InProgress);
    }

    /// The response has begun.
    pub(super) fn answered(&self) {
        self.set(RequestState::Answered);
    }

    /// Returns whether the response has begun and goes on.
    pub(crate) fn is_answered(&self) -> bool {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) == RequestState::Answered
    }

    fn set(&self, next: RequestState) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = match *state {
            RequestState::InProgress | RequestState::Awaited => false,
            RequestState::Answered => next != RequestState::Ended,
            RequestState::Ended => true,
        };
        if *state == next || is_over {
            return;
        }
        match (std::mem::replace(&mut *state, next), next) {
            (RequestState::Awaited, _) => self.activity.change(|streams| streams.awaiting -= 1),
            (_, RequestState::Awaited) => self.activity.change(|streams| streams.awaiting += 1),
            _ => {}
        }
    }
}

impl Drop for RequestProgress {
    fn drop(&mut self) {
        self.answered();
    }
}
