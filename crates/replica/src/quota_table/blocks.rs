//! A quota table in blocks, one for each shard, on its way to or from a file or another process. Callers refer to terms by
//! their index in order of first appearance, because most have the same as others.

use super::{CallerEntry, CompiledTerms, QuotaTable, SHARDS, TermsKey};
use crate::digest::entry_fingerprint;
use crate::key_hash::Subject;
use crate::overrides::QuotaOverride;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

/// Maximum number of callers that room is reserved for at once: a damaged file may announce any number.
const MAX_RESERVED: usize = 1 << 14;

/// A shard of the table.
#[derive(Default)]
pub(crate) struct DumpBlock {
    /// Terms that no previous block contained.
    pub(crate) terms: Vec<DumpedTerms>,
    pub(crate) callers: Vec<DumpedCaller>,
}

/// Terms in serialized form.
#[derive(Serialize)]
pub(crate) struct DumpedTerms {
    pub(crate) subject: Subject,
    pub(crate) tier: Option<String>,
    pub(crate) overrides: Vec<QuotaOverride>,
    /// Terms in effect before these start, and their expiry in seconds.
    pub(crate) before: Option<(u32, Option<String>, Vec<QuotaOverride>)>,
}

/// One caller, with the index of its terms among all terms so far.
pub(crate) struct DumpedCaller {
    pub(crate) key: u64,
    pub(crate) from: u32,
    pub(crate) until: u32,
    pub(crate) terms: u32,
}

impl TermsKey {
    pub(super) fn to_dumped(&self) -> DumpedTerms {
        let limits = |key: &Self| key.overrides.iter().cloned().map(QuotaOverride).collect();
        let before = self.before.as_ref().map(|(until, key)| (*until, key.tier.clone(), limits(key)));
        let subject = self.subject.subject.clone();
        DumpedTerms { subject, tier: self.tier.clone(), overrides: limits(self), before }
    }
}

/// Reads a table block by block.
#[derive(Default)]
pub(crate) struct DumpIndex {
    next: usize,
    /// Index of terms by their address.
    known: HashMap<usize, u32>,
    /// Keeps terms alive until the end, because they are identified by their address.
    held: Vec<Arc<CompiledTerms>>,
    /// Sum of the fingerprints so far.
    pub(crate) digest: u64,
}

impl DumpIndex {
    /// Returns the next block; `None` after the last.
    pub(crate) fn next_block(&mut self, table: &QuotaTable) -> Option<DumpBlock> {
        let shard = table.shards.get(self.next).filter(|_| self.next < SHARDS)?;
        self.next += 1;
        let mut block = DumpBlock::default();
        for (hash, entry) in shard.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let address = Arc::as_ptr(&entry.terms).addr();
            let terms = *self.known.entry(address).or_insert_with(|| {
                block.terms.push(entry.terms.key.to_dumped());
                self.held.push(Arc::clone(&entry.terms));
                u32::try_from(self.held.len() - 1).unwrap_or(u32::MAX)
            });
            self.digest = self.digest.wrapping_add(entry.fingerprint(*hash));
            block.callers.push(DumpedCaller { key: *hash, from: entry.from, until: entry.until, terms });
        }
        Some(block)
    }
}

/// Writes a table block by block.
#[derive(Default)]
pub(crate) struct RestoreIndex {
    known: Vec<Arc<CompiledTerms>>,
    /// Callers of the block that begins.
    expected: usize,
    /// Sum of the fingerprints so far.
    pub(crate) digest: u64,
}

impl RestoreIndex {
    /// Begins a block of `callers` with new terms, which its callers and later ones refer to.
    pub(crate) fn begin_block(&mut self, table: &QuotaTable, terms: Vec<DumpedTerms>, callers: usize) {
        self.expected = callers.min(MAX_RESERVED);
        self.known.extend(terms.into_iter().map(|one| {
            let DumpedTerms { subject, tier, overrides, before } = one;
            let before = before
                .map(|(until, tier, overrides)| (until, table.terms_of(&subject, tier, &overrides, None)));
            table.terms_of(&subject, tier, &overrides, before)
        }));
    }

    /// Adds a caller. Returns whether its terms are known.
    pub(crate) fn add_caller(&mut self, table: &QuotaTable, caller: &DumpedCaller) -> bool {
        let DumpedCaller { key, from, until, terms } = *caller;
        let Some(terms) = self.known.get(terms as usize).map(Arc::clone) else { return false };
        self.digest = self.digest.wrapping_add(entry_fingerprint(key, from, until, terms.fingerprint));
        if self.expected > 0 {
            let mut shard = table.shard(key).write().unwrap_or_else(PoisonError::into_inner);
            shard.reserve(std::mem::take(&mut self.expected));
        }
        table.put(key, Some(CallerEntry { from, until, terms }));
        true
    }
}
