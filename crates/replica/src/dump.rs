//! A whole quota table as a stream of bytes, for a snapshot file or another process: a header line, then the shards one after
//! another, each a line of JSON (new terms, number of callers) and 20 bytes per caller, then a line with the digest of
//! everything. Neither writing nor reading holds more than one shard's terms in memory.

use crate::key_hash::Subject;
use crate::overrides::QuotaOverride;
use crate::quota_table::{DumpIndex, DumpedCaller, DumpedTerms, QuotaTable, RestoreIndex};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Version of the format.
const VERSION: u32 = 3;
/// Size of one caller, in bytes.
const CALLER_BYTES: usize = 20;
/// Maximum length of a line, in bytes: all terms that one shard may add.
const MAX_LINE: usize = 1 << 30;

/// What a dump is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpHeader {
    version: u32,
    /// The installation whose key hashes these are.
    pub installation: String,
    /// Control revision up to which changes are included.
    pub revision: i64,
    /// Time at which the quotas were last known to be current, in milliseconds.
    pub current_at: i64,
}

impl DumpHeader {
    /// Creates the header of a dump.
    #[must_use]
    pub const fn new(installation: String, revision: i64, current_at: i64) -> Self {
        Self { version: VERSION, installation, revision, current_at }
    }
}

/// Why a dump cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DumpError {
    /// It is damaged, or it ends too early.
    Damaged(String),
    /// It has another version or belongs to another installation.
    Foreign,
}

impl fmt::Display for DumpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(reason) => write!(f, "the quotas are damaged: {reason}"),
            Self::Foreign => f.write_str("the quotas have another version or belong to another database"),
        }
    }
}

impl std::error::Error for DumpError {}

fn damaged(reason: impl fmt::Display) -> DumpError {
    DumpError::Damaged(reason.to_string())
}

#[derive(Serialize, Deserialize)]
struct BlockHeader {
    terms: Vec<(Option<String>, Vec<QuotaOverride>)>,
    /// Terms in effect before some of these start: index, expiry, and the terms.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    before: Vec<(usize, u32, Option<String>, Vec<QuotaOverride>)>,
    /// What identifies the callers of some of these: index and subject. API keys identify the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    subjects: Vec<(usize, Subject)>,
    /// Number of callers; `None` at the end of the dump.
    callers: Option<usize>,
    /// Sum of all fingerprints, at the end of the dump. Dumps of older versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<u64>,
}

impl BlockHeader {
    fn from_block(dumped: Vec<DumpedTerms>, callers: usize) -> Self {
        let (mut terms, mut before) = (Vec::with_capacity(dumped.len()), Vec::new());
        let mut subjects = Vec::new();
        for one in dumped {
            if !one.subject.is_api_key() {
                subjects.push((terms.len(), one.subject));
            }
            before.extend(one.before.map(|(until, tier, overrides)| (terms.len(), until, tier, overrides)));
            terms.push((one.tier, one.overrides));
        }
        Self { terms, before, subjects, callers: Some(callers), digest: None }
    }

    fn into_terms(self) -> Vec<DumpedTerms> {
        let terms = self.terms.into_iter().map(|(tier, overrides)| {
            let subject = Subject::default();
            DumpedTerms { subject, tier, overrides, before: None }
        });
        let mut dumped: Vec<DumpedTerms> = terms.collect();
        for (at, subject) in self.subjects {
            if let Some(one) = dumped.get_mut(at) {
                one.subject = subject;
            }
        }
        for (at, until, tier, overrides) in self.before {
            if let Some(one) = dumped.get_mut(at) {
                one.before = Some((until, tier, overrides));
            }
        }
        dumped
    }
}

/// Writes a table in pieces.
pub struct DumpWriter {
    table: Arc<QuotaTable>,
    header: Option<DumpHeader>,
    index: DumpIndex,
    is_done: bool,
}

impl DumpWriter {
    /// Starts a dump. Changes made meanwhile may be included or not, so the header's revision must have been read before:
    /// what is newer will be read again.
    #[must_use]
    pub fn new(table: Arc<QuotaTable>, header: DumpHeader) -> Self {
        Self { table, header: Some(header), index: DumpIndex::default(), is_done: false }
    }
}

/// The pieces of the dump, of some kilobytes each.
impl Iterator for DumpWriter {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut piece = Vec::new();
        if let Some(header) = self.header.take() {
            line(&mut piece, &header);
        }
        while !self.is_done && piece.len() < 1 << 15 {
            match self.index.next_block(&self.table) {
                Some(block) => {
                    // A block without callers says nothing.
                    if !block.callers.is_empty() {
                        line(&mut piece, &BlockHeader::from_block(block.terms, block.callers.len()));
                        block.callers.iter().for_each(|caller| piece.extend_from_slice(&bytes(caller)));
                    }
                }
                None => {
                    let end = BlockHeader::from_block(Vec::new(), 0);
                    line(&mut piece, &BlockHeader { callers: None, digest: Some(self.index.digest), ..end });
                    self.is_done = true;
                }
            }
        }
        (!piece.is_empty()).then_some(piece)
    }
}

impl fmt::Debug for DumpWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DumpWriter").field("table", &self.table).finish_non_exhaustive()
    }
}

/// Reads a dump into a table, as its bytes arrive. A dump that turns out to be damaged leaves the table with a part of it.
pub struct DumpReader {
    table: Arc<QuotaTable>,
    header: Option<DumpHeader>,
    index: RestoreIndex,
    /// Bytes that were not complete yet.
    rest: Vec<u8>,
    /// Callers of the current block that are still to come.
    callers: usize,
    is_done: bool,
}

impl DumpReader {
    /// Starts reading into a table, which should be empty.
    #[must_use]
    pub fn new(table: Arc<QuotaTable>) -> Self {
        let (header, index) = (None, RestoreIndex::default());
        Self { table, header, index, rest: Vec::new(), callers: 0, is_done: false }
    }

    /// Reads the next bytes.
    ///
    /// # Errors
    /// [`DumpError`] if the dump cannot be used.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), DumpError> {
        self.rest.extend_from_slice(bytes);
        let rest = std::mem::take(&mut self.rest);
        let mut at = 0;
        loop {
            let left = &rest[at..];
            if self.is_done {
                if !left.is_empty() {
                    return Err(damaged("there are bytes after the end"));
                }
                break;
            }
            if self.callers > 0 {
                let Some(one) = left.first_chunk::<CALLER_BYTES>() else { break };
                if !self.index.add_caller(&self.table, &caller(one)) {
                    return Err(damaged("a caller has unknown terms"));
                }
                (self.callers, at) = (self.callers - 1, at + CALLER_BYTES);
                continue;
            }
            let Some(end) = left.iter().position(|byte| *byte == b'\n') else {
                if left.len() > MAX_LINE {
                    return Err(damaged("a line is too long"));
                }
                break;
            };
            self.read_line(&left[..end])?;
            at += end + 1;
        }
        self.rest.extend_from_slice(&rest[at..]);
        Ok(())
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), DumpError> {
        if self.header.is_none() {
            let header: DumpHeader = serde_json::from_slice(line).map_err(damaged)?;
            if header.version != VERSION {
                return Err(DumpError::Foreign);
            }
            self.header = Some(header);
            return Ok(());
        }
        let block: BlockHeader = serde_json::from_slice(line).map_err(damaged)?;
        let Some(callers) = block.callers else {
            if block.digest.is_some_and(|digest| digest != self.index.digest) {
                return Err(damaged("the digest is wrong"));
            }
            self.is_done = true;
            return Ok(());
        };
        self.callers = callers;
        self.index.begin_block(&self.table, block.into_terms(), callers);
        Ok(())
    }

    /// Returns the header, once all bytes have been read.
    ///
    /// # Errors
    /// [`DumpError`] if the end is missing, or the dump is of another installation.
    pub fn finish(self, installation: &str) -> Result<DumpHeader, DumpError> {
        let header = self.header.filter(|_| self.is_done).ok_or_else(|| damaged("the end is missing"))?;
        if header.installation == installation { Ok(header) } else { Err(DumpError::Foreign) }
    }
}

impl fmt::Debug for DumpReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DumpReader").field("header", &self.header).finish_non_exhaustive()
    }
}

fn line(piece: &mut Vec<u8>, value: &impl Serialize) {
    // Writing to memory cannot fail, and neither type has keys that are not strings.
    let _ = serde_json::to_writer(&mut *piece, value);
    piece.push(b'\n');
}

fn bytes(caller: &DumpedCaller) -> [u8; CALLER_BYTES] {
    let mut all = [0; CALLER_BYTES];
    all[..8].copy_from_slice(&caller.key.to_le_bytes());
    for (field, number) in all[8..].chunks_exact_mut(4).zip([caller.from, caller.until, caller.terms]) {
        field.copy_from_slice(&number.to_le_bytes());
    }
    all
}

fn caller(all: &[u8; CALLER_BYTES]) -> DumpedCaller {
    let number = |at: usize| u32::from_le_bytes([all[at], all[at + 1], all[at + 2], all[at + 3]]);
    let key = u64::from(number(0)) | u64::from(number(4)) << 32;
    DumpedCaller { key, from: number(8), until: number(12), terms: number(16) }
}

#[cfg(test)]
mod tests;
