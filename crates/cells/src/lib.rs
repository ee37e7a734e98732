//! Limits shared between cells: a cell is a set of nodes with one counter store, a region with its Redis or one node
//! with counters in memory. `docs/deployment/regions.md` has the modes and their bounds.
//!
//! | module | contents |
//! |---|---|
//! | [`regional`](RegionalStore) | the decorator around a cell's own store: selects what decides a charge, all or none |
//! | `mixed` | requests that several stores decide |
//! | `apply` | debits what other cells have consumed |
//! | `counter_locks` | one change of a counter at a time, while reports are applied |
//! | `late` | what a cell is assumed to have consumed whose report is late |
//! | `late_record` | records what a store charges after its deadline |
//! | `unanswered`, `late_debits` | debits whose answers are late, made again if the store refuses them |
//! | [`owner`](OwnerStore) | the remote store: charges forwarded to the cell that owns a counter |
//! | [`members`](Members) | the configured peers, which of them answer, which cell owns a counter and since when its counts are known, how limits are divided while some are silent |
//! | `roster` | the peers by index, configured or learned |
//! | [`ledger`](Ledger), [`outbox`](Outbox), [`inbox`](Inbox) | the exchange of consumption, as pure state machines |
//! | `hot_counts` | the ledger's part without a lock, for counters that are charged again and again: a table for each thread |
//! | [`key_values`](KeyValues) | the values of a counter key as messages carry them |
//! | [`message`] | the messages between cells, as a pure codec |
//! | [`pseudonym`](Pseudonyms) | secrets as keyed hashes, before they reach a counter that cells share |
//! | [`durable`] | consumption that survives the counter store: rows for a database, and what is read back |
//! | `used_units` | how much of a counter is used, also beyond its limit |
//! | [`stats`](RegionStats) | statistics |
//! | `net` (feature) | links over TCP and TLS |

mod apply;
mod charge_codec;
mod counter_locks;
pub mod durable;
mod guarded;
mod hot_counts;
mod inbox;
mod key_values;
mod last_outcomes;
mod late;
mod late_debits;
mod late_record;
mod ledger;
mod lost_units;
mod members;
pub mod message;
mod mixed;
#[cfg(feature = "net")]
pub mod net;
mod others;
mod outbox;
mod overdraft;
mod owner;
mod pseudonym;
mod regional;
mod reported;
mod roster;
mod stats;
mod unanswered;
mod used_units;
mod wire;

pub use charge_codec::{SentCharge, SentCounter};
pub use inbox::{Application, Inbox, Receipt};
pub use key_values::KeyValues;
pub use ledger::{Consumed, Ledger};
pub use members::{CellConfig, Decider, Members, PeerConfig, PeerStatus};
pub use outbox::Outbox;
pub use owner::{OwnerStore, Transport};
pub use pseudonym::Pseudonyms;
pub use regional::{OwnerLeases, RegionalStore};
pub use roster::PeerChanges;
pub use stats::{PeerStats, RegionStats};
