//! Replication: how nodes learn of changes, propagation lag, the list of nodes, and the snapshot for a start without
//! the database.

pub(crate) mod lag;
pub(crate) mod node_record;
pub(crate) mod nodes;
pub(crate) mod snapshot;
pub(crate) mod sync;
