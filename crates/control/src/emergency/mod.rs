//! What operators decide in an emergency: a measure as it is written and read, and how measures are stored.

pub(crate) mod record;
pub(crate) mod store;
