//! Tasks of a client's HTTP/2 streams. A running stream keeps its connection from being idle; it is reset, and its permits are
//! released, when the client does not read the response.

use crate::stall::{BodyProgress, TrackedBody};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_http::server::{LazyTimeout, connections};

tokio::task_local! {
    /// Progress of the response on this task's stream.
    static FLOW: Arc<BodyProgress>;
}

/// Wraps a response body so that its stream's task sees its progress.
pub(super) fn tracked<B>(body: B) -> TrackedBody<B> {
    let flow = FLOW.try_with(Arc::clone).unwrap_or_default();
    TrackedBody::new(Some(body), flow)
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
    streams: AtomicUsize,
    /// When the last stream ended.
    quiet_since: Mutex<Instant>,
}

impl Activity {
    pub(super) fn new(connection: Arc<connections::Activity>) -> Arc<Self> {
        let quiet_since = Mutex::new(Instant::now());
        Arc::new(Self { connection, streams: AtomicUsize::new(0), quiet_since })
    }

    /// Returns since when there has been no stream; `None` while there is one.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        let since = *self.quiet_since.lock().unwrap_or_else(PoisonError::into_inner);
        (self.streams.load(Ordering::Acquire) == 0).then_some(since)
    }
}

/// A running stream on a connection.
struct StreamGuard(Arc<Activity>);

impl StreamGuard {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.streams.fetch_add(1, Ordering::Relaxed);
        activity.connection.busy();
        Self(Arc::clone(activity))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // Stored before the count decreases: a reader must not see the stream gone with an older time.
        let mut quiet_since = self.0.quiet_since.lock().unwrap_or_else(PoisonError::into_inner);
        *quiet_since = Instant::now();
        if self.0.streams.fetch_sub(1, Ordering::Release) == 1 {
            self.0.connection.idle(*quiet_since);
        }
    }
}
