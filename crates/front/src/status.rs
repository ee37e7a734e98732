//! What the fronts may ask of the process that they run in.

use serde_json::Value;

/// The state of the process, as far as callers may see it.
pub trait Status: Send + Sync {
    /// Whether new requests should still be sent here.
    fn is_ready(&self) -> bool;

    /// Everything an operator wants to know about readiness: rule files, revision, the last error.
    fn details(&self) -> Value;

    /// Figures in the Prometheus text format.
    fn metrics(&self) -> String;

    /// The keys with the most traffic at this node.
    fn hot(&self) -> Value {
        serde_json::json!({"hot": []})
    }
}
