//! What other rules would have done to the last traffic: both sets decide on the same requests, in the order of time, each
//! on fresh counters, on a clock that only the rehearsal moves. Pure: a sample and two rule sets in, figures out. Where nodes
//! have counters of their own, so have they here.
//!
//! A request that stands for several of its caller's is asked several times, spread over the time until the caller's next,
//! up to a bound; from there on each of these is charged for several. Permits are left out, and so is what counters held
//! before the sample began: a limit for a day is not used up by five minutes of traffic.

use crate::preview::caller;
use crate::preview::sampled_request::SampledRequest;
use crate::quota::table::QuotaTable;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{Clock, ManualClock, Span, Timestamp};
use tollgate_engine::{Counters, Limiter, Stands, Tenants};
use tollgate_rules::{Ruleset, Tenant};
use tollgate_store::{MemoryConfig, MemoryStore};
use utoipa::ToSchema;

/// The most that is asked of each rule set.
const MAX_CHECKS: usize = 200_000;
/// The most that one request of the sample is asked.
const MAX_CHECKS_PER_REQUEST: usize = 64;
/// Memory for the counters of each rule set.
const COUNTERS: usize = 32 << 20;
/// Callers that are named.
const MAX_TOP: usize = 10;
/// Thinned requests are spread over this at most.
const SPREAD: Span = Span::from_secs(10);

/// What other rules would have done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
#[schema(as = Rehearsal)]
pub struct ImpactReport {
    /// Requests of the sample.
    pub requests: u64,
    /// Requests that they stand for.
    pub weight: u64,
    /// Of these, the part that is let through now and would be denied.
    #[schema(minimum = 0, maximum = 1)]
    pub newly_denied_share: f64,
    /// The part that is denied now and would be let through.
    #[schema(minimum = 0, maximum = 1)]
    pub newly_allowed_share: f64,
    /// The part of callers of whom something would be newly denied.
    #[schema(minimum = 0, maximum = 1)]
    #[serde(rename = "callers_affected_share")]
    pub tenants_affected_share: f64,
    /// The callers of whom most would be newly denied.
    pub top: Vec<AffectedCaller>,
    /// The time that the sample spans.
    pub window_s: f64,
    /// The nodes whose traffic it is, this one first.
    pub nodes: Vec<String>,
    /// Nodes that are alive and did not tell what they remember in time.
    #[serde(rename = "nodes_missing")]
    pub nodes_silent: Vec<String>,
    /// The database did not say which other nodes there are.
    pub nodes_unknown: bool,
}

/// A caller of whom something would be newly denied.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = Affected)]
pub struct AffectedCaller {
    /// Who, by its first characters.
    pub key_masked: String,
    /// The rule that would deny most of it.
    pub rule: String,
    /// The part of its requests that would be newly denied.
    #[schema(minimum = 0, maximum = 1)]
    pub share: f64,
    /// How many of them are denied now.
    pub before_denied: u64,
    /// How many would be.
    pub after_denied: u64,
}

#[derive(Default)]
struct Tally {
    masked: String,
    callers: u64,
    weight: u64,
    newly_denied: u64,
    before_denied: u64,
    after_denied: u64,
    rules: HashMap<String, u64>,
}

/// Rehearses `candidate` beside `live`. The sample is in the order of time.
#[must_use]
pub fn replay(
    sample: &[SampledRequest],
    live: &Arc<Ruleset>,
    candidate: &Arc<Ruleset>,
    book: Option<&Arc<QuotaTable>>,
    counters: Counters,
) -> ImpactReport {
    let (Some(first), Some(last)) = (sample.first(), sample.last()) else { return ImpactReport::default() };
    let clock = Arc::new(ManualClock::at(first.at));
    let limiter = |rules: &Arc<Ruleset>| {
        let store = MemoryStore::new(&MemoryConfig::with_bytes(COUNTERS), Arc::clone(&clock)).ok()?;
        let limiter = Limiter::new(Arc::clone(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
        Some(match book {
            Some(book) => limiter.with_tenants(Arc::new(CompiledQuotas::new(book))),
            None => limiter,
        })
    };
    let (Some(live), Some(candidate)) = (limiter(live), limiter(candidate)) else {
        return ImpactReport::default();
    };
    let mut tallies: HashMap<u64, Tally> = HashMap::new();
    let (mut weight, mut denied, mut allowed) = (0_u64, 0_u64, 0_u64);
    for (at, place, own) in schedule(sample) {
        clock.set(at);
        let one = &sample[place];
        let stands = Stands { own, all: own.saturating_mul(one.callers), node: one.node, counters };
        let (before, after) =
            one.with(|check| (live.rehearse(check, stands), candidate.rehearse(check, stands)));
        let (Some(before), Some(after)) = (before, after) else { continue };
        let tally = tallies
            .entry(one.caller)
            .or_insert_with(|| Tally { masked: one.with(caller::masked), ..Tally::default() });
        tally.callers = tally.callers.max(one.callers);
        weight += stands.all;
        tally.weight += stands.all;
        if !before.is_allowed() {
            tally.before_denied += stands.all;
        }
        if !after.is_allowed() {
            tally.after_denied += stands.all;
        }
        match (before.is_allowed(), after.is_allowed()) {
            (true, false) => {
                denied += stands.all;
                tally.newly_denied += stands.all;
                let rule = after.denied_by_name().unwrap_or("").to_owned();
                *tally.rules.entry(rule).or_default() += stands.all;
            }
            (false, true) => allowed += stands.all,
            _ => {}
        }
    }
    let callers: u64 = tallies.values().map(|tally| tally.callers).sum();
    let affected: u64 = tallies.values().filter(|one| one.newly_denied > 0).map(|one| one.callers).sum();
    ImpactReport {
        requests: sample.len() as u64,
        weight,
        newly_denied_share: share(denied, weight),
        newly_allowed_share: share(allowed, weight),
        tenants_affected_share: share(affected, callers),
        top: top(tallies),
        window_s: last.at.since(first.at).as_micros() as f64 / 1e6,
        ..ImpactReport::default()
    }
}

/// What is asked: when, which of the sample, and for how many of its caller's requests; in the order of time.
fn schedule(sample: &[SampledRequest]) -> Vec<(Timestamp, usize, u64)> {
    let thinned = sample.iter().filter(|one| one.own > 1).count().max(1);
    let more = MAX_CHECKS.saturating_sub(sample.len()) / thinned;
    let most = (1 + more).min(MAX_CHECKS_PER_REQUEST) as u64;
    // What a caller asks of one node says nothing about when it asks another.
    let mut next: HashMap<(u32, u64), Timestamp> = HashMap::new();
    let mut asked = Vec::with_capacity(sample.len());
    for (place, one) in sample.iter().enumerate().rev() {
        let until = next.insert((one.node, one.caller), one.at);
        let pieces = one.own.clamp(1, most);
        let gap = until.map_or(SPREAD, |until| until.since(one.at)).min(SPREAD).as_micros();
        for piece in 0..pieces {
            let at = Timestamp::from_micros(one.at.as_micros() + gap * piece / pieces);
            // What does not divide evenly goes to the first.
            let own = one.own / pieces + u64::from(piece < one.own % pieces);
            asked.push((at, place, own));
        }
    }
    asked.sort_by_key(|(at, place, _)| (*at, *place));
    asked
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
        before_denied: tally.before_denied,
        after_denied: tally.after_denied,
    };
    all.into_iter().take(MAX_TOP).map(affected).collect()
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// What is agreed with callers, compiled once a rehearsal: the book's own copy is for the rules that act.
struct CompiledQuotas {
    table: Arc<QuotaTable>,
    known: Mutex<HashMap<String, Option<Arc<Tenant>>>>,
}

impl CompiledQuotas {
    fn new(book: &Arc<QuotaTable>) -> Self {
        Self { table: Arc::clone(book), known: Mutex::default() }
    }
}

impl Tenants for CompiledQuotas {
    fn find(&self, caller: &str, rules: &Ruleset, clock: &dyn Clock) -> tollgate_engine::Agreed {
        if self.table.is_empty() {
            return tollgate_engine::Agreed::default();
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let tenant = known
            .entry(caller.to_owned())
            .or_insert_with(|| self.table.compile(caller, rules, clock))
            .clone();
        // What is granted once is not what rules are judged by.
        tollgate_engine::Agreed { tenant, grants: None }
    }
}
