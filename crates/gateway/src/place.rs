//! A request's place in flight to its upstream: held only while the gateway waits for the upstream.
//!
//! While the client's bytes are awaited, or the client has not taken what the upstream sent, the place is given back and
//! taken again afterwards; the end of a request's body waits for one. No timer is needed: bodies are polled, and the result of a poll tells for whom the gateway waits.
//! A pause after a grace period was rejected: a client that sends a byte in each period would keep its place.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tollgate_engine::{Ended, WorkerPermit};

/// A place in flight. Dropping it gives it back.
pub(crate) enum UpstreamPlace {
    Own(WorkerPermit),
    /// Of a request with a body.
    Shared(Arc<SharedPlace>),
}

/// A place in flight that a request shares with its body, because another future sends that.
pub(crate) struct SharedPlace(Mutex<SharedState>);

struct SharedState {
    permit: Option<WorkerPermit>,
    /// Whether the next part of the request's body is missing.
    awaits_client: bool,
    /// Whether the place was given back for that, and is not held again.
    needs_place: bool,
    /// Whether the response has begun. From then on its body decides when the place is held.
    has_response: bool,
    /// The task of the end of the body, while that waits for the place.
    waiting: Option<Waker>,
}

impl UpstreamPlace {
    /// Creates the place of a request with a body, for both.
    pub(crate) fn shared(permit: WorkerPermit) -> (Self, Arc<SharedPlace>) {
        let state = SharedState {
            permit: Some(permit),
            awaits_client: false,
            needs_place: false,
            has_response: false,
            waiting: None,
        };
        let shared = Arc::new(SharedPlace(Mutex::new(state)));
        (Self::Shared(Arc::clone(&shared)), shared)
    }

    /// The upstream has sent the head of its response, or has failed to.
    pub(crate) fn ended(&mut self, ended: Ended) {
        match self {
            Self::Own(permit) => permit.ended(ended),
            Self::Shared(shared) => {
                if let Some(permit) = &mut shared.lock().permit {
                    permit.ended(ended);
                }
            }
        }
    }

    /// The client is to take what the upstream has sent.
    pub(crate) fn pause(&mut self) {
        match self {
            Self::Own(permit) => permit.pause(),
            Self::Shared(shared) => {
                let mut state = shared.lock();
                state.has_response = true;
                if let Some(permit) = &mut state.permit {
                    permit.pause();
                }
                // The end of the body waits no longer, and no place is given to it.
                let waiting = state.waiting.take();
                drop(state);
                waiting.into_iter().for_each(Waker::wake);
            }
        }
    }

    /// More of the response is awaited from the upstream.
    pub(crate) fn resume(&mut self) {
        match self {
            Self::Own(permit) => permit.resume(),
            Self::Shared(shared) => {
                let mut state = shared.lock();
                let awaits_client = state.awaits_client;
                if let Some(permit) = state.permit.as_mut().filter(|_| !awaits_client) {
                    permit.resume();
                }
            }
        }
    }
}

impl Drop for UpstreamPlace {
    fn drop(&mut self) {
        // The rest of the body may be sent for longer than the place is held.
        if let Self::Shared(shared) = self {
            let mut state = shared.lock();
            let (permit, waiting) = (state.permit.take(), state.waiting.take());
            drop(state);
            drop(permit);
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

impl SharedPlace {
    /// The next part of the body has not arrived.
    pub(crate) fn pause(&self) {
        let mut state = self.lock();
        (state.awaits_client, state.needs_place) = (true, true);
        if let Some(permit) = &mut state.permit {
            permit.pause();
        }
    }

    /// The next part of the body has arrived. It is passed on with or without a place: the upstream waits for the rest.
    pub(crate) fn try_resume(&self) {
        let _ = self.arrived(|permit| if permit.try_resume() { Ok(()) } else { Err(None) });
    }

    /// The end of the body has arrived. It is passed on when there is a place: callers that hold back the ends of many bodies
    /// would have the upstream work on all of them at once.
    pub(crate) fn poll_resume(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.arrived(|permit| match permit.poll_resume(cx) {
            Poll::Ready(()) => Ok(()),
            Poll::Pending => Err(Some(cx.waker().clone())),
        })
    }

    /// `resume` fails if there is no place, with what is to be woken if the response begins first.
    fn arrived(&self, resume: impl FnOnce(&mut WorkerPermit) -> Result<(), Option<Waker>>) -> Poll<()> {
        let mut state = self.lock();
        state.awaits_client = false;
        if !state.needs_place || state.has_response {
            return Poll::Ready(());
        }
        let resumed = state.permit.as_mut().map_or(Ok(()), resume);
        state.needs_place = resumed.is_err();
        state.waiting = resumed.err().flatten();
        if state.needs_place { Poll::Pending } else { Poll::Ready(()) }
    }

    fn lock(&self) -> MutexGuard<'_, SharedState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
