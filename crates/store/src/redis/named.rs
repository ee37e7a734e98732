//! Named stores: other Redis servers beside the default ones, for the counters of rules that name a store.
//!
//! Each has its own servers, connections, breakers and clock, so that the failure of one touches only its own counters.
//! A request whose counters lie in several stores is decided as one whose counters lie in several slots of a cluster: all
//! parts are charged at once, and undone if one denies; what a store cannot decide is left to the fail policy of its rules
//! (`StoreError::Partial`). Rejected: a store around stores, which would repeat the same splitting, undoing and late
//! replies outside of this module.

use super::dispatch;
use super::shard_request::{self, KeyLayout, Parts, Place};
use super::{Kind, RedisStore};
use std::sync::{Arc, OnceLock};
use tollgate_core::{Charge, Scope, StoreError};

/// Maximum number of named stores: each has connections of its own.
pub const MAX_STORES: usize = 64;

/// The named stores in the order in which they were added. None is ever removed, so a number stays that of its store, and a
/// lookup takes no lock.
#[derive(Clone)]
pub(super) struct NamedStores(Arc<[OnceLock<(String, RedisStore)>]>);

impl Default for NamedStores {
    fn default() -> Self {
        Self((0..MAX_STORES).map(|_| OnceLock::new()).collect())
    }
}

impl NamedStores {
    fn get(&self, at: usize) -> Option<&(String, RedisStore)> {
        self.0.get(at)?.get()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &RedisStore)> {
        self.0.iter().map_while(|slot| slot.get()).map(|(name, store)| (name.as_str(), store))
    }
}

impl RedisStore {
    /// Adds stores by name: they keep the counters whose [`Scope::store`] is that name. All must hash values that may be
    /// secrets in the same way.
    #[must_use]
    pub fn with_named(self, named: Vec<(String, Self)>) -> Self {
        for (name, store) in named {
            self.add_named(&name, store);
        }
        self
    }

    /// Adds a store by name while requests are decided, in all clones. Returns whether there was room for it, and no other
    /// of its name.
    pub fn add_named(&self, name: &str, store: Self) -> bool {
        let mut added = (name.to_owned(), store);
        for slot in self.named.0.iter() {
            match slot.set(added) {
                Ok(()) => return true,
                Err(refused) => added = refused,
            }
            if slot.get().is_some_and(|(known, _)| known == name) {
                return false;
            }
        }
        false
    }

    /// Returns the store with this number.
    pub(super) fn store_at(&self, number: u16) -> Option<&Self> {
        match number.checked_sub(1) {
            None => Some(self),
            Some(named) => self.named.get(usize::from(named)).map(|(_, store)| store),
        }
    }

    /// Returns the number of the store that keeps the counters of this scope, and how it spreads them.
    pub(super) fn layout_of(&self, scope: &Scope) -> (u16, KeyLayout) {
        let number = match scope.store() {
            None => 0,
            Some(name) => {
                let at = self.named.iter().position(|(known, _)| known == name);
                at.and_then(|at| u16::try_from(at + 1).ok()).unwrap_or(Place::UNKNOWN)
            }
        };
        let is_cluster = |store: &Self| store.shared.config.kind == Kind::Cluster;
        let layout =
            if self.store_at(number).is_some_and(is_cluster) { KeyLayout::Slots } else { KeyLayout::Single };
        (number, layout)
    }

    pub(super) fn parts(&self, charges: &[Charge<'_>]) -> Parts {
        let config = &self.shared.config;
        let envoy = config.envoy_keys.map(|keys| (keys, self.shared.now()));
        shard_request::from_charges(charges, |scope| self.layout_of(scope), &config.hashing, envoy)
    }

    /// Fails a request in several places before anything is charged if some of them are known not to answer: otherwise
    /// each such request would be charged in the others, and undone.
    pub(super) fn reject_open(&self, parts: &Parts) -> Result<(), StoreError> {
        let (mut failed, mut cause) = (Vec::new(), None);
        for (place, request) in parts {
            let error = match self.store_at(place.store) {
                None => not_configured(),
                Some(store) => match store.topology.open_shard(place.slot) {
                    Some(shard) => dispatch::left_alone(store, &shard),
                    None => continue,
                },
            };
            failed.extend(request.charges.iter().map(|want| want.index));
            cause.get_or_insert(error);
        }
        let Some(cause) = cause else { return Ok(()) };
        let all: usize = parts.iter().map(|(_, request)| request.charges.len()).sum();
        failed.sort_unstable();
        Err(if failed.len() == all { cause } else { StoreError::Partial { failed, cause: Box::new(cause) } })
    }
}

/// Returns the error of a counter whose store is not configured: a reservation of another node, or of an earlier start.
pub(super) fn not_configured() -> StoreError {
    StoreError::Unavailable("no store of this name is configured".to_owned())
}
