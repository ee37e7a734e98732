//! Replays recent traffic through the active and the candidate rules. Both sets decide the same requests, in time
//! order, each with fresh counters, on a clock that only the replay moves. Pure: a sample and two rule sets in, an
//! impact report out. Counters that are per node in operation are per node here too.
//!
//! A request that represents several of its caller's requests is checked several times, spread over the time until
//! the caller's next one, up to a bound; beyond it, each check is charged for several. Concurrency permits are left
//! out, and so are counts from before the sample: five minutes of traffic do not use up a limit per day.
//!
//! Limits that follow signals are replayed as the rules have them, on both sides: signals of the past are not kept. If the
//! candidate adapts limits, it also decides with all of them tightened as far as it allows, which is the most that
//! signals can do.

use crate::preview::caller;
use crate::preview::sampled_request::SampledRequest;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{CallerQuota, Check, CounterSharing, Limiter, QuotaProvider, SampleWeight};
use tollgate_replica::KeyHasher;
use tollgate_replica::QuotaTable;
use tollgate_rules::{CallerOverrides, Ruleset};
use tollgate_store::{MemoryConfig, MemoryStore};
use utoipa::ToSchema;

/// Maximum number of checks per rule set.
const MAX_CHECKS: usize = 200_000;
/// Maximum number of checks for one sampled request.
const MAX_PIECES: usize = 64;
/// Memory for the counters of each rule set, in bytes.
const COUNTERS: usize = 32 << 20;
/// Number of callers listed.
const MAX_TOP: usize = 10;
/// Maximum time over which the checks of one sampled request are spread.
const SPREAD: TimeDelta = TimeDelta::from_secs(10);

/// Impact of candidate rules on recent traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct ImpactReport {
    /// Number of sampled requests.
    pub requests: u64,
    /// Number of requests that the sample represents.
    pub weight: u64,
    /// Share of these that is allowed now and would be denied.
    #[schema(minimum = 0, maximum = 1)]
    pub newly_denied_share: f64,
    /// Share that is denied now and would be allowed.
    #[schema(minimum = 0, maximum = 1)]
    pub newly_allowed_share: f64,
    /// Share of callers with newly denied requests.
    #[schema(minimum = 0, maximum = 1)]
    #[serde(rename = "callers_affected_share")]
    pub tenants_affected_share: f64,
    /// Share of callers with newly allowed requests.
    #[schema(minimum = 0, maximum = 1)]
    pub callers_newly_allowed_share: f64,
    /// The callers with the most newly denied requests.
    pub top: Vec<AffectedCaller>,
    /// Time span of the sample, in seconds.
    pub window_s: f64,
    /// Nodes whose traffic was replayed, this one first.
    pub nodes: Vec<String>,
    /// Live nodes that did not send their sample in time.
    #[serde(rename = "nodes_missing")]
    pub nodes_silent: Vec<String>,
    /// Whether the list of other nodes could not be read.
    pub nodes_unknown: bool,
    /// The same with limits tightened by signals as far as the rules allow; absent if none follow signals.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = TightenedImpact)]
    pub tightened: Option<TightenedImpact>,
}

/// What candidate rules would deny while signals hold the limits of all tiers at their `least`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct TightenedImpact {
    /// Share of requests that is allowed now and would be denied.
    #[schema(minimum = 0, maximum = 1)]
    pub newly_denied_share: f64,
    /// Share of callers with such requests.
    #[schema(minimum = 0, maximum = 1)]
    pub callers_affected_share: f64,
}

/// A caller with newly denied requests.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct AffectedCaller {
    /// The caller: the attribute that identifies it, and its value, masked as in lists.
    pub key_masked: String,
    /// Id of the caller, as in lists and the decision log; absent without a database.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub key_id: Option<String>,
    /// The rule that would deny most of its requests.
    pub rule: String,
    /// Share of its requests that would be newly denied.
    #[schema(minimum = 0, maximum = 1)]
    pub share: f64,
    /// Number of its requests that are denied now.
    pub before_denied: u64,
    /// Number of its requests that would be denied.
    pub after_denied: u64,
}

#[derive(Default)]
struct Tally {
    masked: String,
    id: Option<u64>,
    callers: u64,
    weight: u64,
    newly_denied: u64,
    newly_allowed: u64,
    denied_tightened: u64,
    before_denied: u64,
    after_denied: u64,
    rules: HashMap<String, u64>,
}

/// Replays `sample`, which is in time order, through `candidate` and `live`.
#[must_use]
pub fn replay(
    sample: &[SampledRequest],
    live: &Arc<Ruleset>,
    candidate: &Arc<Ruleset>,
    quotas: Option<&Arc<QuotaTable>>,
    counters: CounterSharing,
) -> ImpactReport {
    let provider = || quotas.map(|book| Arc::new(CompiledQuotas::new(book)) as Arc<dyn QuotaProvider>);
    compare(sample, (live, provider()), (candidate, provider()), counters, COUNTERS, None)
}

/// Like [`replay`], with the ids of callers.
pub(crate) fn replay_with_ids(
    sample: &[SampledRequest],
    live: &Arc<Ruleset>,
    candidate: &Arc<Ruleset>,
    quotas: &Arc<QuotaTable>,
    counters: CounterSharing,
    hasher: &KeyHasher,
) -> ImpactReport {
    let provider = || Some(Arc::new(CompiledQuotas::new(quotas)) as Arc<dyn QuotaProvider>);
    compare(sample, (live, provider()), (candidate, provider()), counters, COUNTERS, Some(hasher))
}

/// Replays the requests of one caller through the same rules with other terms.
pub(crate) fn replay_terms(
    sample: &[SampledRequest],
    rules: &Arc<Ruleset>,
    before: Option<Arc<CallerOverrides>>,
    after: Option<Arc<CallerOverrides>>,
    counters: CounterSharing,
) -> ImpactReport {
    let provider = |terms| Some(Arc::new(FixedTerms(terms)) as Arc<dyn QuotaProvider>);
    let memory = MemoryConfig::MIN_BYTES.max(sample.len() * 1_024);
    compare(sample, (rules, provider(before)), (rules, provider(after)), counters, memory, None)
}

/// Rules, and the quotas of callers.
type Side<'r> = (&'r Arc<Ruleset>, Option<Arc<dyn QuotaProvider>>);

fn compare(
    sample: &[SampledRequest],
    live: Side<'_>,
    candidate: Side<'_>,
    counters: CounterSharing,
    memory: usize,
    hasher: Option<&KeyHasher>,
) -> ImpactReport {
    let (Some(first), Some(last)) = (sample.first(), sample.last()) else { return ImpactReport::default() };
    let clock = Arc::new(ManualClock::at(first.at));
    let limiter = |(rules, quotas): Side<'_>| {
        let store = MemoryStore::new(&MemoryConfig::with_bytes(memory), Arc::clone(&clock)).ok()?;
        let limiter = Limiter::new(Arc::clone(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
        Some(match quotas {
            Some(quotas) => limiter.with_quotas(quotas),
            None => limiter,
        })
    };
    let adapts = |domain: &tollgate_rules::Domain| {
        domain.overload().is_some_and(|overload| overload.active_adapt().is_some())
    };
    let tightened = match candidate.0.domains().any(adapts) {
        true => limiter((candidate.0, candidate.1.clone())),
        false => None,
    };
    let (Some(live), Some(candidate)) = (limiter(live), limiter(candidate)) else {
        return ImpactReport::default();
    };
    if let Some(tightened) = &tightened {
        tightened.tighten_to_least();
    }
    let mut tallies: HashMap<u64, Tally> = HashMap::new();
    let (mut weight, mut denied, mut allowed, mut denied_tightened) = (0_u64, 0_u64, 0_u64, 0_u64);
    for (at, index, own) in schedule(sample) {
        clock.set(at);
        let one = &sample[index];
        let stands = SampleWeight {
            per_caller: own,
            shared: own.saturating_mul(one.callers),
            node: one.node,
            sharing: counters,
        };
        let (before, after) = one.with(|check| (live.replay(check, stands), candidate.replay(check, stands)));
        let (Some(before), Some(after)) = (before, after) else { continue };
        let tally = tallies.entry(one.caller).or_insert_with(|| {
            let (masked, id) = one.with(|check| caller::masked(check, hasher));
            Tally { masked, id, ..Tally::default() }
        });
        tally.callers = tally.callers.max(one.callers);
        weight += stands.shared;
        tally.weight += stands.shared;
        if !before.is_allowed() {
            tally.before_denied += stands.shared;
        }
        if !after.is_allowed() {
            tally.after_denied += stands.shared;
        }
        let at_least = tightened.as_ref().and_then(|own| one.with(|check| own.replay(check, stands)));
        if before.is_allowed() && at_least.is_some_and(|decision| !decision.is_allowed()) {
            denied_tightened += stands.shared;
            tally.denied_tightened += stands.shared;
        }
        match (before.is_allowed(), after.is_allowed()) {
            (true, false) => {
                denied += stands.shared;
                tally.newly_denied += stands.shared;
                let rule = after.denied_by_name().unwrap_or("").to_owned();
                *tally.rules.entry(rule).or_default() += stands.shared;
            }
            (false, true) => {
                allowed += stands.shared;
                tally.newly_allowed += stands.shared;
            }
            _ => {}
        }
    }
    let callers: u64 = tallies.values().map(|tally| tally.callers).sum();
    let having = |changed: fn(&Tally) -> u64| -> u64 {
        tallies.values().filter(|one| changed(one) > 0).map(|one| one.callers).sum()
    };
    let (denied_callers, allowed_callers) = (having(|one| one.newly_denied), having(|one| one.newly_allowed));
    ImpactReport {
        requests: sample.len() as u64,
        weight,
        newly_denied_share: share(denied, weight),
        newly_allowed_share: share(allowed, weight),
        tenants_affected_share: share(denied_callers, callers),
        callers_newly_allowed_share: share(allowed_callers, callers),
        tightened: tightened.map(|_| TightenedImpact {
            newly_denied_share: share(denied_tightened, weight),
            callers_affected_share: share(having(|one| one.denied_tightened), callers),
        }),
        top: top(tallies),
        window_s: last.at.since(first.at).as_micros() as f64 / 1e6,
        ..ImpactReport::default()
    }
}

/// Returns the checks to make: time, index in the sample, and the number of the caller's requests represented; in
/// time order.
fn schedule(sample: &[SampledRequest]) -> Vec<(Timestamp, usize, u64)> {
    let thinned = sample.iter().filter(|one| one.own > 1).count().max(1);
    let more = MAX_CHECKS.saturating_sub(sample.len()) / thinned;
    let max_pieces = (1 + more).min(MAX_PIECES) as u64;
    // A caller's requests to one node do not affect the spread of its requests to another.
    let mut next: HashMap<(u32, u64), Timestamp> = HashMap::new();
    let mut checks = Vec::with_capacity(sample.len());
    for (index, one) in sample.iter().enumerate().rev() {
        let until = next.insert((one.node, one.caller), one.at);
        let pieces = one.own.clamp(1, max_pieces);
        let gap = until.map_or(SPREAD, |until| until.since(one.at)).min(SPREAD).as_micros();
        for piece in 0..pieces {
            let at = Timestamp::from_micros(one.at.as_micros() + gap * piece / pieces);
            // The first pieces take the remainder.
            let own = one.own / pieces + u64::from(piece < one.own % pieces);
            checks.push((at, index, own));
        }
    }
    checks.sort_by_key(|(at, index, _)| (*at, *index));
    checks
}

fn top(tallies: HashMap<u64, Tally>) -> Vec<AffectedCaller> {
    let mut all: Vec<Tally> = tallies.into_values().filter(|tally| tally.newly_denied > 0).collect();
    all.sort_by(|a, b| (b.newly_denied, &a.masked).cmp(&(a.newly_denied, &b.masked)));
    let affected = |tally: Tally| AffectedCaller {
        share: share(tally.newly_denied, tally.weight),
        rule: tally
            .rules
            .into_iter()
            .max_by_key(|(_, count)| *count)
            .map_or_else(String::new, |(rule, _)| rule),
        key_masked: tally.masked,
        key_id: tally.id.map(|id| format!("{id:016x}")),
        before_denied: tally.before_denied,
        after_denied: tally.after_denied,
    };
    all.into_iter().take(MAX_TOP).map(affected).collect()
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The terms of the one caller of a replay.
struct FixedTerms(Option<Arc<CallerOverrides>>);

impl QuotaProvider for FixedTerms {
    fn lookup(&self, _: &Check<'_>, _: &Ruleset, _: &dyn Clock) -> CallerQuota {
        CallerQuota { quotas: self.0.iter().cloned().collect(), grants: None }
    }
}

/// Quotas, compiled once per replay: the quota table's own compiled copy is for the active rules.
struct CompiledQuotas {
    table: Arc<QuotaTable>,
    /// By the caller's table hash.
    known: Mutex<HashMap<u64, Option<Arc<CallerOverrides>>>>,
}

impl CompiledQuotas {
    fn new(table: &Arc<QuotaTable>) -> Self {
        Self { table: Arc::clone(table), known: Mutex::default() }
    }
}

impl QuotaProvider for CompiledQuotas {
    fn lookup(&self, check: &Check<'_>, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota {
        if self.table.is_empty() {
            return CallerQuota::default();
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // A one-time grant does not count when rules are compared.
        self.table.compile_sampled(check, rules, |hash| {
            known.entry(hash).or_insert_with(|| self.table.compile_hash(hash, rules, clock)).clone()
        })
    }
}
