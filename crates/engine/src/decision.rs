//! Decision: the complete answer to a check. It holds the rule set it was made with, so that it can always name its
//! rules.

use crate::check::{Check, CheckInput};
use crate::decision_body::DecisionBody;
use crate::decision_id::{DecisionId, DrawnId};
use crate::emergency::MeasureAction;
use crate::grant::GrantCharge;
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use tollgate_core::{CalendarUnit, Cost, Limit, Outcome, Period, TimeDelta, Timestamp, Verdict};
use tollgate_overload::ShedOrder;
use tollgate_rules::{DescriptorMatch, MatchKind, Role, RuleLimit, Ruleset};

/// The verdict of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionVerdict {
    /// The request may pass after `delay`.
    Allowed {
        /// Time to delay the request; zero unless a limit queues requests.
        delay: TimeDelta,
    },
    /// The request may not pass.
    Denied {
        /// Time until a retry may pass; `None` if this request can never pass.
        retry_after: Option<TimeDelta>,
    },
}

/// The basis of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// No limit applies.
    Unmatched,
    /// The counters in the store.
    Store,
    /// The store failed, and local counters of this process decided.
    Local,
    /// The store failed, and the matched rules fail open.
    FailOpen,
    /// The store failed, and a matched rule fails closed.
    FailClosed,
    /// A limit was exceeded, and a grant covered the charge.
    Grant,
    /// An emergency measure.
    Emergency,
    /// The worker shedder, without counters.
    Overload,
    /// The counters in the store, by this cell's part of a limit, because other cells are silent.
    Regional,
    /// The process is overloaded and did not ask the store; the matched rules' fail policy lets the request pass.
    Shed,
}

impl Origin {
    /// All origins, each at the position of its [`index`](Self::index).
    pub const ALL: [Self; 10] = [
        Self::Unmatched,
        Self::Store,
        Self::Local,
        Self::FailOpen,
        Self::FailClosed,
        Self::Grant,
        Self::Emergency,
        Self::Overload,
        Self::Regional,
        Self::Shed,
    ];

    /// Returns the position in [`ALL`](Self::ALL), for tables with an entry for each origin.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Returns the name used in responses, logs and metrics.
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
            Self::Overload => "overload",
            Self::Regional => "regional",
            Self::Shed => "shed",
        }
    }
}

const _: () = {
    let mut n = 0;
    while n < Origin::ALL.len() {
        assert!(Origin::ALL[n].index() == n, "origins are listed in the order of their declaration");
        n += 1;
    }
};

/// The period of a limit, for display and for protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// A fixed length.
    Rolling(TimeDelta),
    /// A calendar day or month.
    Calendar(CalendarUnit),
    /// Concurrent permits, which have no window.
    Concurrent,
}

impl Window {
    /// Returns the window of `limit`.
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

/// Reference to the limit of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitRef {
    /// A limit of the rule set, by its number.
    Rule(u32),
    /// An inline limit or a caller's override, by its index in `inline_limits`.
    Inline(u16),
}

/// Status of one limit. Small, because every decision carries several; [`Decision::limit`] returns the limit itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// Outcome of the limit's charge.
    pub outcome: Outcome,
    /// Number of the rule; `None` for an inline limit.
    pub rule: Option<u32>,
    pub(crate) limit: LimitRef,
    /// Index of the request descriptor that the limit matched.
    pub descriptor: u16,
    /// Role of the limit, which determines whether it is enforced.
    pub role: Role,
}

impl LimitStatus {
    /// Creates the status of an inline limit that belongs to no rule.
    #[must_use]
    pub const fn inline(outcome: Outcome) -> Self {
        Self { outcome, rule: None, limit: LimitRef::Inline(0), descriptor: 0, role: Role::Live }
    }

    /// Returns the limit's number in the rule set; `None` for an inline limit or an override.
    #[must_use]
    #[inline]
    pub const fn number(&self) -> Option<u32> {
        match self.limit {
            LimitRef::Rule(number) => Some(number),
            LimitRef::Inline(_) => None,
        }
    }

    /// Returns the source of a verdict by this limit: its rule, or an inline limit.
    #[must_use]
    #[inline]
    pub const fn decided_by(&self) -> DecidedBy {
        DecidedBy::from_rule(self.rule)
    }
}

/// Match result of one descriptor of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorStatus {
    /// The kind of match, if any.
    pub matched: MatchKind,
    /// Number of the matched rule.
    pub rule: Option<u32>,
}

/// The source of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecidedBy {
    /// A rule of the rule set.
    Rule(u32),
    /// An inline limit.
    Inline,
    /// An emergency measure; [`Decision::emergency`] returns its name.
    Emergency,
    /// The policy for domains without rules ([`UnknownDomain::Deny`]).
    UnknownDomain,
    /// A cost attribute that is not a whole number; [`DecisionDetails::malformed_cost`] has its name.
    MalformedCost,
}

impl DecidedBy {
    /// Returns the source of a verdict by a limit of this rule; an inline limit belongs to none.
    #[inline]
    pub(crate) const fn from_rule(rule: Option<u32>) -> Self {
        match rule {
            Some(id) => Self::Rule(id),
            None => Self::Inline,
        }
    }

    /// Returns the name of a source that is no rule; of a measure, if its own is not known.
    #[must_use]
    pub const fn fixed_name(self) -> Option<&'static str> {
        match self {
            Self::Rule(_) => None,
            Self::Inline => Some(INLINE_LIMIT),
            Self::Emergency => Some("emergency"),
            Self::UnknownDomain => Some("unknown-domain"),
            Self::MalformedCost => Some("malformed-cost"),
        }
    }
}

/// What to do with requests whose domain has no rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownDomain {
    /// Allow them, without a limit.
    #[default]
    Allow,
    /// Deny them.
    Deny,
}

/// The rule name reported for an inline limit.
pub const INLINE_LIMIT: &str = "inline-limit";

/// The contents of a decision without its rule set.
#[derive(Clone, Debug)]
pub struct DecisionDetails {
    /// ID of the decision; see [`Self::id`].
    pub(crate) drawn_id: DrawnId,
    /// The verdict.
    pub verdict: DecisionVerdict,
    /// The basis of the verdict.
    pub origin: Origin,
    /// Time of the charge, by the store's clock; zero if no store was called. The outcomes' times count from it.
    pub at: Timestamp,
    /// The source of a denial.
    pub denied_by: Option<DecidedBy>,
    /// The source of a degraded verdict: the request should be served in a reduced form.
    pub degraded_by: Option<DecidedBy>,
    /// The rule whose soft limit was exceeded.
    pub warned_by: Option<DecidedBy>,
    /// All matched limits. A limit whose outcome is not available has the verdict [`tollgate_core::Verdict::Unknown`].
    pub limits: SmallVec<[LimitStatus; 4]>,
    /// One status per descriptor; a single one for attributes.
    pub descriptors: SmallVec<[DescriptorStatus; 4]>,
    /// Attribute from which a rule takes its cost, if its value is not a whole number. The request is malformed: nothing
    /// was charged, and protocol servers reject it (400).
    pub malformed_cost: Option<Box<str>>,
    /// Why the request was shed, that its limits are tightened, that its check went without the store, or which domain is
    /// probably meant by one without rules.
    pub reason: Option<Box<str>>,
    /// Whether the store did not know what the limit that denied had counted, because it may have lost it, and assumed that
    /// it was used up.
    pub is_assumed: bool,
    /// The highest class of its limits that were decided without the store because the process is overloaded.
    pub shed_class: Option<ShedOrder>,
    /// Inline limits and overrides that this decision used.
    pub(crate) inline_limits: Vec<RuleLimit>,
    /// Grant charges made in place of exceeded limits.
    pub(crate) granted: Option<Box<[GrantCharge]>>,
}

impl DecisionDetails {
    /// Creates the decision for a request that no limit applies to. Every other decision starts from it.
    #[inline(always)]
    pub(crate) fn unmatched() -> Self {
        Self {
            drawn_id: DrawnId::Known(DecisionId(0)),
            verdict: DecisionVerdict::Allowed { delay: TimeDelta::ZERO },
            origin: Origin::Unmatched,
            at: Timestamp::ZERO,
            denied_by: None,
            degraded_by: None,
            warned_by: None,
            limits: SmallVec::new(),
            descriptors: SmallVec::new(),
            malformed_cost: None,
            reason: None,
            is_assumed: false,
            shed_class: None,
            inline_limits: Vec::new(),
            granted: None,
        }
    }

    /// Returns the ID of the decision.
    #[must_use]
    #[inline]
    pub fn id(&self) -> DecisionId {
        self.drawn_id.id()
    }

    /// Adds the domain that one without rules is probably meant as: its caller would have no limit, and no error.
    #[cold]
    pub(crate) fn suggest_domain(&mut self, rules: &Ruleset, name: &str) {
        if let Some(similar) = rules.similar_domain(name) {
            self.reason =
                Some(format!("there are no rules for the domain `{name}`; did you mean `{similar}`?").into());
        }
    }

    /// Makes it [`DecisionDetails::unmatched`] again, with the same ID, if it has no rare parts.
    #[inline]
    pub(crate) fn clear(&mut self) {
        let Self { drawn_id: _, verdict, origin, at, denied_by, degraded_by, warned_by, .. } = self;
        (*verdict, *origin) = (DecisionVerdict::Allowed { delay: TimeDelta::ZERO }, Origin::Unmatched);
        (*at, *denied_by, *degraded_by, *warned_by) = (Timestamp::ZERO, None, None, None);
        let Self { limits, descriptors, shed_class, is_assumed, .. } = self;
        (*shed_class, *is_assumed) = (None, false);
        limits.clear();
        descriptors.clear();
    }

    /// Returns whether it has something that few decisions have, or a list in memory of its own.
    #[inline]
    pub(crate) fn has_rare_parts(&self) -> bool {
        let Self { limits, descriptors, malformed_cost, reason, inline_limits, granted, .. } = self;
        // Not `||`: see `Contents::has_rare_parts`.
        limits.spilled()
            | descriptors.spilled()
            | (inline_limits.capacity() > 0)
            | malformed_cost.is_some()
            | reason.is_some()
            | granted.is_some()
    }

    /// Clears what few decisions have. Keeps the lists' memory.
    pub(crate) fn clear_rare_parts(&mut self) {
        let Self { malformed_cost, reason, inline_limits, granted, .. } = self;
        (*malformed_cost, *granted, *reason) = (None, None, None);
        inline_limits.clear();
    }

    /// Returns whether one of its lists has memory for more than so many elements, which are more than it has room for in
    /// itself.
    #[inline]
    pub(crate) fn has_list_beyond(&self, elements: usize) -> bool {
        let is_longer = |spilled: bool, capacity: usize| spilled && capacity > elements;
        is_longer(self.limits.spilled(), self.limits.capacity())
            || is_longer(self.descriptors.spilled(), self.descriptors.capacity())
            || self.inline_limits.capacity() > elements
    }

    /// Returns the limit that a denial is attributed to: of the denying rule, the one that denied and lasts longest, or
    /// its first if none of its counters was read (a store that failed). `None` if no limit denied.
    #[must_use]
    pub fn denying_limit(&self) -> Option<&LimitStatus> {
        let rule = match self.denied_by? {
            DecidedBy::Rule(id) => Some(id),
            DecidedBy::Inline => None,
            DecidedBy::Emergency | DecidedBy::UnknownDomain | DecidedBy::MalformedCost => return None,
        };
        // A rule's candidate, or its limits for callers that it is not enforced for yet, may deny as well and deny nothing.
        let own = self.limits.iter().filter(|status| status.rule == rule && status.role.is_live());
        let lasts = |status: &&LimitStatus| match status.outcome.verdict {
            Verdict::Denied { retry_after } => Some(retry_after.unwrap_or(TimeDelta::MAX)),
            Verdict::Allowed { .. } | Verdict::Unknown => None,
        };
        // Of equal ones, the first.
        own.reduce(|best, next| if lasts(&next) > lasts(&best) { next } else { best })
    }

    /// Returns whether the request may pass.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self.verdict, DecisionVerdict::Allowed { .. })
    }

    /// Returns whether a grant covered this limit's charge. The status then reports the units remaining in the grant.
    #[must_use]
    pub fn is_granted(&self, status: &LimitStatus) -> bool {
        let paid = |paid: &GrantCharge| self.limits.get(paid.limit) == Some(status);
        self.granted.as_ref().is_some_and(|all| all.iter().any(paid))
    }

    /// Denies the request before anything is charged.
    #[cold]
    pub(crate) fn deny_uncharged(&mut self, by: DecidedBy) {
        self.verdict = DecisionVerdict::Denied { retry_after: None };
        self.denied_by = Some(by);
    }

    /// Returns the message for a request with a malformed cost.
    #[must_use]
    pub fn malformed_cost_message(&self) -> Option<String> {
        let attribute = self.malformed_cost.as_ref()?;
        Some(format!("the cost in attribute `{attribute}` is not a whole number; send digits only"))
    }

    /// Returns how long to delay an allowed request.
    #[must_use]
    pub const fn delay(&self) -> TimeDelta {
        match self.verdict {
            DecisionVerdict::Allowed { delay } => delay,
            DecisionVerdict::Denied { .. } => TimeDelta::ZERO,
        }
    }

    /// Returns how long a denied caller should wait; `None` when allowed, or when the request can never pass.
    #[must_use]
    pub const fn retry_after(&self) -> Option<TimeDelta> {
        match self.verdict {
            DecisionVerdict::Allowed { .. } => None,
            DecisionVerdict::Denied { retry_after } => retry_after,
        }
    }
}

/// The complete answer to one check, with the rule set that made it. As large as a pointer.
#[derive(Clone, Debug)]
pub struct Decision {
    pub(crate) body: DecisionBody,
}

impl std::ops::Deref for Decision {
    type Target = DecisionDetails;
    #[inline]
    fn deref(&self) -> &DecisionDetails {
        &self.body.details
    }
}

impl Decision {
    /// Returns the rules hash of the rule set that made the decision.
    #[must_use]
    pub fn revision(&self) -> &str {
        self.body.rules.revision()
    }

    /// Returns the rule set that made the decision.
    #[must_use]
    pub fn rules(&self) -> &Ruleset {
        &self.body.rules
    }

    /// Returns whether the decision was made with exactly this rule set.
    #[must_use]
    #[inline]
    pub fn uses_rules(&self, rules: &Arc<Ruleset>) -> bool {
        Arc::ptr_eq(&self.body.rules, rules)
    }

    /// Returns a shared reference to the rule set, for use after the decision is dropped.
    #[must_use]
    pub fn shared_rules(&self) -> Arc<Ruleset> {
        Arc::clone(&self.body.rules)
    }

    /// Returns the tier in the quota of a caller: of several, the first that has one.
    #[must_use]
    pub fn override_tier(&self) -> Option<&str> {
        self.body.quotas.iter().find_map(|quota| quota.tier())
    }

    /// Returns the name of a verdict's source.
    #[must_use]
    pub fn name(&self, by: DecidedBy) -> &str {
        match by {
            DecidedBy::Rule(id) => self.body.rules.rule(id).map_or("", |rule| rule.name.as_str()),
            _ => self.emergency().filter(|_| by == DecidedBy::Emergency).or(by.fixed_name()).unwrap_or(""),
        }
    }

    /// Returns whether the request was denied to shed load: its caller is not over a limit of its own.
    #[must_use]
    pub fn is_shed(&self) -> bool {
        match self.denied_by {
            Some(DecidedBy::Rule(id)) => self.body.rules.rule(id).is_some_and(|rule| rule.is_shedding),
            _ => false,
        }
    }

    /// Returns the name of the emergency measure that changed the decision: `emergency:` and its ID.
    #[must_use]
    pub fn emergency(&self) -> Option<&str> {
        self.body.effect.as_ref()?.name()
    }

    /// Returns the action of that measure.
    #[must_use]
    pub fn emergency_action(&self) -> Option<MeasureAction> {
        self.body.effect.as_ref()?.action()
    }

    /// Returns the name of the rule that denied the request.
    #[must_use]
    pub fn denied_by_name(&self) -> Option<&str> {
        self.denied_by.map(|by| self.name(by))
    }

    /// Returns the limit of `status`.
    #[must_use]
    pub fn limit(&self, status: &LimitStatus) -> Option<&RuleLimit> {
        match status.limit {
            LimitRef::Rule(id) => self.body.rules.limit(id),
            LimitRef::Inline(at) => self.inline_limits.get(usize::from(at)),
        }
    }

    /// Returns the cost that a limit charged, or would have charged, for the decided request. Computed on demand
    /// because statuses are copied for every limit of every decision and few users need the cost.
    #[must_use]
    pub fn cost(&self, check: &Check<'_>, status: &LimitStatus) -> Cost {
        let mut all = Vec::new();
        let (asked, attributes) = match check.input {
            CheckInput::Attributes(attributes) => (check.cost, attributes),
            CheckInput::Descriptors(descriptors) => match descriptors.get(usize::from(status.descriptor)) {
                Some(descriptor) => {
                    let is_all = |domain: &tollgate_rules::Domain| domain.matching() == DescriptorMatch::All;
                    if self.body.rules.domain(check.domain).is_some_and(is_all) {
                        all = descriptors.iter().flat_map(|one| one.entries.iter().copied()).collect();
                        all.splice(..0, descriptor.entries.iter().copied());
                    }
                    let own = if all.is_empty() { descriptor.entries } else { &all[..] };
                    (descriptor.cost(check.cost), own)
                }
                None => return check.cost,
            },
        };
        let rule = status.rule.and_then(|rule| self.body.rules.rule(rule));
        let resolved = |(rule, limit): (_, &RuleLimit)| limit.resolve_cost(rule, asked, attributes);
        rule.zip(self.limit(status)).and_then(resolved).unwrap_or(asked)
    }

    /// Returns whether a denial by this limit denies the request; see [`Role::is_enforced`].
    #[must_use]
    pub fn is_enforced(&self, status: &LimitStatus) -> bool {
        status.role.is_enforced_by(status.rule.and_then(|rule| self.body.rules.rule(rule)))
    }

    /// Returns whether the request is over this limit, as every protocol reports it: the limit denied it, and is enforced. Of
    /// several quota limits, each that denied is over, although the request passes while one of them has room.
    #[must_use]
    pub fn is_over(&self, status: &LimitStatus) -> bool {
        status.outcome.verdict.is_denied() && self.is_enforced(status)
    }

    /// Returns the name of a limit's rule.
    #[must_use]
    pub fn limit_name(&self, limit: &LimitStatus) -> &str {
        self.name(limit.decided_by())
    }
}
