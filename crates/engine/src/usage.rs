//! Usage of a caller's limits, read from the counters without charging; and usage resets.
//!
//! Every limit that can bind the caller is reported. A rule on a fixed value (an endpoint) is read as if the request had
//! that value. Rules that count by attributes whose values are unknown are listed with those attributes. Counters that the
//! caller shares with others are marked, and never reset: that would refund units of others.

use crate::check::Check;
use crate::decide::plan_into;
use crate::grant::Grants;
use crate::in_force::{AppliedMeasure, InForce};
use crate::limiter::Limiter;
use crate::signals::SignalError;
use futures_util::future::join_all;
use smallvec::SmallVec;
use std::net::IpAddr;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, Mode, Outcome, Outcomes,
    RegionStatus, StoreError, TimeDelta, Timestamp, Verdict,
};
use tollgate_rules::{
    Attributes, Charges, Domain, LimitOrigin, MatchedLimit, PerCallerRule, Plan, Role, Ruleset,
};

/// Source of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitSource {
    /// An override in the caller's quota.
    Override,
    /// The caller's tier.
    Tier,
    /// The rule's default limit.
    Rule,
    /// The request itself, inline.
    Request,
}

impl LimitSource {
    /// Returns the name used in responses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Override => "override",
            Self::Tier => "tier",
            Self::Rule => "rule",
            Self::Request => "request",
        }
    }
}

/// Usage of one limit.
#[derive(Clone, Debug)]
pub struct LimitUsage {
    /// The rule's name.
    pub rule: String,
    /// The rule's number in its rule set.
    pub rule_id: u32,
    /// Path of the rule.
    pub descriptor: String,
    /// How an override of the caller refers to the rule.
    pub reference: String,
    /// The limit in force.
    pub limit: Limit,
    /// The limit without measures and signals, if they change it.
    pub configured: Option<Limit>,
    /// What the limit counts, if that is an attribute of requests.
    pub unit: Option<String>,
    /// Role of the limit, which determines whether it is enforced.
    pub role: Role,
    /// Whether a denial by this limit denies requests.
    pub is_enforced: bool,
    /// Source of the limit's number, before measures.
    pub source: LimitSource,
    /// The emergency measure that changes the limit or sets it aside: name and action.
    pub measure: Option<AppliedMeasure>,
    /// Whether requests are charged to the limit; false if a measure sets it aside.
    pub is_charged: bool,
    /// Units that could be charged now; `None` if the store could not return them.
    pub remaining: Option<u64>,
    /// Whether the store did not know what was used, because it may have lost it, and assumed all of it.
    pub is_assumed: bool,
    /// After a reset, whether the counter was reset; `None` for one that no reset concerns.
    pub is_reset: Option<bool>,
    /// Time until the limit is completely unused.
    pub reset_after: TimeDelta,
    /// The window that the usage is of: its start and end. For a limit without fixed windows, the period that ends when
    /// the limit is unused again; `None` for permits.
    pub window: Option<(Timestamp, Timestamp)>,
    /// Whether the caller shares the counter with others.
    pub is_shared: bool,
    /// How cells share the limit at this moment; `None` if there are no others.
    pub region: Option<RegionStatus>,
}

impl LimitUsage {
    /// Returns the number of used units, of the limit's capacity.
    #[must_use]
    pub fn used(&self) -> Option<u64> {
        self.remaining.map(|left| self.limit.capacity().saturating_sub(left))
    }
}

/// A rule that sets no rate for the caller, because its quota, its tier or the rule says `unlimited`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnlimitedRule {
    /// The rule's name.
    pub rule: String,
    /// Path of the rule.
    pub descriptor: String,
    /// How an override of the caller refers to the rule.
    pub reference: String,
}

/// A rule that the request does not carry enough attributes to match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmatchedRule {
    /// The rule's name.
    pub rule: String,
    /// Path of the rule.
    pub descriptor: String,
    /// The missing attributes.
    pub attributes: Vec<String>,
}

/// Balance of one grant.
#[derive(Clone, Debug)]
pub struct GrantBalance {
    /// ID of the grant.
    pub id: String,
    /// Names of the rules that the grant covers.
    pub rules: Vec<String>,
    /// Units granted.
    pub units: u64,
    /// Units remaining; `None` if the store could not return them.
    pub remaining: Option<u64>,
    /// Expiry time.
    pub expires_at: Timestamp,
}

/// Usage of all limits of one caller.
#[derive(Clone, Debug)]
pub struct Usage {
    /// The domain.
    pub domain: String,
    /// The caller's tier.
    pub tier: Option<String>,
    /// Usage per limit, in the order of the rules.
    pub limits: Vec<LimitUsage>,
    /// Rules that set no rate for the caller.
    pub unlimited: Vec<UnlimitedRule>,
    /// Rules that need more attributes to match.
    pub unmatched: Vec<UnmatchedRule>,
    /// Balances of the caller's grants.
    pub grants: Vec<GrantBalance>,
}

/// Reason why usage is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UsageError {
    /// The domain is unknown, or missing while several are loaded.
    #[error("{0}")]
    Domain(String),
    /// No rule with a per-caller counter has this name.
    #[error("{0}")]
    Rule(String),
    /// No limit of the caller has a counter that can be reset.
    #[error("{0}")]
    NoReset(String),
    /// A signal that was supposed is not one of the rules.
    #[error(transparent)]
    Signal(#[from] SignalError),
    /// The counters could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Selects a caller's limits.
#[derive(Clone, Copy, Debug)]
pub struct UsageOf<'a> {
    /// The domain; may be absent if there is only one.
    pub domain: Option<&'a str>,
    /// The attribute that identifies the caller.
    pub key: &'a str,
    /// Attributes of the caller's requests, with that one.
    pub attributes: &'a Attributes<'a>,
    /// Full address of the client, if the attribute `remote_address` contains only its network.
    pub address: Option<IpAddr>,
    /// Only this rule.
    pub rule: Option<&'a str>,
}

impl UsageOf<'_> {
    /// Returns the check that reads the counters of these attributes.
    fn check<'c>(&self, domain: &'c Domain, attributes: &'c Attributes<'c>) -> Check<'c> {
        let check = Check::attributes(domain.name(), attributes).with_cost(Cost::PEEK);
        self.address.map_or(check, |address| check.with_client_address(address))
    }
}

/// Maximum number of attribute sets that are read for rules on fixed values; rules beyond it are listed by their
/// attributes.
const MAX_GIVEN: usize = 100;

/// The counters of one matched limit: more than one if the rule splits them into shards.
pub(crate) struct CounterSet<'p> {
    pub(crate) limit: usize,
    /// Key parts of each counter.
    pub(crate) names: Vec<SmallVec<[KeyPart<'p>; 4]>>,
}

/// What is done with the counters that are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Peek,
    /// Refund what the caller itself has used, first.
    Reset,
}

impl<S: CounterStore> Limiter<S> {
    /// Returns the usage of the limits that can bind a caller, for one rule or for all.
    ///
    /// # Errors
    /// [`UsageError`] with the reason.
    pub async fn usage(&self, of: &UsageOf<'_>) -> Result<Usage, UsageError> {
        self.read_usage(of, Reading::Peek).await
    }

    /// Resets the usage of the limits that no other caller shares, and returns the new usage. Permits are held, not used:
    /// they are not released.
    ///
    /// # Errors
    /// [`UsageError`] with the reason. What was reset before the store failed stays reset.
    pub async fn reset(&self, of: &UsageOf<'_>) -> Result<Usage, UsageError> {
        self.read_usage(of, Reading::Reset).await
    }

    async fn read_usage(&self, of: &UsageOf<'_>, reading: Reading) -> Result<Usage, UsageError> {
        let rules = self.rules();
        let domain = find_domain(&rules, of.domain)?;
        let only = of.rule.map(|name| find_rules(&rules, of.key, name)).transpose()?;
        let check = of.check(domain, of.attributes);
        let quota = self.quota_for(&check, &rules);
        let wanted = |id: u32| only.as_ref().is_none_or(|only| only.contains(&id));
        let mut found = domain.caller_rules(of.key, of.attributes);
        found.retain(|one| wanted(one.rule.id));
        // Rules on the same values are read together, as one request with these values matches them.
        let mut sets: Vec<&[(&str, &str)]> = vec![&[]];
        for one in found.iter().filter(|one| one.missing.is_empty()) {
            if !sets.contains(&&one.given[..]) && sets.len() <= MAX_GIVEN {
                sets.push(&one.given);
            }
        }
        let (mut limits, mut unlimited, mut tier, mut failed) = (Vec::new(), Vec::new(), None, None);
        for given in sets.iter().copied() {
            let attributes: Vec<(&str, &str)> = of.attributes.iter().chain(given).copied().collect();
            let check = of.check(domain, &attributes);
            // A given value may have a quota of its own.
            let own_quota = (!given.is_empty()).then(|| self.quota_for(&check, &rules));
            let quotas = own_quota.as_ref().map_or(&quota.quotas, |own| &own.quotas);
            let mut plan = Plan::default();
            plan_into(&rules, quotas, &check, &mut plan);
            let in_force = self.put_in_force(&check, &rules, &mut plan);
            let own: Vec<&PerCallerRule<'_>> =
                found.iter().filter(|one| one.missing.is_empty() && one.given == given).collect();
            let lifted = own.iter().filter(|one| plan.set_for(one.rule).unlimited);
            unlimited.extend(lifted.map(|one| UnlimitedRule {
                rule: one.rule.name.clone(),
                descriptor: one.path.clone(),
                reference: one.reference.clone(),
            }));
            match self.read_plan(&plan, in_force, &own, reading).await {
                Ok(read) => limits.extend(read),
                // What cannot be reached is no reason to withhold the rest.
                Err((read, error)) => {
                    // What can be read and was not reset must not seem to be.
                    if reading == Reading::Reset && read.iter().any(|one| one.remaining.is_some()) {
                        return Err(error.into());
                    }
                    limits.extend(read);
                    failed = failed.or(Some(error));
                }
            }
            if given.is_empty() {
                let own = found.iter().filter(|one| !one.is_shared);
                tier = own.filter_map(|one| plan.tier_for(one.rule)).next().or(plan.tier).map(str::to_owned);
            }
        }
        let is_useless = match reading {
            Reading::Peek => limits.iter().all(|one| one.remaining.is_none()),
            Reading::Reset => !limits.iter().any(|one| one.is_reset == Some(true)),
        };
        if let Some(error) = failed.filter(|_| is_useless) {
            return Err(error.into());
        }
        if reading == Reading::Reset && limits.iter().all(|one| one.is_reset.is_none()) {
            let why = match limits.is_empty() {
                true => "no rule with a counter of its own matches the caller",
                false => "the caller shares the counters with others, or they count requests in flight",
            };
            return Err(UsageError::NoReset(format!("nothing can be reset: {why}")));
        }
        limits.sort_by_key(|one| one.rule_id);
        let is_read = |one: &PerCallerRule<'_>| one.missing.is_empty() && sets.contains(&&one.given[..]);
        let needs = found.iter().filter(|one| !is_read(one)).map(|one| {
            let names = one.given.iter().map(|(name, _)| name).chain(&one.missing);
            UnmatchedRule {
                rule: one.rule.name.clone(),
                descriptor: one.path.clone(),
                attributes: names.map(|name| (*name).to_owned()).collect(),
            }
        });
        Ok(Usage {
            domain: domain.name().to_owned(),
            tier,
            limits,
            unlimited,
            unmatched: needs.collect(),
            grants: self.grant_balances(&rules, quota.grants.as_deref()).await,
        })
    }

    /// Reads the counters of these rules, which the plan's request matches. Limits whose counters cannot be reached have no
    /// `remaining`; an error comes with them if that is so for all, or one that was not reset can be read.
    async fn read_plan(
        &self,
        plan: &Plan<'_>,
        mut in_force: Vec<InForce>,
        own: &[&PerCallerRule<'_>],
        reading: Reading,
    ) -> Result<Vec<LimitUsage>, (Vec<LimitUsage>, StoreError)> {
        let (mut failed, mut unreset) = (None, None);
        let mut is_reset = vec![None; plan.limits.len()];
        let of = |id: u32| own.iter().find(|own| own.rule.id == id);
        let counters = counters(plan, |matched| matched.rule.is_some_and(|rule| of(rule.id).is_some()));
        if reading == Reading::Reset {
            let is_own = |counter: &CounterSet<'_>| {
                let rule = plan.limits[counter.limit].rule.and_then(|rule| of(rule.id));
                rule.is_some_and(|rule| !rule.is_shared)
            };
            let spends = |charge: &Charge<'_>| charge.limit.algorithm() != Algorithm::Concurrency;
            let (of_counters, all): (Vec<usize>, Vec<Charge<'_>>) = counters
                .iter()
                .enumerate()
                .filter(|(_, counter)| is_own(counter))
                .flat_map(|(at, counter)| {
                    charges(plan, std::slice::from_ref(counter), Cost::RESET)
                        .into_iter()
                        .map(move |one| (at, one))
                })
                .filter(|(_, charge)| spends(charge))
                .unzip();
            if !all.is_empty() {
                of_counters.iter().for_each(|at| is_reset[counters[*at].limit] = Some(true));
                all.iter().for_each(|reset| self.reset_local(reset));
                let error = self.reset_counters(&all).await.err();
                for at in error.iter().flat_map(|(failed, _)| failed) {
                    is_reset[counters[of_counters[*at]].limit] = Some(false);
                }
                unreset = error.map(|(at, error)| {
                    (at.into_iter().map(|at| of_counters[at]).collect::<Vec<usize>>(), error)
                });
                self.full_counters.clear();
            }
        }
        let looks = charges(plan, &counters, Cost::PEEK);
        let peeked = match looks.is_empty() {
            true => SmallVec::new(),
            false => self.peek(&looks).await.unwrap_or_else(|error| {
                failed = Some(error);
                std::iter::repeat_n(Outcome::UNKNOWN, looks.len()).collect()
            }),
        };
        let (mut peeked, mut looks, now) = (peeked.into_iter(), looks.iter(), self.clock.now());
        let mut is_seen = Vec::new();
        let limits = counters.iter().filter_map(|counter| {
            let outcomes: Vec<Outcome> = peeked.by_ref().take(counter.names.len()).collect();
            is_seen.push(outcomes.iter().any(|outcome| outcome.verdict != Verdict::Unknown));
            let own: Vec<&Charge<'_>> = looks.by_ref().take(counter.names.len()).collect();
            let hash = own.first()?.key.stable_hash();
            let rule = of(plan.limits[counter.limit].rule?.id)?;
            let region = self.region_of(own.iter().copied());
            let put = in_force.get_mut(counter.limit)?;
            let (measure, configured) = (put.measure.take(), put.configured.take());
            let used = used(plan, counter, &outcomes, rule, (now, hash));
            let is_assumed = own.iter().any(|charge| self.is_assumed(charge));
            let is_reset = is_reset[counter.limit];
            Some(LimitUsage {
                is_assumed,
                is_reset,
                region,
                measure,
                configured,
                is_charged: put.is_charged,
                source: put.source,
                ..used
            })
        });
        let limits = limits.collect();
        if let Some((unreset, error)) = unreset
            && unreset.iter().any(|at| is_seen[*at])
        {
            failed = Some(error);
        }
        match failed {
            None => Ok(limits),
            Some(error) => Err((limits, error)),
        }
    }

    /// Resets counters: all, or where some of them cannot be reached, the others. Returns which were not, and why.
    async fn reset_counters(&self, resets: &[Charge<'_>]) -> Result<(), (Vec<usize>, StoreError)> {
        // What is late is recorded as a reset once the store has made it, and only if it is kept.
        let mut error = match self.store.debit(resets).await.inspect_err(StoreError::keep_late) {
            Ok(()) => return Ok(()),
            Err(error) if resets.len() == 1 => return Err((vec![0], error)),
            Err(error) => error,
        };
        let each = resets.iter().map(|reset| self.store.debit(std::slice::from_ref(reset)));
        let mut failed = Vec::new();
        for (at, result) in join_all(each).await.into_iter().enumerate() {
            if let Err(cause) = result.inspect_err(StoreError::keep_late) {
                failed.push(at);
                error = cause;
            }
        }
        if failed.is_empty() { Ok(()) } else { Err((failed, error)) }
    }

    /// Reads counters: all, or where some of them cannot be reached, the others; those are unknown.
    async fn peek(&self, looks: &[Charge<'_>]) -> Result<SmallVec<[Outcome; 4]>, StoreError> {
        let error = match self.store.charge(looks).await {
            Ok(outcomes) => return Ok(outcomes.per_charge.into_iter().collect()),
            Err(error) => error,
        };
        let each = looks.iter().map(|look| self.store.charge(std::slice::from_ref(look)));
        let results = join_all(each).await;
        if results.iter().all(Result::is_err) {
            return Err(error);
        }
        let first = |result: Result<Outcomes, StoreError>| {
            result.ok().and_then(|outcomes| outcomes.per_charge.into_iter().next())
        };
        Ok(results.into_iter().map(|result| first(result).unwrap_or(Outcome::UNKNOWN)).collect())
    }

    /// Returns how cells share the counters of one limit: what others have consumed of all its shards.
    pub(crate) fn region_of<'c>(
        &self,
        counters: impl Iterator<Item = &'c Charge<'c>>,
    ) -> Option<RegionStatus> {
        counters.filter_map(|counter| self.store.region_status(counter)).reduce(|one, other| RegionStatus {
            others: one.others.zip(other.others).map(|(one, other)| one.saturating_add(other)),
            part: one.part.zip(other.part).map(|(one, other)| one.saturating_add(other)),
            ..one
        })
    }

    /// Returns the balances of all unexpired grants.
    pub(crate) async fn grant_balances(&self, rules: &Ruleset, grants: Option<&Grants>) -> Vec<GrantBalance> {
        let now = self.clock.now();
        let mut left = Vec::new();
        for grant in grants.into_iter().flatten().filter(|grant| now < grant.expires_at) {
            let name = grant.name();
            let look = grant.peek(&name);
            let outcomes = self.store.charge(&[look]).await.ok();
            let outcome = outcomes.and_then(|outcomes| outcomes.per_charge.first().copied());
            let outcome = outcome.unwrap_or(Outcome::UNKNOWN);
            left.push(GrantBalance {
                id: grant.id.to_string(),
                rules: grant.rules.iter().filter_map(|id| Some(rules.rule(*id)?.name.clone())).collect(),
                units: grant.units(),
                remaining: answered(&outcome),
                expires_at: grant.expires_at,
            });
        }
        left
    }
}

pub(crate) fn find_domain<'r>(rules: &'r Ruleset, name: Option<&str>) -> Result<&'r Domain, UsageError> {
    let names = || rules.domains().map(Domain::name).collect::<Vec<_>>().join(", ");
    let found = match name {
        Some(name) => rules.domain(name),
        None => Some(rules.domains()).and_then(|mut all| all.next().filter(|_| all.next().is_none())),
    };
    found.ok_or_else(|| {
        UsageError::Domain(match name {
            Some(_) => format!("there is no such domain; there is {}", names()),
            None => format!(
                "several domains are loaded; name one of {} as `?domain=NAME` (on the command line `--domain NAME`)",
                names()
            ),
        })
    })
}

fn find_rules(rules: &Ruleset, key: &str, name: &str) -> Result<Vec<u32>, UsageError> {
    let found = rules.find_per_caller_rules(key, name);
    if found.is_empty() {
        let shown: String = name.chars().take(50).collect();
        let why = format!(
            "no rule with a counter for each `{key}` is called `{shown}`; write its name, its path, or `default`"
        );
        return Err(UsageError::Rule(why));
    }
    Ok(found)
}

pub(crate) fn counters<'p>(
    plan: &Plan<'p>,
    wanted: impl Fn(&MatchedLimit<'_>) -> bool,
) -> Vec<CounterSet<'p>> {
    let hits = plan.limits.iter().enumerate().filter(|(_, matched)| wanted(matched));
    let counters = hits.map(|(at, matched)| {
        let parts = &plan.parts[usize::from(matched.parts.0)..usize::from(matched.parts.1)];
        let split = matched.shard_names();
        let names = if split.is_empty() {
            vec![parts.iter().copied().collect()]
        } else {
            split.iter().map(|name| plan.shard_parts(matched, name)).collect()
        };
        CounterSet { limit: at, names }
    });
    counters.collect()
}

/// Builds one independent charge per counter. Limits that may be leased are charged at the store, too.
pub(crate) fn charges<'a>(plan: &'a Plan<'_>, counters: &'a [CounterSet<'_>], cost: Cost) -> Charges<'a> {
    let each =
        counters.iter().flat_map(|counter| (0..).zip(&counter.names).map(|named| (counter.limit, named)));
    let charge = |(matched, (shard, parts)): (usize, (u16, &'a SmallVec<[KeyPart<'_>; 4]>))| {
        let matched = &plan.limits[matched];
        let key = CounterKey { scope: &matched.limit.scope, parts };
        let loss_policy = matched.rule.map_or_else(Default::default, |rule| rule.class.loss_policy());
        let mode = if matched.limit.mode == Mode::Local { Mode::Local } else { Mode::Central };
        let enforcement = Enforcement::Independent;
        Charge { enforcement, loss_policy, mode, ..Charge::new(key, matched.limit.for_shard(shard), cost) }
    };
    each.map(charge).collect()
}

fn used(
    plan: &Plan<'_>,
    counter: &CounterSet<'_>,
    outcomes: &[Outcome],
    own: &PerCallerRule<'_>,
    (now, hash): (Timestamp, u64),
) -> LimitUsage {
    let matched = &plan.limits[counter.limit];
    let rule = own.rule;
    let limit = &matched.limit.limit;
    let reset_after = outcomes.iter().map(|outcome| outcome.reset_after).max().unwrap_or(TimeDelta::ZERO);
    LimitUsage {
        rule: rule.name.clone(),
        rule_id: rule.id,
        descriptor: own.path.clone(),
        reference: own.reference.clone(),
        limit: limit.clone(),
        configured: None,
        unit: matched.limit.unit_name(matched.rule).map(str::to_owned),
        role: matched.role,
        is_enforced: crate::fold::decides(matched),
        source: LimitSource::Rule,
        measure: None,
        is_charged: true,
        remaining: outcomes.iter().map(answered).sum(),
        is_assumed: false,
        is_reset: None,
        reset_after,
        window: window(limit, (now, hash), reset_after),
        is_shared: own.is_shared,
        region: None,
    }
}

/// Returns the window that a limit's usage is of.
fn window(
    limit: &Limit,
    (now, hash): (Timestamp, u64),
    reset_after: TimeDelta,
) -> Option<(Timestamp, Timestamp)> {
    if limit.algorithm() == Algorithm::Concurrency {
        return None;
    }
    limit.window(now, hash).or_else(|| {
        let length = limit.rate().period.length();
        // An unused limit has its whole period ahead.
        let end = now + if reset_after == TimeDelta::ZERO { length } else { reset_after };
        let start = Timestamp::from_micros(end.as_micros().saturating_sub(length.as_micros()));
        Some((start.min(now), end))
    })
}

/// Returns where the number of a matched limit comes from.
pub(crate) fn source(plan: &Plan<'_>, matched: &MatchedLimit<'_>) -> LimitSource {
    let Some(rule) = matched.rule else { return LimitSource::Request };
    match &matched.limit {
        LimitOrigin::Override(_) => LimitSource::Override,
        _ if plan.tier_for(rule).is_some_and(|tier| rule.tiers.iter().any(|(name, _)| name == tier)) => {
            LimitSource::Tier
        }
        _ => LimitSource::Rule,
    }
}

pub(crate) fn answered(outcome: &Outcome) -> Option<u64> {
    (outcome.verdict != Verdict::Unknown).then_some(outcome.remaining)
}
