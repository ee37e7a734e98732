//! Plan: the limits that a request matched, each with its counter, ready to charge.
//!
//! A plan borrows the rule set and the request and stores its few entries inline: on the usual path nothing is
//! allocated.

use crate::counter_shards::return_turn;
use crate::fleet_match::FleetMatch;
use crate::overrides::{CallerOverrides, set_for, tier_for};
use crate::rule::{Action, Coupling, LimitSet, Role, Rule, RuleLimit};
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Charge, Cost, CounterKey, Enforcement, KeyPart, Limit, LossPolicy, Outcome, Outcomes,
    PermitId, TimeDelta,
};

/// A request's attributes, as pairs of key and value.
pub type Attributes<'a> = [(&'a str, &'a str)];

/// One RLS descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor<'a> {
    /// Entries, in order.
    pub entries: &'a [(&'a str, &'a str)],
    /// Hits of the descriptor, which override the request's. Zero is a peek, a negative number a refund.
    pub hits: Option<Cost>,
    /// Inline limit, which takes precedence over the tree's: a count, and the length of its period, which is one that
    /// [`crate::parse_inline_period`] returns.
    pub limit: Option<(u32, TimeDelta)>,
}

impl Descriptor<'_> {
    /// Returns its cost in a request with this many hits; without a number, a descriptor costs one.
    #[must_use]
    pub fn cost(&self, request: Cost) -> Cost {
        self.hits.unwrap_or(if request.is_peek() { Cost::ONE } else { request })
    }
}

/// Origin of a matched limit.
#[derive(Clone, Debug)]
pub enum LimitOrigin<'p> {
    /// A limit of the rule set.
    Rule(&'p RuleLimit),
    /// An override from the caller's quota.
    Override(&'p RuleLimit),
    /// An inline limit that arrived with the request.
    Inline(Box<RuleLimit>),
}

impl std::ops::Deref for LimitOrigin<'_> {
    type Target = RuleLimit;
    fn deref(&self) -> &RuleLimit {
        match self {
            Self::Rule(limit) | Self::Override(limit) => limit,
            Self::Inline(limit) => limit,
        }
    }
}

/// One limit that a request matches.
#[derive(Clone, Debug)]
pub struct MatchedLimit<'p> {
    /// Rule of the limit; `None` for an inline limit.
    pub rule: Option<&'p Rule>,
    /// Limit to charge.
    pub limit: LimitOrigin<'p>,
    /// Values of the counter key, as a range of the plan's parts. If the counter is split, the one at `shard_at` is the
    /// shard's name.
    pub parts: (u16, u16),
    /// Index of the shard to charge; zero if the counter is not split.
    pub shard: u16,
    /// Index of the shard's name among its parts, if the counter is split.
    pub shard_at: u16,
    /// Number of shards that this thread has charged earlier in the same round.
    pub position: u16,
    /// Remaining units of the whole limit, if known exactly: all shards were read, or a grant was used.
    pub remaining: Option<u64>,
    /// Cost in units.
    pub cost: Cost,
    /// Index of the request's descriptor; zero for attributes.
    pub descriptor: u16,
    /// Effect of a denial on the other charges.
    pub enforcement: Enforcement,
    /// Role in this decision: the limit's, or [`Role::Unenforced`].
    pub role: Role,
}

/// How one descriptor of the request matched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatchKind {
    /// No rule matched.
    #[default]
    None,
    /// A rule without a limit matched: an exception.
    Exempt,
    /// A rule with `unlimited` matched.
    Unlimited,
    /// Limits to charge.
    Limited,
}

/// The key values of a plan.
pub(crate) type PlanParts<'p> = SmallVec<[KeyPart<'p>; 8]>;

/// All limits that a request matches.
#[derive(Clone, Debug)]
pub struct Plan<'p> {
    /// Key values of all matched limits, each of which has a range of them.
    pub parts: PlanParts<'p>,
    /// Limits to charge.
    pub limits: SmallVec<[MatchedLimit<'p>; 8]>,
    /// One entry per descriptor of the request (a single one for attributes), with the rule that matched.
    pub matches: SmallVec<[(MatchKind, Option<&'p Rule>); 4]>,
    /// Whether any of the limits has a split counter.
    pub is_split: bool,
    /// Tier of the request: from the quota of its API key, or its own attribute. See [`Plan::tier_for`].
    pub tier: Option<&'p str>,
    /// Value of the domain's `shard_by` attribute, if the request has it.
    pub shard: Option<KeyPart<'p>>,
    /// Attribute from which an enforced rule takes its cost, if its value is not a whole number: the request cannot be
    /// charged.
    pub malformed_cost: Option<&'p str>,
    /// Quotas of the request's callers, one for each attribute that has one; set before planning.
    pub quotas: &'p [Arc<CallerOverrides>],
    /// Where the request stands in the fleet's capacity, if tenants share it.
    pub fleet: Option<FleetMatch<'p>>,
}

impl Default for Plan<'_> {
    /// Creates an empty plan. Always inlined, so that unfilled slots need not be copied.
    #[inline(always)]
    fn default() -> Self {
        Self {
            parts: SmallVec::new(),
            limits: SmallVec::new(),
            matches: SmallVec::new(),
            is_split: false,
            tier: None,
            shard: None,
            malformed_cost: None,
            quotas: &[],
            fleet: None,
        }
    }
}

/// Does not compile for a type that owns memory.
#[inline(always)]
const fn owns_nothing<T>(_: &T) {
    const { assert!(!std::mem::needs_drop::<T>(), "owns_memory must look into it") }
}

/// Does not compile for a list of them.
#[inline(always)]
const fn each_owns_nothing<A: smallvec::Array>(_: &SmallVec<A>) {
    const { assert!(!std::mem::needs_drop::<A::Item>(), "owns_memory must look into each") }
}

/// The charges of a request.
pub type Charges<'a> = SmallVec<[Charge<'a>; 8]>;

impl Plan<'_> {
    /// Appends the charges for the store. `permit` identifies the holder of any concurrency permits.
    #[inline]
    pub fn charges<'a>(&'a self, permit: PermitId, charges: &mut Charges<'a>) {
        charges.extend(self.limits.iter().map(|matched| self.charge(matched, permit)));
    }

    /// Returns whether one of its lists has memory of its own, because it is too long for the plan.
    #[must_use]
    #[inline]
    pub fn is_spilled(&self) -> bool {
        self.limits.spilled() | self.parts.spilled() | self.matches.spilled()
    }

    /// Returns whether it owns memory: a list of its own, or a limit that arrived with the request.
    #[must_use]
    #[inline]
    pub fn owns_memory(&self) -> bool {
        // Every field is named, because a plan that owns nothing is forgotten: a new one that owns memory would leak it.
        let Self { parts, limits, matches, is_split, tier, shard, malformed_cost, quotas, fleet } = self;
        each_owns_nothing(parts);
        each_owns_nothing(matches);
        owns_nothing(is_split);
        owns_nothing(tier);
        owns_nothing(shard);
        owns_nothing(malformed_cost);
        owns_nothing(quotas);
        owns_nothing(fleet);
        parts.spilled() | limits.spilled() | matches.spilled() || limits.iter().any(MatchedLimit::owns_memory)
    }

    /// Returns the counter of one limit.
    #[inline]
    pub fn key<'a>(&'a self, matched: &'a MatchedLimit<'a>) -> CounterKey<'a> {
        let parts = &self.parts[usize::from(matched.parts.0)..usize::from(matched.parts.1)];
        CounterKey { scope: &matched.limit.scope, parts }
    }

    /// Returns the charge of one limit.
    #[inline]
    pub fn charge<'a>(&'a self, matched: &'a MatchedLimit<'a>, permit: PermitId) -> Charge<'a> {
        let key = self.key(matched);
        let enforcement = matched.enforcement;
        let loss_policy = matched.rule.map_or(LossPolicy::AssumeUnused, |rule| rule.class.loss_policy());
        let (limit, mode) = (matched.charged_limit(), matched.limit.mode);
        Charge { key, limit, cost: matched.cost, enforcement, permit, loss_policy, mode }
    }
}

impl<'p> Plan<'p> {
    /// Returns the tier that a rule's limits are for: the quota's of the attribute that the rule counts by, if it has
    /// one, else the request's.
    #[must_use]
    #[inline]
    pub fn tier_for(&self, rule: &Rule) -> Option<&'p str> {
        tier_for(self.quotas, rule.id, self.tier)
    }

    /// Returns the limits of a rule that are in force for this request's caller, if it matches the rule.
    #[must_use]
    pub fn set_for<'a>(&'a self, rule: &'a Rule) -> &'a LimitSet {
        set_for(self.quotas, rule, self.tier)
    }

    /// Returns the request's tier, or if it has none, that of the first quota that gives one to some of its rules.
    pub(crate) fn any_tier(&self) -> Option<&'p str> {
        self.tier.or_else(|| self.quotas.iter().find_map(|quota| quota.tier()))
    }

    /// Returns the key values of a split counter's shard with this name.
    pub fn shard_parts(&self, matched: &MatchedLimit<'_>, name: &'p str) -> SmallVec<[KeyPart<'p>; 4]> {
        let mut parts: SmallVec<[KeyPart<'p>; 4]> =
            self.parts[usize::from(matched.parts.0)..usize::from(matched.parts.1)].iter().copied().collect();
        if let Some(part) = parts.get_mut(usize::from(matched.shard_at)) {
            *part = KeyPart::Text(name);
        }
        parts
    }

    /// Returns the turns that a denied request took of the split counters that have not denied it: it was not charged to them.
    /// One that has denied it keeps its turn, because that shard is full, and so does one with a limit that was charged on
    /// its own.
    #[cold]
    pub fn return_turns(&self, outcomes: &Outcomes) {
        if outcomes.admission == Admission::Admitted {
            return;
        }
        let pairs = || self.limits.iter().zip(&outcomes.per_charge);
        for (matched, _) in pairs() {
            let Some((rule, split)) = matched.rule.and_then(|rule| Some((rule, rule.split?))) else {
                continue;
            };
            let is_own = |other: &MatchedLimit<'_>| other.rule.is_some_and(|other| other.id == rule.id);
            let keeps = |(other, outcome): (&MatchedLimit<'_>, &Outcome)| {
                other.enforcement == Enforcement::Independent || outcome.verdict.is_denied()
            };
            if matched.cost.is_peek()
                || matched.cost.is_refund()
                || pairs().any(|pair| is_own(pair.0) && keeps(pair))
            {
                continue;
            }
            // The rule's own values, between the shard's name and a home.
            let (from, to) = (matched.parts.0 + matched.shard_at + 1, matched.parts.1);
            let to = usize::from(to) - usize::from(rule.home().is_some());
            let path = self.parts[usize::from(from)..to].iter();
            return_turn(split, rule.id, path, (matched.shard, matched.position));
        }
    }

    /// Moves a split counter's charge to another shard.
    pub fn move_to_shard(&mut self, matched: usize, shard: u16) {
        let Some(name) = self.limits[matched].shard_names().get(usize::from(shard)) else { return };
        let (from, to) = self.limits[matched].parts;
        let (Ok(start), Ok(end)) =
            (u16::try_from(self.parts.len()), u16::try_from(self.parts.len() + usize::from(to - from)))
        else {
            return;
        };
        // Other limits of the rule share the range, so this one gets a separate copy.
        let parts = self.shard_parts(&self.limits[matched], name);
        self.parts.extend(parts);
        (self.limits[matched].parts, self.limits[matched].shard) = ((start, end), shard);
    }
}

impl MatchedLimit<'_> {
    /// Returns whether it owns memory: a limit that arrived with the request.
    #[inline]
    fn owns_memory(&self) -> bool {
        let Self {
            rule,
            limit,
            parts,
            shard,
            shard_at,
            position,
            remaining,
            cost,
            descriptor,
            enforcement,
            role,
        } = self;
        owns_nothing(rule);
        owns_nothing(parts);
        owns_nothing(shard);
        owns_nothing(shard_at);
        owns_nothing(position);
        owns_nothing(remaining);
        owns_nothing(cost);
        owns_nothing(descriptor);
        owns_nothing(enforcement);
        owns_nothing(role);
        match limit {
            LimitOrigin::Rule(_) | LimitOrigin::Override(_) => false,
            LimitOrigin::Inline(_) => true,
        }
    }

    /// Returns the limit that the counter enforces: the rule's, or one shard's.
    #[must_use]
    #[inline]
    pub fn charged_limit(&self) -> &Limit {
        self.limit.for_shard(self.shard)
    }

    /// Returns the names of all shards of its counter; empty if it is not split.
    #[must_use]
    pub fn shard_names(&self) -> &'static [&'static str] {
        if self.limit.shards.is_none() {
            return &[];
        }
        self.rule.map_or(&[], Rule::shard_names)
    }

    /// Estimates what remains of the whole limit from one shard's outcome: a thread charges the shards in turn, so
    /// those earlier in the round have been charged as often as this one, and those later once less. Other threads and
    /// nodes are at other positions in their rounds. A request that another limit denied has read the shard, as a peek
    /// does: `admission` says whether it was charged.
    #[must_use]
    #[inline(never)]
    pub fn remaining_of_whole(&self, outcome: Outcome, admission: Admission) -> u64 {
        let Outcome { verdict, remaining, .. } = outcome;
        let Some(shards) = &self.limit.shards else { return remaining };
        if let Some(exact) = self.remaining {
            return exact;
        }
        if !verdict.is_allowed() {
            return remaining;
        }
        let in_use = shards.iter().filter(|shard| shard.capacity() > 0).count() as u64;
        let used = self.charged_limit().capacity().saturating_sub(remaining);
        let position = u64::from(self.position);
        let is_left_out = admission == Admission::Denied && self.enforcement != Enforcement::Independent;
        let (ahead, before, behind) = match self.cost {
            // A peek reads the next shard: those earlier in the round have been charged once more.
            cost if cost.is_peek() || is_left_out => (position, used + 1, used),
            // A refund returns to the last shard, which is as those later in the round now.
            cost if cost.is_refund() => (position, used.saturating_add(cost.units()), used),
            cost => (position + 1, used, used.saturating_sub(cost.units())),
        };
        let ahead = ahead.min(in_use);
        let used = before.saturating_mul(ahead).saturating_add(behind.saturating_mul(in_use - ahead));
        self.limit.limit.capacity().saturating_sub(used).max(remaining)
    }

    /// Returns how a denial of a limit in this role, by a rule with this action, affects the other charges.
    pub(crate) const fn enforcement(role: Role, action: Action, coupling: Coupling) -> Enforcement {
        match (coupling, role) {
            (Coupling::Each, _) | (Coupling::AllOrNoneOfLive, Role::Quota) => Enforcement::Independent,
            _ if !role.is_enforced(action) => Enforcement::Independent,
            (_, Role::Quota) => Enforcement::Alternative,
            _ => Enforcement::Required,
        }
    }
}
