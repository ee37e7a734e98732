//! All agreements in memory, for the limiter: no request waits for a database.
//!
//! A caller takes an entry of 24 bytes: a word of its key's hash, from when to when in seconds, and the terms. Most callers
//! have the same terms as others (a tier, one of a few plans), so terms are kept once for all who have them, and are
//! compiled against the rules when the first request needs them. A table is between 7/16 and 7/8 full, so an entry takes 29
//! to 58 bytes. Terms that nobody else has cost 300 bytes or so beside that.
//!
//! The table is cut into parts with a lock each: a change holds up one part for the time of one insertion. A copy that is
//! swapped was rejected: a change among ten million would copy them all.

use crate::auth::key_hash::{KeyHash, KeyHasher};
use crate::auth::pseudonym;
use crate::grant::table::GrantTable;
use crate::quota::overrides::QuotaOverride;
use crate::quota::row::ReplicatedTerms;
use arc_swap::ArcSwapOption;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use tollgate_core::Clock;
use tollgate_engine::{CallerQuota, QuotaProvider};
use tollgate_rules::{CallerOverrides, Override, Ruleset};

/// So many that requests wait for microseconds while the table of a part grows, also where there are ten million.
const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 12;

/// All agreements that this node knows of.
pub struct QuotaTable {
    hasher: KeyHasher,
    /// How many there are; none costs a request one look here.
    entries: AtomicUsize,
    shards: Box<[RwLock<TableShard>]>,
    terms: Mutex<HashMap<Arc<TermsKey>, Weak<CompiledTerms>>>,
    /// Extra quota, of the few callers who have any.
    grants: GrantTable,
}

/// Hashes are words already.
type TableShard = HashMap<u64, CallerEntry, BuildHasherDefault<PassthroughHasher>>;

/// Seconds that mean "no end".
const NEVER: u32 = u32::MAX;

struct CallerEntry {
    from: u32,
    until: u32,
    terms: Arc<CompiledTerms>,
}

/// A part of the book on its way to a file or back.
#[derive(Default)]
pub(crate) struct DumpBlock {
    /// Terms that no block before had.
    pub(crate) terms: Vec<DumpedTerms>,
    pub(crate) callers: Vec<DumpedCaller>,
}

/// Terms as they are written down.
pub(crate) struct DumpedTerms {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: Vec<QuotaOverride>,
    /// What acts before they do, and until when at most, in seconds.
    pub(crate) before: Option<(u32, Option<String>, Vec<QuotaOverride>)>,
}

/// One caller, and which of all terms so far it has.
pub(crate) struct DumpedCaller {
    pub(crate) key: u64,
    pub(crate) from: u32,
    pub(crate) until: u32,
    pub(crate) terms: u32,
}

/// What is agreed on, as it is said.
#[derive(PartialEq, Eq, Hash)]
struct TermsKey {
    tier: Option<String>,
    overrides: Vec<Override>,
    /// What acts before it does, and until when at most.
    before: Option<(u32, Arc<TermsKey>)>,
}

struct CompiledTerms {
    key: Arc<TermsKey>,
    before: Option<(u32, Arc<CompiledTerms>)>,
    /// For the rules that were last asked about.
    compiled: ArcSwapOption<(String, Arc<CallerOverrides>)>,
}

impl TermsKey {
    fn to_dumped(&self) -> DumpedTerms {
        let limits = |said: &Self| said.overrides.iter().map(QuotaOverride::from_rule).collect();
        let before = self.before.as_ref().map(|(until, said)| (*until, said.tier.clone(), limits(said)));
        DumpedTerms { tier: self.tier.clone(), overrides: limits(self), before }
    }
}

impl CompiledTerms {
    fn compile_for(&self, rules: &Ruleset) -> Arc<CallerOverrides> {
        let kept = self.compiled.load();
        if let Some(kept) = kept.as_ref().filter(|kept| kept.0 == rules.revision()) {
            return Arc::clone(&kept.1);
        }
        let (tenant, unfit) = rules.compile_overrides(self.key.tier.as_deref(), &self.key.overrides);
        for unfit in unfit {
            tracing::warn!(rules = rules.revision(), "an override of a quota does not act: {}", unfit.reason);
        }
        let tenant = Arc::new(tenant);
        self.compiled.store(Some(Arc::new((rules.revision().to_owned(), Arc::clone(&tenant)))));
        tenant
    }
}

impl QuotaTable {
    pub(crate) fn new(hasher: KeyHasher) -> Self {
        let parts = (0..SHARDS).map(|_| RwLock::default()).collect();
        Self {
            hasher,
            entries: AtomicUsize::new(0),
            shards: parts,
            terms: Mutex::default(),
            grants: GrantTable::default(),
        }
    }

    /// How many agreements there are, those included that do not act now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes room for about so many: a table that grows while they come in leaves as much memory behind as it takes.
    pub(crate) fn reserve(&self, entries: usize) {
        for part in &self.shards {
            part.write().unwrap_or_else(PoisonError::into_inner).reserve(entries / SHARDS);
        }
    }

    /// Takes an agreement in, or forgets it.
    pub(crate) fn set(&self, hash: &KeyHash, kept: Option<ReplicatedTerms>) {
        let entry = kept.map(|kept| CallerEntry {
            from: kept.effective_at.map_or(0, seconds),
            until: kept.expires_at.map_or(NEVER, seconds),
            terms: self.terms_of(
                kept.tier,
                &kept.overrides,
                kept.until.map(|until| {
                    let ends = until.expires_at.map_or(NEVER, seconds);
                    (ends, self.terms_of(until.tier, &until.overrides, None))
                }),
            ),
        });
        self.put(hash.table_hash(), entry);
    }

    fn put(&self, word: u64, entry: Option<CallerEntry>) {
        let mut part = self.shard(word).write().unwrap_or_else(PoisonError::into_inner);
        let before = match entry {
            Some(entry) => {
                let before = part.insert(word, entry);
                if before.is_none() {
                    self.entries.fetch_add(1, Ordering::Relaxed);
                }
                before
            }
            None => {
                let before = part.remove(&word);
                if before.is_some() {
                    self.entries.fetch_sub(1, Ordering::Relaxed);
                }
                before
            }
        };
        drop(part);
        drop(before);
    }

    /// All of it part by part, to be kept in a file; which terms somebody has is a number that `terms` gives out.
    pub(crate) fn dump<E>(&self, mut block: impl FnMut(DumpBlock) -> Result<(), E>) -> Result<(), E> {
        let mut known: HashMap<*const CompiledTerms, u32> = HashMap::new();
        // What is known by its address stays alive until the end.
        let mut held: Vec<Arc<CompiledTerms>> = Vec::new();
        for part in &self.shards {
            let mut one = DumpBlock::default();
            for (word, entry) in part.read().unwrap_or_else(PoisonError::into_inner).iter() {
                let terms = *known.entry(Arc::as_ptr(&entry.terms)).or_insert_with(|| {
                    one.terms.push(entry.terms.key.to_dumped());
                    held.push(Arc::clone(&entry.terms));
                    u32::try_from(held.len() - 1).unwrap_or(u32::MAX)
                });
                one.callers.push(DumpedCaller { key: *word, from: entry.from, until: entry.until, terms });
            }
            block(one)?;
        }
        Ok(())
    }

    /// Takes in what [`QuotaTable::dump`] gave out, block by block.
    pub(crate) fn restore(&self) -> impl FnMut(DumpBlock) + '_ {
        let mut known: Vec<Arc<CompiledTerms>> = Vec::new();
        move |block| {
            known.extend(block.terms.into_iter().map(|DumpedTerms { tier, overrides, before }| {
                let before =
                    before.map(|(until, tier, overrides)| (until, self.terms_of(tier, &overrides, None)));
                self.terms_of(tier, &overrides, before)
            }));
            if let Some(first) = block.callers.first() {
                let mut part = self.shard(first.key).write().unwrap_or_else(PoisonError::into_inner);
                part.reserve(block.callers.len());
            }
            for DumpedCaller { key: word, from, until, terms } in block.callers {
                if let Some(terms) = known.get(terms as usize).map(Arc::clone) {
                    self.put(word, Some(CallerEntry { from, until, terms }));
                }
            }
        }
    }

    /// Forgets everything but extra quota, which is replaced as a whole when all of it is read again.
    pub(crate) fn clear(&self) {
        for part in &self.shards {
            part.write().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.entries.store(0, Ordering::Relaxed);
    }

    /// Extra quota.
    pub(crate) fn grants(&self) -> &GrantTable {
        &self.grants
    }

    fn shard(&self, word: u64) -> &RwLock<TableShard> {
        // The high bits: the table within looks at the low ones.
        &self.shards[(word >> (u64::BITS - SHARD_BITS)) as usize % SHARDS]
    }

    /// The terms of a caller that act now.
    #[inline]
    fn active(&self, word: u64, clock: &dyn Clock) -> Option<Arc<CompiledTerms>> {
        let part = self.shard(word).read().unwrap_or_else(PoisonError::into_inner);
        let entry = part.get(&word)?;
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

    /// What is agreed with a caller, against rules that do not act.
    pub(crate) fn compile(
        &self,
        caller: &str,
        rules: &Ruleset,
        clock: &dyn Clock,
    ) -> Option<Arc<CallerOverrides>> {
        // Of a caller whom another node has told of, what is known is the word alone.
        let word = pseudonym::table_hash(caller).unwrap_or_else(|| self.hasher.hash(caller).table_hash());
        let said = Arc::clone(&self.active(word, clock)?.key);
        Some(Arc::new(rules.compile_overrides(said.tier.as_deref(), &said.overrides).0))
    }

    /// The terms as others have them already, or new ones.
    fn terms_of(
        &self,
        tier: Option<String>,
        overrides: &[QuotaOverride],
        before: Option<(u32, Arc<CompiledTerms>)>,
    ) -> Arc<CompiledTerms> {
        let overrides = overrides.iter().map(QuotaOverride::to_rule).collect();
        let earlier = before.as_ref().map(|(until, terms)| (*until, Arc::clone(&terms.key)));
        let said = Arc::new(TermsKey { tier, overrides, before: earlier });
        let mut known = self.terms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(terms) = known.get(&said).and_then(Weak::upgrade) {
            return terms;
        }
        // What nobody has any more goes when as much again has come.
        if known.len() == known.capacity() {
            known.retain(|_, terms| terms.strong_count() > 0);
        }
        let terms =
            Arc::new(CompiledTerms { key: Arc::clone(&said), before, compiled: ArcSwapOption::empty() });
        known.insert(said, Arc::downgrade(&terms));
        terms
    }
}

impl QuotaProvider for QuotaTable {
    #[inline]
    fn lookup(&self, caller: &str, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota {
        if self.is_empty() && self.grants.is_empty() {
            return CallerQuota::default();
        }
        let word = self.hasher.hash(caller).table_hash();
        CallerQuota {
            overrides: self.active(word, clock).map(|terms| terms.compile_for(rules)),
            grants: self.grants.lookup(word, rules, clock),
        }
    }
}

impl std::fmt::Debug for QuotaTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuotaTable").field("entries", &self.len()).finish()
    }
}

fn seconds(at: i64) -> u32 {
    u32::try_from(at.max(0)).unwrap_or(NEVER)
}

/// Passes a word on as it is.
#[derive(Default)]
struct PassthroughHasher(u64);

impl Hasher for PassthroughHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = (self.0 << 8) | u64::from(*byte));
    }

    fn write_u64(&mut self, word: u64) {
        // The table takes its tag from the top bits, which all entries of a part share.
        self.0 = word.rotate_left(SHARD_BITS);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicated(tier: &str, own: Option<u64>) -> ReplicatedTerms {
        let own = own.map(|count| QuotaOverride {
            descriptor: "default".to_owned(),
            requests_per_unit: count,
            unit: "minute".to_owned(),
            burst: None,
        });
        let overrides = own.into_iter().collect();
        ReplicatedTerms {
            tier: Some(tier.to_owned()),
            overrides,
            effective_at: None,
            expires_at: None,
            until: None,
        }
    }

    /// What a node needs for ten million keys stands and falls with this.
    #[test]
    fn an_entry_takes_24_bytes_and_terms_are_shared() {
        assert_eq!(size_of::<(u64, CallerEntry)>(), 24);
        let hasher = KeyHasher::new(b"secret");
        let book = QuotaTable::new(hasher.clone());
        for i in 0..300_000 {
            book.set(&hasher.hash(&format!("key-{i}")), Some(replicated("pro", (i % 10 == 0).then_some(7))));
        }
        assert_eq!((book.len(), book.terms.lock().expect("terms").len()), (300_000, 2));
        let places: usize = book.shards.iter().map(|part| part.read().expect("a part").capacity()).sum();
        // A table of n buckets has room for 7/8 n entries; a bucket takes 24 bytes and one of its own.
        let bytes = places * 8 / 7 * 25 / book.len();
        assert!(bytes <= 64, "{bytes} bytes a key");
    }

    #[test]
    fn unused_terms_are_dropped() {
        let hasher = KeyHasher::new(b"secret");
        let book = QuotaTable::new(hasher.clone());
        let hash = hasher.hash("key");
        for i in 0..10_000 {
            book.set(&hash, Some(replicated("pro", Some(i))));
        }
        assert_eq!(book.len(), 1);
        assert!(book.terms.lock().expect("terms").len() < 100);
        book.set(&hash, None);
        book.set(&hash, None);
        assert!(book.is_empty());
    }
}
