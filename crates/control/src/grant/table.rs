//! Extra quota in memory, for the limiter: few callers have any, and who has none pays for one look at a number.

use crate::db::time::timestamp;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{Clock, TimeDelta};
use tollgate_engine::{Grant, Grants};
use tollgate_rules::Ruleset;

/// A grant, for those who follow.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReplicatedGrant {
    pub(crate) id: String,
    pub(crate) rule: String,
    pub(crate) units: u64,
    /// In milliseconds.
    pub(crate) lasts: i64,
    pub(crate) until: i64,
}

/// What callers were granted, by the word that stands for their keys.
#[derive(Default)]
pub(crate) struct GrantTable {
    callers: AtomicUsize,
    by_key: Mutex<HashMap<u64, CompiledGrants>>,
}

#[derive(Default)]
struct CompiledGrants {
    grants: Vec<ReplicatedGrant>,
    /// For the rules that were last asked about.
    compiled: Option<(String, Arc<Grants>)>,
}

impl GrantTable {
    pub(crate) fn is_empty(&self) -> bool {
        self.callers.load(Ordering::Relaxed) == 0
    }

    /// Takes these in, each in the place of the same one as it was before. What has ended goes.
    pub(crate) fn change(&self, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
        let mut by_word = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        put(&mut by_word, grants, now);
        self.callers.store(by_word.len(), Ordering::Relaxed);
    }

    /// These are all there are: what was known before goes, at once with their coming.
    pub(crate) fn replace(&self, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
        let mut fresh = HashMap::new();
        put(&mut fresh, grants, now);
        let mut by_word = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        *by_word = fresh;
        self.callers.store(by_word.len(), Ordering::Relaxed);
    }

    /// All of them, by the word of the caller.
    pub(crate) fn all(&self) -> Vec<(u64, ReplicatedGrant)> {
        let by_word = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |(word, kept): (&u64, &CompiledGrants)| {
            kept.grants.iter().map(|grant| (*word, grant.clone())).collect::<Vec<_>>()
        };
        by_word.iter().flat_map(of).collect()
    }

    /// What a caller was granted that has not ended, compiled against these rules.
    pub(crate) fn lookup(&self, word: u64, rules: &Ruleset, clock: &dyn Clock) -> Option<Arc<Grants>> {
        if self.is_empty() {
            return None;
        }
        let mut by_word = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = by_word.get_mut(&word)?;
        let grants = match &kept.compiled {
            Some((revision, grants)) if revision == rules.revision() => Arc::clone(grants),
            _ => {
                let grants: Arc<Grants> =
                    Arc::new(kept.grants.iter().filter_map(|kept| kept.compile(rules)).collect());
                kept.compiled = Some((rules.revision().to_owned(), Arc::clone(&grants)));
                grants
            }
        };
        let now = clock.now();
        grants.iter().any(|grant| now < grant.expires_at).then_some(grants)
    }
}

fn put(by_word: &mut HashMap<u64, CompiledGrants>, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
    for (word, grant) in grants {
        let kept = by_word.entry(word).or_default();
        kept.compiled = None;
        kept.grants.retain(|known| known.id != grant.id);
        kept.grants.push(grant);
        // What ends first is used first.
        kept.grants.sort_by(|one, other| (one.until, &one.id).cmp(&(other.until, &other.id)));
    }
    for kept in by_word.values_mut() {
        kept.grants.retain(|grant| grant.until > now);
    }
    by_word.retain(|_, kept| !kept.grants.is_empty());
}

impl ReplicatedGrant {
    fn compile(&self, rules: &Ruleset) -> Option<Arc<Grant>> {
        let lasts = TimeDelta::from_millis(u64::try_from(self.lasts).unwrap_or(1));
        let covered = rules.find_per_caller_rules(&self.rule);
        Grant::new(&self.id, self.units, covered, lasts, timestamp(self.until)).ok().map(Arc::new)
    }
}
