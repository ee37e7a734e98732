//! The order of shedding.
//!
//! It has [`POSITIONS`] places: four priorities of [`COHORTS`] cohorts each, critical first. Whatever is shed is shed from
//! the end of it, so a threshold is a single number, and moving it by one place moves a 128th of a priority's callers.

use tollgate_core::Priority;

/// Number of cohorts of callers within a priority.
pub const COHORTS: u16 = 128;
/// Number of places in the order of shedding.
pub const POSITIONS: u16 = COHORTS * 4;

/// Returns the first place of a priority.
pub(crate) const fn first_position(priority: Priority) -> u16 {
    priority as u16 * COHORTS
}
