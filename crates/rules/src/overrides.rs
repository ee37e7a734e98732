//! Overrides: a caller's tier and the limits that replace some rules' limits.
//!
//! A quota refers to rules by strings that are stored in a database, so it is compiled against a rule set before it
//! takes effect, and again when the rules change. An override keeps the rule's algorithm, and if it keeps the period
//! too, it keeps the counter: another number does not reset usage.
//!
//! A rule is referenced by its `name`, by its path (`api_key/endpoint=POST /orders`), or by what follows the caller in
//! the path (`endpoint=POST /orders`, or with a colon, `endpoint:POST /orders`); `default` is the rule on the caller
//! alone, or if there is none, a rule whose path ends with the caller. `@tokens` after a reference means the rule's limits with `cost: tokens`; those of another cost stay in force.
//! Only rules with a counter per caller can be overridden: otherwise one caller's number would affect all.

use crate::placement;
use crate::quota_key::is_general;
use crate::region::CellPlace;
use crate::rule::{Profile, Role, Rule, RuleLimit, SoftLimit};
use crate::ruleset::{Domain, Ruleset};
use crate::scope::{Kind, ScopePath};
use crate::unit::Unit;
use crate::yaml::shorten;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Algorithm, Limit, LimitSpec, Period, Rate};

/// The attribute that identifies the caller of a quota, unless the quota is about another one.
pub const CALLER_KEY: &str = "api_key";

/// A limit for one caller that replaces a rule's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Override {
    /// Reference to the rule.
    pub descriptor: String,
    /// Units per period.
    pub count: u64,
    /// Period, as written in rules: `minute`, `30s`, `day in Europe/Zurich`.
    pub period: String,
    /// Maximum burst in units, if the rule's algorithm supports one.
    pub burst: Option<u64>,
}

/// A caller's quota, compiled against one rule set.
#[derive(Clone, Debug, Default)]
pub struct CallerOverrides {
    tier: Option<Box<str>>,
    /// Limits by rule number, sorted.
    limits: Vec<(u32, Vec<RuleLimit>)>,
    /// The rules that count by the attribute that the quota is about, with its place in their paths; sorted.
    places: Arc<[(u32, u8)]>,
    /// Whether the tier is also for rules that count by no attribute of a quota.
    is_general: bool,
}

impl CallerOverrides {
    /// Returns the caller's tier, which takes precedence over the request's.
    #[must_use]
    pub fn tier(&self) -> Option<&str> {
        self.tier.as_deref()
    }

    /// Returns the tier that the quota gives a rule, unless it overrides the rule's limits.
    #[must_use]
    pub fn tier_for(&self, rule: u32) -> Option<&str> {
        self.tier().filter(|_| self.is_general || self.place(rule) > 0)
    }

    /// Returns the limits that replace a rule's.
    #[must_use]
    #[inline]
    pub fn limits(&self, rule: u32) -> Option<&[RuleLimit]> {
        let at = self.limits.binary_search_by_key(&rule, |(id, _)| *id).ok()?;
        Some(&self.limits[at].1)
    }

    /// Returns the place of the quota's attribute in a rule's path, from 1; zero if the rule does not count by it.
    fn place(&self, rule: u32) -> u8 {
        self.places.binary_search_by_key(&rule, |(id, _)| *id).map_or(0, |at| self.places[at].1)
    }
}

/// Returns the tier of the quotas of one request for rules that count by no attribute of a quota.
pub(crate) fn general_tier(quotas: &[Arc<CallerOverrides>]) -> Option<&str> {
    quotas.iter().find(|quota| quota.is_general).and_then(|quota| quota.tier())
}

/// Returns the limits that the quotas of one request agree for a rule, and otherwise the tier that they give it. Of
/// several, an override wins over a tier, and then the quota whose attribute is last in the rule's path.
pub(crate) fn terms_for(quotas: &[Arc<CallerOverrides>], rule: u32) -> (Option<&[RuleLimit]>, Option<&str>) {
    if let [only] = quotas
        && only.is_general
    {
        return (only.limits(rule), only.tier());
    }
    let last = |has: fn(&CallerOverrides, u32) -> bool| {
        let own = quotas.iter().filter(|quota| has(quota, rule)).map(|quota| (quota.place(rule), quota));
        own.filter(|(place, quota)| *place > 0 || quota.is_general).max_by_key(|(place, _)| *place)
    };
    let limits = last(|quota, rule| quota.limits(rule).is_some()).and_then(|(_, quota)| quota.limits(rule));
    (limits, last(|quota, _| quota.tier.is_some()).and_then(|(_, quota)| quota.tier()))
}

/// The error for an override that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OverrideError {
    /// Index in the list.
    pub index: usize,
    /// Name of the invalid field.
    pub field: &'static str,
    /// Description of the error.
    pub reason: String,
}

/// Where a rule is: the number of its domain, and its node there.
type RulePlace = (usize, u32);

/// The rules that can be overridden per caller, by all their names.
pub(crate) type Overridable = HashMap<String, Vec<RulePlace>, foldhash::fast::RandomState>;

impl Ruleset {
    /// Compiles a quota of the callers that the attribute `key` identifies. Overrides that do not fit these rules are
    /// skipped and reported.
    #[must_use]
    pub fn compile_overrides(
        &self,
        key: &str,
        tier: Option<&str>,
        overrides: &[Override],
    ) -> (CallerOverrides, Vec<OverrideError>) {
        let mut limits: Vec<(u32, Vec<RuleLimit>)> = Vec::new();
        let (mut errors, mut replaced) = (Vec::new(), Vec::new());
        for (at, wanted) in overrides.iter().enumerate() {
            match self.compile_override(key, tier, wanted) {
                Ok(compiled) => {
                    for (rule, limit) in compiled {
                        let own = match limits.iter().position(|(id, _)| *id == rule) {
                            Some(place) => &mut limits[place].1,
                            None => {
                                let written = self.rule(rule).map_or(&[][..], |rule| rule.limits_for(tier));
                                limits.push((rule, written.to_vec()));
                                &mut limits.last_mut().expect("just pushed").1
                            }
                        };
                        // An override of a rule's requests leaves its limit on tokens in force.
                        if !replaced.contains(&(rule, limit.cost.clone())) {
                            own.retain(|other| !is_replaced(other) || other.cost != limit.cost);
                            replaced.push((rule, limit.cost.clone()));
                        }
                        if own.iter().any(|other| other.scope == limit.scope) {
                            let why =
                                "two limits of one rule with the same period would share a counter; keep one";
                            errors.push(OverrideError { index: at, field: "period", reason: why.to_owned() });
                        } else {
                            own.push(limit);
                        }
                    }
                }
                Err((field, why)) => errors.push(OverrideError { index: at, field, reason: why }),
            }
        }
        limits.sort_by_key(|(id, _)| *id);
        let places = self.quota_keys().get(key).map(|key| Arc::clone(&key.places)).unwrap_or_default();
        (CallerOverrides { tier: tier.map(Into::into), limits, places, is_general: is_general(key) }, errors)
    }

    fn compile_override(
        &self,
        key: &str,
        tier: Option<&str>,
        wanted: &Override,
    ) -> Result<Vec<(u32, RuleLimit)>, (&'static str, String)> {
        let (rules, cost) = self.find_overridable(key, &wanted.descriptor).ok_or_else(|| {
            let why = format!(
                "no rule with a counter for each `{key}` is called `{}`; write its name, its path as in \
                 `{key}/endpoint=POST /orders`, or `default` for the rule about `{key}` alone; `@tokens` \
                 after it means its limits with `cost: tokens`",
                shorten(&wanted.descriptor)
            );
            ("descriptor", why)
        })?;
        let period = crate::period::parse_period(&wanted.period).map_err(|why| ("period", why))?;
        let quota = Rate { count: wanted.count, period };
        let compile = |(domain, node): &(usize, u32)| {
            let domain = self.domains().nth(*domain)?;
            let rule = self.rule(domain.tree[*node as usize].rule?)?;
            Some((domain, *node, rule))
        };
        let compiled = rules.iter().filter_map(compile).map(|(domain, node, rule)| {
            Ok((
                rule.id,
                domain.override_limit(
                    (node, rule, rule.store_for(tier)),
                    cost,
                    &quota,
                    wanted.burst,
                    (self.nodes, self.cells.as_ref()),
                )?,
            ))
        });
        compiled.collect()
    }

    /// Returns the rules that a reference means, and the cost of the limits if it says which: `default@tokens`.
    fn find_overridable<'n>(&self, key: &str, name: &'n str) -> Option<(&[RulePlace], Option<&'n str>)> {
        let all = |name: &str| self.overridable(key)?.get(&canonical(key, name)).map(Vec::as_slice);
        match (all(name), name.rsplit_once('@')) {
            (Some(rules), _) => Some((rules, None)),
            (None, Some((name, cost))) => Some((all(name)?, Some(cost))),
            (None, None) => None,
        }
    }
}

impl Domain {
    /// Returns the nodes from the first level down to this one.
    pub(crate) fn path(&self, node: u32) -> Vec<u32> {
        let mut path = vec![node];
        while let Some(above) =
            path.last().map(|last| self.tree[*last as usize].parent).filter(|above| *above != 0)
        {
            path.push(above);
        }
        path.reverse();
        path
    }

    /// Returns a limit like the rule's of this cost with another rate, in this store.
    fn override_limit(
        &self,
        (node, rule, store): (u32, &Rule, Option<&str>),
        cost: Option<&str>,
        quota: &Rate,
        burst: Option<u64>,
        (nodes, cells): (Option<u32>, Option<&CellPlace>),
    ) -> Result<RuleLimit, (&'static str, String)> {
        // Without a cost, the reference means what the rule's first limit counts.
        let named = rule.all_limits().filter(|limit| is_replaced(limit));
        let named = match cost {
            None => named.map(|limit| &limit.cost).next(),
            Some(cost) => {
                let counts = |limit: &&RuleLimit| limit.cost_from(rule).to_string() == cost;
                Some(named.filter(counts).map(|limit| &limit.cost).next().ok_or_else(|| {
                    let why = format!("the rule `{}` has no limit with `cost: {}`", rule.name, shorten(cost));
                    ("descriptor", why)
                })?)
            }
        };
        let cost = named.cloned().flatten();
        let own = || rule.all_limits().filter(|limit| is_replaced(limit) && limit.cost == cost);
        let same_period = own().find(|limit| limit.limit.rate().period == quota.period);
        let limit = match same_period.or_else(|| own().next()) {
            Some(like) => like.limit.with_rate(quota.clone(), burst),
            None => self.default_limit(quota.clone(), burst),
        };
        let limit = limit.map_err(|error| {
            (
                if burst.is_some() && !is_bucket(&error) { "burst" } else { "requests_per_unit" },
                error.to_string(),
            )
        })?;
        let role = own().next().map_or(Role::Live, |limit| limit.role);
        let scope = match same_period.filter(|like| like.limit.algorithm() == limit.algorithm()) {
            Some(like) if like.scope.store() == store => like.scope.clone(),
            Some(like) => {
                let path = self.scope_path(node, rule, like.scope.store());
                path.moved(like.scope.clone(), &self.scope_path(node, rule, store))
            }
            None => {
                let path = self.scope_path(node, rule, store);
                let kind = Kind::of(role, self.profile);
                path.limit(kind, &limit, None, cost.as_deref().map(|own| (own, &rule.cost)))
            }
        };
        let unit = match &quota.period {
            Period::Rolling(length) => Unit::from_length(*length),
            Period::Calendar(_) => None,
        };
        // A soft limit stays at the same fraction of the limit.
        let soft = own().next().and_then(|like| {
            let soft = like.soft?;
            let at = u128::from(soft.threshold) * u128::from(limit.capacity());
            let at = at.div_ceil(u128::from(like.limit.capacity().max(1)));
            Some(SoftLimit { threshold: u64::try_from(at).unwrap_or(u64::MAX), ..soft })
        });
        let mut limit = RuleLimit { cost, ..RuleLimit::new(limit, scope, unit, role, soft) };
        placement::resolve_limit(&mut limit, rule, nodes, cells);
        Ok(limit)
    }

    /// Returns a limit for a rule that has none to take as a model.
    fn default_limit(&self, quota: Rate, burst: Option<u64>) -> Result<Limit, tollgate_core::LimitError> {
        let calendar = matches!(quota.period, Period::Calendar(_));
        let algorithm = if calendar { Algorithm::FixedWindow } else { self.algorithm };
        let spec = match self.profile {
            Profile::Envoy => LimitSpec::new(Algorithm::FixedWindow, quota).count_denied(),
            Profile::Native => LimitSpec::new(algorithm, quota),
        };
        LimitSpec { burst, ..spec }.build()
    }

    fn scope_path(&self, node: u32, rule: &Rule, store: Option<&str>) -> ScopePath {
        let path = self.path(node);
        let scope = path
            .iter()
            .fold(self.scope.clone(), |scope, node| scope.child(&self.tree[*node as usize].element));
        let scope = scope.in_region(rule.region.as_deref()).in_store(store);
        rule.split.map_or(scope.clone(), |split| scope.split(u64::from(split)))
    }
}

/// Returns whether an override replaces a limit of this kind.
fn is_replaced(limit: &RuleLimit) -> bool {
    limit.role != Role::Candidate && limit.limit.algorithm() != Algorithm::Concurrency
}

fn is_bucket(error: &tollgate_core::LimitError) -> bool {
    !matches!(error, tollgate_core::LimitError::NoBurst(_))
}

/// Returns the canonical spelling of a rule's name, for the callers that the attribute `key` identifies.
pub(crate) fn canonical(key: &str, name: &str) -> String {
    if name == "default" { key.to_owned() } else { name.replace('=', ":") }
}
