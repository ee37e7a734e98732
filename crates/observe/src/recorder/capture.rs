//! Captured decisions: what the recorder copies into a per-thread buffer while the request waits. The worker turns captures
//! into log records later.
//!
//! Buffers are bounded. If the worker falls behind, captures that do not fit are dropped and counted: a decision never waits
//! for telemetry.

use crate::mask::{Mask, identifies_caller};
use crate::metrics::labels::{INLINE_LABEL, LabelLayout};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use tollgate_core::{Charge, Cost, KeyPart, Limit, Outcome, RegionStatus, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{
    Check, CheckInput, DecidedBy, Decision, DecisionId, LimitStatus, MeasureAction, Origin,
};
use tollgate_rules::GLOBAL;

/// Maximum number of decisions in one buffer.
pub(crate) const MAX_CAPTURES: usize = 2_048;
/// Maximum bytes of attributes in one buffer, and of one decision.
const MAX_TEXT: usize = 1024 * 1024;
const MAX_TEXT_PER_DECISION: usize = 2 * 1024;
/// Maximum number of attributes captured per request, and bytes of each name or value.
const MAX_PAIRS: usize = 16;
pub(crate) const MAX_VALUE: usize = 256;

/// Verdict of a logged decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedVerdict {
    /// The request passed.
    Allow,
    /// The request was denied.
    Deny,
    /// The request passed, but a rule in shadow mode would have denied it.
    ShadowDeny,
    /// The request passed after a delay.
    Delay,
    /// The request passed with degraded service.
    Degrade,
    /// The request passed, and a soft limit warned.
    Warn,
}

impl LoggedVerdict {
    /// Returns the verdict of a decision, regardless of rules in shadow mode.
    #[inline]
    pub(crate) fn from_decision(decision: &Decision) -> Self {
        match () {
            () if !decision.is_allowed() => Self::Deny,
            () if decision.delay() > TimeDelta::ZERO => Self::Delay,
            () if decision.degraded_by.is_some() => Self::Degrade,
            () if decision.warned_by.is_some() => Self::Warn,
            () => Self::Allow,
        }
    }

    /// Returns the word used in logs and the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::ShadowDeny => "shadow_deny",
            Self::Delay => "delay",
            Self::Degrade => "degrade",
            Self::Warn => "warn",
        }
    }

    /// Parses the word that [`Self::name`] returns.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Allow, Self::Deny, Self::ShadowDeny, Self::Delay, Self::Degrade, Self::Warn]
            .into_iter()
            .find(|ruled| ruled.name() == name)
    }
}

/// What the recorder determined while counting a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionMeta {
    pub(crate) slot: u32,
    pub(crate) verdict: LoggedVerdict,
    /// Rule or other cause that the decision is attributed to.
    pub(crate) by: Option<DecidedBy>,
    /// Limit that the decision is attributed to: the one that denied, else the one closest to exhaustion.
    pub(crate) status: Option<LimitStatus>,
    /// Utilization of the caller's own limits.
    pub(crate) caller_utilization: Option<CallerUtilization>,
    /// Whether the decision is logged.
    pub(crate) log: bool,
    /// Number of decisions this one represents in the sketches; 0 if it is not sampled.
    pub(crate) weight: u32,
}

/// Utilization of the live per-caller limit that is closest to exhaustion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerUtilization {
    pub(crate) slot: u32,
    /// Number of the limit's tier.
    pub(crate) tier: u16,
    /// Used share of the limit, from 0 to 1.
    pub(crate) used: f32,
}

impl CallerUtilization {
    pub(crate) fn from_outcome(slot: u32, tier: u16, outcome: &Outcome, capacity: u64) -> Self {
        // A limit that denies is exhausted, even if a remainder smaller than the cost is left.
        let used = if outcome.verdict.is_denied() {
            1.0
        } else {
            1.0 - outcome.remaining as f32 / capacity.max(1) as f32
        };
        Self { slot, tier, used }
    }
}

/// Returns all attributes of a request except `global`, which identifies nothing.
pub(crate) fn pairs<'c>(check: &Check<'c>) -> impl Iterator<Item = &'c (&'c str, &'c str)> + Clone {
    let (attributes, descriptors) = match check.input {
        CheckInput::Attributes(attributes) => (attributes, &[][..]),
        CheckInput::Descriptors(descriptors) => (&[][..], descriptors),
    };
    let all = attributes.iter().chain(descriptors.iter().flat_map(|descriptor| descriptor.entries));
    all.filter(|(key, _)| *key != GLOBAL.0)
}

/// Returns the bytes captured of an attribute.
fn size((key, value): &(&str, &str)) -> usize {
    key.len().min(MAX_VALUE) + value.len().min(MAX_VALUE)
}

/// A captured decision.
#[derive(Debug)]
pub(crate) struct CapturedDecision {
    pub(crate) id: DecisionId,
    pub(crate) at: Timestamp,
    pub(crate) meta: DecisionMeta,
    pub(crate) origin: Origin,
    pub(crate) protocol: &'static str,
    /// Units charged to the limit in `meta`.
    pub(crate) cost: u64,
    /// Emergency measure that affected the decision.
    pub(crate) measure: Option<(Box<str>, MeasureAction)>,
    /// Why the request was shed, if it was.
    pub(crate) reason: Option<Box<str>>,
    /// Whether the store was not asked because the process was overloaded.
    pub(crate) is_check_shed: bool,
    /// Whether the store assumed what the limit in `meta` had counted.
    pub(crate) is_assumed: bool,
    /// Whether a grant covered the charge to the limit in `meta`.
    pub(crate) is_granted: bool,
    pub(crate) retry_after: Option<TimeDelta>,
    pub(crate) delay: TimeDelta,
    /// How cells share the limit, where there are several.
    pub(crate) region: Option<Box<RegionStatus>>,
    /// Limit that is not in the rule set (an override, an inline limit, or one that a measure changed), and what it counts.
    pub(crate) own: Option<Box<(Limit, Option<Box<str>>)>>,
    /// Index into the buffer's layouts; `None` for a decision without rules.
    layout: Option<usize>,
    /// Range in the buffer's `ends`: those of the domain, then alternating keys and values.
    ends: Range<usize>,
    start: usize,
}

impl CapturedDecision {
    /// Returns the name of what denied the request, if that was no limit: an emergency measure, or a request that no limit
    /// could be asked about.
    pub(crate) fn other_cause(&self) -> Option<&str> {
        let by = self.meta.by.filter(|_| self.meta.verdict == LoggedVerdict::Deny)?;
        let measure = self.measure.as_ref().filter(|_| by == DecidedBy::Emergency).map(|(name, _)| &**name);
        measure.or(by.fixed_name().filter(|_| by != DecidedBy::Inline))
    }
}

/// Returns the units charged; 0 for a refund.
fn taken(cost: Cost) -> u64 {
    if cost.is_refund() { 0 } else { cost.units() }
}

/// Buffer of captured decisions.
#[derive(Debug, Default)]
pub(crate) struct CaptureBuffer {
    pub(crate) captures: Vec<CapturedDecision>,
    text: String,
    ends: Vec<usize>,
    layouts: Vec<Arc<LabelLayout>>,
}

impl CaptureBuffer {
    /// Returns whether another decision fits.
    pub(crate) const fn has_room(&self) -> bool {
        self.captures.len() < MAX_CAPTURES
    }

    /// Captures a decision. The caller checks [`Self::has_room`] first.
    pub(crate) fn push(
        &mut self,
        check: &Check<'_>,
        decision: &Decision,
        layout: &Arc<LabelLayout>,
        (noted, region): (DecisionMeta, Option<Box<RegionStatus>>),
        mask: &Mask,
        at: Timestamp,
    ) {
        if !self.layouts.last().is_some_and(|last| Arc::ptr_eq(last, layout)) {
            self.layouts.push(Arc::clone(layout));
        }
        let (start, first) = (self.text.len(), self.ends.len());
        let mut room = self.room();
        self.put(check.domain, room);
        room -= self.text.len() - start;
        self.put_pairs(pairs(check), mask, room);
        let own = noted.status.filter(|status| status.number().is_none());
        let own = own.and_then(|status| {
            let limit = decision.limit(&status)?;
            let unit = limit.unit_name(status.rule.and_then(|rule| decision.rules().rule(rule)));
            Some(Box::new((limit.limit.clone(), unit.map(Into::into))))
        });
        self.captures.push(CapturedDecision {
            id: decision.id(),
            at,
            meta: noted,
            origin: decision.origin,
            protocol: check.protocol,
            cost: taken(noted.status.map_or(check.cost, |status| decision.cost(check, &status))),
            reason: decision.reason.clone(),
            is_check_shed: decision.shed_class.is_some(),
            measure: decision.emergency().map(Into::into).zip(decision.emergency_action()),
            is_assumed: decision.is_assumed,
            is_granted: noted.status.is_some_and(|status| decision.is_granted(&status)),
            retry_after: decision.retry_after(),
            delay: decision.delay(),
            region,
            own,
            layout: self.layouts.len().checked_sub(1),
            ends: first..self.ends.len(),
            start,
        });
    }

    /// Captures the decision on an inline limit without rules; returns `false` if the buffer is full.
    pub(crate) fn push_inline(&mut self, charge: &Charge<'_>, noted: DecisionMeta, at: Timestamp) -> bool {
        if !self.has_room() {
            return false;
        }
        let (start, first) = (self.text.len(), self.ends.len());
        let room = self.room();
        self.put(INLINE_LABEL, room);
        if let Some(KeyPart::Text(key)) = charge.key.parts.first()
            && size(&("key", key)) + INLINE_LABEL.len() <= room
        {
            self.put("key", MAX_VALUE);
            self.put(key, MAX_VALUE);
        }
        let retry_after = noted.status.and_then(|status| match status.outcome.verdict {
            Verdict::Denied { retry_after } => retry_after,
            _ => None,
        });
        self.captures.push(CapturedDecision {
            id: DecisionId::generate(),
            at,
            meta: noted,
            origin: Origin::Store,
            protocol: "resp",
            cost: taken(charge.cost),
            reason: None,
            is_check_shed: false,
            measure: None,
            is_assumed: false,
            is_granted: false,
            retry_after,
            delay: TimeDelta::ZERO,
            region: None,
            own: Some(Box::new((charge.limit.clone(), None))),
            layout: None,
            ends: first..self.ends.len(),
            start,
        });
        true
    }

    /// Returns the bytes available to the next decision: the maximum while the buffer is at most half full, then an equal share
    /// of the rest. So a few requests with long attributes never displace those with short ones.
    fn room(&self) -> usize {
        let left = MAX_TEXT - self.text.len();
        let part = left / (MAX_CAPTURES - self.captures.len()).max(1);
        if left > MAX_TEXT / 2 { MAX_TEXT_PER_DECISION } else { part.min(MAX_TEXT_PER_DECISION) }
    }

    /// Stores attributes up to the bounds, each completely or not at all. If not all fit, masked ones come first, since only a
    /// known secret is recognized under other names: if one of them does not fit, no unmasked attribute is stored. Attributes
    /// that identify the caller come next.
    fn put_pairs<'p>(
        &mut self,
        pairs: impl Iterator<Item = &'p (&'p str, &'p str)> + Clone,
        mask: &Mask,
        mut room: usize,
    ) {
        let (count, bytes) =
            pairs.clone().fold((0, 0), |(count, bytes), pair| (count + 1, bytes + size(pair)));
        if count <= MAX_PAIRS && bytes <= room {
            pairs.for_each(|pair| self.put_pair(pair));
            return;
        }
        let mut pairs_left = MAX_PAIRS;
        let mut put = |pair: &(&str, &str)| {
            let fits = pairs_left > 0 && size(pair) <= room;
            if fits {
                self.put_pair(pair);
                pairs_left -= 1;
                room -= size(pair);
            }
            fits
        };
        let hides: SmallVec<[bool; 32]> = pairs.clone().map(|(key, _)| mask.is_masked(key)).collect();
        let known = || pairs.clone().zip(&hides);
        let mut all_hidden = true;
        for (pair, _) in known().filter(|(_, hidden)| **hidden) {
            all_hidden &= put(pair);
        }
        if all_hidden {
            let open = || known().filter(|(_, hidden)| !**hidden).map(|(pair, _)| pair);
            open().filter(|(key, _)| identifies_caller(key)).for_each(|pair| _ = put(pair));
            open().filter(|(key, _)| !identifies_caller(key)).for_each(|pair| _ = put(pair));
        }
    }

    fn put_pair(&mut self, (key, value): &(&str, &str)) {
        self.put(key, MAX_VALUE);
        self.put(value, MAX_VALUE);
    }

    fn put(&mut self, text: &str, max: usize) {
        let mut end = text.len().min(MAX_VALUE).min(max);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.text.push_str(&text[..end]);
        self.ends.push(self.text.len());
    }

    /// Returns the domain and attributes of a capture as one text with the end offsets; equal for equal requests.
    pub(crate) fn attribute_text(&self, capture: &CapturedDecision) -> (&str, SmallVec<[usize; 16]>) {
        let ends = &self.ends[capture.ends.clone()];
        let end = ends.last().copied().unwrap_or(capture.start);
        (&self.text[capture.start..end], ends.iter().map(|end| end - capture.start).collect())
    }

    /// Returns the domain and the attributes of a capture.
    pub(crate) fn attributes<'b>(&'b self, capture: &CapturedDecision) -> (&'b str, Vec<(&'b str, &'b str)>) {
        let mut start = capture.start;
        let mut words = self.ends[capture.ends.clone()].iter().map(|end| {
            let word = &self.text[start..*end];
            start = *end;
            word
        });
        let domain = words.next().unwrap_or_default();
        let mut pairs = Vec::new();
        while let (Some(key), Some(value)) = (words.next(), words.next()) {
            pairs.push((key, value));
        }
        (domain, pairs)
    }

    /// Returns the label layout of a capture; `None` for a decision without rules.
    pub(crate) fn layout(&self, capture: &CapturedDecision) -> Option<&Arc<LabelLayout>> {
        self.layouts.get(capture.layout?)
    }

    /// Removes all captures and keeps the allocations.
    pub(crate) fn clear(&mut self) {
        self.captures.clear();
        self.text.clear();
        self.ends.clear();
        self.layouts.clear();
    }
}
