//! Audit of adapted limits: the steps by which signals tighten or loosen the limits of a tier.

use crate::audit::record;
use crate::control_plane::ControlPlane;
use crate::db::time::rfc3339;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::ControlError;
use serde_json::{Value, json};
use tollgate_core::Timestamp;

/// Steps of a tier's limits that are one entry of the audit log.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptationRecord {
    /// Domain of the rules.
    pub domain: String,
    /// The tier.
    pub tier: String,
    /// Percent of its limits that applied before.
    pub from: f64,
    /// The steps, in order.
    pub steps: Vec<AdaptationStep>,
}

/// A step of a tier's limits.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptationStep {
    /// When it was made.
    pub at: Timestamp,
    /// Percent of the limits that apply since.
    pub percent: f64,
    /// The signal above its bound, its value and the bound; `None` if limits were loosened.
    pub signal: Option<(String, f64, f64)>,
}

impl AdaptationStep {
    fn as_json(&self) -> Value {
        let mut step = json!({"percent": self.percent});
        if let Some((name, value, bound)) = &self.signal {
            step["signal"] = json!({"name": name, "value": value, "bound": bound});
        }
        step
    }
}

impl ControlPlane {
    /// Records steps in the audit log, as `overload.adapt`: the state after the last one, and if there are several each of them
    /// with its time. That changes nothing that nodes read from the database, so it takes no revision.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
    pub async fn audit_adaptation(
        &self,
        record: &AdaptationRecord,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        let now = self.now_millis();
        let AdaptationRecord { domain, tier, from, steps } = record;
        let target = format!("{domain}/{tier}");
        let before = json!({"percent": from}).to_string();
        let mut after = steps.last().map_or_else(|| json!({"percent": from}), AdaptationStep::as_json);
        if steps.len() > 1 {
            let timed = |step: &AdaptationStep| {
                let mut own = step.as_json();
                own["at"] = json!(rfc3339(step.at));
                own
            };
            after["steps"] = steps.iter().map(timed).collect();
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
