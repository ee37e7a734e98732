//! Idle connections of one backend, and the limit on open connections.
//!
//! Under `max_connections`, a permit belongs to a request and not to a connection: an idle connection has returned its permit,
//! so that the next request to get a permit also finds the connection. Rejected: idle connections that keep their permit,
//! because requests would wait for a permit while a connection is idle.

use crate::config::PoolConfig;
use crate::h1::exchange::UpstreamConnection;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Idle connections are in several stacks, one for every few threads, to avoid contention.
const STACKS: usize = 8;

/// Permit to have a connection open; `None` without a limit.
pub(crate) type ConnectionPermit = Option<OwnedSemaphorePermit>;

pub(super) struct IdleConnections {
    /// Boxed, because they move many times per request. With a connection limit all are in the first stack: a request that
    /// finds none opens a connection, so it must not miss one that is returned to a stack it has already searched.
    #[allow(clippy::vec_box, reason = "the box itself is moved around")]
    stacks: [Mutex<Vec<Box<UpstreamConnection>>>; STACKS],
    /// Maximum number per stack.
    max_idle: usize,
    keep_alive: Duration,
    permits: Option<Arc<Semaphore>>,
}

impl IdleConnections {
    pub(super) fn new(config: &PoolConfig) -> Self {
        let semaphore = |max: usize| Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS)));
        Self {
            stacks: Default::default(),
            max_idle: config.idle_connections,
            keep_alive: config.keep_alive.0,
            permits: config.max_connections.map(semaphore),
        }
    }

    /// Returns a usable idle connection, if there is one and a permit is available.
    pub(super) fn take(&self) -> Option<Box<UpstreamConnection>> {
        let permit = match &self.permits {
            None => None,
            Some(permits) => Some(Arc::clone(permits).try_acquire_owned().ok()?),
        };
        let mut connection = self.pop()?;
        connection.permit = permit;
        Some(connection)
    }

    /// Waits for a permit, first come first served; `None` on timeout.
    pub(super) async fn permit(&self, within: Duration) -> Option<ConnectionPermit> {
        let Some(permits) = &self.permits else { return Some(None) };
        let permit = tokio::time::timeout(within, Arc::clone(permits).acquire_owned()).await;
        Some(Some(permit.ok()?.ok()?))
    }

    /// Returns an idle connection to a request that already has a permit. A request that waited for one must call this before
    /// it opens a connection, so that there are never more connections than permits.
    pub(super) fn take_with(&self, permit: &mut ConnectionPermit) -> Option<Box<UpstreamConnection>> {
        permit.as_ref()?;
        let mut connection = self.pop()?;
        connection.permit = permit.take();
        Some(connection)
    }

    /// Stores a connection for the next request.
    pub(super) fn put(&self, mut connection: Box<UpstreamConnection>) {
        connection.idle_since = Instant::now();
        connection.is_reused = true;
        let permit = connection.permit.take();
        let mut stack = self.own().lock().unwrap_or_else(PoisonError::into_inner);
        if stack.len() < self.max_idle {
            stack.push(connection);
        }
        drop(stack);
        // Released last, when the connection can be found.
        drop(permit);
    }

    /// Closes expired idle connections.
    pub(super) fn sweep(&self) {
        for stack in &self.stacks {
            let mut stack = stack.lock().unwrap_or_else(PoisonError::into_inner);
            stack.retain_mut(|connection| self.is_usable(connection));
        }
    }

    fn is_usable(&self, connection: &mut UpstreamConnection) -> bool {
        connection.is_quiet() && connection.idle_since.elapsed() < self.keep_alive
    }

    fn pop(&self) -> Option<Box<UpstreamConnection>> {
        let (own, stacks) = if self.permits.is_some() { (0, 1) } else { (stack(), STACKS) };
        for step in 0..stacks {
            let stack = &self.stacks[(own + step) % STACKS];
            loop {
                let Some(mut connection) = stack.lock().unwrap_or_else(PoisonError::into_inner).pop() else {
                    break;
                };
                if self.is_usable(&mut connection) {
                    return Some(connection);
                }
            }
        }
        None
    }

    #[allow(clippy::vec_box, reason = "the box itself is moved around")]
    fn own(&self) -> &Mutex<Vec<Box<UpstreamConnection>>> {
        &self.stacks[if self.permits.is_some() { 0 } else { stack() }]
    }
}

/// Returns the stack of this thread.
fn stack() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STACKS;
    }
    OWN.with(|own| *own)
}
