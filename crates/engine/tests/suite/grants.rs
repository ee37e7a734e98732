//! Extra quota: a caller gets what the limit lets through and what was granted, to the unit, whatever the algorithm.

use crate::rig::{Memory, rules};
use proptest::prelude::*;
use std::sync::Arc;
use tollgate_core::{Clock, Cost, CounterOwner, Limit, ManualClock, State, TimeDelta, Timestamp};
use tollgate_engine::{
    CallerQuota, Check, Grant, Grants, Limiter, Origin, QuotaProvider, Settlement, UsageOf,
};
use tollgate_rules::Ruleset;
use tollgate_store::{MemoryConfig, MemoryStore};

/// Grants for one caller.
struct Granted(Arc<Grants>);

impl QuotaProvider for Granted {
    fn lookup(&self, check: &Check<'_>, _: &Ruleset, _: &dyn Clock) -> CallerQuota {
        CallerQuota {
            grants: (check.value("api_key") == Some("vip")).then(|| Arc::clone(&self.0)),
            ..CallerQuota::default()
        }
    }
}

fn of<'a>(attributes: &'a [(&'a str, &'a str)]) -> UsageOf<'a> {
    UsageOf { domain: None, key: "api_key", attributes, address: None, rule: None }
}

const DAY: TimeDelta = TimeDelta::from_secs(86_400);

struct Rig {
    limiter: Limiter<Memory>,
    clock: Arc<ManualClock>,
}

/// Grants of these units each, for the rules about `api_key` that are called so.
fn rig(text: &str, grants: &[(&str, u64)]) -> Rig {
    let rules = rules(text);
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let until = clock.now() + DAY;
    let grant = |(at, (rule, units)): (usize, &(&str, u64))| {
        let covered = rules.find_per_caller_rules("api_key", rule);
        assert!(!covered.is_empty(), "{rule}");
        Arc::new(Grant::new(&format!("g{at}"), *units, covered, DAY, until).expect("a grant"))
    };
    let grants = Arc::new(grants.iter().enumerate().map(grant).collect::<Grants>());
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    Rig { limiter: Limiter::new(rules, store, time).with_quotas(Arc::new(Granted(grants))), clock }
}

impl Rig {
    fn take(&self, attributes: &[(&str, &str)], cost: u64) -> tollgate_engine::Decision {
        let check = Check::attributes("d", attributes).with_cost(Cost::new(cost));
        pollster::block_on(self.limiter.check(&check))
    }

    fn passes(&self, attributes: &[(&str, &str)]) -> usize {
        (0..100).take_while(|_| self.take(attributes, 1).is_allowed()).count()
    }

    fn left(&self) -> Vec<Option<u64>> {
        let usage = pollster::block_on(self.limiter.usage(&of(&[("api_key", "vip")])));
        usage.expect("usage").grants.iter().map(|grant| grant.remaining).collect()
    }
}

/// Otherwise each cell gives the units of a grant once more, where one cell should decide.
#[test]
fn a_grant_is_decided_by_the_owner_of_its_rules_counters() {
    let rules = rules(
        "
domain: d
descriptors:
  - {key: api_key, name: plain, limit: 9/day}
  - {key: user, name: named, limit: 9/day, region: {mode: owner, owner: eu}}
  - {key: tenant, name: leased, limit: 9/day, region: leased}
  - {key: team, name: homes, limit: 9/day, region: {mode: owner, home: home_region}}
  - {key: part, name: parts, limit: 9/day, region: split}
",
    );
    let owner = |key: &str, rule: &str| {
        let covered = rules.find_per_caller_rules(key, rule);
        assert!(!covered.is_empty(), "{rule}");
        rules.grant_owner(&covered)
    };
    assert_eq!(owner("api_key", "plain"), None);
    assert_eq!(owner("user", "named"), Some(CounterOwner::Region("eu")));
    assert_eq!(owner("tenant", "leased"), Some(CounterOwner::Hash));
    assert_eq!(owner("team", "homes"), Some(CounterOwner::Hash));
    assert_eq!(owner("part", "parts"), None);
}

const FORMS: [&str; 8] = [
    "limit: 7/second",
    "limit: 10/minute, burst: 4",
    "limit: 10/minute, algorithm: token_bucket",
    "limit: 10/minute, algorithm: fixed_window",
    "limit: 10/minute, algorithm: sliding_window",
    "limit: 10/minute, algorithm: strict_window",
    "limit: 10/minute, algorithm: sliding_log",
    "limit: 10/day, algorithm: fixed_window",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_grant_adds_its_units_and_no_more(
        form in 0..FORMS.len(),
        units in 1_u64..30,
        trace in prop::collection::vec((0_u64..20_000, 1_u64..6), 1..120),
    ) {
        let rig = rig(&format!("{{domain: d, descriptors: [{{key: api_key, {}}}]}}", FORMS[form]), &[("default", units)]);
        let limit: Limit = rig.limiter.rules().rules()[0].limits.limits[0].limit.clone();
        let (mut state, mut left) = (State::default(), units);
        for (wait, cost) in trace {
            rig.clock.advance(TimeDelta::from_millis(wait));
            let fits = limit.step(&mut state, rig.clock.now(), Cost::new(cost)).verdict.is_allowed();
            let granted = !fits && cost <= left;
            left -= if granted { cost } else { 0 };
            let decision = rig.take(&[("api_key", "vip")], cost);
            prop_assert_eq!(decision.is_allowed(), fits || granted);
            prop_assert_eq!(decision.origin, if granted { Origin::Grant } else { Origin::Store });
        }
        prop_assert_eq!(rig.left(), vec![Some(left)]);
    }
}

#[test]
fn only_the_longest_window_of_the_rule_is_extended() {
    let rig = rig("{domain: d, descriptors: [{key: api_key, limit: [3/second, 5/day]}]}", &[("default", 4)]);
    assert_eq!(rig.passes(&[("api_key", "vip")]), 3, "the second's limit stays");
    assert_eq!(rig.left(), [Some(4)]);
    rig.clock.advance(TimeDelta::from_secs(1));
    assert_eq!(rig.passes(&[("api_key", "vip")]), 3, "two of the day, one granted");
    assert_eq!(rig.left(), [Some(3)]);
    assert_eq!(rig.passes(&[("api_key", "other")]), 3);
}

#[test]
fn an_uncovered_limit_still_denies_and_nothing_is_charged() {
    let text = "{domain: d, descriptors: [{key: api_key, limit: 2/day}, {key: path, limit: 4/day}]}";
    let rig = rig(text, &[("default", 10)]);
    assert_eq!(rig.passes(&[("api_key", "vip"), ("path", "/a")]), 4);
    assert_eq!(rig.left(), [Some(8)], "what the path's limit refused took nothing of the grant");
    let denied = rig.take(&[("api_key", "vip"), ("path", "/a")], 1);
    assert_eq!(denied.denied_by_name(), Some("api_key"), "as without a grant");
    assert_eq!(rig.passes(&[("api_key", "vip")]), 8);
    assert!(!rig.take(&[("api_key", "vip")], 1).is_allowed());
}

/// A tenant that has used up its guarantee of a capacity with room must get what it was granted, as others do.
#[test]
fn a_guarantee_that_is_used_up_keeps_nobody_from_a_grant() {
    let text = "
domain: d
descriptors: [{key: api_key, limit: 8/day}]
overload:
  fleet: {capacity: 1000 in flight, ttl: 600s}
  fairness: {by: tenant, guarantees: {enterprise: 0.5% each}}
";
    for tier in ["none", "enterprise"] {
        let rig = rig(text, &[("default", 12)]);
        let caller = [("api_key", "vip"), ("tenant", "acme"), ("tier", tier)];
        let passed = (0..30).filter(|_| {
            rig.clock.advance(TimeDelta::from_millis(15));
            rig.take(&caller, 1).is_allowed()
        });
        assert_eq!((passed.count(), rig.left()), (20, vec![Some(0)]), "{tier}");
    }
}

#[test]
fn grants_are_used_one_after_another_until_they_end() {
    let rig =
        rig("{domain: d, descriptors: [{key: api_key, limit: 1/day}]}", &[("default", 2), ("api_key", 3)]);
    assert_eq!(rig.passes(&[("api_key", "vip")]), 6);
    assert_eq!(rig.left(), [Some(0), Some(0)]);
    let late = self::rig("{domain: d, descriptors: [{key: api_key, limit: 1/day}]}", &[("default", 2)]);
    late.clock.advance(DAY);
    assert_eq!(late.passes(&[("api_key", "vip")]), 1, "it has ended");
}

#[test]
fn a_canceled_reservation_refunds_its_grant() {
    let rig = rig("{domain: d, descriptors: [{key: api_key, limit: 5/day}]}", &[("default", 10)]);
    assert_eq!(rig.take(&[("api_key", "vip")], 5).origin, Origin::Store);
    let attributes = [("api_key", "vip")];
    let check = Check::attributes("d", &attributes).with_cost(Cost::new(8));
    let reserved =
        pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), None)).expect("reserved");
    assert_eq!((reserved.decision.origin, rig.left()), (Origin::Grant, vec![Some(2)]));
    let settled = pollster::block_on(rig.limiter.settle(reserved.id.expect("held"), 3));
    let settled = settled.map(|closed| closed.settlement);
    assert_eq!((settled, rig.left()), (Ok(Settlement::Settled(3)), vec![Some(7)]));
    let usage = pollster::block_on(rig.limiter.usage(&of(&attributes))).expect("usage");
    assert_eq!(usage.limits[0].used(), Some(5), "the limit itself was given nothing");
}

#[test]
fn grants_apply_to_the_envoy_profile_too() {
    let rig = rig(
        "{domain: d, profile: envoy, descriptors: [{key: api_key, rate_limit: {unit: day, requests_per_unit: 2}}]}",
        &[("default", 3)],
    );
    assert_eq!(rig.passes(&[("api_key", "vip")]), 5);
}
