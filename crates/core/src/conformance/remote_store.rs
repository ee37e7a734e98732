//! A store that must be waited for, as one behind a network is, over any store: it declines every attempt to charge without
//! waiting, is pending for one poll, and records what it was asked to charge.

use crate::charge::{Charge, Outcomes, Permit};
use crate::store::{CounterStore, StoreError};
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;

/// See the module.
#[derive(Debug)]
pub struct RemoteStore<S> {
    inner: S,
    charged: Mutex<Vec<Vec<String>>>,
}

impl<S> RemoteStore<S> {
    /// Over this store.
    pub const fn new(inner: S) -> Self {
        Self { inner, charged: Mutex::new(Vec::new()) }
    }

    fn record(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The calls since the last time, in order: for each, the counters it charged, a name and its values.
    pub fn take_calls(&self) -> Vec<Vec<String>> {
        std::mem::take(&mut self.record())
    }
}

fn counter(charge: &Charge<'_>) -> String {
    let values: Vec<String> = charge.key.parts.iter().map(ToString::to_string).collect();
    format!("{} [{}]", charge.key.scope.label(), values.join(", "))
}

impl<S: CounterStore> CounterStore for RemoteStore<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.record().push(charges.iter().map(counter).collect());
        let mut has_waited = false;
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if std::mem::replace(&mut has_waited, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.inner.charge(charges).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.inner.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.inner.release(permits).await
    }
}
