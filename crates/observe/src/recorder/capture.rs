//! What is set aside of a decision while its request waits: copied into a buffer of the thread's own, and nothing more. What
//! it says to people is worked out later, by the worker.
//!
//! Buffers are of bounded size. When the worker is behind, what does not fit is dropped and counted: a decision never waits
//! for whoever wants to read about it.

use crate::mask::{Mask, identifies_caller};
use crate::metrics::labels::{INLINE_LABEL, LabelLayout};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use tollgate_core::{Charge, Cost, KeyPart, Limit, Outcome, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{
    Check, CheckInput, DecidedBy, Decision, DecisionId, LimitStatus, MeasureAction, Origin,
};

/// Decisions that one buffer holds.
pub(crate) const MAX_CAPTURES: usize = 2_048;
/// Bytes of attributes that one buffer holds, and of one request.
const MAX_TEXT: usize = 1024 * 1024;
const MAX_TEXT_PER_DECISION: usize = 2 * 1024;
/// Attributes of one request that are kept, and bytes of each.
const MAX_PAIRS: usize = 16;
pub(crate) const MAX_VALUE: usize = 256;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedVerdict {
    /// It passed.
    Allow,
    /// It was turned away.
    Deny,
    /// It passed, and would not have if a rule in shadow had decided.
    ShadowDeny,
    /// It was told to wait.
    Delay,
    /// It passed, to be served in a lesser way.
    Degrade,
}

impl LoggedVerdict {
    /// What a decision says, whatever rules in shadow would have said.
    #[inline]
    pub(crate) fn from_decision(decision: &Decision) -> Self {
        match () {
            () if !decision.is_allowed() => Self::Deny,
            () if decision.delay() > TimeDelta::ZERO => Self::Delay,
            () if decision.degraded_by.is_some() => Self::Degrade,
            () => Self::Allow,
        }
    }

    /// The word in logs and answers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::ShadowDeny => "shadow_deny",
            Self::Delay => "delay",
            Self::Degrade => "degrade",
        }
    }

    /// The other way round.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Allow, Self::Deny, Self::ShadowDeny, Self::Delay, Self::Degrade]
            .into_iter()
            .find(|ruled| ruled.name() == name)
    }
}

/// What was noted while counting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionMeta {
    pub(crate) slot: u32,
    pub(crate) verdict: LoggedVerdict,
    /// The rule that it is about, or what else.
    pub(crate) by: Option<DecidedBy>,
    /// The limit that it is about: the one that denied, else the one nearest its end.
    pub(crate) status: Option<LimitStatus>,
    /// How much the caller has used of its own.
    pub(crate) caller_utilization: Option<CallerUtilization>,
    /// Whether it goes to the log.
    pub(crate) log: bool,
    /// How many decisions it stands for in the sketches; none, if it is not shown to them.
    pub(crate) weight: u32,
}

/// How much a caller has used of the limit nearest its end, of those that can turn it away and that it shares with nobody.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerUtilization {
    pub(crate) slot: u32,
    /// The tier that the limit is of.
    pub(crate) tier: u16,
    /// From 0 to 1.
    pub(crate) used: f32,
}

impl CallerUtilization {
    pub(crate) fn from_outcome(slot: u32, tier: u16, outcome: &Outcome, capacity: u64) -> Self {
        // One that denies is at its limit, whatever odd units are left.
        let used = if outcome.verdict.is_denied() {
            1.0
        } else {
            1.0 - outcome.remaining as f32 / capacity.max(1) as f32
        };
        Self { slot, tier, used }
    }
}

/// All attributes of a request, but for what stands for everybody.
pub(crate) fn pairs<'c>(check: &Check<'c>) -> impl Iterator<Item = &'c (&'c str, &'c str)> + Clone {
    let (attributes, descriptors) = match check.input {
        CheckInput::Attributes(attributes) => (attributes, &[][..]),
        CheckInput::Descriptors(descriptors) => (&[][..], descriptors),
    };
    let all = attributes.iter().chain(descriptors.iter().flat_map(|descriptor| descriptor.entries));
    all.filter(|(key, _)| *key != "global")
}

/// Bytes that are kept of an attribute, at most.
fn size((key, value): &(&str, &str)) -> usize {
    key.len().min(MAX_VALUE) + value.len().min(MAX_VALUE)
}

/// One decision, set aside.
#[derive(Debug)]
pub(crate) struct CapturedDecision {
    pub(crate) id: DecisionId,
    pub(crate) at: Timestamp,
    pub(crate) meta: DecisionMeta,
    pub(crate) origin: Origin,
    pub(crate) protocol: &'static str,
    /// What it cost by that limit.
    pub(crate) cost: u64,
    /// The measure of an emergency that made a difference.
    pub(crate) measure: Option<(Box<str>, MeasureAction)>,
    /// Extra quota has paid in that limit's place.
    pub(crate) is_granted: bool,
    pub(crate) retry_after: Option<TimeDelta>,
    pub(crate) delay: TimeDelta,
    /// A limit that is not the rule set's.
    pub(crate) own: Option<Box<Limit>>,
    /// Its place among the buffer's layouts, if it is by rules.
    layout: Option<usize>,
    /// Its ends among the buffer's: of the domain, then of keys and values in turn.
    ends: Range<usize>,
    start: usize,
}

/// Units that are taken; none by what gives back.
fn taken(cost: Cost) -> u64 {
    if cost.is_refund() { 0 } else { cost.units() }
}

/// Decisions that were set aside.
#[derive(Debug, Default)]
pub(crate) struct CaptureBuffer {
    pub(crate) captures: Vec<CapturedDecision>,
    text: String,
    ends: Vec<usize>,
    layouts: Vec<Arc<LabelLayout>>,
}

impl CaptureBuffer {
    /// Whether another decision can be set aside.
    pub(crate) const fn has_room(&self) -> bool {
        self.captures.len() < MAX_CAPTURES
    }

    /// Sets a decision aside, where there is room.
    pub(crate) fn push(
        &mut self,
        check: &Check<'_>,
        decision: &Decision,
        layout: &Arc<LabelLayout>,
        noted: DecisionMeta,
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
        let own = own.and_then(|status| decision.limit(&status)).map(|limit| Box::new(limit.limit.clone()));
        self.captures.push(CapturedDecision {
            id: decision.id,
            at,
            meta: noted,
            origin: decision.origin,
            protocol: check.protocol,
            cost: taken(noted.status.map_or(check.cost, |status| decision.cost(check, &status))),
            measure: decision.emergency().map(Into::into).zip(decision.emergency_action()),
            is_granted: noted.status.is_some_and(|status| decision.is_granted(&status)),
            retry_after: decision.retry_after(),
            delay: decision.delay(),
            own,
            layout: self.layouts.len().checked_sub(1),
            ends: first..self.ends.len(),
            start,
        });
    }

    /// Sets the decision about a limit aside that came with its call, if there is room.
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
            measure: None,
            is_granted: false,
            retry_after,
            delay: TimeDelta::ZERO,
            own: Some(Box::new(charge.limit.clone())),
            layout: None,
            ends: first..self.ends.len(),
            start,
        });
        true
    }

    /// How many bytes the next decision may take: as many as any, while there is much room; then no more than its part of what
    /// is left. So a few who say much never take the places of those who say little.
    fn room(&self) -> usize {
        let left = MAX_TEXT - self.text.len();
        let part = left / (MAX_CAPTURES - self.captures.len()).max(1);
        if left > MAX_TEXT / 2 { MAX_TEXT_PER_DECISION } else { part.min(MAX_TEXT_PER_DECISION) }
    }

    /// Attributes, as many as are kept, each of them whole or not at all. Where there are too many, what is hidden goes first,
    /// since only what is known to be a secret is recognised as one under other names: without all of it nothing else is told.
    /// Then come those that tell who asks.
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
        let mut places = MAX_PAIRS;
        let mut put = |pair: &(&str, &str)| {
            let fits = places > 0 && size(pair) <= room;
            if fits {
                self.put_pair(pair);
                places -= 1;
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

    fn put(&mut self, text: &str, most: usize) {
        let mut end = text.len().min(MAX_VALUE).min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.text.push_str(&text[..end]);
        self.ends.push(self.text.len());
    }

    /// All of a decision's words together, and where each ends: the same for the same request.
    pub(crate) fn attributes(&self, capture: &CapturedDecision) -> (&str, SmallVec<[usize; 16]>) {
        let ends = &self.ends[capture.ends.clone()];
        let end = ends.last().copied().unwrap_or(capture.start);
        (&self.text[capture.start..end], ends.iter().map(|end| end - capture.start).collect())
    }

    /// The domain and the attributes of one.
    pub(crate) fn values<'b>(&'b self, capture: &CapturedDecision) -> (&'b str, Vec<(&'b str, &'b str)>) {
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

    /// The rules that one is by; none, for a limit that a caller brought.
    pub(crate) fn layout(&self, capture: &CapturedDecision) -> Option<&Arc<LabelLayout>> {
        self.layouts.get(capture.layout?)
    }

    /// Makes room again, and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.captures.clear();
        self.text.clear();
        self.ends.clear();
        self.layouts.clear();
    }
}
