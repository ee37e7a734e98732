//! The decision log: records of decisions, the ring that is searched, and their explanations.

pub(crate) mod buffer;
pub(crate) mod cache;
pub(crate) mod explain;
pub(crate) mod record;
