//! Billing: what callers consumed of the rules with `billing: true`, by hour and month, for invoices.
//!
//! ```text
//! request ─▶ meter (buffers of each thread) ─▶ ledger (absolute values of this process) ─▶ database ─▶ API, webhook
//!             every half second                 every half second, one transaction
//! ```
//!
//! A row of the database belongs to one process and holds what it has counted in that hour, not what it has counted
//! since the last write: a write whose outcome is unknown is simply repeated. So a crash loses at most what has not
//! been written, less than a second, and nothing is counted twice.
//!
//! Rejected: a log of single requests, which costs a row each; and adding differences to shared rows, which counts a
//! repeated write twice.
//!
//! | module | contents |
//! |---|---|
//! | `meter` | the part on the request path |
//! | `ledger` | what this process has counted, and what of it is not written yet |
//! | `row` | rows as readers see them, their ids, cursors, hours and months |
//! | `store` | writes, and the purge that adds old hours up by month |
//! | `read` | pages by hour and month |
//! | `delivery` | what the webhook sends next, and who sends |
//! | `run` | the background task |

pub(crate) mod delivery;
pub(crate) mod ledger;
pub(crate) mod meter;
pub(crate) mod read;
pub(crate) mod row;
pub(crate) mod run;
pub(crate) mod store;
