//! Durable counters: consumption that survives the counter store, because it is also written to a database.
//!
//! ```text
//! request ─▶ DurableStore ─▶ ledger ─▶ kept (absolute values of this process) ─▶ rows for the database, each second
//!                 ▲                                                                         │
//!                 └── missing units are debited, when a counter is charged first ◀── saved ◀┘ after a loss or a start
//! ```
//!
//! A row belongs to one process and holds what that process has admitted of one counter in one slot of time, as an
//! absolute value with a number that only grows: a write whose outcome is unknown is repeated. Rows name counters by a
//! keyed hash, so the database learns no values of requests.
//!
//! A loss is noticed by canaries: counters of this process in the store, which are gone when the store's counters are.
//! Then the rows of all processes are read, and each counter is compared with the store when it is charged next. A
//! marker beside the counter, in the store, lets one node of all debit what is missing.
//!
//! Rejected: writing counters' states, which several nodes would overwrite; adding differences to shared rows, which
//! counts a repeated write twice; debiting all counters at once after a loss, which needs the values that the database
//! must not have.
//!
//! | module | contents |
//! |---|---|
//! | `slots` | slots of time, and what of them still counts |
//! | `kept` | what this process has counted, and what of it is not written yet |
//! | `saved` | what was read back, until each counter has been compared |
//! | `canary` | whether the store has lost its counters |
//! | `marker` | which node debits what is missing |
//! | `moves` | what waits when counters get another owner |
//! | `outages` | what waits when the store was away |
//! | `store` | the decorator |

mod canary;
mod kept;
mod marker;
mod moves;
mod outages;
mod saved;
mod slots;
mod store;

pub use kept::{DurableRow, Kept};
pub use saved::SavedSlot;
pub use slots::{Slot, is_kept, slot_of, used_after};
pub use store::{Durable, DurableStats, DurableStore, Peers, ReadBack};

/// Name of a counter in the database: a keyed hash.
pub type CounterDigest = [u8; 16];
