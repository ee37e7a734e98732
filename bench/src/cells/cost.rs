//! What the modes of `region` cost.
//!
//! | module | contents |
//! |---|---|
//! | `local` | a decision of a cell with peers beside one without, in process |
//! | `exchange` | the exchange of 50,000 counters charged a second in each of three cells |
//! | `debits` | the exchange over Redis: a debit beside a charge, by the server's CPU time |
//! | `leased` | one key leased over links of 100 ms |

mod debits;
mod exchange;
mod leased;
mod local;

use super::Length;

/// Runs all parts; needs the server's binary and redis-server.
pub(crate) fn run(length: Length) -> Result<(), String> {
    local::measure_all(length)?;
    exchange::run(length)?;
    debits::run(length)?;
    leased::run(length)
}
