//! Replication: how nodes learn of changes, propagation lag, the list of nodes, the fleet's hot counters, and the snapshot
//! for a start without the database.

pub(crate) mod hot;
pub(crate) mod hot_counters;
pub(crate) mod lag;
pub(crate) mod node_record;
pub(crate) mod nodes;
pub(crate) mod replica;
pub(crate) mod snapshot;
pub(crate) mod sync;
