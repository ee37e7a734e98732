//! Rules of a node: the active rules, published revisions and their storage, and the rollback guard.

pub(crate) mod denial_counts;
pub(crate) mod guard;
pub(crate) mod guardrails;
pub(crate) mod manager;
pub(crate) mod publish;
pub(crate) mod revision;
pub(crate) mod revision_store;
