//! Displaced: another process has this cell's name, and the other cells reach that one.
//!
//! A copy of a node, or the process that its replacement runs beside, does not hear what the others consume, and what it
//! admits is not reported to them. The part of limits that the name has is the other one's. So a process that one of its peers
//! says this to has no part: it decides nothing that cells share, until all that said so accept it again, or are away for
//! longer than the next attempt to reach them takes.
//!
//! Rejected: deciding by the cell's own part as when all others are silent. Then two processes have it, for as long as both
//! run.

use super::Members;
use std::sync::atomic::Ordering;
use tollgate_core::{TimeDelta, Timestamp};

/// How long a refusal counts: longer than a pause between two attempts and the attempt itself.
const REFUSED_FOR: TimeDelta = TimeDelta::from_secs(5);

impl Members {
    /// Records that a peer refuses this process, because it reaches another one under this cell's name. Returns whether no
    /// peer had said so before.
    pub(crate) fn on_displaced(&self, peer: usize, now: Timestamp) -> bool {
        let is_first = !self.is_displaced(now);
        if let Some(peer) = self.peers.get(peer) {
            peer.displaced.store(now.as_micros(), Ordering::Relaxed);
        }
        is_first
    }

    /// Returns whether another process has this cell's name, so that this one decides nothing that cells share.
    #[must_use]
    pub fn is_displaced(&self, now: Timestamp) -> bool {
        let is_refused = |at: u64| at != 0 && now.since(Timestamp::from_micros(at)) <= REFUSED_FOR;
        self.peers.iter().any(|peer| is_refused(peer.displaced.load(Ordering::Relaxed)))
    }
}
