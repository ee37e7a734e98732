//! Who may do what: tokens with a role, how one is verified, and how secrets and API keys are stored.

pub(crate) mod key_hash;
pub(crate) mod offline;
pub(crate) mod principal;
pub(crate) mod pseudonym;
pub(crate) mod secret;
pub(crate) mod tokens;
pub(crate) mod verified;
pub(crate) mod verify;
