//! Lease statistics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Running counts of rare events; frequent events are counted under a lock that is held anyway.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) requested: AtomicU64,
    pub(super) granted: AtomicU64,
    pub(super) denied_refills: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) returned: AtomicU64,
    pub(super) central: AtomicU64,
    pub(super) promoted: AtomicU64,
    pub(super) listed: AtomicU64,
    pub(super) demoted: AtomicU64,
    pub(super) unrefunded: AtomicU64,
}

/// Adds `n` to a count.
pub(super) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

/// Lease statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseStats {
    /// Number of keys with a lease.
    pub leases: u64,
    /// Number of leased keys that are leased because they are hot.
    pub hot: u64,
    /// Units available on this node.
    pub available: u64,
    /// Charges allowed from leased units.
    pub local: u64,
    /// Charges denied from a recent denial by the authority.
    pub denied: u64,
    /// Charges sent to the authority.
    pub central: u64,
    /// Lease refills requested.
    pub requested: u64,
    /// Units granted by refills.
    pub granted: u64,
    /// Refills denied because the budget is used up.
    pub denied_refills: u64,
    /// Refills that failed because the authority was unavailable.
    pub failed: u64,
    /// Units returned to the authority.
    pub returned: u64,
    /// Keys promoted to a lease because they became hot.
    pub promoted: u64,
    /// Keys among them that were promoted because the fleet's hot list has them.
    pub listed: u64,
    /// Hot keys demoted after they cooled down.
    pub demoted: u64,
    /// Units not refunded because leases were outstanding; they recover with time.
    pub unrefunded: u64,
}

impl Counts {
    /// Returns `present` with the running counts filled in.
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
            listed: read(&self.listed),
            demoted: read(&self.demoted),
            unrefunded: read(&self.unrefunded),
            ..present
        }
    }
}
