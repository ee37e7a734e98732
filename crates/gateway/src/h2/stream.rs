//! A caller's streams, each a task of its own: they keep their connection from being idle, and end when their caller does not
//! read what it has asked for, with all that their requests hold.

use crate::stall::{BodyProgress, TrackedBody};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_http::server::LazyTimeout;

tokio::task_local! {
    /// How the answer of this task's stream gets on.
    static FLOW: Arc<BodyProgress>;
}

/// An answer's body, looked after by the task of its stream.
pub(super) fn tracked<B>(body: B) -> TrackedBody<B> {
    let flow = FLOW.try_with(Arc::clone).unwrap_or_default();
    TrackedBody::new(Some(body), flow)
}

/// Runs the streams of one connection.
#[derive(Clone)]
pub(super) struct StreamExecutor {
    pub(super) activity: Arc<Activity>,
    /// How long a caller may take nothing of an answer.
    pub(super) timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let (busy, patience) = (StreamGuard::new(&self.activity), self.timeout);
        let flow = Arc::new(BodyProgress::default());
        tokio::spawn(FLOW.scope(Arc::clone(&flow), async move {
            let _busy = busy;
            run(stream, &flow, patience).await;
        }));
    }
}

/// Runs a stream to its end, or until its caller has taken nothing for too long: dropped, it is reset.
async fn run(stream: impl Future<Output = ()>, flow: &BodyProgress, patience: Duration) {
    let mut stream = pin!(stream);
    let mut timeout: Option<LazyTimeout> = None;
    let mut seen = None;
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let owed = flow.stalled_by_reader();
        let has_moved = owed != seen;
        seen = owed;
        if owed.is_none() {
            return Poll::Pending;
        }
        let timeout = timeout.get_or_insert_with(|| LazyTimeout::new(patience));
        if has_moved {
            timeout.set(patience);
        }
        timeout.poll(cx)
    })
    .await;
}

/// What is under way on a connection.
pub(super) struct Activity {
    streams: AtomicUsize,
    /// When the last one ended.
    quiet_since: Mutex<Instant>,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { streams: AtomicUsize::new(0), quiet_since: Mutex::new(Instant::now()) })
    }

    /// Since when nothing is.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        let since = *self.quiet_since.lock().unwrap_or_else(PoisonError::into_inner);
        (self.streams.load(Ordering::Acquire) == 0).then_some(since)
    }
}

/// A stream under way on a connection.
struct StreamGuard(Arc<Activity>);

impl StreamGuard {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.streams.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // Before it counts as ended: nobody may see it gone and an older time.
        *self.0.quiet_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.streams.fetch_sub(1, Ordering::Release);
    }
}
