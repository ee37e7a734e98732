//! Overrides: a caller's tier and the limits that replace some rules' limits.
//!
//! A quota refers to rules by strings that are stored in a database, so it is compiled against a rule set before it
//! takes effect, and again when the rules change. An override keeps the rule's algorithm, and if it keeps the period
//! too, it keeps the counter: another number does not reset usage. It replaces the rule's limit of the same period; the
//! others stay in force, unless it says that it replaces all: a customer's 1200 a minute is no reason to admit all of
//! them in one second. What replaces what depends on the limits in force for the caller, and so on its tier, which may
//! come with the request: each tier's limits are compiled.
//!
//! A rule is referenced by its `name`, by its path (`api_key/endpoint=POST /orders`), or by what follows the caller in
//! the path (`endpoint=POST /orders`, or with a colon, `endpoint:POST /orders`); `default` is the rule on the caller
//! alone, or if there is none, a rule whose path ends with the caller. `@tokens` after a reference means the rule's limits with `cost: tokens`; those of another cost stay in force.
//! Only rules with a counter per caller can be overridden: otherwise one caller's number would affect all.

use crate::placement;
use crate::quota_key::is_general;
use crate::region::CellPlace;
use crate::rule::{CostFrom, LimitSet, Profile, Role, Rule, RuleLimit, TieredLimits};
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
    /// The limit; `None` for unlimited.
    pub limit: Option<OverrideRate>,
    /// Which of the rule's limits give way.
    pub replaces: Replaces,
}

/// The limit of an override.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OverrideRate<P = String> {
    /// Units per period.
    pub count: u64,
    /// Period, as written in rules: `minute`, `30s`, `day in Europe/Zurich`.
    pub period: P,
    /// Maximum burst in units, if the rule's algorithm supports one.
    pub burst: Option<u64>,
}

/// The limits of a rule that an override replaces, of those that count the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Replaces {
    /// The one with the same period.
    #[default]
    SamePeriod,
    /// All.
    All,
}

impl Override {
    /// Returns an override with this many units per period.
    #[must_use]
    pub fn new(descriptor: &str, count: u64, period: &str) -> Self {
        let limit = Some(OverrideRate { count, period: period.to_owned(), burst: None });
        Self { descriptor: descriptor.to_owned(), limit, replaces: Replaces::default() }
    }
}

impl OverrideRate {
    fn parse(&self) -> Result<OverrideRate<Period>, Problem> {
        let period = crate::period::parse_period(&self.period).map_err(|why| ("period", why))?;
        Ok(OverrideRate { count: self.count, period, burst: self.burst })
    }
}

/// Name of the invalid field, and a description of the error.
type Problem = (&'static str, String);

const CONTRADICTION: &str = "`unlimited` beside another limit of the same rule; keep one";

/// A caller's quota, compiled against one rule set.
#[derive(Clone, Debug, Default)]
pub struct CallerOverrides {
    tier: Option<Box<str>>,
    /// Limits of the rules with overrides, by rule number, sorted.
    limits: Vec<(u32, TieredLimits)>,
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

    /// Returns whether an override changes the limits of a rule.
    #[must_use]
    pub fn overrides(&self, rule: u32) -> bool {
        self.limits(rule).is_some()
    }

    /// Returns the limits of a rule that are in force for the caller. `tier` is that of its requests.
    #[must_use]
    pub fn set_for<'s>(&'s self, rule: &'s Rule, tier: Option<&str>) -> &'s LimitSet {
        let tier = self.tier_for(rule.id).or(tier);
        self.limits(rule.id).map_or_else(|| rule.set_for(tier), |limits| limits.set_for(tier))
    }

    /// Returns the limits of a rule with overrides.
    #[inline]
    fn limits(&self, rule: u32) -> Option<&TieredLimits> {
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

/// Returns the tier that a rule's limits are for. Of several quotas with a tier, that one counts whose attribute is last in
/// the rule's path; `tier` is the request's.
pub(crate) fn tier_for<'p>(
    quotas: &'p [Arc<CallerOverrides>],
    rule: u32,
    tier: Option<&'p str>,
) -> Option<&'p str> {
    last(quotas, rule, |quota| quota.tier.is_some()).and_then(CallerOverrides::tier).or(tier)
}

/// Returns the limits of a rule that are in force for a request: of several quotas with overrides of the rule, that one
/// counts whose attribute is last in its path.
pub(crate) fn set_for<'p>(
    quotas: &'p [Arc<CallerOverrides>],
    rule: &'p Rule,
    tier: Option<&str>,
) -> &'p LimitSet {
    if quotas.is_empty() {
        return rule.set_for(tier);
    }
    let tier = tier_for(quotas, rule.id, None).or(tier);
    let limits =
        last(quotas, rule.id, |quota| quota.overrides(rule.id)).and_then(|quota| quota.limits(rule.id));
    limits.map_or_else(|| rule.set_for(tier), |limits| limits.set_for(tier))
}

/// Returns the quota about the attribute that is last in a rule's path, of those that fit.
fn last(
    quotas: &[Arc<CallerOverrides>],
    rule: u32,
    fits: impl Fn(&CallerOverrides) -> bool,
) -> Option<&CallerOverrides> {
    if let [only] = quotas
        && only.is_general
    {
        return Some(&**only).filter(|only| fits(only));
    }
    let own = quotas.iter().filter(|quota| fits(quota)).map(|quota| (quota.place(rule), &**quota));
    let own = own.filter(|(place, quota)| *place > 0 || quota.is_general);
    own.max_by_key(|(place, _)| *place).map(|(_, quota)| quota)
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
        let (mut limits, mut errors) = (Vec::new(), Vec::new());
        for (index, wanted) in overrides.iter().enumerate() {
            if let Err((field, reason)) = self.apply_override(key, wanted, &mut limits) {
                errors.push(OverrideError { index, field, reason });
            }
        }
        limits.sort_by_key(|(id, _)| *id);
        let places = self.quota_keys().get(key).map(|key| Arc::clone(&key.places)).unwrap_or_default();
        (CallerOverrides { tier: tier.map(Into::into), limits, places, is_general: is_general(key) }, errors)
    }

    /// Applies an override to the limits of the rules that it means: to those for all callers, and to each tier's.
    fn apply_override(
        &self,
        key: &str,
        wanted: &Override,
        all: &mut Vec<(u32, TieredLimits)>,
    ) -> Result<(), Problem> {
        let (places, cost) = self.find_overridable(key, &wanted.descriptor).ok_or_else(|| {
            let why = format!(
                "no rule with a counter for each `{key}` is called `{}`; write its name, its path as in \
                 `{key}/endpoint=POST /orders`, or `default` for the rule about `{key}` alone; `@tokens` \
                 after it means its limits with `cost: tokens`",
                shorten(&wanted.descriptor)
            );
            ("descriptor", why)
        })?;
        let rate = wanted.limit.as_ref().map(OverrideRate::parse).transpose()?;
        let mut changed: Vec<(u32, TieredLimits)> = Vec::new();
        for (domain, node) in places {
            let Some(domain) = self.domains().nth(*domain) else { continue };
            let Some(rule) = domain.tree[*node as usize].rule.and_then(|id| self.rule(id)) else { continue };
            let context =
                OverriddenRule { domain, node: *node, rule, place: (self.nodes, self.cells.as_ref()) };
            let cost = context.cost(cost)?;
            let known = all.iter().find(|(id, _)| *id == rule.id);
            let mut limits = known.map_or_else(
                || TieredLimits { base: rule.limits.clone(), tiers: rule.tiers.clone() },
                |(_, limits)| limits.clone(),
            );
            let change = (&cost, rate.as_ref(), wanted.replaces);
            context.change(&mut limits.base, (&rule.limits, rule.store_for(None)), change)?;
            for ((tier, set), (_, own)) in limits.tiers.iter_mut().zip(&rule.tiers) {
                context.change(set, (own, rule.store_for(Some(tier))), change)?;
            }
            changed.push((rule.id, limits));
        }
        for (rule, limits) in changed {
            match all.iter_mut().find(|(id, _)| *id == rule) {
                Some(known) => known.1 = limits,
                None => all.push((rule, limits)),
            }
        }
        Ok(())
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
}

/// A rule for which a quota has overrides.
struct OverriddenRule<'r> {
    domain: &'r Domain,
    node: u32,
    rule: &'r Rule,
    /// The number of nodes, and this cell's place among the others.
    place: (Option<u32>, Option<&'r CellPlace>),
}

/// The source of the cost of a limit, if it is another than the rule's.
type OwnCost = Option<Box<CostFrom>>;

impl OverriddenRule<'_> {
    /// Returns what the override counts: what the reference says, and without that what the rule's first limit counts.
    fn cost(&self, cost: Option<&str>) -> Result<OwnCost, Problem> {
        let mut named = self.rule.all_limits().filter(|limit| is_replaced(limit));
        let Some(cost) = cost else { return Ok(named.next().and_then(|limit| limit.cost.clone())) };
        let counts = |limit: &&RuleLimit| limit.cost_from(self.rule).to_string() == cost;
        let found = named.find(counts).map(|limit| limit.cost.clone());
        found.ok_or_else(|| {
            let why = format!("the rule `{}` has no limit with `cost: {}`", self.rule.name, shorten(cost));
            ("descriptor", why)
        })
    }

    /// Changes the limits of the rule or of one of its tiers, `own`, some of which other overrides may have changed.
    fn change(
        &self,
        set: &mut LimitSet,
        (own, store): (&LimitSet, Option<&str>),
        (cost, rate, replaces): (&OwnCost, Option<&OverrideRate<Period>>, Replaces),
    ) -> Result<(), Problem> {
        let is_override = |limit: &RuleLimit| limit.id == RuleLimit::NO_ID && limit.cost == *cost;
        let is_own =
            |limit: &RuleLimit| is_replaced(limit) && limit.cost == *cost && limit.id != RuleLimit::NO_ID;
        let Some(rate) = rate else {
            if self.rule.billing.is_some() {
                let why = "its consumption is billed, and what has no limit is not counted; write a limit that is never \
                           reached";
                return Err(("limit", why.to_owned()));
            }
            if set.limits.iter().any(is_override) {
                return Err(("limit", CONTRADICTION.to_owned()));
            }
            set.limits.retain(|limit| !is_own(limit));
            set.unlimited = !set.limits.iter().any(is_replaced);
            return Ok(());
        };
        if set.unlimited && !own.unlimited {
            return Err(("limit", CONTRADICTION.to_owned()));
        }
        let limit = self.limit((own, store), cost, rate)?;
        if set.limits.iter().any(|other| other.id == RuleLimit::NO_ID && other.scope == limit.scope) {
            let why = "two limits of one rule with the same period would share a counter; keep one";
            return Err(("period", why.to_owned()));
        }
        let gives_way = |other: &RuleLimit| {
            is_own(other) && (replaces == Replaces::All || other.limit.rate().period == rate.period)
        };
        // In the place of the limit that it replaces, else after the others of its kind.
        let rates = set.limits.iter().take_while(|other| is_replaced(other)).count();
        let at = set.limits.iter().position(gives_way).unwrap_or(rates);
        set.limits.retain(|other| !gives_way(other));
        set.limits.insert(at, limit);
        set.unlimited = false;
        Ok(())
    }

    /// Returns a limit like the rule's of this cost, for callers with these limits, with another rate.
    fn limit(
        &self,
        (set, store): (&LimitSet, Option<&str>),
        cost: &OwnCost,
        rate: &OverrideRate<Period>,
    ) -> Result<RuleLimit, Problem> {
        let Self { domain, node, rule, place: (nodes, cells) } = *self;
        let burst = rate.burst;
        let quota = Rate { count: rate.count, period: rate.period.clone() };
        let own = || {
            let all = set.limits.iter().chain(rule.all_limits());
            all.filter(|limit| is_replaced(limit) && limit.cost == *cost)
        };
        let same_period = own().find(|limit| limit.limit.rate().period == quota.period);
        let like = same_period.or_else(|| own().next());
        let needs_bucket = |like: &RuleLimit| {
            let is_strict = like.limit.algorithm() == Algorithm::StrictWindow;
            burst.is_some() && is_strict && rule.has_algorithm_of_class
        };
        let limit = match like {
            // A burst asks for a bucket, where only the class and not the file asks for a window.
            Some(like) if !needs_bucket(like) => like.limit.with_rate(quota, burst),
            Some(_) | None => domain.default_limit(rule, quota, burst),
        };
        let limit = limit.map_err(|error| {
            (
                if burst.is_some() && !is_bucket(&error) { "burst" } else { "requests_per_unit" },
                error.to_string(),
            )
        })?;
        let role = like.map_or(Role::Live, |like| like.role);
        let scope = match same_period.filter(|like| like.limit.algorithm() == limit.algorithm()) {
            Some(like) if like.scope.store() == store => like.scope.clone(),
            Some(like) => {
                let path = domain.scope_path(node, rule, like.scope.store());
                path.moved(like.scope.clone(), &domain.scope_path(node, rule, store))
            }
            None => {
                let path = domain.scope_path(node, rule, store);
                let kind = Kind::of(role, domain.profile);
                path.limit(kind, &limit, None, cost.as_deref().map(|own| (own, &rule.cost)))
            }
        };
        let unit = match &rate.period {
            Period::Rolling(length) => Unit::from_length(*length),
            Period::Calendar(_) => None,
        };
        // A soft limit stays at the same fraction of the limit.
        let soft = like.and_then(|like| Some(like.soft?.scaled(&like.limit, &limit)));
        let mut limit = RuleLimit { cost: cost.clone(), ..RuleLimit::new(limit, scope, unit, role, soft) };
        placement::resolve_limit(&mut limit, rule, nodes, cells);
        Ok(limit)
    }
}

impl Domain {
    /// Returns a limit for a rule that has none to take as a model, or whose model has no burst.
    fn default_limit(
        &self,
        rule: &Rule,
        quota: Rate,
        burst: Option<u64>,
    ) -> Result<Limit, tollgate_core::LimitError> {
        let algorithm = match &quota.period {
            Period::Calendar(_) => Algorithm::FixedWindow,
            Period::Rolling(_) => self.algorithm.unwrap_or_else(|| match burst {
                Some(_) => Algorithm::Gcra,
                None => rule.class.algorithm(),
            }),
        };
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
