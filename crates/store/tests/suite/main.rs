//! Counters in memory.

mod conformance;
mod denied_refunds;
mod deny_cache;
mod far_leases;
mod hot_list;
mod lease_refunds;
mod oracle;
mod stress;
