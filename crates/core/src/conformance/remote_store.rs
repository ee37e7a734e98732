//! Remote store for tests: wraps any store and simulates a network. It declines every attempt to charge without
//! waiting, is pending for one poll, and records the charges it receives.

use super::yield_once;
use crate::charge::{Charge, Outcomes, Permit};
use crate::store::{CounterStore, StoreError};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A store wrapped to behave as if it were remote; see the module.
#[derive(Debug)]
pub struct RemoteStore<S> {
    inner: S,
    charged: Mutex<Vec<Vec<String>>>,
}

impl<S> RemoteStore<S> {
    /// Wraps `inner`.
    pub const fn new(inner: S) -> Self {
        Self { inner, charged: Mutex::new(Vec::new()) }
    }

    fn record(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the calls since the previous `take_calls`, in order: for each, the scopes and values of the counters it
    /// charged.
    pub fn take_calls(&self) -> Vec<Vec<String>> {
        std::mem::take(&mut self.record())
    }

    /// Takes the calls of requests for one counter of `split` shards, and returns their number. A plan advances the
    /// counter to its next shard, so a request that was planned twice skips one.
    ///
    /// # Errors
    /// A call that charged anything else than the shard after that of the call before it, and all calls.
    pub fn take_rounds(&self, split: u16) -> Result<usize, String> {
        let calls = self.take_calls();
        let read: Option<Vec<(u16, String)>> = calls.iter().map(|charges| shard(charges)).collect();
        let read = read.ok_or_else(|| format!("a call charged no shard, or several counters: {calls:?}"))?;
        for (at, pair) in read.windows(2).enumerate() {
            let ((previous, one), (next, other)) = (&pair[0], &pair[1]);
            if one != other {
                return Err(format!("call {} charged another counter: {calls:?}", at + 1));
            }
            let steps = (next + split - previous) % split;
            if *previous.max(next) >= split || steps != 1 % split {
                return Err(format!(
                    "call {} is {steps} shards on from the call before it: {calls:?}",
                    at + 1
                ));
            }
        }
        Ok(read.len())
    }
}

/// Reads the shard that a call charged, and the counter without it. Rules name shards by two hexadecimal digits, the
/// first of the counter's values.
fn shard(charges: &[String]) -> Option<(u16, String)> {
    let [charge] = charges else { return None };
    let (scope, values) = charge.split_once('[')?;
    let (shard, values) = values.split_at_checked(2)?;
    Some((u16::from_str_radix(shard, 16).ok()?, format!("{scope}{values}")))
}

fn counter(charge: &Charge<'_>) -> String {
    let values: Vec<String> = charge.key.parts.iter().map(ToString::to_string).collect();
    format!("{} [{}]", charge.key.scope.label(), values.join(", "))
}

impl<S: CounterStore> CounterStore for RemoteStore<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.record().push(charges.iter().map(counter).collect());
        yield_once().await;
        self.inner.charge(charges).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.inner.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.inner.release(permits).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(calls: &[&[&str]]) -> Result<usize, String> {
        let store = RemoteStore::new(());
        *store.record() =
            calls.iter().map(|charges| charges.iter().map(ToString::to_string).collect()).collect();
        store.take_rounds(4)
    }

    /// A request that is planned twice or three times would pass where only different shards are required.
    #[test]
    fn requests_that_skip_a_shard_are_found() {
        assert_eq!(rounds(&[&["s [02, u]"], &["s [03, u]"], &["s [00, u]"], &["s [01, u]"]]), Ok(4));
        assert_eq!(rounds(&[]), Ok(0));
        for wrong in [
            &[&["s [00, u]"][..], &["s [02, u]"]][..],
            &[&["s [00, u]"], &["s [03, u]"]],
            &[&["s [01, u]"], &["s [01, u]"]],
            &[&["s [03, u]"], &["s [04, u]"]],
            &[&["s [00, u]"], &["s [01, v]"]],
            &[&["s [00, u]", "t [00, u]"]],
            &[&["s [user]"]],
            &[&["s"]],
            &[&[]],
        ] {
            assert!(rounds(wrong).is_err(), "{wrong:?}");
        }
    }
}
