//! The fleet's hot counters: limits by leases report what they find hot to the server, and lease what others have found hot
//! from the first request on. The list expires by itself if the server is unavailable.

use super::client::Client;
use super::config::FollowError;
use super::replica::Replica;
use http::HeaderValue;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{Clock, CounterStore, TimeDelta};
use tollgate_engine::Limiter;
use tollgate_replica::{CounterHasher, HOT_LIFETIME, HotReport, MAX_HOT};
use tollgate_store::LeasedStore;

/// The leases of one limiter.
trait Leases: Send + Sync {
    /// Adds what is hot here, by name and units per second. Returns whether the limiter still exists.
    fn report(&self, hot: &mut Vec<(u64, u64)>) -> bool;

    fn set_hot_list(&self, names: &[u64], lifetime: TimeDelta);
}

impl<S, A, C> Leases for Weak<Limiter<LeasedStore<S, A, C>>>
where
    S: CounterStore + 'static,
    A: CounterStore + 'static,
    C: Clock + Clone + 'static,
{
    fn report(&self, hot: &mut Vec<(u64, u64)>) -> bool {
        let Some(limiter) = self.upgrade() else { return false };
        let counters = limiter.store().hot_counters(MAX_HOT);
        hot.extend(counters.into_iter().map(|counter| (counter.name, counter.rate)));
        true
    }

    fn set_hot_list(&self, names: &[u64], lifetime: TimeDelta) {
        if let Some(limiter) = self.upgrade() {
            limiter.store().set_hot_list(names.iter().copied(), lifetime);
        }
    }
}

/// All limiters of this process that lease counters.
#[derive(Default)]
pub(super) struct LeasedLimiters(Mutex<Vec<Box<dyn Leases>>>);

impl LeasedLimiters {
    pub(super) fn add<S, A, C>(&self, limiter: &Arc<Limiter<LeasedStore<S, A, C>>>, hasher: CounterHasher)
    where
        S: CounterStore + 'static,
        A: CounterStore + 'static,
        C: Clock + Clone + 'static,
    {
        limiter.store().share_hot_keys(Arc::new(move |key| hasher.name(key)));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(Arc::downgrade(limiter)));
    }

    /// Returns what all of them find hot, the busiest first; `None` if there are none.
    fn report(&self) -> Option<HotReport> {
        let mut limiters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hot = Vec::new();
        limiters.retain(|limiter| limiter.report(&mut hot));
        hot.sort_unstable_by_key(|(name, rate)| (std::cmp::Reverse(*rate), *name));
        hot.truncate(MAX_HOT);
        (!limiters.is_empty()).then_some(HotReport { hot })
    }

    fn set_hot_list(&self, names: &[u64], lifetime: TimeDelta) {
        let limiters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        limiters.iter().for_each(|limiter| limiter.set_hot_list(names, lifetime));
    }
}

/// The list as last received.
#[derive(Default)]
pub(super) struct HotExchange {
    names: Vec<u64>,
    tag: Option<HeaderValue>,
    /// When the list expires, unless the server confirms it.
    until: Option<Instant>,
    /// The server is of an older version, which has no list.
    is_unsupported: bool,
}

impl HotExchange {
    /// Exchanges the list with the server, if there are leases. A failure is not one of following: the next request for the
    /// state shows it. `asks_again` also asks a server that had no list.
    pub(super) async fn exchange(
        &mut self,
        client: &mut Client,
        replica: &Replica,
        poll: Duration,
        asks_again: bool,
    ) {
        let Some(report) = replica.leased.report() else { return };
        self.is_unsupported &= !asks_again;
        if self.is_unsupported {
            return self.expire(replica);
        }
        match client.exchange_hot(&report, self.tag.as_ref()).await {
            Ok(changed) => {
                if let Some((names, tag)) = changed {
                    (self.names, self.tag) = (names.hot, tag);
                    self.names.truncate(MAX_HOT);
                }
                // Longer than several polls, so that a slow one does not end it.
                let lifetime = Duration::from_micros(HOT_LIFETIME.as_micros()).max(poll * 4);
                self.until = Some(Instant::now() + lifetime);
                let micros = u64::try_from(lifetime.as_micros()).unwrap_or(u64::MAX);
                replica.leased.set_hot_list(&self.names, TimeDelta::from_micros(micros));
                self.show(replica);
            }
            Err(error) => {
                self.is_unsupported = matches!(error, FollowError::Refused { status: 404 | 405, .. });
                tracing::debug!(%error, "exchanging hot counters failed");
                self.expire(replica);
            }
        }
    }

    /// Forgets the list once it has expired; the leases do so by themselves.
    pub(super) fn expire(&mut self, replica: &Replica) {
        if self.until.is_some_and(|until| Instant::now() >= until) {
            *self = Self { is_unsupported: self.is_unsupported, ..Self::default() };
            self.show(replica);
        }
    }

    fn show(&self, replica: &Replica) {
        let hot = self.names.len();
        if replica.status.borrow().hot != hot {
            replica.report(|status| status.hot = hot);
        }
    }
}
