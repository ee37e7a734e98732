//! The rules that act on this node: published revisions, how they are stored, and the guard that rolls them back.

pub(crate) mod denial_counts;
pub(crate) mod guard;
pub(crate) mod guardrails;
pub(crate) mod manager;
pub(crate) mod publish;
pub(crate) mod revision;
pub(crate) mod revision_store;
