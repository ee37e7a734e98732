//! Limits follow signals: tier by tier down to the least, and back, even if reports stop.

use std::sync::Arc;
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{
    ActiveMeasures, Check, Ended, HeldLimits, Limiter, Measure, MeasureAction, MeasureTarget, SampleWeight,
    SharedSignal, SignalError,
};
use tollgate_rules::{ADAPT_RULE, Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors: [{key: user, name: per-user, limit: 10/day, algorithm: fixed_window}]
overload:
  adapt: {signals: {queue_depth: 100}, order: [free, pro], least: 50%, step: 1s}
";

type Memory = MemoryStore<Arc<ManualClock>>;

fn limiter() -> (Limiter<Memory>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("t.yaml", RULES)], &Options::default());
    let rules = Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")));
    (Limiter::new(rules, store, Arc::clone(&clock) as Arc<dyn Clock>), clock)
}

/// Number of requests of a new user of this tier that pass.
fn passing(limiter: &Limiter<Memory>, user: &str, tier: &str) -> usize {
    let attributes = [("user", user), ("tier", tier)];
    let check = Check::attributes("d", &attributes);
    (0..20).filter(|_| pollster::block_on(limiter.check(&check)).is_allowed()).count()
}

#[test]
fn free_is_tightened_before_pro_and_both_come_back_by_themselves() {
    let (limiter, clock) = limiter();
    let report = |value| limiter.record_signals("d", [("queue_depth", value)]);
    report(150.0).expect("a signal of the rules");
    assert_eq!((passing(&limiter, "a", "free"), passing(&limiter, "b", "pro")), (8, 10));
    for _ in 0..10 {
        clock.advance(TimeDelta::from_secs(1));
        report(150.0).expect("a signal of the rules");
    }
    assert_eq!((passing(&limiter, "c", "free"), passing(&limiter, "d", "pro")), (5, 5), "down to the least");
    // Usage stays: what a user had before counts.
    assert_eq!(passing(&limiter, "a", "free"), 0);
    // Without reports, requests make the steps.
    for n in 0..40 {
        clock.advance(TimeDelta::from_secs(1));
        passing(&limiter, &format!("x{n}"), "free");
    }
    assert_eq!((passing(&limiter, "e", "free"), passing(&limiter, "f", "pro")), (10, 10));
}

#[test]
fn an_operator_can_restore_limits() {
    let (limiter, clock) = limiter();
    let measures = Arc::new(ActiveMeasures::new(|key| key.len() as u64));
    let limiter = limiter.with_measures(Arc::clone(&measures));
    limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
    assert_eq!(passing(&limiter, "a", "free"), 8);
    measures.replace([Measure {
        name: "emergency:1".into(),
        action: MeasureAction::DisableRule,
        target: MeasureTarget::Rule(ADAPT_RULE.into()),
        expires_at: clock.now() + TimeDelta::from_secs(60),
    }]);
    assert_eq!(passing(&limiter, "b", "free"), 10);
    // Reports say what applies, and what will again when the measure ends.
    let shown = || {
        let free = limiter.adapted_tiers().remove(0);
        (free.percent(), free.held, free.shadow_percent())
    };
    assert_eq!(shown(), (100.0, Some(HeldLimits::Measure), Some(80.0)));
    measures.replace([]);
    assert_eq!(shown(), (80.0, None, None));
}

#[test]
fn a_signal_that_is_no_longer_reported_is_calm() {
    let (limiter, clock) = limiter();
    let shown = || limiter.adaptations()[0].signals[0].value;
    assert_eq!(shown(), 0.0);
    limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
    clock.advance(TimeDelta::from_millis(1_900));
    assert_eq!(shown(), 150.0);
    clock.advance(TimeDelta::from_millis(100));
    assert_eq!(shown(), 0.0, "two steps later, though nothing has made a step");
    assert_eq!(limiter.adaptations()[0].tiers[0].thousandths, 800);
}

/// A node without traffic must not show limits as tightened for ever, nor tighten them by its first request.
#[test]
fn limits_recover_on_an_idle_node() {
    for by_request in [false, true] {
        let (limiter, clock) = limiter();
        let steps = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = Arc::clone(&steps);
        limiter.on_adapted(move |step| seen.lock().expect("steps").push(step.to));
        for _ in 0..6 {
            limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
            clock.advance(TimeDelta::from_millis(1_000));
        }
        // Too early for a step.
        limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
        assert_eq!(thousandths(&limiter), 500);
        clock.advance(TimeDelta::from_secs(20));
        if by_request {
            assert_eq!((passing(&limiter, "a", "free"), passing(&limiter, "b", "pro")), (10, 10));
        } else {
            pollster::block_on(limiter.reconcile());
        }
        assert_eq!(steps.lock().expect("steps").last(), Some(&1000), "nothing else has read the state");
        let state = &limiter.adaptations()[0];
        assert_eq!((state.tiers[0].thousandths, state.tiers[1].thousandths), (1000, 1000));
        assert_eq!(state.signals[0].value, 0.0);
    }
}

#[test]
fn a_report_with_a_mistake_records_nothing() {
    let (limiter, _) = limiter();
    let mixed = limiter.record_signals("d", [("queue_depth", 150.0), ("queue_dpth", 1.0)]);
    assert!(matches!(mixed, Err(SignalError::Unknown { .. })));
    assert!(matches!(limiter.record_signals("d", [("queue_depth", f64::NAN)]), Err(SignalError::Value(_))));
    assert!(matches!(limiter.record_signals("x", [("queue_depth", 1.0)]), Err(SignalError::NotAdaptive(_))));
    assert_eq!(limiter.adapted_tiers()[0].thousandths, 1000);
}

fn with_rules(text: &str) -> (Limiter<Memory>, Arc<ManualClock>) {
    let (limiter, clock) = limiter();
    let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default());
    limiter.replace_rules(Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}"))));
    (limiter, clock)
}

fn thousandths(limiter: &Limiter<Memory>) -> u32 {
    limiter.adapted_tiers()[0].thousandths
}

/// Sends requests to an upstream, a hundred in each step, each of which it answers after this time.
fn serve(limiter: &Limiter<Memory>, clock: &ManualClock, upstream: &str, steps: u64, latency: u64) {
    let check = Check::attributes("d", &[("user", "u")]);
    for _ in 0..steps * 100 {
        let permit = pollster::block_on(limiter.enter_upstream(&check, upstream, limiter.clock().now()))
            .expect("not shed");
        clock.advance(TimeDelta::from_millis(latency.min(10)));
        let mut permit = permit.expect("measured");
        // Many are in flight at once.
        let began = clock.now();
        clock.set(began + TimeDelta::from_millis(latency.saturating_sub(10)));
        permit.ended(Ended::Completed);
        drop(permit);
        clock.set(began + TimeDelta::from_millis(10 - latency.min(10)));
    }
}

const MEASURED: &str = "
domain: d
overload:
  adapt:
    signals: {slow: {above: 300, measure: upstream_p99_ms, upstream: web}}
    order: [free]
    step: 1s
";

#[test]
fn a_slow_upstream_tightens_limits_and_a_fast_one_restores_them() {
    let (limiter, clock) = with_rules(MEASURED);
    serve(&limiter, &clock, "web", 5, 20);
    assert_eq!(thousandths(&limiter), 1000);
    serve(&limiter, &clock, "other", 5, 900);
    assert_eq!(thousandths(&limiter), 1000, "the rules name the upstream");
    serve(&limiter, &clock, "web", 8, 400);
    let tightened = thousandths(&limiter);
    assert!(tightened < 600, "{tightened}");
    let state = &limiter.adaptations()[0].signals[0];
    assert!((350.0..450.0).contains(&state.value) && state.source == "measured", "{state:?}");
    serve(&limiter, &clock, "web", 30, 20);
    assert_eq!(thousandths(&limiter), 1000);
    assert!(matches!(
        limiter.record_signals("d", [("slow", 900.0)]),
        Err(SignalError::NotPushed { key: "measure", .. })
    ));
}

#[test]
fn requests_in_flight_are_measured_without_a_limit() {
    let (limiter, clock) = with_rules(
        "{domain: d, overload: {adapt: {signals: {busy: {above: 5, measure: upstream_in_flight}}, order: [free], step: 1s}}}",
    );
    let check = Check::attributes("d", &[("user", "u")]);
    let enter = || {
        pollster::block_on(limiter.enter_upstream(&check, "up", limiter.clock().now()))
            .expect("not shed")
            .expect("measured")
    };
    let held: Vec<_> = (0..20).map(|_| enter()).collect();
    for _ in 0..5 {
        clock.advance(TimeDelta::from_secs(1));
        drop(enter());
    }
    assert!(thousandths(&limiter) < 1000);
    assert_eq!(limiter.adaptations()[0].signals[0].value, 20.0);
    drop(held);
    for _ in 0..30 {
        clock.advance(TimeDelta::from_secs(1));
        drop(enter());
    }
    assert_eq!((thousandths(&limiter), limiter.adaptations()[0].signals[0].value), (1000, 0.0));
    // Rules that measure nothing have no meters.
    limiter.replace_rules(Arc::new(Ruleset::load(&[], &Options::default()).expect("no rules")));
    assert!(!limiter.tracks_upstreams());
}

#[test]
fn utilization_is_the_part_of_the_limit_that_is_used() {
    let (limiter, clock) = with_rules(
        "{domain: d, overload: {workers: {limit: 40}, adapt: {signals: {use: {above: 0.4, measure: upstream_utilization}}, \
         order: [free], step: 1s}}}",
    );
    let check = Check::attributes("d", &[("user", "u")]);
    let enter = || {
        pollster::block_on(limiter.enter_upstream(&check, "up", limiter.clock().now()))
            .expect("not shed")
            .expect("a place")
    };
    let held: Vec<_> = (0..20).map(|_| enter()).collect();
    for _ in 0..3 {
        clock.advance(TimeDelta::from_secs(1));
        drop(enter());
    }
    assert_eq!(limiter.adaptations()[0].signals[0].value, 0.5);
    assert!(thousandths(&limiter) < 1000);
    drop(held);
}

#[test]
fn queries_are_listed_and_only_they_take_query_results() {
    let (limiter, _) = with_rules(
        "{domain: d, overload: {adapt: {signals: {q: 5, deep: {above: 9, query: sum(x)}}, order: [free], step: 2s}}}",
    );
    let queries = limiter.signal_queries();
    assert_eq!((queries.len(), queries[0].signal.as_str(), queries[0].query.as_str()), (1, "deep", "sum(x)"));
    assert_eq!(queries[0].step, TimeDelta::from_secs(2));
    limiter.record_query("d", "deep", 10.0).expect("a query");
    assert_eq!(thousandths(&limiter), 800);
    assert!(
        limiter.record_query("d", "q", 10.0).is_err()
            && limiter.record_signals("d", [("deep", 1.0)]).is_err()
    );
}

#[test]
fn what_one_node_is_told_bears_on_another_and_is_not_passed_on() {
    let ((one, _), (two, clock)) = (limiter(), limiter());
    one.record_signals("d", [("queue_depth", 90.0)]).expect("a signal of the rules");
    one.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
    let shared = one.take_own_signals();
    assert_eq!((shared.len(), shared[0].value, shared[0].lasts), (1, 150.0, TimeDelta::from_secs(1)));
    assert_eq!(one.take_own_signals(), []);
    let unknown = SharedSignal { signal: "gone".to_owned(), ..shared[0].clone() };
    let wrong = SharedSignal { value: f64::NAN, ..shared[0].clone() };
    two.record_shared_signals(&[unknown, wrong, shared[0].clone()]);
    assert_eq!((thousandths(&two), two.take_own_signals()), (800, vec![]));
    clock.advance(TimeDelta::from_secs(1));
    two.record_shared_signals(&shared);
    assert_eq!(thousandths(&two), 640);
}

#[test]
fn a_rehearsal_decides_with_the_least_until_the_end() {
    let (limiter, clock) = limiter();
    limiter.tighten_to_least();
    let check = Check::attributes("d", &[("user", "u"), ("tier", "pro")]);
    let mut passed = 0;
    for _ in 0..20 {
        clock.advance(TimeDelta::from_secs(60));
        let decision = limiter.replay(&check, SampleWeight::ONE).expect("memory");
        passed += usize::from(decision.is_allowed());
    }
    assert_eq!(passed, 5, "half of ten, and time does not loosen it");
}

#[test]
fn a_request_that_only_shadow_mode_lets_pass_says_why() {
    let rules = "{domain: d, overload: {workers: {limit: 1}, shadow: true}}";
    let rules = Ruleset::load(&[Source::new("t.yaml", rules)], &Options::default());
    let rules = Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")));
    let (limiter, clock) = limiter();
    limiter.replace_rules(rules);
    let check = Check::attributes("d", &[("user", "u")]);
    let mut held = Vec::new();
    let permit = loop {
        clock.advance(TimeDelta::from_millis(20));
        let permit = pollster::block_on(limiter.enter_upstream(&check, "up", limiter.clock().now()))
            .expect("nothing is shed");
        let permit = permit.expect("workers are limited");
        if permit.would_be_shed().is_some() {
            break permit;
        }
        assert!(held.len() < 10_000, "the limit of one is exceeded");
        held.push(permit);
    };
    let (decision, _) = pollster::block_on(limiter.admit(&check.with_reason(permit.would_be_shed())));
    let reason = decision.reason.as_deref().expect("a reason");
    assert!(
        decision.is_allowed() && reason.starts_with("would be shed at priority normal, cohort "),
        "{reason}"
    );
}

fn publish(limiter: &Limiter<Memory>, text: &str) {
    let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default());
    limiter.replace_rules(Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}"))));
}

/// A change of `adapt` while a service is overloaded must not hand all limits back at once.
#[test]
fn new_settings_keep_the_levels_of_tiers_and_report_what_changes() {
    let (limiter, clock) = limiter();
    let steps = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&steps);
    for _ in 0..10 {
        clock.advance(TimeDelta::from_secs(1));
        limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
    }
    limiter.on_adapted(move |step| seen.lock().expect("steps").push((step.tier, step.from, step.to)));
    let levels = || {
        let tiers = limiter.adapted_tiers().into_iter();
        tiers.map(|tier| (tier.tier, tier.thousandths)).collect::<Vec<_>>()
    };
    assert_eq!(levels(), [("free".to_owned(), 500), ("pro".to_owned(), 500)]);
    publish(
        &limiter,
        &RULES.replace("queue_depth: 100", "queue_depth: 90").replace("[free, pro]", "[pro, free]"),
    );
    assert_eq!(levels(), [("pro".to_owned(), 500), ("free".to_owned(), 500)]);
    assert!(steps.lock().expect("steps").is_empty(), "nothing has changed");
    publish(&limiter, &RULES.replace("50%", "60%"));
    assert_eq!(levels(), [("free".to_owned(), 600), ("pro".to_owned(), 600)], "the least is kept at once");
    publish(&limiter, &RULES.replace("50%", "60%").replace("[free, pro]", "[free]"));
    assert_eq!(levels(), [("free".to_owned(), 600)]);
    publish(&limiter, "{domain: d, descriptors: [{key: user, limit: 10/day}]}");
    let mut seen = steps.lock().expect("steps").split_off(0);
    seen.sort();
    let step = |tier: &str, from, to| (tier.to_owned(), from, to);
    let expected =
        [step("free", 500, 600), step("free", 600, 1000), step("pro", 500, 600), step("pro", 600, 1000)];
    assert_eq!(seen, expected);
}

#[test]
fn in_shadow_mode_signals_are_accepted_and_limits_stay() {
    let (limiter, clock) = limiter();
    publish(&limiter, &format!("{RULES}  shadow: true\n"));
    limiter.on_adapted(|step| panic!("no limit has changed: {step:?}"));
    limiter.record_signals("d", [("queue_depth", 150.0)]).expect("a signal of the rules");
    let free = &limiter.adapted_tiers()[0];
    assert_eq!((free.thousandths, free.held), (800, Some(HeldLimits::Shadow)));
    assert_eq!(passing(&limiter, "a", "free"), 10);
    // Without reports, requests make the steps.
    for n in 0..10 {
        clock.advance(TimeDelta::from_secs(1));
        passing(&limiter, &format!("x{n}"), "free");
    }
    assert_eq!(thousandths(&limiter), 1000);
}

#[test]
fn a_request_that_the_fleet_sheds_says_why_and_is_counted() {
    let (limiter, _) = limiter();
    publish(
        &limiter,
        "
domain: d
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 2 in flight, reserve: {critical: 50%}}
",
    );
    // A counter that appears with its first events hides them from rates: it is there before.
    assert!(limiter.fleet_sheds().iter().all(|shed| shed.count == 0) && limiter.fleet_sheds().len() == 4);
    let decide = |path: &str| {
        let attributes = [("path", path)];
        // What is held is not released: the requests stay in flight.
        let (decision, _held) = pollster::block_on(limiter.admit(&Check::attributes("d", &attributes)));
        decision.reason.as_deref().map(str::to_owned)
    };
    assert_eq!(decide("/x"), None);
    let reason = decide("/x").expect("a reason");
    assert!(
        reason.starts_with("shed at priority normal: of the fleet's capacity of 2 in flight, 1 are"),
        "{reason}"
    );
    assert_eq!(decide("/pay"), None);
    let reason = decide("/pay").expect("a reason");
    assert_eq!(reason, "shed at priority critical: the fleet's capacity of 2 in flight is in use");
    let counts: Vec<u64> = limiter.fleet_sheds().into_iter().map(|shed| shed.count).collect();
    assert_eq!(counts, [1, 0, 1, 0], "critical, important, normal, sheddable");
    let state = limiter.fleet_states().remove(0);
    let priorities = state.priorities.map(|own| (own.capacity, own.shed, own.would_be_shed));
    assert_eq!((state.capacity.as_str(), state.is_shadow), ("2 in flight", false));
    assert_eq!(priorities, [(2, 1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 0)]);
    assert!(state.shares.is_none());
}
