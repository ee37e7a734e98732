//! Quotas file of a snapshot: a header line, then the shards of the quota table one after another, each a line of
//! JSON (new terms, number of callers) and 20 bytes per caller. Neither writing nor reading holds more than one shard
//! in memory.

use super::{VERSION, replace};
use crate::auth::key_hash::Subject;
use crate::control_plane::ControlPlane;
use crate::quota::overrides::QuotaOverride;
use crate::quota::table::{DumpBlock, DumpedCaller, DumpedTerms};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Error, Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering;

/// Size of one caller, in bytes.
const CALLER_BYTES: usize = 20;
/// Maximum length of a line, in bytes: all terms that one shard may add.
const MAX_LINE: u64 = 1 << 30;

#[derive(Serialize, Deserialize)]
struct SnapshotHeader {
    version: u32,
    /// The installation whose key hashes these are.
    installation: String,
    /// Control revision up to which changes are included.
    revision: i64,
    /// Time at which the quotas were last known to be current, in milliseconds.
    current_at: i64,
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
    /// Number of callers; `None` at the end of the file.
    callers: Option<usize>,
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
        Self { terms, before, subjects, callers: Some(callers) }
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

impl ControlPlane {
    pub(super) fn write_quotas(&self, path: &Path) -> std::io::Result<()> {
        // Changes made meanwhile may be included or not: they are newer than the recorded revision, and will be read
        // again. The time is read first, because it must not be later than that of the revision.
        let current_at = self.current_at.load(Ordering::Relaxed);
        let (installation, revision) = (self.installation_id(), self.revision());
        let header = SnapshotHeader { version: VERSION, installation, revision, current_at };
        replace(path, |file| {
            line(file, &header)?;
            self.quota_table.dump(|DumpBlock { terms, callers }| {
                line(file, &BlockHeader::from_block(terms, callers.len()))?;
                callers.iter().try_for_each(|caller| file.write_all(&bytes(caller)))
            })?;
            line(file, &BlockHeader { callers: None, ..BlockHeader::from_block(Vec::new(), 0) })
        })
    }

    pub(super) fn restore_quotas(&self, path: &Path) -> std::io::Result<()> {
        let mut file = BufReader::with_capacity(1 << 16, std::fs::File::open(path)?);
        let header: SnapshotHeader = read(&mut file)?;
        if header.version != VERSION || header.installation != self.installation_id() {
            return Err(Error::other("the file has another version or belongs to another database"));
        }
        let mut restore = self.quota_table.restore();
        loop {
            let block: BlockHeader = read(&mut file)?;
            let Some(count) = block.callers else { break };
            let mut callers = Vec::new();
            let mut one = [0; CALLER_BYTES];
            for _ in 0..count {
                file.read_exact(&mut one)?;
                callers.push(caller(&one));
            }
            restore(DumpBlock { terms: block.into_terms(), callers });
        }
        self.quota_revision.store(header.revision, Ordering::Relaxed);
        self.current_at.store(header.current_at, Ordering::Relaxed);
        Ok(())
    }
}

fn line(file: &mut impl Write, value: &impl Serialize) -> std::io::Result<()> {
    serde_json::to_writer(&mut *file, value)?;
    file.write_all(b"\n")
}

fn read<T: for<'a> Deserialize<'a>>(file: &mut impl BufRead) -> std::io::Result<T> {
    let mut text = Vec::new();
    file.take(MAX_LINE).read_until(b'\n', &mut text)?;
    Ok(serde_json::from_slice(&text)?)
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
