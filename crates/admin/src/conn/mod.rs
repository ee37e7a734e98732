//! Connections to the admin address.

pub(crate) mod limiter;
pub(crate) mod listener;
