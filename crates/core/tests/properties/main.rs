//! The laws of the algorithms, held against exact models over random traces. One file a law.

mod calendar;
mod ceiling;
mod changes;
mod clocks;
mod debt;
mod drift;
mod envoy;
mod escrow;
mod keys;
mod packing;
mod refunds;
mod reload;
mod retry;
mod stepped;
mod throttle;
mod traces;
mod undo;
