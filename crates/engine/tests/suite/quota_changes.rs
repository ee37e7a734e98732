//! Limits that change while traffic flows keep what was used: every decision is what a plain list of all admissions and
//! the limit of that moment say it must be. So no change gives used quota back, and none lets a burst above the new limit.

use crate::rig::rules;
use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{CallerQuota, Check, Limiter, QuotaProvider};
use tollgate_rules::{Override, OverrideRate, Ruleset};
use tollgate_store::{MemoryConfig, MemoryStore};

/// So many a minute, and so many at once where that is another number.
type Quota = (u64, Option<u64>);

/// What is agreed with everybody at the moment, or nothing.
struct Changing(Mutex<Option<Quota>>);

impl QuotaProvider for Changing {
    fn lookup(&self, _: &Check<'_>, rules: &Ruleset, _: &dyn Clock) -> CallerQuota {
        let Some((count, burst)) = *self.0.lock().expect("a number") else { return CallerQuota::default() };
        let limit = Some(OverrideRate { count, period: "minute".to_owned(), burst });
        let own = Override { limit, ..Override::new("default", count, "minute") };
        let (tenant, unfit) = rules.compile_overrides("api_key", None, &[own]);
        assert!(unfit.is_empty(), "{unfit:?}");
        CallerQuota { quotas: [Arc::new(tenant)].into_iter().collect(), grants: None }
    }
}

const MINUTE: u64 = 60_000_000;
/// What the rule itself says.
const RULES_LIMIT: u64 = 20;

/// All admissions so far: when, how many units, and by which limit.
type Past = [(u64, u64, u64)];

fn sum(past: &Past, within: impl Fn(u64) -> bool) -> u64 {
    past.iter().filter(|(at, ..)| within(*at)).map(|(_, units, _)| units).sum()
}

/// Whether `units` fit now, from the past alone.
fn fits(algorithm: &str, past: &Past, now: u64, (limit, burst): Quota, units: u64) -> bool {
    let window = now - now % MINUTE;
    match algorithm {
        "fixed_window" => sum(past, |at| at >= window) + units <= limit,
        "sliding_log" => sum(past, |at| at + MINUTE > now) + units <= limit,
        "strict_window" => {
            let slot = |at: u64| at / (MINUTE / 10);
            sum(past, |at| slot(at) + 10 >= slot(now)) + units <= limit
        }
        "sliding_window" => {
            let last = sum(past, |at| at < window && at + MINUTE >= window);
            let this = sum(past, |at| at >= window);
            last * (MINUTE - (now - window)) + (this + units) * MINUTE <= limit * MINUTE
        }
        // What was used comes back as by the limit that admitted last, and is the same number of units to every limit.
        _ => {
            let owed = |(full_at, by): (u64, u64), at: u64, limit: u64| {
                (full_at.saturating_sub(at) * (MINUTE / limit)).div_ceil(MINUTE / by)
            };
            let last = past.iter().fold((0, 1), |last, (at, units, by)| {
                (at + owed(last, *at, *by) + units * (MINUTE / by), *by)
            });
            owed(last, now, limit) + units * (MINUTE / limit) <= burst.unwrap_or(limit) * (MINUTE / limit)
        }
    }
}

const ALGORITHMS: [&str; 7] = [
    "gcra",
    "token_bucket",
    "leaky_bucket",
    "fixed_window",
    "sliding_window",
    "strict_window",
    "sliding_log",
];

#[derive(Clone, Debug)]
enum Step {
    Check(u64),
    Wait(u64),
    /// Nothing: the rule acts alone again.
    Change(Option<Quota>),
}

fn step() -> impl Strategy<Value = Step> {
    // Numbers whose units come back after whole microseconds: what is rounded elsewhere is another test's affair.
    let counts = prop::sample::select(vec![None, Some(1), Some(5), Some(10), Some(20), Some(30), Some(60)]);
    prop_oneof![
        6 => (1_u64..6).prop_map(Step::Check),
        2 => (1_u64..40_000_000).prop_map(Step::Wait),
        // No burst is above its count: see `Bucket::furthest`.
        1 => (counts, prop::option::of(1_u64..20)).prop_map(|(count, burst)| {
            Step::Change(count.map(|count| (count, burst.map(|burst| burst.min(count)))))
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_change_neither_gives_back_nor_lets_more_through(
        algorithm in prop::sample::select(ALGORITHMS.to_vec()),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let rules = rules(&format!(
            "{{domain: d, descriptors: [{{key: api_key, limit: {RULES_LIMIT}/minute, algorithm: {algorithm}}}]}}"
        ));
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let changing = Arc::new(Changing(Mutex::new(None)));
        let limiter = Limiter::new(rules, store, Arc::clone(&clock) as _).with_quotas(Arc::clone(&changing) as _);
        let (mut past, mut limit) = (Vec::new(), (RULES_LIMIT, None));
        let has_burst = ["gcra", "token_bucket", "leaky_bucket"].contains(&algorithm);
        let (mut since, mut at_once) = (0, 0);
        for step in steps {
            match step {
                Step::Wait(micros) => {
                    clock.advance(TimeDelta::from_micros(micros));
                    at_once = 0;
                }
                Step::Change(to) => {
                    let to = to.map(|(count, burst)| (count, burst.filter(|_| has_burst)));
                    *changing.0.lock().expect("a number") = to;
                    limit = to.unwrap_or((RULES_LIMIT, None));
                    (since, at_once) = (past.len(), 0);
                }
                Step::Check(units) => {
                    let now = clock.now().as_micros();
                    let check = Check::attributes("d", &[("api_key", "k")]).with_cost(Cost::new(units));
                    let decision = pollster::block_on(limiter.check(&check));
                    let expected = fits(algorithm, &past, now, limit, units);
                    prop_assert_eq!(decision.is_allowed(), expected, "{} after {:?}", algorithm, &past);
                    if expected {
                        past.push((now, units, limit.0));
                        at_once += units;
                        // In words, as users hear it: a burst after a change is never above the new limit.
                        prop_assert!(at_once <= limit.1.unwrap_or(limit.0), "{} at once, {} since the change", at_once, past.len() - since);
                    }
                }
            }
        }
    }
}
