//! Emergency measures: their JSON form, validation and storage.

pub(crate) mod record;
pub(crate) mod store;
