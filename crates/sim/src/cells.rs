//! Cells in virtual time: the real regional stores, with their exchange, forwarding and leases, over links that delay, lose,
//! duplicate, reorder and hold back messages and that are cut in one direction or both, with clocks that differ and cells that restart.
//!
//! A run has one counter, one mode and one caller that spends everywhere at once. The stated bound of the mode is checked over
//! every span: `docs/deployment/regions.md` has the bounds. Planted bugs show that the check finds something.
//!
//! | module | contents |
//! |---|---|
//! | `scenario` | what a seed determines |
//! | `links` | time, events, messages in transit |
//! | `own_store` | the store of a cell, which may be down, and may outlive its processes |
//! | `run` | one run |

mod links;
mod own_store;
mod run;
mod scenario;

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellBug {
    /// Batches are acknowledged and not applied.
    ForgetsBatches,
    /// A cell that cannot reach the owner decides by its own counter.
    DecidesWithoutOwner,
    /// Each cell has the whole of a split limit.
    KeepsWholeLimit,
    /// The owner grants leases without deducting them.
    SkipsDeduction,
    /// A report that comes late is debited beside what was assumed of it.
    CountsLateReportsTwice,
    /// Reports of refunds are acknowledged and not applied.
    ForgetsRefunds,
    /// Reports of refunds are applied twice.
    CountsRefundsTwice,
    /// Units of refunds are taken for older than they are, so that a log does not find them.
    DatesRefundsTooEarly,
    /// A cell that was away takes its counters for complete, whatever others decided meanwhile.
    BelievesOldTenures,
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct CellReport {
    /// What was run.
    pub scenario: String,
    /// Violated property, if any.
    pub violation: Option<String>,
    /// Number of checks.
    pub checks: u64,
    /// Number of admitted units.
    pub admitted: u64,
    /// Number of checks decided with the consumption of a late cell assumed.
    pub assumed: u64,
    /// Number of checks that no cell could decide.
    pub failed: u64,
}

/// Runs one seed.
#[must_use]
pub fn run_cells(seed: u64, bug: Option<CellBug>) -> CellReport {
    run::Run::new(seed, bug).finish()
}
