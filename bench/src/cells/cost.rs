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

type Part = (&'static str, fn(Length) -> Result<(), String>);

const PARTS: [Part; 4] = [
    ("local", local::measure_all),
    ("exchange", exchange::run),
    ("debits", debits::run),
    ("leased", leased::run),
];

/// Runs these parts, or all; needs the server's binary and redis-server.
pub(crate) fn run(length: Length, parts: &[&str]) -> Result<(), String> {
    if let Some(unknown) = parts.iter().find(|part| PARTS.iter().all(|(name, _)| name != *part)) {
        return Err(format!("no part `{unknown}`: local, exchange, debits, leased"));
    }
    let mut wanted = PARTS.iter().filter(|(name, _)| parts.is_empty() || parts.contains(name));
    wanted.try_for_each(|(_, measure)| measure(length))
}
