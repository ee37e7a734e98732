//! Decision: the complete answer to a check. It holds the rule set it was made with, so that it can always name its
//! rules.

use crate::check::{Check, CheckInput};
use crate::decision_id::DecisionId;
use crate::emergency::{MeasureAction, MeasureEffect};
use crate::grant::{GrantCharge, Grants};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use tollgate_core::{CalendarUnit, Cost, Limit, Outcome, Period, TimeDelta, Verdict};
use tollgate_rules::{Action, CallerOverrides, MatchKind, Role, RuleLimit, Ruleset};

/// Whether the request may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionVerdict {
    /// It may, after `delay`.
    Allowed {
        /// How long to hold it back; zero for all but queues.
        delay: TimeDelta,
    },
    /// It may not.
    Denied {
        /// When to come back; `None` if this request can never pass.
        retry_after: Option<TimeDelta>,
    },
}

/// What a decision rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No limit applies.
    Unmatched,
    /// The counters.
    Store,
    /// The store failed, and counters of this process decided.
    Local,
    /// The store failed, and the rules that matched let such requests pass.
    FailOpen,
    /// The store failed, and a rule that matched turns such requests away.
    FailClosed,
    /// A limit was over, and extra quota that the caller was granted has paid.
    Grant,
    /// What operators decided in an emergency.
    Emergency,
}

impl Origin {
    /// The word in answers, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unmatched => "unmatched",
            Self::Store => "store",
            Self::Local => "local",
            Self::FailOpen => "fail_open",
            Self::FailClosed => "fail_closed",
            Self::Grant => "grant",
            Self::Emergency => "emergency",
        }
    }
}

/// The period of a limit, for people and protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// A fixed length.
    Rolling(TimeDelta),
    /// A day or month of the calendar.
    Calendar(CalendarUnit),
    /// Permits held at once: no window.
    Concurrent,
}

impl Window {
    /// The window of a limit.
    #[must_use]
    pub fn from_limit(limit: &Limit) -> Self {
        match &limit.rate().period {
            _ if limit.algorithm() == tollgate_core::Algorithm::Concurrency => Self::Concurrent,
            Period::Rolling(span) => Self::Rolling(*span),
            Period::Calendar(calendar) => Self::Calendar(calendar.unit()),
        }
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rolling(span) => span.fmt(f),
            Self::Calendar(CalendarUnit::Day) => f.write_str("day"),
            Self::Calendar(CalendarUnit::Month) => f.write_str("month"),
            Self::Concurrent => f.write_str("concurrent"),
        }
    }
}

/// Which limit a status is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitRef {
    /// One of the rule set, by its number.
    Rule(u32),
    /// One that the request brought with it or its caller has agreed on, by its place.
    Inline(u16),
}

/// What one limit said. Small, since every decision carries some: [`Decision::limit`] tells the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// What it said.
    pub outcome: Outcome,
    /// The rule's number; `None` for a limit that the request brought with it.
    pub rule: Option<u32>,
    pub(crate) limit: LimitRef,
    /// Which descriptor of the request it answers.
    pub descriptor: u16,
    /// Whether it decides.
    pub role: Role,
}

impl LimitStatus {
    /// What a limit said that came with a call, apart from all rules.
    #[must_use]
    pub const fn inline(outcome: Outcome) -> Self {
        Self { outcome, rule: None, limit: LimitRef::Inline(0), descriptor: 0, role: Role::Live }
    }

    /// The limit's number in the rule set; nothing for one that the request brought with it or its caller has agreed on.
    #[must_use]
    #[inline]
    pub const fn number(&self) -> Option<u32> {
        match self.limit {
            LimitRef::Rule(number) => Some(number),
            LimitRef::Inline(_) => None,
        }
    }
}

/// What became of one descriptor of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorStatus {
    /// Whether and how a rule matched.
    pub matched: MatchKind,
    /// The rule that did.
    pub rule: Option<u32>,
}

/// Which rule a ruling is owed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// A rule of the rule set.
    Rule(u32),
    /// A limit that the request brought with it.
    Inline,
    /// A measure of an emergency: [`Decision::emergency`] names it.
    Emergency,
}

/// What a limit is called that a request brought with it.
pub const INLINE_LIMIT: &str = "inline-limit";

/// What is decided, apart from its name and its rules.
#[derive(Clone, Debug)]
pub struct DecisionDetails {
    /// Whether the request may pass.
    pub verdict: DecisionVerdict,
    /// What that rests on.
    pub origin: Origin,
    /// What it is owed to, where it is a denial.
    pub denied_by: Option<DecidedBy>,
    /// The rule by which the request should be served in a lesser way.
    pub degraded_by: Option<DecidedBy>,
    /// The rule whose soft mark has been passed.
    pub warned_by: Option<DecidedBy>,
    /// All limits that were met; those that nobody answered for have the verdict [`tollgate_core::Verdict::Unknown`].
    pub limits: SmallVec<[LimitStatus; 4]>,
    /// One for each descriptor; a single one for attributes.
    pub descriptors: SmallVec<[DescriptorStatus; 4]>,
    /// Limits that the request brought with it, or its caller has agreed on.
    pub(crate) inline_limits: Vec<RuleLimit>,
    /// What was taken of extra quota in place of limits that were over.
    pub(crate) granted: Option<Box<[GrantCharge]>>,
}

impl DecisionDetails {
    /// The answer to a request that no limit applies to, and what every other begins with.
    #[inline(always)]
    pub(crate) fn unmatched() -> Self {
        Self {
            verdict: DecisionVerdict::Allowed { delay: TimeDelta::ZERO },
            origin: Origin::Unmatched,
            denied_by: None,
            degraded_by: None,
            warned_by: None,
            limits: SmallVec::new(),
            descriptors: SmallVec::new(),
            inline_limits: Vec::new(),
            granted: None,
        }
    }

    /// The limit of a descriptor that is nearest its end: one that denies, else the one with the least left.
    #[must_use]
    pub fn tightest(&self, descriptor: usize) -> Option<&LimitStatus> {
        let own = self.limits.iter().filter(|limit| {
            usize::from(limit.descriptor) == descriptor
                && limit.role != Role::Candidate
                && limit.outcome.verdict != Verdict::Unknown
        });
        own.min_by_key(|limit| (!limit.outcome.verdict.is_denied(), limit.outcome.remaining))
    }

    /// Whether the request may pass.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self.verdict, DecisionVerdict::Allowed { .. })
    }

    /// Whether extra quota has paid in this limit's place: what it says remains is what is left of that.
    #[must_use]
    pub fn is_granted(&self, status: &LimitStatus) -> bool {
        let paid = |paid: &GrantCharge| self.limits.get(paid.limit) == Some(status);
        self.granted.as_ref().is_some_and(|all| all.iter().any(paid))
    }

    /// How long to hold an allowed request back.
    #[must_use]
    pub const fn delay(&self) -> TimeDelta {
        match self.verdict {
            DecisionVerdict::Allowed { delay } => delay,
            DecisionVerdict::Denied { .. } => TimeDelta::ZERO,
        }
    }

    /// How long a denied caller should stay away; `None` when allowed, or when it can never pass.
    #[must_use]
    pub const fn retry_after(&self) -> Option<TimeDelta> {
        match self.verdict {
            DecisionVerdict::Allowed { .. } => None,
            DecisionVerdict::Denied { retry_after } => retry_after,
        }
    }
}

/// The answer to one check, with its name and the rules it was made by.
#[derive(Debug)]
pub struct Decision {
    /// Its name.
    pub id: DecisionId,
    pub(crate) details: DecisionDetails,
    pub(crate) rules: arc_swap::Guard<Arc<Ruleset>>,
    /// What is agreed on with the caller.
    pub(crate) overrides: Option<Arc<CallerOverrides>>,
    /// Extra quota that the caller was granted.
    pub(crate) grants: Option<Arc<Grants>>,
    /// What the measures of an emergency do to it.
    pub(crate) effect: Option<Box<MeasureEffect>>,
}

impl std::ops::Deref for Decision {
    type Target = DecisionDetails;
    fn deref(&self) -> &DecisionDetails {
        &self.details
    }
}

impl Decision {
    /// The revision of the rules that it was made by.
    #[must_use]
    pub fn revision(&self) -> &str {
        self.rules.revision()
    }

    /// The rule set that it was made by.
    #[must_use]
    pub fn rules(&self) -> &Ruleset {
        &self.rules
    }

    /// Whether it was made by this very rule set.
    #[must_use]
    #[inline]
    pub fn uses_rules(&self, rules: &Arc<Ruleset>) -> bool {
        Arc::ptr_eq(&self.rules, rules)
    }

    /// The rule set, to be kept.
    #[must_use]
    pub fn shared_rules(&self) -> Arc<Ruleset> {
        Arc::clone(&self.rules)
    }

    /// The tier that is agreed on with the caller.
    #[must_use]
    pub fn override_tier(&self) -> Option<&str> {
        self.overrides.as_ref().and_then(|tenant| tenant.tier())
    }

    /// The name of what a ruling is owed to.
    #[must_use]
    pub fn name(&self, by: DecidedBy) -> &str {
        match by {
            DecidedBy::Rule(id) => self.rules.rule(id).map_or("", |rule| rule.name.as_str()),
            DecidedBy::Inline => INLINE_LIMIT,
            DecidedBy::Emergency => self.emergency().unwrap_or("emergency"),
        }
    }

    /// The measure of an emergency that made a difference, as `emergency:` and its id.
    #[must_use]
    pub fn emergency(&self) -> Option<&str> {
        self.effect.as_ref()?.name()
    }

    /// What that measure does.
    #[must_use]
    pub fn emergency_action(&self) -> Option<MeasureAction> {
        self.effect.as_ref()?.action()
    }

    /// The name of the rule that denied.
    #[must_use]
    pub fn denied_by_name(&self) -> Option<&str> {
        self.denied_by.map(|by| self.name(by))
    }

    /// The limit that a status is of.
    #[must_use]
    pub fn limit(&self, status: &LimitStatus) -> Option<&RuleLimit> {
        match status.limit {
            LimitRef::Rule(id) => self.rules.limit(id),
            LimitRef::Inline(at) => self.inline_limits.get(usize::from(at)),
        }
    }

    /// What a limit took, or would have taken, of the request that was decided on. Worked out anew for the few who ask:
    /// statuses are copied for every limit of every decision.
    #[must_use]
    pub fn cost(&self, check: &Check<'_>, status: &LimitStatus) -> Cost {
        let (asked, attributes) = match check.input {
            CheckInput::Attributes(attributes) => (check.cost, attributes),
            CheckInput::Descriptors(descriptors) => match descriptors.get(usize::from(status.descriptor)) {
                Some(descriptor) => (descriptor.cost(check.cost), descriptor.entries),
                None => return check.cost,
            },
        };
        let rule = status.rule.and_then(|rule| self.rules.rule(rule));
        let cost = rule.map_or(asked, |rule| rule.resolve_cost(asked, attributes));
        self.limit(status).map_or(cost, |limit| limit.cost_for(cost))
    }

    /// Whether a denial by this limit denies the request; see [`Role::is_enforced`].
    #[must_use]
    pub fn is_enforced(&self, status: &LimitStatus) -> bool {
        let rule = status.rule.and_then(|rule| self.rules.rule(rule));
        status.role.is_enforced(rule.map_or(Action::Reject, |rule| rule.action))
    }

    /// The name of a limit's rule.
    #[must_use]
    pub fn limit_name(&self, limit: &LimitStatus) -> &str {
        self.name(limit.rule.map_or(DecidedBy::Inline, DecidedBy::Rule))
    }
}

impl Clone for Decision {
    fn clone(&self) -> Self {
        let rules = arc_swap::Guard::from_inner(Arc::clone(&self.rules));
        Self {
            id: self.id,
            details: self.details.clone(),
            rules,
            overrides: self.overrides.clone(),
            grants: self.grants.clone(),
            effect: self.effect.clone(),
        }
    }
}
