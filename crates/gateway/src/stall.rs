//! Stall detection for bodies on HTTP/2 streams: distinguishes a slow sender from a slow reader.
//!
//! hyper polls a body only when the peer's window has room for more. A timeout inside the body therefore never fires when the
//! peer does not read, because nothing polls it. So each body records its last poll and result, and another task that is
//! polled checks that record.

use crate::body::BodyError;
use crate::h2::Responding;
use crate::upstream::{Failure, body_failure};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Progress of one body.
#[derive(Debug, Default)]
pub(crate) struct BodyProgress {
    /// One more than the number of frames taken; 0 before there is a body.
    taken: AtomicU64,
    /// Whether the reader is waiting for the next frame.
    is_polled: AtomicBool,
    /// The error that the body ended with.
    failure: Mutex<Option<Box<Failure>>>,
    ended: Notify,
}

/// The reader has taken nothing for too long.
#[derive(Debug)]
pub(crate) struct Stalled;

impl BodyProgress {
    /// Returns the progress if the body waits for its reader.
    pub(crate) fn stalled_by_reader(&self) -> Option<u64> {
        let taken = self.taken.load(Ordering::Relaxed);
        (taken > 0 && !self.is_polled.load(Ordering::Relaxed)).then_some(taken)
    }

    /// Returns the error that the body ended with, if it did.
    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take().map(|failure| *failure)
    }

    /// Waits until the body is dropped; fails if its reader stalls for `timeout`.
    pub(crate) async fn ended(&self, timeout: Duration) -> Result<(), Stalled> {
        let mut ended = pin!(self.ended.notified());
        let mut seen = (None, Instant::now());
        loop {
            tokio::select! {
                () = ended.as_mut() => return Ok(()),
                () = tokio::time::sleep(timeout / 4) => {}
            }
            let stalled = self.stalled_by_reader();
            if stalled.is_none() || stalled != seen.0 {
                seen = (stalled, Instant::now());
            } else if seen.1.elapsed() >= timeout {
                return Err(Stalled);
            }
        }
    }
}

/// A body, possibly empty, that records its progress.
pub(crate) struct TrackedBody<B> {
    body: Option<B>,
    progress: Arc<BodyProgress>,
    /// Dropped with the body.
    _responding: Option<Responding>,
}

impl<B> TrackedBody<B> {
    pub(crate) fn new(body: Option<B>, flow: Arc<BodyProgress>) -> Self {
        flow.taken.store(1, Ordering::Relaxed);
        Self { body, progress: flow, _responding: None }
    }

    /// Keeps this until the body is dropped.
    pub(crate) fn until(mut self, responding: Option<Responding>) -> Self {
        self._responding = responding;
        self
    }

    /// Returns the body of a request that was not sent.
    pub(crate) fn into_inner(mut self) -> Option<B> {
        self.body.take()
    }
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> Body for TrackedBody<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Self { body, progress: flow, .. } = self.get_mut();
        let Some(body) = body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        flow.is_polled.store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_ready() {
            flow.taken.fetch_add(1, Ordering::Relaxed);
        }
        if let Poll::Ready(Some(Err(error))) = &polled {
            *flow.failure.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(Box::new(body_failure(error)));
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
