//! An explanation foretells the decision, to the unit and the microsecond, and changes nothing.

use crate::rig::{Memory, rules};
use proptest::prelude::*;
use std::sync::Arc;
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{
    ActiveMeasures, CallerQuota, Check, CheckExplanation, Decision, ExplainedLimit, Grant, Grants,
    LimitSource, Limiter, Measure, MeasureAction, MeasureTarget, Origin, QuotaProvider,
};
use tollgate_rules::{Descriptor, RuleResult, Ruleset};
use tollgate_store::{MemoryConfig, MemoryStore};

/// A grant for the caller `vip`.
struct Granted(Arc<Grants>);

impl QuotaProvider for Granted {
    fn lookup(&self, check: &Check<'_>, _: &Ruleset, _: &dyn Clock) -> CallerQuota {
        let is_vip = check.value("api_key") == Some("vip");
        CallerQuota { grants: is_vip.then(|| Arc::clone(&self.0)), ..CallerQuota::default() }
    }
}

const DAY: TimeDelta = TimeDelta::from_secs(86_400);

struct Rig {
    limiter: Limiter<Memory>,
    clock: Arc<ManualClock>,
    measures: Arc<ActiveMeasures>,
}

fn rig(text: &str) -> Rig {
    let rules = rules(text);
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let covered = rules.find_per_caller_rules("api_key", "default");
    let grants: Grants = match covered.is_empty() {
        true => Vec::new(),
        false => vec![Arc::new(Grant::new("g", 6, covered, DAY, clock.now() + DAY).expect("a grant"))],
    };
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let measures = Arc::new(ActiveMeasures::new(|key| key.len() as u64));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let limiter = Limiter::new(rules, store, time)
        .with_quotas(Arc::new(Granted(Arc::new(grants))))
        .with_measures(Arc::clone(&measures));
    Rig { limiter, clock, measures }
}

impl Rig {
    fn on(&self, measures: &[(MeasureAction, MeasureTarget)]) {
        let until = self.clock.now() + TimeDelta::from_secs(60);
        self.measures.replace(measures.iter().enumerate().map(|(at, (action, target))| Measure {
            name: format!("emergency:{at}").into(),
            action: *action,
            target: target.clone(),
            expires_at: until,
        }));
    }

    fn explain(&self, check: &Check<'_>) -> CheckExplanation {
        pollster::block_on(self.limiter.explain(None, Some(check.domain), check)).expect("an explanation")
    }

    fn decide(&self, check: &Check<'_>) -> Decision {
        pollster::block_on(self.limiter.check(check))
    }
}

/// What a decision says, without what differs between two equal ones.
fn summary(decision: &Decision) -> String {
    let limits: Vec<_> = decision
        .limits
        .iter()
        .map(|limit| (limit.rule, limit.role, limit.outcome.verdict, limit.outcome.remaining))
        .collect();
    let named = |by| decision.name(by).to_owned();
    format!(
        "{:?} {:?} by {:?}, degraded {:?}, warned {:?}, {:?}, {:?}, cost {:?}, {limits:?}",
        decision.verdict,
        decision.origin,
        decision.denied_by.map(named),
        decision.degraded_by.map(named),
        decision.warned_by.map(named),
        decision.emergency(),
        decision.descriptors,
        decision.malformed_cost,
    )
}

const FORMS: [&str; 15] = [
    "limit: 7/second",
    "limit: 10/minute, burst: 4",
    "limit: [3/second, 10/minute]",
    "limit: 10/minute, algorithm: token_bucket",
    "limit: 10/minute, algorithm: leaky_bucket, action: delay",
    "limit: 10/minute, algorithm: fixed_window",
    "limit: 10/minute, algorithm: sliding_window",
    "limit: 10/minute, algorithm: strict_window",
    "limit: 10/minute, algorithm: sliding_log",
    "limit: 10/day, algorithm: fixed_window",
    "limit: 10/minute, shadow: true",
    "limit: 10/minute, action: degrade",
    "limit: 10/minute, soft: {at: 50%}",
    "concurrency: 3",
    "limit: 10/minute, algorithm: token_bucket, refill_interval: 12s",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Two limiters get the same requests, and one of them explains each before: both decide the same, and as foretold.
    #[test]
    fn an_explanation_foretells_the_decision_and_changes_nothing(
        first in 0..FORMS.len(),
        second in 0..FORMS.len(),
        is_envoy in any::<bool>(),
        measure in 0_usize..8,
        trace in prop::collection::vec((0_u64..8_000, 0_u64..6, 0_usize..4, any::<bool>()), 1..60),
    ) {
        let profile = if is_envoy && first < 3 && second < 3 { "envoy" } else { "native" };
        let text = format!(
            "{{domain: d, profile: {profile}, descriptors: [{{key: api_key, name: a, {}}}, {{key: tenant, name: b, {}}}]}}",
            if profile == "envoy" { "rate_limit: {unit: minute, requests_per_unit: 7}" } else { FORMS[first] },
            if profile == "envoy" { "rate_limit: {unit: second, requests_per_unit: 3}" } else { FORMS[second] },
        );
        let (explained, plain) = (rig(&text), rig(&text));
        let on: &[(MeasureAction, MeasureTarget)] = &match measure {
            0 => vec![(MeasureAction::Tighten(500), MeasureTarget::All)],
            1 => vec![(MeasureAction::DisableRule, MeasureTarget::Rule("a".into()))],
            2 => vec![(MeasureAction::Block, MeasureTarget::ApiKey(3))],
            3 => vec![(MeasureAction::ShadowAll, MeasureTarget::All), (MeasureAction::Tighten(300), MeasureTarget::All)],
            _ => Vec::new(),
        };
        explained.on(on);
        plain.on(on);
        for (wait, cost, whose, by_descriptors) in trace {
            explained.clock.advance(TimeDelta::from_millis(wait));
            plain.clock.advance(TimeDelta::from_millis(wait));
            let attributes = [("api_key", ["vip", "k", "longer", "k"][whose]), ("tenant", ["t", "u", "t", "t"][whose])];
            let descriptors =
                [Descriptor { entries: &attributes[..1], hits: None, limit: None }, Descriptor { entries: &attributes[1..], hits: None, limit: None }];
            let check = match by_descriptors {
                true => Check::descriptors("d", &descriptors),
                false => Check::attributes("d", &attributes),
            };
            let check = check.with_cost(Cost::new(cost));
            let foretold = explained.explain(&check);
            let decision = explained.decide(&check);
            prop_assert_eq!(summary(&foretold.decision), summary(&decision));
            prop_assert_eq!(summary(&decision), summary(&plain.decide(&check)));
        }
    }
}

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 5/minute, algorithm: fixed_window, tiers: {pro: 50/minute}}
  - {key: endpoint, value: POST /login, name: logins, limit: 2/minute}
  - {key: endpoint, value: GET /, name: home, limit: 9/minute, split: 4}
";

#[test]
fn limits_come_with_their_source_and_their_counters() {
    let rig = rig(RULES);
    let attributes = [("api_key", "some-long-secret"), ("tier", "pro"), ("endpoint", "POST /login")];
    let check = Check::attributes("d", &attributes);
    for _ in 0..2 {
        rig.decide(&check);
    }
    rig.on(&[(MeasureAction::Tighten(500), MeasureTarget::All)]);
    let explanation = rig.explain(&check);
    assert!(!explanation.decision.is_allowed());
    assert_eq!(explanation.decision.denied_by_name(), Some("logins"));
    let [per_key, logins] = &explanation.limits[..] else { panic!("{:?}", explanation.limits) };
    assert_eq!((per_key.source, logins.source), (LimitSource::Tier, LimitSource::Rule));
    assert_eq!((per_key.limit.capacity(), per_key.used()), (25, Some(2)), "tightened, on the same counter");
    assert_eq!(per_key.measure, Some(("emergency:0".to_owned(), MeasureAction::Tighten(500))));
    assert!(!per_key.counter.contains("long-secret"), "masked: {}", per_key.counter);
    assert!(matches!(logins.outcome.map(|one| one.verdict), Some(Verdict::Denied { retry_after: Some(_) })));
    let text = explanation.matching.to_string();
    assert!(!text.contains("long-secret"), "masked: {text}");
    assert_eq!(explanation.matching.rules[2].result, RuleResult::NoMatch);

    rig.on(&[(MeasureAction::DisableRule, MeasureTarget::Rule("logins".into()))]);
    let explanation = rig.explain(&check);
    assert!(explanation.decision.is_allowed());
    assert!(explanation.limits[0].is_charged && !explanation.limits[1].is_charged);
    assert_eq!(explanation.limits[1].measure, Some(("emergency:0".to_owned(), MeasureAction::DisableRule)));
    assert_eq!(explanation.limits[1].used(), Some(2), "what it holds is shown all the same");

    rig.on(&[(MeasureAction::Block, MeasureTarget::ApiKey(16))]);
    let explanation = rig.explain(&check);
    assert_eq!(explanation.decision.origin, Origin::Emergency);
    assert!(
        explanation.limits.iter().all(|limit| !limit.is_charged && limit.outcome.is_none()),
        "{:?}",
        explanation.limits
    );
}

#[test]
fn a_grant_pays_in_an_explanation_and_is_not_spent_by_it() {
    let rig = rig(RULES);
    let attributes = [("api_key", "vip")];
    let check = Check::attributes("d", &attributes);
    for _ in 0..5 {
        assert!(rig.decide(&check).is_allowed());
    }
    for _ in 0..10 {
        let explanation = rig.explain(&check);
        assert_eq!(explanation.decision.origin, Origin::Grant);
        assert!(explanation.limits[0].is_granted);
        assert_eq!(explanation.grants[0].remaining, Some(6));
    }
    let dear = rig.explain(&check.with_cost(Cost::new(7)));
    assert!(!dear.decision.is_allowed() && !dear.limits[0].is_granted, "a grant of 6 does not pay 7");
}

#[test]
fn other_shards_of_a_split_counter_are_asked_too() {
    let rig = rig(RULES);
    let attributes = [("endpoint", "GET /")];
    let check = Check::attributes("d", &attributes);
    for taken in 0..12 {
        let explanation = rig.explain(&check);
        assert_eq!(explanation.limits[0].used(), Some(taken.min(9)), "all shards together");
        assert_eq!(explanation.decision.is_allowed(), taken < 9, "{taken} of 9 taken");
        assert_eq!(rig.decide(&check).is_allowed(), taken < 9);
    }
}

/// A draft has the live counters of the rules that stay.
#[test]
fn a_draft_is_explained_on_the_live_counters() {
    let rig = rig(RULES);
    let attributes = [("api_key", "k"), ("endpoint", "GET /new")];
    let check = Check::attributes("d", &attributes);
    for _ in 0..5 {
        assert!(rig.decide(&check).is_allowed());
    }
    assert!(!rig.explain(&check).decision.is_allowed());
    let draft = rules(
        "domain: d\ndescriptors:\n  - {key: api_key, name: per-key, limit: 8/minute, algorithm: fixed_window}\n  - {key: endpoint, \
         name: each, limit: 1/minute}\n",
    );
    let explanation =
        pollster::block_on(rig.limiter.explain(Some(&draft), None, &check)).expect("an explanation");
    assert!(explanation.decision.is_allowed());
    assert_eq!(explanation.limits.iter().map(ExplainedLimit::used).collect::<Vec<_>>(), [Some(5), Some(0)]);
    assert!(!rig.explain(&check).decision.is_allowed(), "the live rules are as they were");
    let unknown =
        pollster::block_on(rig.limiter.explain(Some(&draft), Some("x"), &check)).expect("an explanation");
    assert!(unknown.matching.rules.is_empty() && unknown.decision.is_allowed());
}

#[test]
fn descriptors_are_explained_entry_by_entry() {
    let rig = rig(
        "domain: d\ndescriptors:\n  - {key: a, name: outer, limit: 5/minute, descriptors: [{key: b, value: x, name: inner, limit: \
         2/minute}]}\n  - {key: c, name: other, limit: 1/minute}\n",
    );
    let entries = [("a", "1"), ("b", "x")];
    let descriptors = [Descriptor { entries: &entries, hits: None, limit: None }];
    let explanation = rig.explain(&Check::descriptors("d", &descriptors));
    let text = explanation.matching.to_string();
    assert!(
        text.contains("outer (test.yaml:3): no match\n  yes  a: `1`\n  no   1 entries: the descriptor has 2"),
        "{text}"
    );
    assert!(text.contains("inner (test.yaml:3): matches, 1 limit\n  yes  a: `1`\n  yes  b=x: `x`"), "{text}");
    assert!(
        text.contains("other (test.yaml:4): no match\n  no   c: entry 1 of the descriptor is `a`"),
        "{text}"
    );
    assert_eq!(explanation.limits.len(), 1);
}

const ADAPTED: &str = "
domain: d
descriptors: [{key: user, name: per-user, limit: 10/day, algorithm: fixed_window}]
overload:
  adapt:
    signals: {queue_depth: 100, errors: {above: 5, query: sum(x)}}
    order: [free, pro]
    least: 50%
    step: 1s
";

/// While signals tighten limits, an explanation by the whole limits would promise what is denied.
#[test]
fn limits_that_follow_signals_are_explained_as_they_are_and_as_they_would_be() {
    let rig = rig(ADAPTED);
    let attributes = [("user", "a"), ("tier", "free")];
    let check = Check::attributes("d", &attributes);
    let capacity = |signals: &[(&str, f64)]| {
        let explained = pollster::block_on(rig.limiter.explain_with_signals(None, None, &check, signals));
        let explained = explained.expect("an explanation");
        let reason = explained.decision.reason.as_deref().map(str::to_owned);
        (explained.limits[0].limit.capacity(), reason)
    };
    let at = |percent: u64| Some(format!("limits of tier free are at {percent}% because of overload"));
    assert_eq!(capacity(&[]), (10, None));
    assert_eq!(capacity(&[("queue_depth", 90.0)]), (10, None), "below its bound");
    assert_eq!(capacity(&[("queue_depth", 150.0)]), (8, at(80)));
    assert_eq!(capacity(&[("errors", 6.0)]), (8, at(80)), "whatever its source");
    assert_eq!(capacity(&[]), (10, None), "nothing was recorded");
    assert!(rig.limiter.adapted_tiers().iter().all(|tier| tier.thousandths == 1_000));
    // A report makes the same step.
    rig.limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
    assert_eq!(capacity(&[]), (8, at(80)), "as they are now");
    assert_eq!(capacity(&[("queue_depth", 150.0)]), (6, at(64)), "one step further");
    for _ in 0..8 {
        assert!(rig.decide(&check).is_allowed());
    }
    assert!(!rig.explain(&check).decision.is_allowed());
    assert!(!rig.decide(&check).is_allowed());
    // Rules with the same settings have the same state, and others begin anew.
    let explain = |draft: &str| {
        let draft = rules(draft);
        pollster::block_on(rig.limiter.explain(Some(&draft), None, &check)).expect("an explanation")
    };
    let same = explain(&ADAPTED.replace("10/day", "20/day"));
    assert_eq!((same.limits[0].limit.capacity(), same.decision.is_allowed()), (16, true));
    assert_eq!(explain(&ADAPTED.replace("50%", "40%")).limits[0].limit.capacity(), 10);
}

#[test]
fn signals_that_the_rules_do_not_use_are_errors() {
    let check = Check::attributes("d", &[("user", "a")]);
    let explain = |rules: &str, signals: &[(&str, f64)]| {
        pollster::block_on(rig(rules).limiter.explain_with_signals(None, None, &check, signals))
            .map(|explained| explained.decision.is_allowed())
            .map_err(|error| error.to_string())
    };
    let unknown = explain(ADAPTED, &[("queue", 1.0)]);
    assert_eq!(unknown, Err("unknown signal `queue`; the rules use: queue_depth, errors".to_owned()));
    let negative = explain(ADAPTED, &[("queue_depth", -1.0)]);
    assert_eq!(negative, Err("the value of `queue_depth` must be a finite number of at least 0".to_owned()));
    assert!(explain(RULES, &[("queue_depth", 1.0)]).is_err_and(|why| why.contains("does not adapt limits")));
}
