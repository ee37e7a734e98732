//! Admin API handlers, one file per resource. Each file lists its routes; `openapi` combines them into the OpenAPI
//! document, and `schemas` describes JSON that other crates produce.

pub(crate) mod audit;
pub(crate) mod consumption;
pub(crate) mod decision_export;
pub(crate) mod decisions;
pub(crate) mod emergency;
pub(crate) mod explain;
pub(crate) mod explained;
pub(crate) mod health;
pub(crate) mod history;
pub(crate) mod log_level;
pub(crate) mod openapi;
pub(crate) mod overload;
pub(crate) mod quota_bulk;
pub(crate) mod quota_preview;
pub(crate) mod quotas;
mod region;
pub(crate) mod replica;
pub(crate) mod rule_files;
pub(crate) mod rule_tree;
pub(crate) mod rules;
mod schemas;
pub(crate) mod stats;
pub(crate) mod tokens;
pub(crate) mod usage;
