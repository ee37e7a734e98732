//! Audit of adapted limits: each step by which signals tighten or loosen the limits of a tier.

use crate::audit::record;
use crate::control_plane::ControlPlane;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::ControlError;

/// A step of a tier's limits.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptationRecord {
    /// Domain of the rules.
    pub domain: String,
    /// The tier.
    pub tier: String,
    /// Percent of its limits that applied before.
    pub from: f64,
    /// Percent that apply now.
    pub to: f64,
    /// The signal above its bound, its value and the bound; `None` if limits were loosened.
    pub signal: Option<(String, f64, f64)>,
}

impl ControlPlane {
    /// Records a step in the audit log, as `overload.adapt`. It changes nothing that nodes read from the database, so it
    /// takes no revision.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
    pub async fn audit_adaptation(&self, step: &AdaptationRecord, actor: &Actor) -> Result<(), ControlError> {
        let now = self.now_millis();
        let AdaptationRecord { domain, tier, from, to, signal } = step;
        let target = format!("{domain}/{tier}");
        let before = serde_json::json!({"percent": from}).to_string();
        let mut after = serde_json::json!({"percent": to});
        if let Some((name, value, bound)) = signal {
            after["signal"] = serde_json::json!({"name": name, "value": value, "bound": bound});
        }
        let after = after.to_string();
        writing!(&self.db, 0_i64, |tx, head| {
            let changed = ChangeRecord {
                action: "overload.adapt",
                target: &target,
                before: before.clone(),
                after: after.clone(),
            };
            record!(tx, head, now, actor, &changed);
        });
        Ok(())
    }
}
