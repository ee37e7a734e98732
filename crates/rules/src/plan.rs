//! Plan: the limits that a request matched, each with its counter, ready to charge.
//!
//! A plan borrows the rule set and the request and holds its few entries inline: on the usual path nothing is allocated.

use crate::overrides::CallerOverrides;
use crate::rule::{Action, Role, Rule, RuleLimit};
use smallvec::SmallVec;
use tollgate_core::{Charge, Cost, CounterKey, Enforcement, KeyPart, Limit, LossPolicy, Outcome, PermitId};

/// A request's attributes, as pairs of key and value.
pub type Attributes<'a> = [(&'a str, &'a str)];

/// One RLS descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor<'a> {
    /// Its entries, in order.
    pub entries: &'a [(&'a str, &'a str)],
    /// Hits of its own, which win over the request's. Zero looks, negative refunds.
    pub hits: Option<Cost>,
    /// A limit of its own, which wins over the tree's.
    pub limit: Option<(u32, crate::unit::Unit)>,
}

impl Descriptor<'_> {
    /// What it costs as part of a request with so many hits; of descriptors, a request without a number is one.
    #[must_use]
    pub fn cost(&self, request: Cost) -> Cost {
        self.hits.unwrap_or(if request.is_peek() { Cost::ONE } else { request })
    }
}

/// Which limit a hit is about.
#[derive(Clone, Debug)]
pub enum LimitOrigin<'p> {
    /// One of the rule set's.
    Rule(&'p RuleLimit),
    /// One that is agreed on with the caller.
    Override(&'p RuleLimit),
    /// One that the request brought with it.
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

/// One limit that a request meets.
#[derive(Clone, Debug)]
pub struct MatchedLimit<'p> {
    /// The rule; none for a limit that the request brought with it.
    pub rule: Option<&'p Rule>,
    /// The limit.
    pub limit: LimitOrigin<'p>,
    /// The values that name the counter: a range of the plan's parts. Where the counter is split, the first of them names
    /// the shard.
    pub parts: (u16, u16),
    /// Which shard of its counter is charged; zero where the counter is not split.
    pub shard: u16,
    /// How many shards this thread has charged before it in the same round.
    pub position: u16,
    /// What remains of the whole limit, where that is known exactly: all shards were read, or a grant has paid.
    pub remaining: Option<u64>,
    /// What it costs.
    pub cost: Cost,
    /// Which descriptor of the request it answers; zero for attributes.
    pub descriptor: u16,
    /// How a denial bears on the others.
    pub enforcement: Enforcement,
}

/// What became of one descriptor of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatchKind {
    /// No rule.
    #[default]
    None,
    /// A rule without a limit: an exception.
    Exempt,
    /// A rule that says `unlimited`.
    Unlimited,
    /// Limits to charge.
    Limited,
}

/// Everything that a request meets.
#[derive(Clone, Debug)]
pub struct Plan<'p> {
    /// Counter values of all hits, one after another.
    pub parts: SmallVec<[KeyPart<'p>; 8]>,
    /// The limits to charge.
    pub limits: SmallVec<[MatchedLimit<'p>; 4]>,
    /// One for each descriptor of the request (a single one for attributes), with the rule that matched.
    pub matches: SmallVec<[(MatchKind, Option<&'p Rule>); 4]>,
    /// Whether any of the limits has a counter that is split.
    pub is_split: bool,
    /// The caller's tier, where it says one or one is agreed on.
    pub tier: Option<&'p str>,
    /// What is agreed on with the caller: set before planning.
    pub overrides: Option<&'p CallerOverrides>,
}

impl Default for Plan<'_> {
    /// Inlined always: what is not yet in the lists need then not be copied with them.
    #[inline(always)]
    fn default() -> Self {
        Self {
            parts: SmallVec::new(),
            limits: SmallVec::new(),
            matches: SmallVec::new(),
            is_split: false,
            tier: None,
            overrides: None,
        }
    }
}

/// A request's charges.
pub type Charges<'a> = SmallVec<[Charge<'a>; 4]>;

impl Plan<'_> {
    /// Adds the charges for the store. `permit` names the holder of any concurrency permits.
    #[inline]
    pub fn charges<'a>(&'a self, permit: PermitId, charges: &mut Charges<'a>) {
        charges.extend(self.limits.iter().map(|matched| self.charge(matched, permit)));
    }

    /// The charge of one limit.
    #[inline]
    pub fn charge<'a>(&'a self, matched: &'a MatchedLimit<'a>, permit: PermitId) -> Charge<'a> {
        let parts = &self.parts[usize::from(matched.parts.0)..usize::from(matched.parts.1)];
        let key = CounterKey { scope: &matched.limit.scope, parts };
        let enforcement = matched.enforcement;
        let loss_policy = matched.rule.map_or(LossPolicy::AssumeUnused, |rule| rule.class.loss_policy());
        let (limit, mode) = (matched.charged_limit(), matched.limit.mode);
        Charge { key, limit, cost: matched.cost, enforcement, permit, loss_policy, mode }
    }
}

impl Plan<'_> {
    /// Moves a split counter's charge to another of its shards.
    pub fn move_to_shard(&mut self, matched: usize, shard: u16) {
        let Some(name) = self.limits[matched].shard_names().get(usize::from(shard)) else { return };
        let (from, to) = self.limits[matched].parts;
        let (Ok(start), Ok(end)) =
            (u16::try_from(self.parts.len()), u16::try_from(self.parts.len() + usize::from(to - from)))
        else {
            return;
        };
        // Other limits of the rule share the range, so this one gets its own.
        self.parts.push(KeyPart::Text(name));
        for at in usize::from(from) + 1..usize::from(to) {
            let part = self.parts[at];
            self.parts.push(part);
        }
        (self.limits[matched].parts, self.limits[matched].shard) = ((start, end), shard);
    }
}

impl MatchedLimit<'_> {
    /// The limit that the counter is charged by: the rule's, or one shard's.
    #[must_use]
    #[inline]
    pub fn charged_limit(&self) -> &Limit {
        self.limit.for_shard(self.shard)
    }

    /// The names of all shards of its counter; none where it is not split.
    #[must_use]
    pub fn shard_names(&self) -> &'static [&'static str] {
        if self.limit.shards.is_none() {
            return &[];
        }
        self.rule.map_or(&[], Rule::shard_names)
    }

    /// What remains of the whole limit, as far as one shard's outcome shows: a thread takes the shards in turn, so those
    /// before this one in the round have been charged as often, and those behind it once less. An estimate: other threads and
    /// nodes are elsewhere in their rounds.
    #[must_use]
    pub fn remaining_of_whole(&self, outcome: &Outcome) -> u64 {
        let Some(shards) = &self.limit.shards else { return outcome.remaining };
        if let Some(exact) = self.remaining {
            return exact;
        }
        if !outcome.verdict.is_allowed() {
            return outcome.remaining;
        }
        let in_use = shards.iter().filter(|shard| shard.capacity() > 0).count() as u64;
        let used = self.charged_limit().capacity().saturating_sub(outcome.remaining);
        let position = u64::from(self.position);
        let (ahead, before, behind) = match self.cost.is_peek() {
            false => (position + 1, used, used.saturating_sub(self.cost.units())),
            // A peek reads the shard that is next: those before it have been charged once more.
            true => (position, used + 1, used),
        };
        let ahead = ahead.min(in_use);
        let used = before.saturating_mul(ahead).saturating_add(behind.saturating_mul(in_use - ahead));
        self.limit.limit.capacity().saturating_sub(used).max(outcome.remaining)
    }

    /// How a denial of a limit in this role, by a rule with this action, bears on the others.
    #[must_use]
    pub const fn enforcement(role: Role, action: Action, profile: crate::rule::Profile) -> Enforcement {
        match (profile, role, action) {
            (crate::rule::Profile::Envoy, ..)
            | (_, Role::Shadow | Role::Candidate, _)
            | (_, _, Action::Degrade) => Enforcement::Independent,
            (_, Role::Quota, _) => Enforcement::Alternative,
            _ => Enforcement::Required,
        }
    }
}
