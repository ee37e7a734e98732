//! What the fronts may ask of the process that they run in.

use serde_json::Value;
use std::sync::Arc;
use tollgate_observe::{Observe, Page};

/// The state of the process, as far as callers may see it.
pub trait Status: Send + Sync {
    /// Whether new requests should still be sent here.
    fn is_ready(&self) -> bool;

    /// Everything an operator wants to know about readiness: rule files, revision, the last error.
    fn details(&self) -> Value;

    /// Writes the figures of the process.
    fn metrics(&self, page: &mut Page);

    /// Who watches decisions, if anybody does.
    fn observe(&self) -> Option<&Arc<Observe>> {
        None
    }

    /// What is known of this node beyond what its watcher knows: rules, store, breakers, leases.
    fn node(&self) -> Value {
        serde_json::json!({})
    }

    /// What nodes that share a database tell each other of themselves.
    fn presence(&self) -> Value {
        serde_json::json!({})
    }

    /// The keys with the most traffic at this node.
    fn hot(&self) -> Value {
        serde_json::json!({"hot": []})
    }
}
