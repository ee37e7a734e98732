//! Authentication: tokens with a role, their verification, and the storage of secrets and API keys.

pub(crate) mod offline;
pub(crate) mod principal;
pub(crate) mod secret;
pub(crate) mod tokens;
pub(crate) mod verified;
pub(crate) mod verify;
