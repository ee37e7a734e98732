//! In-memory grant table for the limiter. Few callers have grants; a lookup for the others costs one atomic load.

use crate::key_hash::Subject;
use crate::measure::timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{Clock, TimeDelta};
use tollgate_engine::{Grant, Grants};
use tollgate_rules::Ruleset;

/// A grant as replicated to every node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedGrant {
    /// Id of the grant.
    pub id: String,
    /// What identifies the caller.
    #[serde(default, skip_serializing_if = "Subject::is_api_key")]
    pub subject: Subject,
    /// The rule whose limit it extends.
    pub rule: String,
    /// Extra units.
    pub units: u64,
    /// Time to live, in milliseconds.
    pub lasts: i64,
    /// Expiry, in milliseconds.
    pub until: i64,
}

/// Grants, by the table hash of the caller's key.
#[derive(Default)]
pub struct GrantTable {
    callers: AtomicUsize,
    by_key: Mutex<HashMap<u64, CompiledGrants>>,
}

#[derive(Default)]
struct CompiledGrants {
    grants: Vec<ReplicatedGrant>,
    /// The grants compiled for a rule set, with that rule set's hash.
    compiled: Option<(String, Arc<Grants>)>,
}

impl GrantTable {
    /// Returns whether no caller has any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.callers.load(Ordering::Relaxed) == 0
    }

    /// Inserts grants, replacing those with the same id, and removes expired ones.
    pub(crate) fn change(&self, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
        let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        put(&mut by_key, grants, now);
        self.callers.store(by_key.len(), Ordering::Relaxed);
    }

    /// Replaces all grants, atomically.
    pub(crate) fn replace(&self, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
        let mut new = HashMap::new();
        put(&mut new, grants, now);
        let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        *by_key = new;
        self.callers.store(by_key.len(), Ordering::Relaxed);
    }

    /// Returns what the grants are about.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        let by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let all = by_key.values().flat_map(|caller| &caller.grants).map(|grant| grant.subject.clone());
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns all grants, with the caller's table hash.
    #[must_use]
    pub fn all(&self) -> Vec<(u64, ReplicatedGrant)> {
        let by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = |(hash, caller): (&u64, &CompiledGrants)| {
            caller.grants.iter().map(|grant| (*hash, grant.clone())).collect::<Vec<_>>()
        };
        by_key.iter().flat_map(pairs).collect()
    }

    /// Returns a caller's unexpired grants, compiled for `rules`.
    pub(crate) fn lookup(&self, hash: u64, rules: &Ruleset, clock: &dyn Clock) -> Option<Arc<Grants>> {
        if self.is_empty() {
            return None;
        }
        let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let caller = by_key.get_mut(&hash)?;
        let grants = match &caller.compiled {
            Some((revision, grants)) if revision == rules.revision() => Arc::clone(grants),
            _ => {
                let grants: Arc<Grants> =
                    Arc::new(caller.grants.iter().filter_map(|grant| grant.compile(rules)).collect());
                caller.compiled = Some((rules.revision().to_owned(), Arc::clone(&grants)));
                grants
            }
        };
        let now = clock.now();
        grants.iter().any(|grant| now < grant.expires_at).then_some(grants)
    }
}

fn put(by_key: &mut HashMap<u64, CompiledGrants>, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
    for (hash, grant) in grants {
        let caller = by_key.entry(hash).or_default();
        caller.compiled = None;
        caller.grants.retain(|known| known.id != grant.id);
        caller.grants.push(grant);
        // The grant that expires first is used first.
        caller.grants.sort_by(|one, other| (one.until, &one.id).cmp(&(other.until, &other.id)));
    }
    for caller in by_key.values_mut() {
        caller.grants.retain(|grant| grant.until > now);
    }
    by_key.retain(|_, caller| !caller.grants.is_empty());
}

impl ReplicatedGrant {
    fn compile(&self, rules: &Ruleset) -> Option<Arc<Grant>> {
        let lasts = TimeDelta::from_millis(u64::try_from(self.lasts).unwrap_or(1));
        let covered = rules.find_per_caller_rules(&self.subject.key, &self.rule);
        let owner = rules.grant_owner(&covered);
        let grant = Grant::new(&self.id, self.units, covered, lasts, timestamp(self.until)).ok()?;
        Some(Arc::new(match owner {
            Some(owner) => grant.owned_by(owner),
            None => grant,
        }))
    }
}

impl std::fmt::Debug for GrantTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrantTable").field("callers", &self.callers.load(Ordering::Relaxed)).finish()
    }
}
