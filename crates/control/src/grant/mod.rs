//! Extra quota of single callers, once: how grants are stored, and the table of them that the limiter reads.

pub(crate) mod store;
pub(crate) mod table;
