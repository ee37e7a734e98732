//! The quotas of a snapshot: a line that says what they are, then the parts of the book one after another, each a line of JSON
//! (terms that are new, how many callers) and 20 bytes for each caller. Neither writing nor reading holds more than a part.

use super::{VERSION, replace};
use crate::control_plane::ControlPlane;
use crate::quota::overrides::QuotaOverride;
use crate::quota::table::{DumpBlock, DumpedCaller, DumpedTerms};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Error, Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering;

/// What one caller takes.
const CALLER_BYTES: usize = 20;
/// The longest line: all terms that one part may bring.
const MAX_LINE: u64 = 1 << 30;

#[derive(Serialize, Deserialize)]
struct SnapshotHeader {
    version: u32,
    /// Whose words these are.
    installation: String,
    /// Up to which revision of the database they go.
    revision: i64,
    /// When they were last known to be all there are, in milliseconds.
    current_at: i64,
}

#[derive(Serialize, Deserialize)]
struct BlockHeader {
    terms: Vec<(Option<String>, Vec<QuotaOverride>)>,
    /// What acts before some of these terms do: which of them, until when at most, and what.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    before: Vec<(usize, u32, Option<String>, Vec<QuotaOverride>)>,
    /// `None`: this is the end.
    callers: Option<usize>,
}

impl BlockHeader {
    fn from_block(spoken: Vec<DumpedTerms>, callers: usize) -> Self {
        let (mut terms, mut before) = (Vec::with_capacity(spoken.len()), Vec::new());
        for one in spoken {
            before.extend(one.before.map(|(until, tier, overrides)| (terms.len(), until, tier, overrides)));
            terms.push((one.tier, one.overrides));
        }
        Self { terms, before, callers: Some(callers) }
    }

    fn into_terms(self) -> Vec<DumpedTerms> {
        let terms =
            self.terms.into_iter().map(|(tier, overrides)| DumpedTerms { tier, overrides, before: None });
        let mut spoken: Vec<DumpedTerms> = terms.collect();
        for (at, until, tier, overrides) in self.before {
            if let Some(one) = spoken.get_mut(at) {
                one.before = Some((until, tier, overrides));
            }
        }
        spoken
    }
}

impl ControlPlane {
    pub(super) fn write_quotas(&self, path: &Path) -> std::io::Result<()> {
        // What changes meanwhile may be in it or not: it is newer than this, and will be asked for. The time is read first:
        // it must not be later than that of the revision.
        let current_at = self.current_at.load(Ordering::Relaxed);
        let (installation, revision) = (self.installation_id(), self.revision());
        let title = SnapshotHeader { version: VERSION, installation, revision, current_at };
        replace(path, |file| {
            line(file, &title)?;
            self.quota_table.dump(|DumpBlock { terms, callers }| {
                line(file, &BlockHeader::from_block(terms, callers.len()))?;
                callers.iter().try_for_each(|caller| file.write_all(&bytes(caller)))
            })?;
            line(file, &BlockHeader { callers: None, ..BlockHeader::from_block(Vec::new(), 0) })
        })
    }

    pub(super) fn restore_quotas(&self, path: &Path) -> std::io::Result<()> {
        let mut file = BufReader::with_capacity(1 << 16, std::fs::File::open(path)?);
        let title: SnapshotHeader = read(&mut file)?;
        if title.version != VERSION || title.installation != self.installation_id() {
            return Err(Error::other("they are of another version, or another database"));
        }
        let mut restore = self.quota_table.restore();
        loop {
            let beginning: BlockHeader = read(&mut file)?;
            let Some(count) = beginning.callers else { break };
            let mut callers = Vec::new();
            let mut one = [0; CALLER_BYTES];
            for _ in 0..count {
                file.read_exact(&mut one)?;
                callers.push(caller(&one));
            }
            restore(DumpBlock { terms: beginning.into_terms(), callers });
        }
        self.quota_revision.store(title.revision, Ordering::Relaxed);
        self.current_at.store(title.current_at, Ordering::Relaxed);
        Ok(())
    }
}

fn line(file: &mut impl Write, what: &impl Serialize) -> std::io::Result<()> {
    serde_json::to_writer(&mut *file, what)?;
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
    for (place, number) in all[8..].chunks_exact_mut(4).zip([caller.from, caller.until, caller.terms]) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    all
}

fn caller(all: &[u8; CALLER_BYTES]) -> DumpedCaller {
    let number = |at: usize| u32::from_le_bytes([all[at], all[at + 1], all[at + 2], all[at + 3]]);
    let word = u64::from(number(0)) | u64::from(number(4)) << 32;
    DumpedCaller { key: word, from: number(8), until: number(12), terms: number(16) }
}
