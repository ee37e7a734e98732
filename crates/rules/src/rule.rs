//! A compiled rule: what the engine reads when a request has matched.

use crate::unit::Unit;
use std::collections::BTreeMap;
use tollgate_core::{Limit, LossPolicy, Mode, Scope};

/// Which arithmetic a domain decides by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Tollgate's own: one atomic decision over all limits.
    #[default]
    Native,
    /// The Envoy service's: fixed windows from the epoch, each descriptor on its own, denied hits counted.
    Envoy,
}

/// What a limit protects; it chooses the defaults of everything that may go wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// Fairness between callers. Fails to a counter of this process.
    #[default]
    Comfort,
    /// Log-ins, password resets. Fails closed.
    Security,
    /// What costs money. Fails by tier: free callers closed, paying ones open.
    Cost,
    /// Must be exact. Fails closed.
    Strict,
}

impl Class {
    /// What its counters are taken for where the store may have lost them.
    #[must_use]
    #[inline]
    pub const fn loss_policy(self) -> LossPolicy {
        match self {
            Self::Security | Self::Strict => LossPolicy::AssumeExhausted,
            Self::Comfort | Self::Cost => LossPolicy::AssumeUnused,
        }
    }
}

/// What to answer when the store cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnError {
    /// The same for all callers.
    Always(FailPolicy),
    /// By the caller's tier.
    ByTier {
        /// For the tiers that are named.
        tiers: BTreeMap<String, FailPolicy>,
        /// For any other.
        otherwise: FailPolicy,
    },
}

/// An answer that does not need the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailPolicy {
    /// Let it pass.
    Open,
    /// Turn it away.
    Closed,
    /// Decide by a counter of this process alone, with this node's share of the limit; where there is none, let it pass.
    Local,
}

impl OnError {
    /// The policy for a caller of this tier.
    #[must_use]
    pub fn policy(&self, tier: Option<&str>) -> FailPolicy {
        match self {
            Self::Always(policy) => *policy,
            Self::ByTier { tiers, otherwise } => {
                tier.and_then(|tier| tiers.get(tier)).copied().unwrap_or(*otherwise)
            }
        }
    }
}

/// What happens to a request that is over the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// It is turned away.
    #[default]
    Reject,
    /// It is told how long to wait, up to the queue's length; beyond that it is turned away.
    Delay,
    /// It passes, marked as degraded.
    Degrade,
}

/// Whether a limit decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It decides.
    Live,
    /// Counted, never denies.
    Shadow,
    /// A new number for a live limit, counted beside it, never denies.
    Candidate,
    /// Over only when every quota limit of the request is over.
    Quota,
}

impl Role {
    /// Whether the limit is in force: it bears on the answer, unlike one that is only counted beside it.
    #[must_use]
    #[inline]
    pub const fn is_live(self) -> bool {
        matches!(self, Self::Live | Self::Quota)
    }

    /// Whether a limit in this role denies requests, of a rule with this action. A quota does so only together with all
    /// other quotas of the request. The one answer to "does this limit decide?".
    #[must_use]
    #[inline]
    pub const fn is_enforced(self, action: Action) -> bool {
        self.is_live() && !matches!(action, Action::Degrade)
    }
}

/// A mark below the limit that warns or degrades first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftLimit {
    /// Units used at which it acts.
    pub threshold: u64,
    /// What it does.
    pub action: SoftAction,
}

/// What a soft mark does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftAction {
    /// The decision says so.
    #[default]
    Warn,
    /// The decision is marked as degraded.
    Degrade,
}

/// One limit of a rule.
#[derive(Clone, Debug)]
pub struct RuleLimit {
    /// Its number in the rule set; nothing in a limit that a request brought with it.
    pub id: u32,
    /// The limit as the rule file has it: what responses, logs and metrics show.
    pub limit: Limit,
    /// Where the rule splits its counters, the limit of each shard; they sum to `limit`.
    pub shards: Option<Box<[Limit]>>,
    /// This node's share of it, for when the store is away; none where the number of nodes is not known.
    pub node_share: Option<Box<Limit>>,
    /// The share has been set aside: what passes by it need not be charged to the shared counters afterwards.
    pub prepaid: bool,
    /// Where its charges may be decided.
    pub mode: Mode,
    /// What names its counters.
    pub scope: Scope,
    /// The Envoy unit that its period is, if it is one.
    pub unit: Option<Unit>,
    /// Whether it decides.
    pub role: Role,
    /// Its soft mark.
    pub soft: Option<SoftLimit>,
}

impl RuleLimit {
    /// The limit that the counter of this shard is charged by.
    #[must_use]
    #[inline]
    pub fn for_shard(&self, shard: u16) -> &Limit {
        match &self.shards {
            None => &self.limit,
            Some(shards) => shards.get(usize::from(shard)).unwrap_or(&self.limit),
        }
    }

    /// The limit, its shards and its node's share, changed in the same way. The shards sum to the changed limit.
    #[must_use]
    pub fn map_limits(&self, change: impl Fn(&Limit) -> Limit) -> Self {
        let limit = change(&self.limit);
        let shards = self.shards.as_ref().map(|shards| u32::try_from(shards.len()).unwrap_or(u32::MAX));
        Self {
            shards: shards.map(|shards| limit.shards(shards)),
            limit,
            node_share: self.node_share.as_ref().map(|share| Box::new(change(share))),
            ..self.clone()
        }
    }

    /// A limit that is asked about in the store; [`crate::placement`] says what else there is to know of it.
    pub(crate) fn new(
        limit: Limit,
        scope: Scope,
        unit: Option<Unit>,
        role: Role,
        soft: Option<SoftLimit>,
    ) -> Self {
        Self {
            id: 0,
            limit,
            shards: None,
            node_share: None,
            prepaid: false,
            mode: Mode::Central,
            scope,
            unit,
            role,
            soft,
        }
    }
}

/// Where a request's cost comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CostFrom {
    /// What the caller says, one if nothing.
    #[default]
    Request,
    /// This number, whatever the caller says: a limit on requests beside one on tokens. Looks stay looks, refunds
    /// give this number back.
    Fixed(u64),
    /// The number in this attribute; what the caller says if it is absent or no number.
    Attribute(String),
}

/// The limits that apply to a caller of some tier.
#[derive(Clone, Debug, Default)]
pub struct LimitSet {
    /// In the order of the file. Empty and not `unlimited`: an exception, matched but not limited.
    pub limits: Vec<RuleLimit>,
}

/// A compiled rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its number in the rule set.
    pub id: u32,
    /// `name` from the file, or the path of keys.
    pub name: String,
    /// Whether the name was given in the file.
    pub has_explicit_name: bool,
    /// The limits where no tier's apply.
    pub limits: LimitSet,
    /// Limits by tier, sorted by name.
    pub tiers: Vec<(String, LimitSet)>,
    /// Matches and is reported, never counted.
    pub unlimited: bool,
    /// What it protects.
    pub class: Class,
    /// What to answer when the store cannot.
    pub on_error: OnError,
    /// What happens over the limit.
    pub action: Action,
    /// Where its charges may be decided; adaptive where the file does not say.
    pub mode: Mode,
    /// Its counters are shared by all callers: none of their values tells who asks.
    pub shared_by_callers: bool,
    /// Thousandths of the limits that are set aside for nodes that are cut off from the store.
    pub fallback: Option<u64>,
    /// Counters that each counter is split into; a request is counted in one of them.
    pub split: Option<u16>,
    /// Which of several denying rules is named: the highest.
    pub priority: i32,
    /// Where the cost comes from.
    pub cost: CostFrom,
    /// The names of matched rules that it drops from a request.
    pub replaces: Vec<String>,
    /// Read and shown, and nothing else: metrics never carry values of requests, which callers could make without end.
    pub detailed_metric: bool,
    /// The same, of this key alone.
    pub value_to_metric: bool,
    /// Handed back to the caller's proxy.
    pub metadata: BTreeMap<String, String>,
    /// Where it stands: file, line.
    pub location: (String, u32),
}

impl Rule {
    /// All its limits: those without a tier, then each tier's.
    pub fn all_limits(&self) -> impl Iterator<Item = &RuleLimit> {
        let sets = std::iter::once(&self.limits).chain(self.tiers.iter().map(|(_, set)| set));
        sets.flat_map(|set| &set.limits)
    }

    /// The first values of its counters' names, where each is split; nothing where they are not.
    #[must_use]
    pub fn shard_names(&self) -> &'static [&'static str] {
        self.split.map_or(&[], crate::counter_shards::names)
    }

    /// Whether a caller's tier bears on its limits or its fail policy.
    #[must_use]
    pub fn depends_on_tier(&self) -> bool {
        !self.tiers.is_empty() || matches!(self.on_error, OnError::ByTier { .. })
    }

    /// The limits for a caller of this tier: the tier's own, else the rule's.
    #[must_use]
    #[inline]
    pub fn limits_for(&self, tier: Option<&str>) -> &[RuleLimit] {
        if let (false, Some(tier)) = (self.tiers.is_empty(), tier)
            && let Ok(i) = self.tiers.binary_search_by(|(name, _)| name.as_str().cmp(tier))
        {
            return &self.tiers[i].1.limits;
        }
        &self.limits.limits
    }
}
