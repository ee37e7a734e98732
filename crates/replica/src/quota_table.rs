//! In-memory quota table for the limiter; lookups never touch the database.
//!
//! A caller takes an entry of 24 bytes: 64 bits of its key's hash, its validity in seconds, and its terms. Most
//! callers have the same terms as others (a tier, one of a few plans), so equal terms are stored once, and are
//! compiled for the active rules when the first request needs them. A table is between 7/16 and 7/8 full, so an entry
//! takes 29 to 58 bytes. Terms that no other caller has take about 300 bytes more.
//!
//! The table is divided into shards with a lock each: a change blocks one shard for the time of one insertion.
//! Rejected: swapping a copy, because a change among ten million quotas would copy them all.

mod blocks;

pub(crate) use blocks::{DumpIndex, DumpedCaller, DumpedTerms, RestoreIndex};

use crate::digest::{entry_fingerprint, terms_fingerprint};
use crate::grant_table::{GrantTable, ReplicatedGrant};
use crate::key_hash::{KeyHasher, Subject};
use crate::lookup::Lookup;
use crate::overrides::QuotaOverride;
use crate::terms::{ReplicatedQuota, ReplicatedTerms};
use arc_swap::{ArcSwap, ArcSwapOption};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use tollgate_core::Clock;
use tollgate_engine::{CallerQuota, Check, Grants, QuotaProvider};
use tollgate_rules::{CallerOverrides, Override, OverrideError, Ruleset};

/// Number of shards: enough that requests wait only microseconds while a shard's table grows, even with ten million
/// callers.
const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 12;

/// All quotas that this node has replicated.
pub struct QuotaTable {
    hasher: KeyHasher,
    /// Number of entries.
    entries: AtomicUsize,
    /// Sum of the entries' fingerprints.
    digest: AtomicU64,
    /// Whether there are any quotas or grants; with none, a lookup costs one atomic load.
    in_use: AtomicBool,
    /// The attributes to look up.
    lookups: ArcSwap<Vec<Lookup>>,
    /// What quotas are about, with their number.
    subjects: Mutex<Vec<Arc<CountedSubject>>>,
    shards: Box<[RwLock<TableShard>]>,
    terms: Mutex<HashMap<Arc<TermsKey>, Weak<CompiledTerms>>>,
    /// Grants of the few callers that have any.
    grants: GrantTable,
}

/// Keys are hashes already.
type TableShard = HashMap<u64, CallerEntry, BuildHasherDefault<PassthroughHasher>>;

/// Seconds value for "no expiry".
const NEVER: u32 = u32::MAX;

/// A subject, and the number of its entries.
#[derive(Debug)]
struct CountedSubject {
    subject: Subject,
    entries: AtomicUsize,
}

/// What tells whether two tables have the same quotas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableDigest {
    /// Number of quotas.
    pub count: u64,
    /// Sum of their fingerprints.
    pub digest: u64,
}

struct CallerEntry {
    from: u32,
    until: u32,
    terms: Arc<CompiledTerms>,
}

/// The terms of a quota, as the key under which they are shared.
#[derive(PartialEq, Eq, Hash)]
struct TermsKey {
    subject: Arc<CountedSubject>,
    tier: Option<String>,
    overrides: Vec<Override>,
    /// Terms in effect before these start, and their expiry.
    before: Option<(u32, Arc<TermsKey>)>,
}

struct CompiledTerms {
    key: Arc<TermsKey>,
    before: Option<(u32, Arc<CompiledTerms>)>,
    /// What distinguishes the terms in digests.
    fingerprint: u64,
    /// The terms compiled for a rule set, with that rule set's hash.
    compiled: ArcSwapOption<(String, Arc<CallerOverrides>)>,
}

impl TermsKey {
    fn compile(&self, rules: &Ruleset) -> (CallerOverrides, Vec<OverrideError>) {
        rules.compile_overrides(&self.subject.subject.key, self.tier.as_deref(), &self.overrides)
    }
}

impl CallerEntry {
    fn fingerprint(&self, key: u64) -> u64 {
        entry_fingerprint(key, self.from, self.until, self.terms.fingerprint)
    }
}

impl PartialEq for CountedSubject {
    fn eq(&self, other: &Self) -> bool {
        self.subject == other.subject
    }
}

impl Eq for CountedSubject {}

impl Hash for CountedSubject {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.subject.hash(state);
    }
}

impl CompiledTerms {
    fn compile_for(&self, rules: &Ruleset) -> Arc<CallerOverrides> {
        let cached = self.compiled.load();
        if let Some(cached) = cached.as_ref().filter(|cached| cached.0 == rules.revision()) {
            return Arc::clone(&cached.1);
        }
        let (tenant, unfit) = self.key.compile(rules);
        for unfit in unfit {
            tracing::warn!(rules = rules.revision(), "skipping invalid quota override: {}", unfit.reason);
        }
        let tenant = Arc::new(tenant);
        self.compiled.store(Some(Arc::new((rules.revision().to_owned(), Arc::clone(&tenant)))));
        tenant
    }
}

impl QuotaTable {
    /// Creates an empty table.
    #[must_use]
    pub fn new(hasher: KeyHasher) -> Self {
        let shards = (0..SHARDS).map(|_| RwLock::default()).collect();
        Self {
            hasher,
            entries: AtomicUsize::new(0),
            digest: AtomicU64::new(0),
            in_use: AtomicBool::new(false),
            lookups: ArcSwap::default(),
            subjects: Mutex::default(),
            shards,
            terms: Mutex::default(),
            grants: GrantTable::default(),
        }
    }

    /// Returns the number of quotas, including pending and expired ones.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Returns whether there are no quotas.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns what tells whether another table has the same quotas.
    #[must_use]
    pub fn digest(&self) -> TableDigest {
        TableDigest { count: self.len() as u64, digest: self.digest.load(Ordering::Relaxed) }
    }

    /// Reserves room for about this many entries: a table that grows during a load leaves as much garbage behind as
    /// it takes.
    pub fn reserve(&self, entries: usize) {
        for shard in &self.shards {
            shard.write().unwrap_or_else(PoisonError::into_inner).reserve(entries / SHARDS);
        }
    }

    /// Applies a change.
    pub fn apply(&self, change: ReplicatedQuota) {
        self.set(change.hash, &change.subject, change.terms);
    }

    /// Sets or removes the quota of the caller with this table hash.
    fn set(&self, hash: u64, subject: &Subject, terms: Option<ReplicatedTerms>) {
        let entry = terms.map(|terms| CallerEntry {
            from: terms.effective_at.map_or(0, seconds),
            until: terms.expires_at.map_or(NEVER, seconds),
            terms: self.terms_of(
                subject,
                terms.tier,
                &terms.overrides,
                terms.until.map(|until| {
                    let ends = until.expires_at.map_or(NEVER, seconds);
                    (ends, self.terms_of(subject, until.tier, &until.overrides, None))
                }),
            ),
        });
        self.put(hash, entry);
    }

    fn put(&self, hash: u64, entry: Option<CallerEntry>) {
        let counted = |entry: &CallerEntry| Arc::clone(&entry.terms.key.subject);
        let added = entry.as_ref().map(counted);
        let added_print = entry.as_ref().map_or(0, |entry| entry.fingerprint(hash));
        let mut shard = self.shard(hash).write().unwrap_or_else(PoisonError::into_inner);
        let before = match entry {
            Some(entry) => {
                let before = shard.insert(hash, entry);
                if before.is_none() {
                    self.entries.fetch_add(1, Ordering::Relaxed);
                }
                before
            }
            None => {
                let before = shard.remove(&hash);
                if before.is_some() {
                    self.entries.fetch_sub(1, Ordering::Relaxed);
                }
                before
            }
        };
        drop(shard);
        self.digest.fetch_add(added_print, Ordering::Relaxed);
        self.digest.fetch_sub(before.as_ref().map_or(0, |entry| entry.fingerprint(hash)), Ordering::Relaxed);
        let removed = before.as_ref().map(counted);
        drop(before);
        let begins = added.is_some_and(|subject| subject.entries.fetch_add(1, Ordering::Relaxed) == 0);
        let ends = removed.is_some_and(|subject| subject.entries.fetch_sub(1, Ordering::Relaxed) == 1);
        if begins || ends {
            self.update_lookups();
        }
    }

    /// Finds out which attributes to look up: those that quotas or grants are about.
    fn update_lookups(&self) {
        let subjects = self.subjects.lock().unwrap_or_else(PoisonError::into_inner);
        let quotas = subjects.iter().filter(|one| one.entries.load(Ordering::Relaxed) > 0);
        let all = quotas.map(|one| one.subject.clone()).chain(self.grants.subjects());
        let lookups = Lookup::all(&self.hasher, all);
        let in_use = !lookups.is_empty();
        self.lookups.store(Arc::new(lookups));
        self.in_use.store(in_use, Ordering::Relaxed);
    }

    /// Returns the lengths of networks that quotas and grants of an attribute are about.
    #[must_use]
    pub fn lengths(&self, key: &str) -> Vec<u8> {
        let lookups = self.lookups.load();
        lookups.iter().find(|one| one.key() == key).map_or_else(Vec::new, |one| one.lengths().to_vec())
    }

    /// Returns whether there is a quota for an API key, also one that is pending or has expired.
    #[must_use]
    pub fn has_key(&self, api_key: &str) -> bool {
        let hash = self.hasher.hash(api_key).table_hash();
        self.shard(hash).read().unwrap_or_else(PoisonError::into_inner).contains_key(&hash)
    }

    /// Returns the attribute that a stored caller is identified by.
    #[must_use]
    pub fn key_of(&self, hash: u64) -> Option<String> {
        let shard = self.shard(hash).read().unwrap_or_else(PoisonError::into_inner);
        shard.get(&hash).map(|entry| entry.terms.key.subject.subject.key.to_string())
    }

    /// Inserts grants, replacing those with the same id, and removes expired ones.
    pub fn change_grants(&self, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
        self.grants.change(grants, now);
        self.update_lookups();
    }

    /// Replaces all grants, atomically.
    pub fn replace_grants(&self, grants: Vec<(u64, ReplicatedGrant)>, now: i64) {
        self.grants.replace(grants, now);
        self.update_lookups();
    }

    /// Removes all quotas. Grants stay, because they are replaced atomically when all of them are read again.
    pub fn clear(&self) {
        for shard in &self.shards {
            shard.write().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.entries.store(0, Ordering::Relaxed);
        self.digest.store(0, Ordering::Relaxed);
        self.subjects.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.terms.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.update_lookups();
    }

    /// Returns the grants.
    #[must_use]
    pub fn grants(&self) -> &GrantTable {
        &self.grants
    }

    fn shard(&self, hash: u64) -> &RwLock<TableShard> {
        // Uses the high bits: the hash table within a shard uses the low ones.
        &self.shards[(hash >> (u64::BITS - SHARD_BITS)) as usize % SHARDS]
    }

    /// Returns the terms of a caller that are in effect now.
    #[inline]
    fn active(&self, hash: u64, clock: &dyn Clock) -> Option<Arc<CompiledTerms>> {
        let shard = self.shard(hash).read().unwrap_or_else(PoisonError::into_inner);
        let entry = shard.get(&hash)?;
        if entry.from != 0 || entry.until != NEVER {
            let now = u32::try_from(clock.now().as_secs()).unwrap_or(NEVER);
            if now < entry.from {
                let before = entry.terms.before.as_ref().filter(|(until, _)| now < *until);
                return before.map(|(_, terms)| Arc::clone(terms));
            }
            if now >= entry.until {
                return None;
            }
        }
        Some(Arc::clone(&entry.terms))
    }

    /// Compiles the terms of a sampled request's callers for rules that are not active, each with `compile`.
    #[must_use]
    pub fn compile_sampled(
        &self,
        check: &Check<'_>,
        rules: &Ruleset,
        mut compile: impl FnMut(u64) -> Option<Arc<CallerOverrides>>,
    ) -> CallerQuota {
        let mut quota = CallerQuota::default();
        for lookup in self.lookups.load().iter() {
            if let Some(value) = lookup.value(check, rules) {
                let hashes = lookup.sampled_hashes(&self.hasher, check, value);
                quota.quotas.extend(hashes.into_iter().find_map(&mut compile));
            }
        }
        quota
    }

    /// Compiles the terms of the caller with this hash.
    #[must_use]
    pub fn compile_hash(
        &self,
        hash: u64,
        rules: &Ruleset,
        clock: &dyn Clock,
    ) -> Option<Arc<CallerOverrides>> {
        Some(Arc::new(self.active(hash, clock)?.key.compile(rules).0))
    }

    /// Returns the one counter of a subject's entries.
    fn counted(&self, subject: &Subject) -> Arc<CountedSubject> {
        let mut subjects = self.subjects.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = subjects.iter().find(|one| one.subject == *subject) {
            return Arc::clone(known);
        }
        let new = Arc::new(CountedSubject { subject: subject.clone(), entries: AtomicUsize::new(0) });
        subjects.push(Arc::clone(&new));
        new
    }

    /// Returns the shared terms if they exist, or creates them.
    fn terms_of(
        &self,
        subject: &Subject,
        tier: Option<String>,
        overrides: &[QuotaOverride],
        before: Option<(u32, Arc<CompiledTerms>)>,
    ) -> Arc<CompiledTerms> {
        let overrides = overrides.iter().map(|own| own.0.clone()).collect();
        let earlier = before.as_ref().map(|(until, terms)| (*until, Arc::clone(&terms.key)));
        let key = Arc::new(TermsKey { subject: self.counted(subject), tier, overrides, before: earlier });
        let mut known = self.terms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(terms) = known.get(&key).and_then(Weak::upgrade) {
            return terms;
        }
        let fingerprint = terms_fingerprint(&key.to_dumped());
        // Unused terms are removed when the map would have to grow.
        if known.len() == known.capacity() {
            known.retain(|_, terms| terms.strong_count() > 0);
        }
        let terms = Arc::new(CompiledTerms {
            key: Arc::clone(&key),
            before,
            fingerprint,
            compiled: ArcSwapOption::empty(),
        });
        known.insert(key, Arc::downgrade(&terms));
        terms
    }
}

impl QuotaProvider for QuotaTable {
    #[inline]
    fn lookup(&self, check: &Check<'_>, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota {
        let mut quota = CallerQuota::default();
        if !self.in_use.load(Ordering::Relaxed) {
            return quota;
        }
        for lookup in self.lookups.load().iter() {
            let Some(value) = lookup.value(check, rules) else { continue };
            let hashes = lookup.hashes(&self.hasher, check, value);
            let terms = hashes.iter().find_map(|hash| self.active(*hash, clock));
            quota.quotas.extend(terms.map(|terms| terms.compile_for(rules)));
            let own = hashes.iter().find_map(|hash| self.grants.lookup(*hash, rules, clock));
            quota.grants = merge(quota.grants, own);
        }
        quota
    }
}

/// Returns the grants of both callers; the one that expires first is used first.
fn merge(one: Option<Arc<Grants>>, other: Option<Arc<Grants>>) -> Option<Arc<Grants>> {
    let (Some(own), Some(others)) = (&one, &other) else { return one.or(other) };
    let mut all: Grants = own.iter().chain(others.iter()).cloned().collect();
    all.sort_by_key(|grant| grant.expires_at);
    Some(Arc::new(all))
}

impl std::fmt::Debug for QuotaTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuotaTable").field("entries", &self.len()).finish()
    }
}

fn seconds(at: i64) -> u32 {
    u32::try_from(at.max(0)).unwrap_or(NEVER)
}

/// Uses a 64-bit hash as it is.
#[derive(Default)]
struct PassthroughHasher(u64);

impl Hasher for PassthroughHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = (self.0 << 8) | u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        // The hash table takes its tag from the top bits, which all entries of a shard share.
        self.0 = hash.rotate_left(SHARD_BITS);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicated(tier: &str, own: Option<u64>) -> ReplicatedTerms {
        let own = own.map(|count| QuotaOverride(Override::new("default", count, "minute")));
        let overrides = own.into_iter().collect();
        ReplicatedTerms {
            tier: Some(tier.to_owned()),
            overrides,
            effective_at: None,
            expires_at: None,
            until: None,
        }
    }

    fn api_keys() -> Subject {
        Subject { key: "api_key".into(), bits: None }
    }

    /// The memory that a node needs for ten million keys depends on this.
    #[test]
    fn an_entry_takes_24_bytes_and_terms_are_shared() {
        assert_eq!(size_of::<(u64, CallerEntry)>(), 24);
        let hasher = KeyHasher::new(b"secret");
        let table = QuotaTable::new(hasher.clone());
        for i in 0..300_000 {
            table.set(
                hasher.hash(&format!("key-{i}")).table_hash(),
                &api_keys(),
                Some(replicated("pro", (i % 10 == 0).then_some(7))),
            );
        }
        assert_eq!((table.len(), table.terms.lock().expect("terms").len()), (300_000, 2));
        let slots: usize = table.shards.iter().map(|shard| shard.read().expect("a shard").capacity()).sum();
        // A table of n buckets has room for 7/8 n entries; a bucket takes 24 bytes, and one for its tag.
        let bytes = slots * 8 / 7 * 25 / table.len();
        assert!(bytes <= 64, "{bytes} bytes per key");
    }

    #[test]
    fn unused_terms_are_dropped() {
        let hasher = KeyHasher::new(b"secret");
        let table = QuotaTable::new(hasher.clone());
        let hash = hasher.hash("key").table_hash();
        for i in 0..10_000 {
            table.set(hash, &api_keys(), Some(replicated("pro", Some(i))));
        }
        assert_eq!(table.len(), 1);
        assert!(table.terms.lock().expect("terms").len() < 100);
        table.set(hash, &api_keys(), None);
        table.set(hash, &api_keys(), None);
        assert!(table.is_empty());
    }
}
