//! Lease statistics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Running counts of what is rare; what is not is counted where a lock is held anyway.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) requested: AtomicU64,
    pub(super) granted: AtomicU64,
    pub(super) denied_refills: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) returned: AtomicU64,
    pub(super) central: AtomicU64,
    pub(super) promoted: AtomicU64,
    pub(super) demoted: AtomicU64,
    pub(super) unrefunded: AtomicU64,
}

/// Adds to a count.
pub(super) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

/// What leases tell about themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseStats {
    /// Keys with a lease.
    pub leases: u64,
    /// Of these, those that are leased because they are hot.
    pub hot: u64,
    /// Units in hand.
    pub available: u64,
    /// Charges paid for out of a lease.
    pub local: u64,
    /// Charges denied out of what the authority had said a moment ago.
    pub denied: u64,
    /// Charges for which the authority was asked.
    pub central: u64,
    /// Asks for leases.
    pub requested: u64,
    /// Units granted.
    pub granted: u64,
    /// Asks that were refused: the budget is used up.
    pub denied_refills: u64,
    /// Asks that nobody answered.
    pub failed: u64,
    /// Units given back.
    pub returned: u64,
    /// Keys that became hot.
    pub promoted: u64,
    /// Keys that cooled.
    pub demoted: u64,
    /// Units that were not refunded because leases were out; they come back with time.
    pub unrefunded: u64,
}

impl Counts {
    /// Adds the running counts to figures of the present.
    pub(super) fn with_present(&self, present: LeaseStats) -> LeaseStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LeaseStats {
            central: read(&self.central),
            requested: read(&self.requested),
            granted: read(&self.granted),
            denied_refills: read(&self.denied_refills),
            failed: read(&self.failed),
            returned: read(&self.returned),
            promoted: read(&self.promoted),
            demoted: read(&self.demoted),
            unrefunded: read(&self.unrefunded),
            ..present
        }
    }
}
