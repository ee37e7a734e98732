//! Connections to the admin listener.

pub(crate) mod limiter;
pub(crate) mod listener;
