//! The `overload` section of a domain: what is shed, and in which order, when not all can be served.
//!
//! Rules say who may have how much; this section says who goes first when there is less than that. The fleet's capacity is
//! a rule like any other, with limits that depend on the request's priority and its tenant's share (`fleet_match.rs`); the
//! rest applies where requests are seen to begin and end: in the gateway and the tower layer.

use crate::matcher::find_attribute;
use crate::pattern::Pattern;
use crate::plan::Attributes;
use crate::signal::{Signal, SignalSource};
use tollgate_core::{NameSet, Priority, TimeDelta, is_same_name};

/// Name of the rule of the fleet's capacity, and of denials by it.
pub const FLEET_RULE: &str = "overload/fleet";
/// Name of the rule of requests that are shed before an upstream.
pub const WORKERS_RULE: &str = "overload/workers";
/// Name by which an emergency measure (`disable_rule`) restores the limits that signals have tightened.
pub const ADAPT_RULE: &str = "overload/adapt";

/// The section, compiled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overload {
    /// Priorities of requests; the first match wins.
    pub priorities: Vec<PriorityRule>,
    /// Capacity of the whole fleet.
    pub fleet: Option<Fleet>,
    /// Limit of requests in flight in each process.
    pub workers: Option<Workers>,
    /// Shares of tenants.
    pub fairness: Option<Fairness>,
    /// Limits that follow signals.
    pub adapt: Option<Adapt>,
    /// Whether nothing is shed, only counted and reported.
    pub shadow: bool,
}

/// Priority of the requests with certain attributes.
#[derive(Clone, Debug, PartialEq)]
pub struct PriorityRule {
    /// What the request must fulfil.
    pub when: Vec<Condition>,
    /// Its priority then.
    pub priority: Priority,
    /// Names of the attributes.
    names: NameSet,
}

impl PriorityRule {
    pub(crate) fn new(when: Vec<Condition>, priority: Priority) -> Self {
        let names = NameSet::of(when.iter().map(|condition| condition.name.as_str()));
        Self { when, priority, names }
    }

    /// Returns whether a request is meant whose attributes `value` returns.
    #[inline]
    fn matches<'v>(&self, value: impl Fn(&str) -> Option<&'v str>) -> bool {
        self.when.iter().all(|condition| value(&condition.name).is_some_and(|value| condition.allows(value)))
    }
}

/// An attribute that a request must have, with one of these values.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// Name of the attribute.
    pub name: String,
    /// The values.
    pub values: Vec<AttributeValue>,
    /// The values again, to tell fast that another one is none of them.
    possible: NameSet,
}

impl Condition {
    pub(crate) fn new(name: String, values: Vec<AttributeValue>) -> Self {
        let literals: Option<Vec<&str>> = values.iter().map(AttributeValue::literal).collect();
        let possible = literals.map_or(NameSet::ALL, NameSet::of);
        Self { name, values, possible }
    }

    #[inline]
    fn allows(&self, value: &str) -> bool {
        self.possible.may_contain(NameSet::of([value])) && self.values.iter().any(|own| own.matches(value))
    }
}

/// A value of an attribute: a literal, or with `*` a wildcard.
#[derive(Clone, Debug)]
pub struct AttributeValue {
    text: String,
    pattern: Option<Pattern>,
}

impl AttributeValue {
    pub(crate) fn new(text: String) -> Self {
        let pattern = Pattern::new(&text);
        Self { text, pattern }
    }

    /// Returns the value as it is written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the value if it is no wildcard.
    #[must_use]
    pub fn literal(&self) -> Option<&str> {
        self.pattern.is_none().then_some(&*self.text)
    }

    #[inline]
    fn matches(&self, value: &str) -> bool {
        match &self.pattern {
            None => is_same_name(&self.text, value),
            Some(pattern) => pattern.matches(value),
        }
    }

    /// Returns whether every value that `other` matches is matched.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        match (&self.pattern, &other.pattern) {
            (Some(pattern), Some(other)) => pattern.covers(other),
            (Some(pattern), None) => pattern.matches(&other.text),
            (None, None) => self.text == other.text,
            (None, Some(_)) => false,
        }
    }
}

impl PartialEq for AttributeValue {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// Capacity of the whole fleet: a rule whose limits depend on the priority.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    /// ID of the rule.
    pub rule: u32,
    /// Number of the rule's limits, from the first, that requests of each priority are charged to: the whole capacity, then
    /// what is left of it without the part that is reserved for critical requests, and so on.
    pub charged: [usize; 4],
    /// How tenants share it, if the section has `fairness`.
    pub shares: Option<FleetShares>,
}

/// Limits by which tenants share the fleet's capacity. They charge the counters of the capacity itself, by other numbers: requests
/// beyond their tenant's fair share find it in use a little earlier, requests within a guarantee later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetShares {
    /// ID of the rule that has these limits; it is not listed among the domain's, and denials name the fleet's rule. Its first
    /// limits are those of the fleet's rule for requests beyond a fair share, then follow as many for requests within a
    /// guarantee, and for requests within a reserve, then the guarantees, and what is reserved for priorities.
    pub rule: u32,
    /// Index of the guarantee's limit of each tier of `fairness`.
    pub guarantees: Vec<Option<usize>>,
    /// Indexes of the limits of what is reserved for each priority: for requests within their tenant's fair share of it, and beyond.
    pub reserves: [Option<(usize, usize)>; 4],
}

/// Limit of requests in flight in each process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workers {
    /// ID of the rule that denials by the limit are attributed to; it has no limits of its own.
    pub rule: u32,
    /// The limit; adaptive if there is none.
    pub limit: Option<u32>,
    /// The adaptive limit never falls below this.
    pub floor: u32,
    /// How many times the latency without queueing a request may take while others are shed.
    pub target: f64,
}

/// Shares of tenants.
#[derive(Clone, Debug, PartialEq)]
pub struct Fairness {
    /// Attribute that names the tenant.
    pub by: String,
    /// Guarantees and weights by tier.
    pub tiers: Vec<TierFairness>,
}

/// Share of the tenants of a tier.
#[derive(Clone, Debug, PartialEq)]
pub struct TierFairness {
    /// Name of the tier.
    pub tier: String,
    /// Guaranteed share of the capacity, in thousandths.
    pub guarantee: u64,
    /// Whether each tenant has the guarantee, or all of the tier have it together.
    pub is_each: bool,
    /// Weight in sharing what is left, in thousandths.
    pub weight: u64,
}

impl TierFairness {
    /// Returns the guarantee as the rules write it: `5% each`.
    #[must_use]
    pub fn guarantee_text(&self) -> String {
        let scope = if self.is_each { "each" } else { "together" };
        format!("{}% {scope}", self.guarantee as f64 / 10.0)
    }
}

/// Limits that follow signals.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapt {
    /// Signals; while one is above its bound, limits are tightened.
    pub signals: Vec<Signal>,
    /// Tiers in the order in which their limits are tightened.
    pub order: Vec<String>,
    /// Part of a limit that is always left, in thousandths.
    pub least: u64,
    /// Time between two steps.
    pub step: TimeDelta,
}

impl Adapt {
    /// Returns whether the gateway or the layer measures any signal.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.signals.iter().any(|signal| matches!(signal.source, SignalSource::Measured { .. }))
    }

    /// Returns whether a Prometheus is asked for any signal.
    #[must_use]
    pub fn is_queried(&self) -> bool {
        self.signals.iter().any(|signal| matches!(signal.source, SignalSource::Query(_)))
    }
}

impl Overload {
    /// Returns the limits that follow signals, unless nothing of the section is enforced.
    #[must_use]
    pub fn active_adapt(&self) -> Option<&Adapt> {
        self.adapt.as_ref().filter(|_| !self.shadow)
    }

    /// Returns the values of an attribute in the priorities.
    pub(crate) fn values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a AttributeValue> {
        let values = self.priorities.iter().flat_map(|rule| &rule.when);
        values.filter(move |condition| condition.name == key).flat_map(|condition| &condition.values)
    }

    /// Returns the priority of a request with these attributes.
    #[must_use]
    #[inline]
    pub fn priority(&self, request: &Attributes<'_>) -> Priority {
        if self.priorities.is_empty() {
            return Priority::default();
        }
        // Most requests lack an attribute of most entries: it is not looked for there.
        let names = NameSet::of(request.iter().map(|(name, _)| *name));
        let is_match = |rule: &&PriorityRule| {
            names.may_contain(rule.names) && rule.matches(|key| find_attribute(request, key))
        };
        self.priorities.iter().find(is_match).map_or(Priority::default(), |rule| rule.priority)
    }

    /// Returns the priority of a request whose attributes `value` returns.
    #[must_use]
    #[inline]
    pub fn priority_of<'v>(&self, value: impl Fn(&str) -> Option<&'v str>) -> Priority {
        let matched = self.priorities.iter().find(|rule| rule.matches(&value));
        matched.map_or(Priority::default(), |rule| rule.priority)
    }

    /// Returns the index of the entry of `priorities` that a request matches.
    pub(crate) fn priority_entry<'v>(&self, value: impl Fn(&str) -> Option<&'v str>) -> Option<usize> {
        self.priorities.iter().position(|rule| rule.matches(&value))
    }

    /// Returns the index of a tier among those with shares.
    #[must_use]
    pub fn tier_index(&self, tier: Option<&str>) -> Option<usize> {
        let (fairness, tier) = self.fairness.as_ref().zip(tier)?;
        fairness.tiers.iter().position(|share| share.tier == tier)
    }
}
