//! A preview foretells decisions: a replayed request is decided as a check decides it. Where the two differ, operators publish rules
//! by a report that is wrong.

use crate::rig::{Rig, rig};
use proptest::prelude::*;
use std::sync::Arc;
use tollgate_core::{Clock, Cost, TimeDelta};
use tollgate_engine::{CallerQuota, Check, Decision, Limiter, QuotaProvider, SampleWeight, UnknownDomain};
use tollgate_rules::{Override, Ruleset};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: user, priority: 1, limit: [4/second, 20/minute], soft: 50%}
  - {key: user, value: user-0, name: shadow, shadow: true, limit: 2/second}
  - {key: api_key, name: key, algorithm: fixed_window, limit: 9/second}
  - {key: customer, name: customer, limit: 12/second, descriptors: [{key: endpoint, name: nested, limit: 6/second}]}
  - {key: plan, name: degrades, action: degrade, limit: 3/second}
  - {key: account_id, name: some, enforce: 50%, limit: 3/second}
  - {key: either, name: one, quota_mode: true, limit: 3/second}
  - {key: or, name: other, quota_mode: true, limit: 5/second}
  - {key: work, name: work, cost: tokens, limit: 40/second}
  - {key: queue, name: queue, action: delay, limit: {count: 4, period: second, burst: 6}}
  - {key: exempt, value: free, rate_limit: {unlimited: true}}
  - {key: global, name: total, limit: 30/second}
";

/// A quota of one caller, in place of the rule's limit.
struct OneQuota;

impl QuotaProvider for OneQuota {
    fn lookup(&self, check: &Check<'_>, rules: &Ruleset, _: &dyn Clock) -> CallerQuota {
        if check.value("api_key") != Some("key-1") {
            return CallerQuota::default();
        }
        let own = Override::new("key", 3, "second");
        let (quota, unfit) = rules.compile_overrides("api_key", None, &[own]);
        assert!(unfit.is_empty(), "{unfit:?}");
        CallerQuota { quotas: [Arc::new(quota)].into_iter().collect(), grants: None }
    }
}

fn with_quota(text: &str) -> Rig {
    let Rig { clock, limiter } = rig(text);
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let limiter = Limiter::new(limiter.rules(), store, time).with_quotas(Arc::new(OneQuota));
    let limiter = limiter.with_unknown_domain(UnknownDomain::Deny);
    Rig { clock, limiter }
}

fn checked(limiter: &Limiter<crate::rig::Memory>, check: &Check<'_>) -> Decision {
    pollster::block_on(limiter.check(check))
}

fn replayed(limiter: &Limiter<crate::rig::Memory>, check: &Check<'_>) -> Decision {
    limiter.replay(check, SampleWeight::ONE).expect("memory does not wait")
}

/// All of a decision but its ID.
fn shown(decision: &Decision) -> String {
    let limits: Vec<_> = decision
        .limits
        .iter()
        .map(|status| (decision.limit_name(status), status.role, status.descriptor, status.outcome))
        .collect();
    let by = [decision.denied_by, decision.degraded_by, decision.warned_by];
    format!(
        "{:?} {:?} {:?} {by:?} {:?} {:?} {limits:?}",
        decision.verdict, decision.origin, decision.at, decision.malformed_cost, decision.descriptors
    )
}

type Step = (usize, i64, u64, u16, u8);

/// Makes the request of a step.
fn with_check<T>((user, cost, _, keys, tokens): Step, use_check: impl FnOnce(&Check<'_>) -> T) -> T {
    let names = [format!("user-{user}"), format!("key-{user}"), format!("customer-{}", user % 2)];
    let mut request = Vec::new();
    let optional = [
        ("user", names[0].as_str()),
        ("api_key", &names[1]),
        ("customer", &names[2]),
        ("endpoint", "GET /x"),
        ("plan", "some"),
        ("account_id", &names[0]),
        ("either", &names[0]),
        ("or", &names[0]),
        ("work", &names[0]),
        ("queue", &names[0]),
        ("exempt", "free"),
    ];
    for (bit, pair) in optional.into_iter().enumerate() {
        if keys & (1 << bit) != 0 {
            request.push(pair);
        }
    }
    request.push(("tokens", ["7", "0", "many"][usize::from(tokens % 3)]));
    let domain = if keys & (1 << 15) != 0 && tokens == 0 { "unknown" } else { "d" };
    let cost = if cost < 0 { Cost::refund(cost.unsigned_abs()) } else { Cost::new(cost.unsigned_abs()) };
    use_check(&Check::attributes(domain, &request).with_cost(cost))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_replayed_request_is_decided_as_a_check_is(
        steps in prop::collection::vec((0..3_usize, -1..4_i64, 0..300_u64, any::<u16>(), 0..9_u8), 1..120),
    ) {
        let (live, preview) = (with_quota(RULES), with_quota(RULES));
        for step in steps {
            for rig in [&live, &preview] {
                rig.clock.advance(TimeDelta::from_millis(step.2));
            }
            let decided = with_check(step, |check| shown(&checked(&live.limiter, check)));
            let foretold = with_check(step, |check| shown(&replayed(&preview.limiter, check)));
            prop_assert_eq!(foretold, decided, "{:?}", step);
        }
    }

    /// A check finds the shard that has room, so a split rule admits its whole limit; so does its preview.
    #[test]
    fn a_split_rule_admits_as_much_in_a_replay(
        limit in 16..60_u64, split in 2..=16_u64, waits in prop::collection::vec(0..200_u64, 1..200),
    ) {
        let rules = format!(
            "{{domain: d, descriptors: [{{key: user, name: split, algorithm: fixed_window, limit: {limit}/second, \
             split: {split}}}, {{key: global, name: total, limit: 50/second}}]}}"
        );
        let (live, preview) = (rig(&rules), rig(&rules));
        let check = Check::attributes("d", &[("user", "u")]);
        for wait in waits {
            for rig in [&live, &preview] {
                rig.clock.advance(TimeDelta::from_millis(wait / 10));
            }
            let (decided, foretold) = (checked(&live.limiter, &check), replayed(&preview.limiter, &check));
            prop_assert_eq!(foretold.is_allowed(), decided.is_allowed());
            prop_assert_eq!(foretold.denied_by_name(), decided.denied_by_name());
        }
    }
}

/// A sample that represents more requests than a shard admits is no reason to call them all denied.
#[test]
fn a_sample_is_charged_to_the_whole_of_a_split_limit() {
    let preview = rig("{domain: d, descriptors: [{key: user, limit: 80/minute, split: 8}]}");
    let check = Check::attributes("d", &[("user", "u")]);
    let weight = SampleWeight { per_caller: 16, shared: 16, ..SampleWeight::ONE };
    let replay = || preview.limiter.replay(&check, weight).expect("memory does not wait").is_allowed();
    let passed = (0..9).filter(|_| replay()).count();
    assert_eq!(passed, 5);
}
