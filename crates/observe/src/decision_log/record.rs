//! Decision records: one decision with all values masked, as the log, the API and explanations show it.

use crate::decision_log::cache::{CallerDescription, LimitDescription};
use crate::mask::ApiKey;
use crate::metrics::labels::RuleLabel;
use crate::recorder::capture::{CaptureBuffer, CapturedDecision, LoggedVerdict};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_core::{RegionStatus, TimeDelta, Timestamp};
use tollgate_engine::{DecidedBy, DecisionId, INLINE_LIMIT, MeasureAction, Origin};
use tollgate_rules::Role;

/// A logged decision. Contains no unmasked values except the caller's API key, which is never rendered.
#[derive(Debug)]
pub struct DecisionRecord {
    /// Sequence number in the log, increasing; 0 until the record is stored.
    pub seq: u64,
    /// Decision ID.
    pub id: DecisionId,
    /// Time of the decision.
    pub at: Timestamp,
    /// Verdict.
    pub verdict: LoggedVerdict,
    pub(super) rule: Option<Arc<str>>,
    pub(super) caller: Arc<CallerDescription>,
    pub(super) origin: Origin,
    pub(super) protocol: &'static str,
    pub(super) limit: Option<LimitDetail>,
    pub(super) cost: u64,
    pub(super) measure: Option<(Box<str>, MeasureAction)>,
    /// Why the request was shed, if it was.
    pub(super) reason: Option<Box<str>>,
    /// Whether the store was not asked because the process was overloaded.
    pub(super) is_check_shed: bool,
    pub(super) retry_after: Option<TimeDelta>,
    pub(super) delay: TimeDelta,
    /// How cells shared the limit at that moment, where there are several.
    pub(super) region: Option<Box<RegionStatus>>,
    /// Rules hash; `None` for an inline limit without rules.
    pub(super) revision: Option<Arc<str>>,
}

/// The limit that a decision is attributed to, and the state of its counter.
#[derive(Debug)]
pub(super) struct LimitDetail {
    pub(super) limit: Arc<LimitDescription>,
    pub(super) used_before: u64,
    pub(super) remaining: u64,
    pub(super) role: Role,
    /// Until when the limit counts as used, at least in part, if the store did not know what was used.
    pub(super) assumed_until: Option<Timestamp>,
    /// Whether a grant covered the request; `remaining` is then what is left of the grant.
    pub(super) is_granted: bool,
}

impl DecisionRecord {
    pub(crate) fn from_capture(
        capture: &CapturedDecision,
        buffer: &CaptureBuffer,
        names: &[RuleLabel],
        caller: Arc<CallerDescription>,
        limit: Option<Arc<LimitDescription>>,
    ) -> Self {
        let layout = buffer.layout(capture);
        let noted = &capture.meta;
        let limit = limit.zip(noted.status).map(|(limit, status)| {
            let (remaining, is_granted) = (status.outcome.remaining, capture.is_granted);
            let used = limit.capacity.saturating_sub(remaining);
            let taken = if status.outcome.verdict.is_allowed() { capture.cost } else { 0 };
            let used_before = if is_granted { limit.capacity } else { used.saturating_sub(taken) };
            let assumed_until = capture.is_assumed.then(|| capture.at + status.outcome.reset_after);
            LimitDetail { limit, used_before, remaining, role: status.role, assumed_until, is_granted }
        });
        // Several rules may share one slot; the record names the exact rule.
        let counted = names.get(noted.slot as usize).map(|name| &name.rule);
        let name = match (noted.by, layout) {
            (Some(DecidedBy::Rule(id)), Some(layout)) => layout.rules.rule(id).map(|rule| rule.name.as_str()),
            (Some(DecidedBy::Inline), Some(_)) => Some(INLINE_LIMIT),
            (_, Some(_)) => None,
            (_, None) => counted.map(|name| &**name),
        };
        let rule = name.map(|name| match counted.filter(|counted| ***counted == *name) {
            Some(counted) => Arc::clone(counted),
            None => name.into(),
        });
        Self {
            seq: 0,
            id: capture.id,
            at: capture.at,
            verdict: noted.verdict,
            rule,
            caller,
            origin: capture.origin,
            protocol: capture.protocol,
            limit,
            cost: capture.cost,
            measure: capture.measure.clone(),
            reason: capture.reason.clone(),
            is_check_shed: capture.is_check_shed,
            retry_after: capture.retry_after,
            delay: capture.delay,
            region: capture.region.clone(),
            revision: layout.map(|layout| Arc::clone(&layout.revision)),
        }
    }

    /// Returns its memory use in bytes, without the caller description.
    pub(crate) fn bytes(&self) -> usize {
        let owner = |region: &RegionStatus| region.owner.as_ref().map_or(0, String::capacity);
        let region = self.region.as_deref().map_or(0, |region| size_of::<RegionStatus>() + owner(region));
        size_of::<Self>() + size_of::<Arc<Self>>() + 2 * size_of::<usize>() + region
    }

    /// Returns the caller description, which records of the same request share.
    pub(crate) fn caller(&self) -> &CallerDescription {
        &self.caller
    }

    /// Returns whether an attribute has this value, raw or masked; `ids` are the value's hash and the value parsed as an id.
    pub(crate) fn concerns(&self, key: &str, ids: &[Option<u64>]) -> bool {
        self.caller.ids.iter().any(|id| ids.contains(&Some(*id)))
            || self.caller.attributes.iter().any(|(_, shown)| shown == key)
    }

    /// Returns whether the shown value of an attribute starts with `prefix`, of any case.
    pub(crate) fn shows(&self, prefix: &str) -> bool {
        let starts = |shown: &str| {
            let mut shown = shown.chars().flat_map(char::to_lowercase);
            prefix.chars().flat_map(char::to_lowercase).all(|wanted| shown.next() == Some(wanted))
        };
        self.caller.attributes.iter().any(|(_, shown)| starts(shown))
    }

    /// Returns the shown value of an attribute of the request.
    #[must_use]
    pub fn value_of(&self, name: &str) -> Option<&str> {
        let found = self.caller.attributes.iter().find(|(key, _)| key == name)?;
        Some(&found.1)
    }

    /// Returns the domain of the request.
    pub(crate) fn domain(&self) -> &str {
        &self.caller.domain
    }

    /// Returns the caller's API key if its id is `id`. For operator actions; must never be shown.
    pub(crate) fn key_of(&self, id: u64) -> Option<&str> {
        let caller = self.caller.caller.as_ref().filter(|caller| caller.id == id)?;
        caller.key.as_ref().map(ApiKey::expose)
    }

    /// Returns the record as JSON, as the log and the API show it.
    #[must_use]
    pub fn json(&self, node: &NodeInfo) -> Value {
        let mut attributes = serde_json::Map::new();
        for (name, value) in &self.caller.attributes {
            // A repeated name, as in two descriptors, gets a list of all its values.
            match attributes.get_mut(name) {
                None => _ = attributes.insert(name.clone(), json!(value)),
                Some(Value::Array(all)) => all.push(json!(value)),
                Some(one) => *one = json!([one.take(), value]),
            }
        }
        let mut record = json!({
            "id": self.id.to_string(),
            "at": rfc3339(self.at),
            "domain": self.caller.domain,
            "attributes": attributes,
            "protocol": self.protocol,
            "verdict": self.verdict.name(),
            "origin": self.origin.name(),
            "cost": self.cost,
            "revision": self.revision,
            "node": node.node,
            "why": self.summary(),
        });
        let more = [
            ("key_id", self.caller.key_id.map(|id| json!(format!("{id:016x}")))),
            ("rule", self.rule.as_ref().map(|rule| json!(rule))),
            ("limit", self.limit.as_ref().map(|detail| detail.limit.json())),
            ("used_before", self.known_limit().map(|limit| json!(limit.used_before))),
            ("remaining", self.limit.as_ref().map(|limit| json!(limit.remaining))),
            (
                "assumed_until",
                self.limit.as_ref().and_then(|limit| limit.assumed_until).map(|at| json!(rfc3339(at))),
            ),
            ("retry_after_ms", self.retry_after.map(|wait| json!(wait.ceil_millis()))),
            ("delay_ms", (self.delay > TimeDelta::ZERO).then(|| json!(self.delay.ceil_millis()))),
            ("emergency", self.measure.as_ref().map(|(measure, _)| json!(measure))),
            ("cells", self.region.as_deref().map(region_json)),
            ("region", node.region.as_ref().map(|region| json!(region))),
        ];
        for (name, value) in more {
            if let Some(value) = value {
                record[name] = value;
            }
        }
        record
    }

    /// Returns the limit that the decision is attributed to, if what it had counted is known.
    fn known_limit(&self) -> Option<&LimitDetail> {
        self.limit.as_ref().filter(|limit| limit.assumed_until.is_none())
    }

    /// Returns the rule that the decision is attributed to.
    pub(crate) fn rule(&self) -> Option<&str> {
        self.rule.as_deref()
    }
}

/// Returns how cells shared a limit, with the fields that usage and explanations have.
fn region_json(region: &RegionStatus) -> Value {
    let mut json = json!({
        "mode": region.mode.name(),
        "decided_here": region.is_own,
        "lag_ms": region.lag.ceil_millis(),
        "regional_only": region.is_regional_only,
    });
    if let Some(owner) = &region.owner {
        json["owner"] = json!(owner);
    }
    if let Some(part) = region.part {
        json["part"] = json!(part);
    }
    if let Some(others) = region.others {
        json["used_by_others"] = json!(others);
    }
    json
}

impl LimitDescription {
    fn json(&self) -> Value {
        let mut json = json!({"limit": self.limit, "window": self.window, "algorithm": self.algorithm});
        if self.capacity != self.limit {
            json["burst"] = json!(self.capacity);
        }
        if let Some(unit) = &self.unit {
            json["unit"] = json!(unit);
        }
        json
    }
}

/// Identity of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// The node's name.
    pub node: Arc<str>,
    /// Region, if configured.
    pub region: Option<Arc<str>>,
}

/// Formats a time as RFC 3339 with milliseconds.
#[must_use]
pub fn rfc3339(at: Timestamp) -> String {
    let micros = i64::try_from(at.as_micros()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_microsecond(micros).map_or_else(|_| String::new(), |at| format!("{at:.3}"))
}
