//! Envoy's rate limit quota service (RLQS): streams report what they admit and deny, and are assigned shares of the limits.
//!
//! One task owns all state; streams send it their reports and receive its actions. Units are charged through the engine
//! before they are assigned, so RLS, HTTP, the gateway and quota streams share the same counters, and their sum stays
//! within the limit.
//!
//! | module | contents |
//! |---|---|
//! | `parts` | messages of any size, cut into small ones |
//! | `wire` | messages to reports, actions to messages |
//! | `allocation` | max–min fair shares by demand |
//! | `assignment` | token buckets and blanket rules, and the most that they can admit |
//! | `sent` | assignments that were sent, how long they last, and what a client may still admit by them |
//! | `counter` | what is known of a limit's counter, and the rate that can be assigned of it |
//! | `ledger` | units of a limit that were charged, and until when they may be spent |
//! | `exposed` | the most that a stream may have admitted since its last report, and may still admit |
//! | `pool` | units of a limit for all streams; **the invariant** |
//! | `curve` | the units of a pool beside what streams may admit, kept true from pass to pass |
//! | `account` | one bucket on one stream |
//! | `admission` | which streams there are, if more are opened than there may be |
//! | `places` | how many buckets streams may have, and how large they are |
//! | `turns` | which accounts a pass serves |
//! | `table` | all accounts, and the pass over those that need one: allocate, charge, assign |
//! | `service` | streams, their bounds, and the task |
//! | `stats` | metrics |
//!
//! Rejected: a static assignment for each stream, as a server without counters would give, because N streams then admit
//! N times the limit; and charging when requests are reported, because five seconds of every stream would come on top.

mod account;
mod admission;
mod allocation;
mod assignment;
mod counter;
mod curve;
mod exposed;
mod ledger;
mod parts;
mod places;
mod pool;
mod sent;
mod service;
mod stats;
mod table;
mod turns;
mod wire;

pub use service::RlqsConfig;
pub(crate) use service::{QuotaServer, QuotaService};
pub use stats::RlqsStats;
