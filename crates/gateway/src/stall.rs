//! Who is waited for on an HTTP/2 stream: whoever sends, or whoever reads.
//!
//! hyper asks a body for more only when the other side has had room for what came before. An alarm inside the body therefore
//! never goes off when it is the other side that does not read: nobody polls it. So each body notes what it was last
//! asked and answered, and somebody else who is polled looks at that.

use crate::body::BodyError;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How one body gets on.
#[derive(Debug, Default)]
pub(crate) struct BodyProgress {
    /// One more than the frames that were taken; zero while there is no body yet.
    taken: AtomicU64,
    /// Whether more was asked for, and has not come.
    is_polled: AtomicBool,
    ended: Notify,
}

/// Whoever should read has taken nothing for too long.
#[derive(Debug)]
pub(crate) struct Stalled;

impl BodyProgress {
    /// If it is the reader's turn: how far it has come.
    pub(crate) fn stalled_by_reader(&self) -> Option<u64> {
        let taken = self.taken.load(Ordering::Relaxed);
        (taken > 0 && !self.is_polled.load(Ordering::Relaxed)).then_some(taken)
    }

    /// Waits until the body is done with.
    pub(crate) async fn ended(&self, patience: Duration) -> Result<(), Stalled> {
        let mut ended = pin!(self.ended.notified());
        let mut seen = (None, Instant::now());
        loop {
            tokio::select! {
                () = ended.as_mut() => return Ok(()),
                () = tokio::time::sleep(patience / 4) => {}
            }
            let owed = self.stalled_by_reader();
            if owed.is_none() || owed != seen.0 {
                seen = (owed, Instant::now());
            } else if seen.1.elapsed() >= patience {
                return Err(Stalled);
            }
        }
    }
}

/// A body, if there is one, that notes how it gets on.
pub(crate) struct TrackedBody<B> {
    body: Option<B>,
    progress: Arc<BodyProgress>,
}

impl<B> TrackedBody<B> {
    pub(crate) fn new(body: Option<B>, flow: Arc<BodyProgress>) -> Self {
        flow.taken.store(1, Ordering::Relaxed);
        Self { body, progress: flow }
    }
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> Body for TrackedBody<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Self { body, progress: flow } = self.get_mut();
        let Some(body) = body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        flow.is_polled.store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_ready() {
            flow.taken.fetch_add(1, Ordering::Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

impl<B> Drop for TrackedBody<B> {
    fn drop(&mut self) {
        self.progress.ended.notify_one();
    }
}
