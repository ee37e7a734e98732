//! Permit sets: the sorted set beside a bundle that holds most permits of a concurrency limit.
//!
//! A list of all permits in the bundle was rejected: every charge, renewal and release parses and writes it, which takes
//! milliseconds from a thousand permits on. `lua/permit_sets.lua` reads and writes the sets. It needs to know which holders a
//! call concerns before it steps the first charge, so the counter's declaration has them.

use super::pipeline::{Command, Job};
use super::shard_request::{BundleCounter, ShardCharge};
use smallvec::SmallVec;
use std::io::Write;
use tollgate_core::{Algorithm, PermitId};

/// The permits of one counter that a call concerns.
pub(super) struct PermitSet {
    /// Number of the counter in the call, from 1.
    pub(super) counter: u16,
    /// Key of the sorted set; in the slot of the counter's bundle, whose hash tag it has.
    pub(super) key: String,
    /// Units that anonymous holders may give back.
    refunds: u64,
    ids: SmallVec<[PermitId; 4]>,
}

/// Returns the key of a counter's set. No value in a bundle's key contains a brace.
fn key(bundle: &str, counter: &BundleCounter) -> String {
    format!("{bundle}}}{}", String::from_utf8_lossy(&counter.name))
}

/// Which concurrency limits of a call have a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Declare {
    /// Those that allow more permits than the text of a bundle holds. The others need one key less, so that they work in a
    /// cluster's slot while it moves.
    #[default]
    Large,
    /// All: a limit of the same counter that allows more has begun a set.
    All,
}

/// Maximum permits in the text of a bundle, as in `lua/permit_sets.lua`.
const MAX_IN_TEXT: u64 = 16;

/// Returns whether a script failed, before it wrote anything, because it needs a set that was not declared.
pub(super) fn is_undeclared(details: &str) -> bool {
    details.contains("permits are in a set")
}

/// Returns the sets of a call's concurrency limits.
pub(super) fn from_jobs(
    declare: Declare,
    jobs: &[Job],
    numbers: &[SmallVec<[u16; 4]>],
    counters: &[BundleCounter],
    bundles: &[String],
) -> Vec<PermitSet> {
    let mut sets: Vec<PermitSet> = Vec::new();
    let is_permit = |want: &&ShardCharge| want.limit.algorithm() == Algorithm::Concurrency;
    for (job, numbers) in jobs.iter().zip(numbers) {
        for want in job.request.charges.iter().filter(is_permit) {
            let number = numbers[want.counter];
            let is_large = declare == Declare::All || want.limit.capacity() > MAX_IN_TEXT;
            if is_large && sets.iter().all(|set| set.counter != number) {
                let counter = &counters[usize::from(number) - 1];
                let key = key(&bundles[counter.bundle], counter);
                sets.push(PermitSet { counter: number, key, refunds: 0, ids: SmallVec::new() });
            }
        }
    }
    if sets.is_empty() {
        return sets;
    }
    for (job, numbers) in jobs.iter().zip(numbers) {
        let gives_back = matches!(job.command, Command::Undo { .. } | Command::ReturnUnits { .. });
        for want in job.request.charges.iter().filter(is_permit) {
            let Some(set) = sets.iter_mut().find(|set| set.counter == numbers[want.counter]) else {
                continue;
            };
            if want.permit != PermitId::ANONYMOUS {
                set.ids.push(want.permit);
            } else if gives_back || want.cost.is_refund() {
                set.refunds = set.refunds.saturating_add(want.cost.units().min(MAX_REFUND));
            }
        }
    }
    sets
}

/// Above the units of any counter, and small enough that their sum is exact in a script.
const MAX_REFUND: u64 = 1 << 42;

impl PermitSet {
    /// Appends what a script needs to know of the set at the key with this number: `p3,0,1f,2e`.
    pub(super) fn declare(&self, key: usize, text: &mut Vec<u8>) {
        // Writing to memory cannot fail.
        let _ = write!(text, "p{key},{}", self.refunds);
        for PermitId(id) in &self.ids {
            let _ = write!(text, ",{id:x}");
        }
    }
}
