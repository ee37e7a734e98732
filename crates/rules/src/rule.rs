//! Compiled rule: the data that the engine reads after a request has matched.

use crate::denial_response::DenialResponse;
use crate::metadata::Metadata;
use crate::plan::MatchedLimit;
use crate::region::RegionSetting;
use crate::unit::Unit;
use std::collections::BTreeMap;
use std::sync::Arc;
use tollgate_core::{
    Algorithm, Enforcement, KeyPart, Limit, LossPolicy, Mode, RegionMode, Scope, StableHasher, TimeDelta,
};

/// The arithmetic of a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Profile {
    /// Native: one atomic decision over all limits.
    #[default]
    Native,
    /// Envoy-compatible: fixed windows from the epoch, each descriptor separately, denied hits counted.
    Envoy,
}

/// What a denial by one limit of a request means for its other limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coupling {
    /// None is charged.
    AllOrNone,
    /// None of those that can deny the request is charged; quota limits are charged on their own.
    AllOrNoneOfLive,
    /// Each is charged on its own.
    Each,
}

/// Which rules the descriptors of a request match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DescriptorMatch {
    /// Each descriptor the one rule at which its last entry ends, as in Envoy.
    #[default]
    One,
    /// Every rule whose keys the entries of the request's descriptors contain, as attributes do.
    All,
}

/// What a limit protects; determines the defaults of its failure handling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// Fairness between callers. Falls back to a counter of this process.
    #[default]
    Comfort,
    /// Logins, password resets. Fails closed.
    Security,
    /// Resources that cost money. Fails by tier: free callers closed, paying ones open.
    Cost,
    /// Limits that must be exact. Fails closed.
    Strict,
}

impl Class {
    /// Returns the algorithm of limits for which nothing states one. The limit of a login must hold in every window; a
    /// bucket that starts full admits nearly twice as much in the first.
    #[must_use]
    pub const fn algorithm(self) -> Algorithm {
        match self {
            Self::Security => Algorithm::StrictWindow,
            Self::Comfort | Self::Cost | Self::Strict => Algorithm::Gcra,
        }
    }

    /// Returns the assumption about counters that the store may have lost.
    #[must_use]
    #[inline]
    pub const fn loss_policy(self) -> LossPolicy {
        match self {
            Self::Security | Self::Strict => LossPolicy::AssumeExhausted,
            Self::Comfort | Self::Cost => LossPolicy::AssumeUnused,
        }
    }
}

/// Fail policy of a rule when the store is unavailable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnError {
    /// The same policy for all callers.
    Always(FailPolicy),
    /// A policy by the caller's tier.
    ByTier {
        /// Policies of the listed tiers.
        tiers: BTreeMap<String, FailPolicy>,
        /// Policy of all other tiers.
        otherwise: FailPolicy,
    },
}

/// A decision that does not need the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailPolicy {
    /// Allow the request.
    Open,
    /// Deny the request.
    Closed,
    /// Decide by a counter of this process, with this node's share of the limit; if there is no share, allow the
    /// request.
    Local,
}

impl FailPolicy {
    /// Returns the policy that admits less.
    #[must_use]
    pub const fn stricter(self, other: Self) -> Self {
        match (self, other) {
            (Self::Closed, _) | (_, Self::Closed) => Self::Closed,
            (Self::Local, _) | (_, Self::Local) => Self::Local,
            (Self::Open, Self::Open) => Self::Open,
        }
    }
}

impl OnError {
    /// Makes callers of none of these tiers fail no more openly than `least`; the tiers keep their policies.
    pub(crate) fn protect_unnamed<'t>(self, tiers: impl Iterator<Item = &'t str>, least: FailPolicy) -> Self {
        let policies: BTreeMap<String, FailPolicy> =
            tiers.map(|tier| (tier.to_owned(), self.policy(Some(tier)))).collect();
        match self {
            Self::ByTier { tiers, otherwise } if otherwise.stricter(least) != otherwise => Self::ByTier {
                tiers: policies.into_iter().chain(tiers).collect(),
                otherwise: otherwise.stricter(least),
            },
            unchanged => unchanged,
        }
    }

    /// Returns the policy for a caller of this tier.
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

/// The action for a request that is over the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// The request is denied.
    #[default]
    Reject,
    /// The request is delayed, up to the queue's length; beyond that it is denied.
    Delay,
    /// The request is allowed and marked as degraded.
    Degrade,
}

/// The role of a limit in decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Enforced.
    Live,
    /// Counted, never denies.
    Shadow,
    /// A new number for a live limit, counted beside it; never denies.
    Candidate,
    /// Denies only when every quota limit of the request is over.
    Quota,
    /// Counted, because its rule is not enforced for this caller yet; never denies. Only in decisions.
    Unenforced,
}

impl Role {
    /// All roles, in the order of their declaration.
    pub(crate) const ALL: [Self; 5] =
        [Self::Live, Self::Shadow, Self::Candidate, Self::Quota, Self::Unenforced];

    /// Returns whether the limit is in force: it affects the decision, unlike one that is only counted.
    #[must_use]
    #[inline]
    pub const fn is_live(self) -> bool {
        matches!(self, Self::Live | Self::Quota)
    }

    /// Returns whether a limit in this role denies requests, in a rule with this action. A quota limit does so only
    /// together with all other quota limits of the request. The only place that answers "does this limit decide?".
    #[must_use]
    #[inline]
    pub const fn is_enforced(self, action: Action) -> bool {
        self.is_live() && !matches!(action, Action::Degrade)
    }

    /// Returns the same for a limit of this rule; an inline limit belongs to none, and rejects.
    #[must_use]
    #[inline]
    pub fn is_enforced_by(self, rule: Option<&Rule>) -> bool {
        self.is_enforced(rule.map_or(Action::Reject, |rule| rule.action))
    }
}

/// Gradual enforcement: the share of a rule's callers that its limits deny. For the others they only count.
///
/// A caller is in if a hash of its value, keyed by the rule, is below the share. So the choice is the same on every node
/// and after every restart, a larger share keeps those that were in, and each rule chooses others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enforce {
    /// The share in thousandths.
    pub thousandths: u64,
    /// Index of the caller's value among the values of the rule's counter keys.
    pub(crate) part: usize,
    /// Key of the hash.
    pub(crate) key: u64,
}

impl Enforce {
    /// All callers.
    pub const ALL: u64 = 1_000;

    /// Returns a share as it is written in rules.
    #[must_use]
    pub fn percent(thousandths: u64) -> String {
        match thousandths % 10 {
            0 => format!("{}%", thousandths / 10),
            tenth => format!("{}.{tenth}%", thousandths / 10),
        }
    }

    /// Returns whether a caller is among those that are denied.
    #[must_use]
    pub(crate) fn contains(&self, caller: &KeyPart<'_>) -> bool {
        let mut hasher = StableHasher::default();
        hasher.number(self.key);
        match caller {
            KeyPart::Text(text) | KeyPart::Secret(text) => hasher.bytes(text.as_bytes()),
            KeyPart::Network { address, prefix } => {
                hasher.bytes(&address.to_le_bytes());
                hasher.number(u64::from(*prefix));
            }
        }
        hasher.finish() % Self::ALL < self.thousandths
    }
}

/// A soft limit: a lower threshold that warns, degrades or delays first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftLimit {
    /// Threshold in used units.
    pub threshold: u64,
    /// Action at the threshold.
    pub action: SoftAction,
}

impl SoftLimit {
    /// Returns how long to delay a request after which so many units are used, of a limit that is unused again after `reset`:
    /// until what is beyond the threshold has drained. Of a bucket that is exact, so delayed requests are spaced at its rate.
    ///
    /// ```
    /// use tollgate_core::TimeDelta;
    /// use tollgate_rules::{SoftAction, SoftLimit};
    /// let soft = SoftLimit { threshold: 80, action: SoftAction::Delay };
    /// assert_eq!(soft.delay(80, TimeDelta::from_secs(48)), TimeDelta::ZERO);
    /// // A unit drains in 600 ms, and three are beyond.
    /// assert_eq!(soft.delay(83, TimeDelta::from_millis(49_800)), TimeDelta::from_millis(1_800));
    /// ```
    #[must_use]
    pub fn delay(&self, used: u64, reset: TimeDelta) -> TimeDelta {
        let beyond = u128::from(used.saturating_sub(self.threshold)) * u128::from(reset.as_micros());
        TimeDelta::from_micros(u64::try_from(beyond.div_ceil(u128::from(used.max(1)))).unwrap_or(u64::MAX))
    }

    /// Returns this soft limit, of the limit `from`, at the same fraction of the limit `to`.
    pub(crate) fn scaled(self, from: &Limit, to: &Limit) -> Self {
        let at = u128::from(self.threshold) * u128::from(to.capacity());
        let at = at.div_ceil(u128::from(from.capacity().max(1)));
        Self { threshold: u64::try_from(at).unwrap_or(u64::MAX), ..self }
    }
}

/// The action of a soft limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftAction {
    /// The decision carries a warning.
    #[default]
    Warn,
    /// The decision is marked as degraded.
    Degrade,
    /// The request is delayed, the longer the further it is beyond the threshold.
    Delay,
}

impl SoftAction {
    /// Returns the name in rule files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Warn => "warn",
            Self::Degrade => "degrade",
            Self::Delay => "delay",
        }
    }
}

/// One limit of a rule. What every charge reads comes first.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct RuleLimit {
    /// Number in the rule set; [`RuleLimit::NO_ID`] for an override and an inline limit.
    pub id: u32,
    /// Role in decisions.
    pub role: Role,
    /// Where its charges may be decided.
    pub mode: Mode,
    /// Whether the share is reserved: requests that it allows need not be charged to the shared counters afterwards.
    pub prepaid: bool,
    /// Envoy unit equal to its period, if there is one.
    pub unit: Option<Unit>,
    /// Limit of each shard if the rule splits its counters; they sum to `limit`.
    pub shards: Option<Box<[Limit]>>,
    /// Soft limit.
    pub soft: Option<SoftLimit>,
    /// Source of the cost, if it is another than the rule's; boxed because few limits have one.
    pub cost: Option<Box<CostFrom>>,
    /// Limit as written in the rule file; shown in responses, logs and metrics.
    pub limit: Limit,
    /// Scope of its counter keys.
    pub scope: Scope,
    /// This node's share of the limit while the store is unavailable; `None` if the number of nodes is unknown.
    pub node_share: Option<Box<Limit>>,
    /// Part of the limit that all nodes together have while the store is unavailable, if the rules do not say how many
    /// nodes there are: each may use its share of it by the number of nodes alive.
    pub reserve: Option<Box<Limit>>,
}

impl RuleLimit {
    /// The number of a limit that is not in the rule set.
    pub const NO_ID: u32 = u32::MAX;

    /// Returns the source of its cost, as a limit of this rule.
    #[must_use]
    pub fn cost_from<'r>(&'r self, rule: &'r Rule) -> &'r CostFrom {
        self.cost.as_deref().unwrap_or(&rule.cost)
    }

    /// Returns what it counts, as a limit of this rule, if that is an attribute of requests; `None` for requests, or units
    /// without a name.
    #[must_use]
    pub fn unit_name<'r>(&'r self, rule: Option<&'r Rule>) -> Option<&'r str> {
        match self.cost.as_deref().or(rule.map(|rule| &rule.cost))? {
            CostFrom::Attribute(name) => Some(name),
            CostFrom::Request | CostFrom::Fixed(_) => None,
        }
    }

    /// Returns the limit as text, with what it counts.
    #[must_use]
    pub fn describe(&self, rule: Option<&Rule>) -> String {
        let unit = self.unit_name(rule).filter(|_| self.limit.algorithm() != Algorithm::Concurrency);
        let text = self.limit.display_of(unit).to_string();
        match self.cost.as_deref() {
            Some(CostFrom::Attribute(_)) | None => text,
            Some(cost) => format!("{text} cost {cost}"),
        }
    }

    /// Returns what its soft limit does once so many units remain; `None` below its threshold, or without one.
    #[must_use]
    #[inline]
    pub fn soft_action(&self, remaining: u64) -> Option<SoftAction> {
        let soft = self.soft?;
        (self.limit.capacity().saturating_sub(remaining) > soft.threshold).then_some(soft.action)
    }

    /// Returns the limit that the counter of this shard enforces.
    #[must_use]
    #[inline]
    pub fn for_shard(&self, shard: u16) -> &Limit {
        match &self.shards {
            None => &self.limit,
            Some(shards) => shards.get(usize::from(shard)).unwrap_or(&self.limit),
        }
    }

    /// Applies the same change to the limit, its shards and its node share. The shards sum to the changed limit, and a
    /// soft limit stays at the same fraction.
    #[must_use]
    pub fn map_limits(&self, change: impl Fn(&Limit) -> Limit) -> Self {
        let limit = change(&self.limit);
        let shards = self.shards.as_ref().map(|shards| u32::try_from(shards.len()).unwrap_or(u32::MAX));
        Self {
            shards: shards.map(|shards| limit.shards(shards)),
            soft: self.soft.map(|soft| soft.scaled(&self.limit, &limit)),
            limit,
            node_share: self.node_share.as_ref().map(|share| Box::new(change(share))),
            reserve: self.reserve.as_ref().map(|reserve| Box::new(change(reserve))),
            ..self.clone()
        }
    }

    /// Returns this limit with a share of its units; a soft limit stays at the same fraction.
    #[must_use]
    pub fn with_share(&self, share: &Limit) -> Self {
        let soft = self.soft.map(|soft| soft.scaled(&self.limit, share));
        Self { limit: share.clone(), soft, ..self.clone() }
    }

    /// Creates a limit that is charged in the store; [`crate::placement`] sets the other placement fields.
    pub(crate) fn new(
        limit: Limit,
        scope: Scope,
        unit: Option<Unit>,
        role: Role,
        soft: Option<SoftLimit>,
    ) -> Self {
        Self {
            id: Self::NO_ID,
            limit,
            shards: None,
            node_share: None,
            prepaid: false,
            reserve: None,
            mode: Mode::Central,
            scope,
            unit,
            role,
            soft,
            cost: None,
        }
    }
}

/// The source of a request's cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CostFrom {
    /// The request's cost; one if absent.
    #[default]
    Request,
    /// This fixed number, whatever the request's cost: a limit on requests next to one on tokens. Peeks stay peeks;
    /// refunds refund this number.
    Fixed(u64),
    /// The number in this attribute; the request's cost if the attribute is absent. A request whose attribute is not a
    /// whole number is rejected.
    Attribute(String),
}

impl CostFrom {
    /// Returns the name of what is counted, for billing: the attribute, `cost` for the request's own cost, `requests` for
    /// a fixed cost of one, or `fixed`.
    #[must_use]
    pub const fn meter(&self) -> &str {
        match self {
            Self::Request => "cost",
            Self::Fixed(1) => "requests",
            Self::Fixed(_) => "fixed",
            Self::Attribute(name) => name.as_str(),
        }
    }
}

impl std::fmt::Display for CostFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request => f.write_str("of the request"),
            Self::Fixed(units) => units.fmt(f),
            Self::Attribute(name) => f.write_str(name),
        }
    }
}

/// How a rule's consumption is billed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Billing {
    /// Attribute that names the caller, if the rule has a counter for each of its values; otherwise the request's caller
    /// is billed.
    pub caller_key: Option<Box<str>>,
}

/// The limits that apply to callers of one tier.
#[derive(Clone, Debug, Default)]
pub struct LimitSet {
    /// Limits in the order of the file. Empty and not `unlimited`: an exception, matched but not limited.
    pub limits: Vec<RuleLimit>,
    /// Whether it is said that no rate limits these callers; a concurrency limit beside it still holds.
    pub unlimited: bool,
}

/// The limits of a rule: those for all callers, and those of tiers.
#[derive(Clone, Debug, Default)]
pub(crate) struct TieredLimits {
    pub(crate) base: LimitSet,
    /// Sorted by name.
    pub(crate) tiers: Vec<(String, LimitSet)>,
}

impl TieredLimits {
    pub(crate) fn set_for(&self, tier: Option<&str>) -> &LimitSet {
        select_tier(&self.base, &self.tiers, tier)
    }
}

/// Returns the limits for a caller of this tier: the tier's, else those for all callers.
#[inline]
fn select_tier<'s>(base: &'s LimitSet, tiers: &'s [(String, LimitSet)], tier: Option<&str>) -> &'s LimitSet {
    if let (false, Some(tier)) = (tiers.is_empty(), tier)
        && let Ok(i) = tiers.binary_search_by(|(name, _)| name.as_str().cmp(tier))
    {
        return &tiers[i].1;
    }
    base
}

/// A compiled rule. What every match of a plain rule reads comes first, in one cache line.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct Rule {
    /// Number in the rule set.
    pub id: u32,
    /// Number of shards that each counter is split into; a request is charged to one of them.
    pub split: Option<u16>,
    /// Action over the limit.
    pub action: Action,
    /// Class: what the rule protects.
    pub class: Class,
    /// Whether a match has only `limits` to add, unless the caller has overrides: it needs no other field.
    pub(crate) is_plain: bool,
    /// Whether a denial sheds load: the caller is not over a limit of its own.
    pub is_shedding: bool,
    /// What a denial by a limit in each role, at the position of its index, means for the request's other limits.
    pub(crate) enforcement: [Enforcement; Role::ALL.len()],
    /// Priority: of several denying rules, the one with the highest is reported.
    pub priority: i32,
    /// Limits for callers without limits by tier.
    pub limits: LimitSet,
    /// Limits by tier, sorted by name.
    pub tiers: Vec<(String, LimitSet)>,
    /// The tiers whose limits apply to callers of none of its tiers, because the rule protects something and states no
    /// limit for them; empty if `limits` are its own.
    pub unnamed_tiers: Vec<String>,
    /// Source of the cost.
    pub cost: CostFrom,
    /// Names of matched rules that this rule removes from a request.
    pub replaces: Vec<String>,
    /// Attribute whose value begins its counter keys where a request has it (`shard_by` of the domain).
    pub shard_by: Option<String>,
    /// Name: `name` from the file, or the path of keys.
    pub name: String,
    /// Whether the name was given in the file.
    pub has_explicit_name: bool,
    /// Whether its limits have the algorithm of its class, because nothing states one.
    pub(crate) has_algorithm_of_class: bool,
    /// Keys of its path in the tree, outermost first: those whose values name its counters.
    pub keys: Vec<Box<str>>,
    /// Fail policy while the store is unavailable.
    pub on_error: OnError,
    /// Where its charges may be decided; adaptive if the file has no `mode`.
    pub mode: Mode,
    /// Name of the store that keeps its counters; `None` for the default store.
    pub store: Option<Arc<str>>,
    /// Stores that keep the counters of single tiers, by tier; `None` for the default store.
    pub tier_stores: Vec<(String, Option<Arc<str>>)>,
    /// How cells share its limits; `None` if the file does not say.
    pub region: Option<Arc<RegionSetting>>,
    /// The regions that a request's home may name; `None` if they are not known when rules are compiled.
    pub homes: Option<Arc<[String]>>,
    /// Whether this cell's part of a limit that cells divide is zero, and the limit is not.
    pub(crate) has_empty_part: bool,
    /// Whether all callers share its counters: none of the key's values identifies a caller.
    pub shared_by_callers: bool,
    /// Thousandths of the limits that are reserved for nodes that cannot reach the store.
    pub fallback: Option<u64>,
    /// Share of callers that its limits deny, if not all.
    pub enforce: Option<Enforce>,
    /// Set if its consumption is recorded for billing.
    pub billing: Option<Billing>,
    /// Whether its consumption is also written to the database; `None` if the file does not say. Each limit's scope has
    /// the resolved answer.
    pub durable: Option<bool>,
    /// Parsed and displayed only: metrics never carry values of requests, because callers could create any number of
    /// them.
    pub detailed_metric: bool,
    /// Parsed and displayed only, like `detailed_metric`, for this key alone.
    pub value_to_metric: bool,
    /// Metadata returned to the caller's proxy.
    pub metadata: Metadata,
    /// Response to its denials, if it is not the integration's.
    pub response: Option<Box<DenialResponse>>,
    /// Location: file and line.
    pub location: (String, u32),
}

impl Rule {
    /// Sets what matching reads of it, in a domain with this coupling, from the other fields.
    pub(crate) fn prepared(mut self, coupling: Coupling) -> Self {
        self.enforcement = Role::ALL.map(|role| MatchedLimit::enforcement(role, self.action, coupling));
        self.is_plain = !self.limits.limits.is_empty()
            && self.tiers.is_empty()
            && self.cost == CostFrom::Request
            && self.limits.limits.iter().all(|limit| limit.cost.is_none())
            && self.replaces.is_empty()
            && self.shard_by.is_none()
            && self.split.is_none()
            && self.enforce.is_none()
            && self.home().is_none();
        self
    }

    /// Returns the name of the store that keeps the counters of a tier's callers; `None` for the default store.
    #[must_use]
    pub fn store_for(&self, tier: Option<&str>) -> Option<&str> {
        let own = tier.and_then(|tier| self.tier_stores.iter().find(|(name, _)| name == tier));
        own.map_or(self.store.as_deref(), |(_, store)| store.as_deref())
    }

    /// Returns the attribute that names the region which owns the caller's counters.
    #[must_use]
    pub fn home(&self) -> Option<&str> {
        self.region.as_deref().and_then(RegionSetting::home)
    }

    /// Returns the value of the counter's key for the home that a request names. One that is no region counts as missing:
    /// a caller that invents homes would have a counter for each.
    pub(crate) fn known_home<'a>(&self, named: Option<&'a str>) -> &'a str {
        let is_known =
            |home: &&str| self.homes.as_ref().is_none_or(|homes| homes.iter().any(|one| one == home));
        named.filter(is_known).unwrap_or_default()
    }

    /// Returns how cells share its limits.
    #[must_use]
    pub fn region_mode(&self) -> RegionMode {
        self.region.as_deref().map_or(RegionMode::Shared, |region| region.mode)
    }

    /// Returns all limits: those without a tier, then each tier's.
    pub fn all_limits(&self) -> impl Iterator<Item = &RuleLimit> {
        let sets = std::iter::once(&self.limits).chain(self.tiers.iter().map(|(_, set)| set));
        sets.flat_map(|set| &set.limits)
    }

    /// Returns the shard names that begin its counter keys' values; empty if its counters are not split.
    #[must_use]
    pub fn shard_names(&self) -> &'static [&'static str] {
        self.split.map_or(&[], crate::counter_shards::names)
    }

    /// Returns whether a caller's tier affects its limits or its fail policy.
    #[must_use]
    pub fn depends_on_tier(&self) -> bool {
        !self.tiers.is_empty() || matches!(self.on_error, OnError::ByTier { .. })
    }

    /// Returns the limits for a caller of this tier: the tier's, else the rule's.
    #[must_use]
    #[inline]
    pub fn set_for(&self, tier: Option<&str>) -> &LimitSet {
        select_tier(&self.limits, &self.tiers, tier)
    }

    /// Returns the same as a list, which is empty for callers without a limit.
    #[must_use]
    #[inline]
    pub fn limits_for(&self, tier: Option<&str>) -> &[RuleLimit] {
        &self.set_for(tier).limits
    }
}
