//! Grants: extra units for single callers, once. Their storage, and the in-memory table that the limiter reads.

pub(crate) mod store;
