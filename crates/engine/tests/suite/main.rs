//! The limiter as its callers see it: decisions, reservations, failing stores, observers.

mod adapt;
mod arrivals;
mod check_shedding;
mod decision_reuse;
mod decisions;
mod emergencies;
mod enforce;
mod explain;
mod failing_store;
mod fleet_claims;
mod fleet_fairness;
mod fleet_marks;
mod fleet_nodes;
mod fleet_outage;
mod fleet_reserve_shares;
mod fleet_reserves;
mod fleet_shadow;
mod fleet_shadow_faults;
mod fleet_shares;
mod grants;
mod late_answers;
mod observers;
mod one_path;
mod outage_reservations;
mod panics;
mod pause;
mod permits;
mod quota_changes;
mod repeated_cancel;
mod reservations;
#[path = "../rig/mod.rs"]
mod rig;
mod shard_by;
mod shared_reservations;
mod usage;
mod workers;
