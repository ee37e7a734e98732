//! Decision texts match what happened: the counts of the rules, the cost, and when the request would have passed; with the
//! store, without it, and under emergency measures.

use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_core::conformance::DeadStore;
use tollgate_core::{Clock, Cost, CounterStore, SystemClock, TimeDelta};
use tollgate_engine::{
    ActiveMeasures, CallerQuota, Check, Grant, Grants, Limiter, Measure, MeasureAction, MeasureTarget,
    QuotaProvider,
};
use tollgate_observe::{DecisionQuery, ExpositionFormat, MetricsWriter, Telemetry, TelemetryConfig};
use tollgate_rules::{Descriptor, Options, Ruleset, Source, Unit};
use tollgate_store::{MemoryConfig, MemoryStore};

fn memory() -> MemoryStore<SystemClock> {
    MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), SystemClock::new()).expect("memory")
}

/// A limiter that logs every decision.
fn observed<S: CounterStore>(text: &str, store: S) -> (Limiter<S>, Arc<Telemetry>) {
    let observe = Telemetry::new(TelemetryConfig { allowed_sample: 1.0, ..TelemetryConfig::default() })
        .expect("telemetry");
    let rules = Ruleset::load(&[Source::new("r.yaml", text)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::new(SystemClock::new()));
    (limiter.with_observer(Arc::clone(&observe) as _), observe)
}

fn check<S: CounterStore>(limiter: &Limiter<S>, pairs: &[(&str, &str)]) -> bool {
    pollster::block_on(limiter.check(&Check::attributes("d", pairs))).is_allowed()
}

/// Returns the log, newest first: each record with its explanation and when it would have passed.
fn records(observe: &Telemetry) -> Vec<(Value, String, Option<String>)> {
    observe.run_once();
    let found = observe.search(&DecisionQuery { limit: 100, ..DecisionQuery::default() }).0;
    let all = found.iter().map(|entry| {
        let (lines, passes) = entry.explanation(observe.node_info());
        (entry.json(observe.node_info()), lines.join("\n"), passes)
    });
    all.collect()
}

/// `allow`, `deny` and `shadow_deny` of a rule.
fn rule(observe: &Telemetry, name: &str) -> [Value; 3] {
    let stats = observe.stats(1);
    let rules = stats["rules"].as_array().expect("rules");
    let found = rules.iter().find(|rule| rule["rule"] == name).unwrap_or_else(|| panic!("{name}: {stats}"));
    ["allow", "deny", "shadow_deny"].map(|count| found[count].clone())
}

/// The verdicts of `ratelimit_rule_checks_total` of a rule, with their counts.
fn checks(page: &str, rule: &str) -> Vec<(String, u64)> {
    let own = format!("ratelimit_rule_checks_total{{domain=\"d\",rule=\"{rule}\",verdict=\"");
    let each = page.lines().filter_map(|line| line.strip_prefix(&own)?.split_once("\"} "));
    each.map(|(verdict, count)| (verdict.to_owned(), count.parse().expect("a count"))).collect()
}

fn page(observe: &Telemetry) -> String {
    let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
    observe.write(&mut page);
    page.finish()
}

/// An operator who reads that a limit of 5 denied, where the limit is 10, changes the wrong number.
#[test]
fn a_denial_is_explained_by_the_limit_that_denied() {
    for candidate in ["5/hour", "3/day", "1/hour"] {
        let text = format!(
            "{{domain: d, descriptors: [{{key: a, name: a, algorithm: fixed_window, limit: 10/hour, candidate: {candidate}}}]}}"
        );
        let (limiter, observe) = observed(&text, memory());
        assert_eq!((0..12).filter(|_| check(&limiter, &[("a", "x")])).count(), 10);
        let (record, lines, _) = records(&observe).swap_remove(0);
        assert_eq!((&record["verdict"], &record["limit"]["limit"]), (&json!("deny"), &json!(10)), "{record}");
        assert!(lines.contains("Denied by rule `a`: 10 of 10 units were in use (10 per 1h"), "{lines}");
        let text = page(&observe);
        let count: u64 = candidate.split('/').next().and_then(|count| count.parse().ok()).expect("a count");
        let expected = [("allow", 10), ("deny", 2), ("candidate_deny", 12 - count)];
        assert_eq!(
            checks(&text, "a"),
            expected.map(|(verdict, count)| (verdict.to_owned(), count)),
            "{text}"
        );
        assert!(text.contains("ratelimit_denied_total{domain=\"d\",rule=\"a\"} 2\n"), "{text}");
    }
}

/// What was not enforced is no denial of the rule, whatever the reason.
#[test]
fn checks_are_counted_by_what_the_limits_did() {
    let text = "{domain: d, descriptors: [
        {key: c, name: later, limit: 1/hour, enforce: 1%},
        {key: a, name: lesser, limit: 2/hour, action: degrade},
        {key: b, name: shut, limit: 0/hour}]}";
    let (limiter, observe) = observed(text, memory());
    (0..4).for_each(|_| assert!(check(&limiter, &[("a", "x"), ("c", "x")])));
    assert!(!check(&limiter, &[("a", "x"), ("b", "x"), ("c", "x")]));
    let text = page(&observe);
    let named = |all: &[(&str, u64)]| -> Vec<(String, u64)> {
        all.iter().map(|(verdict, count)| ((*verdict).to_owned(), *count)).collect()
    };
    assert_eq!(checks(&text, "later"), named(&[("allow", 1), ("unenforced_deny", 4)]), "{text}");
    assert_eq!(checks(&text, "lesser"), named(&[("allow", 2), ("degrade", 3)]), "{text}");
    assert_eq!(checks(&text, "shut"), named(&[("deny", 1)]), "{text}");
    assert!(!text.contains("ratelimit_denied_total{domain=\"d\",rule=\"lesser\"}"), "{text}");
}

/// A delay is explained by the limit that caused it, not by another one with less left.
#[test]
fn a_delay_is_explained_by_the_limit_that_delays() {
    let text = "{domain: d, descriptors: [
        {key: a, name: paced, limit: 60/minute, burst: 9, action: delay},
        {key: n, name: nearly, limit: 3/hour}]}";
    let (limiter, observe) = observed(text, memory());
    assert!((0..2).all(|_| check(&limiter, &[("a", "x"), ("n", "x")])));
    let (record, lines, _) = records(&observe).swap_remove(0);
    assert_eq!((&record["verdict"], &record["rule"]), (&json!("delay"), &json!("paced")), "{lines}");
    assert!(page(&observe).contains("rule=\"paced\",verdict=\"delay\""));
}

/// Tokens are no requests: who reads `10000 per 1m` would expect to send as many.
#[test]
fn limits_on_tokens_say_so() {
    let text = "{domain: d, descriptors: [{key: a, name: a, limit: 100/hour, cost: tokens}]}";
    let (limiter, observe) = observed(text, memory());
    assert!(check(&limiter, &[("a", "x"), ("tokens", "100")]));
    assert!(!check(&limiter, &[("a", "x"), ("tokens", "1234"), ("token", "5678-secret")]));
    let (record, lines, _) = records(&observe).swap_remove(0);
    assert_eq!(
        (&record["limit"]["unit"], &record["attributes"]["tokens"]),
        (&json!("tokens"), &json!("1234"))
    );
    assert!(lines.contains("100 of 100 tokens were in use (100 tokens per 1h"), "{lines}");
    assert!(!lines.contains("5678"), "{lines}");
}

/// A rule under trial reports how many requests it would have denied, not how many of its limits.
#[test]
fn a_rule_in_shadow_counts_once_for_each_request() {
    let text = "{domain: d, descriptors: [
        {key: a, name: tried, shadow: true, limit: [2/hour, 2/day]},
        {key: a, value: x, name: other, shadow: true, limit: 3/hour}]}";
    let (limiter, observe) = observed(text, memory());
    (0..4).for_each(|_| assert!(check(&limiter, &[("a", "y")])));
    (0..4).for_each(|_| assert!(check(&limiter, &[("a", "x")])));
    let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
    observe.write(&mut page);
    let text = page.finish();
    for (name, count) in [("tried", 2), ("other", 1)] {
        let line = format!(
            "ratelimit_decisions_total{{domain=\"d\",rule=\"{name}\",verdict=\"deny\",origin=\"store\",shadow=\"true\"}} {count}\n"
        );
        assert!(text.contains(&line), "{name}: {text}");
        // It denied no request.
        assert_eq!(rule(&observe, name), [json!(4), json!(0), json!(count)], "{name}");
        let checks = checks(&text, name);
        assert_eq!(
            checks,
            [("allow".to_owned(), 4 - count), ("shadow_deny".to_owned(), count)],
            "{name}: {text}"
        );
    }
}

/// A request that two shadow rules would have denied counts as one request in the total.
#[test]
fn a_request_is_one_in_shadow_whatever_rules_it_meets() {
    let text = "{domain: d, descriptors: [
        {key: a, name: one, shadow: true, limit: 2/hour},
        {key: b, name: two, shadow: true, limit: 2/hour},
        {key: c, name: bites, limit: 1/hour, candidate: 0/hour}]}";
    let (limiter, observe) = observed(text, memory());
    let shadowed = |observe: &Telemetry| {
        observe.tick();
        let stats = observe.stats(3_600);
        let all = stats["series"]["shadow_deny"].as_array().expect("a column").iter();
        all.filter_map(Value::as_u64).sum::<u64>()
    };
    (0..5).for_each(|_| assert!(check(&limiter, &[("a", "x"), ("b", "x")])));
    assert_eq!(shadowed(&observe), 3);
    assert_eq!(rule(&observe, "one"), [json!(5), json!(0), json!(3)]);
    assert_eq!(rule(&observe, "two"), [json!(5), json!(0), json!(3)]);
    // A candidate limit beside a live limit.
    assert!(check(&limiter, &[("c", "x")]));
    assert!(!check(&limiter, &[("c", "x")]));
    assert_eq!(rule(&observe, "bites"), [json!(1), json!(1), json!(2)]);
    assert_eq!(shadowed(&observe), 5);
}

/// A rule with `action: degrade` denies no request.
#[test]
fn a_degrading_rule_denies_no_request() {
    let text = "{domain: d, descriptors: [
        {key: a, name: lesser, limit: 2/hour, action: degrade}, {key: b, name: shut, limit: 0/hour}]}";
    let (limiter, observe) = observed(text, memory());
    (0..3).for_each(|_| assert!(check(&limiter, &[("a", "x")])));
    assert!(!check(&limiter, &[("a", "x"), ("b", "x")]));
    assert_eq!(rule(&observe, "lesser"), [json!(4), json!(0), json!(0)]);
    assert_eq!(rule(&observe, "shut"), [json!(0), json!(1), json!(0)]);
}

/// The recorded cost is the one that was charged, wherever it comes from, and matches the counter.
#[test]
fn costs_are_those_that_were_charged() {
    let text = "{domain: d, descriptors: [
        {key: a, name: by-attribute, limit: 100/hour, cost: units},
        {key: b, name: fixed, limit: 100/hour, cost: 7},
        {key: c, name: permits, concurrency: 3},
        {key: e, name: hits, limit: 100/hour}]}";
    let (limiter, observe) = observed(text, memory());
    let costs = |observe: &Telemetry| -> Vec<(Value, Value)> {
        let all = records(observe).into_iter().rev();
        all.map(|(record, ..)| (record["cost"].clone(), record["used_before"].clone())).collect()
    };
    for (pairs, passed) in [
        ([("a", "x"), ("units", "40")], true),
        ([("a", "x"), ("units", "40")], true),
        ([("a", "x"), ("units", "40")], false),
        ([("a", "x"), ("units", "no number")], false),
        ([("b", "x"), ("units", "40")], true),
        ([("b", "x"), ("units", "40")], true),
    ] {
        assert_eq!(check(&limiter, &pairs), passed, "{pairs:?}");
    }
    // A cost that cannot be read charges nothing, and no counter was asked.
    let expected = [(40, Some(0)), (40, Some(40)), (40, Some(80)), (1, None), (7, Some(0)), (7, Some(7))];
    assert_eq!(costs(&observe), expected.map(|(cost, used)| (json!(cost), json!(used))));
    // A request holds one permit at any cost; a descriptor has its own cost.
    let check = Check::attributes("d", &[("c", "x")]).with_cost(Cost::new(5));
    assert!(pollster::block_on(limiter.check(&check)).is_allowed());
    let own =
        |units| Descriptor { entries: &[("e", "x")], hits: Some(Cost::new(units)), ..Descriptor::default() };
    for units in [30, 20] {
        let descriptors = [own(units)];
        assert!(pollster::block_on(limiter.check(&Check::descriptors("d", &descriptors))).is_allowed());
    }
    let expected = [(1, 0), (30, 0), (20, 30)];
    assert_eq!(costs(&observe)[6..], expected.map(|(cost, used)| (json!(cost), json!(used))));
}

/// Without the store, denials and allowed requests are still counted, and no time of recovery is promised.
#[test]
fn decisions_without_the_store_are_counted_and_promise_no_quota() {
    let text = "{domain: d, descriptors: [
        {key: a, name: open, limit: 9/hour, on_error: open},
        {key: b, name: shut, limit: [9/hour, 20/day], on_error: closed}]}";
    let (limiter, observe) = observed(text, DeadStore);
    (0..3).for_each(|_| assert!(check(&limiter, &[("a", "x")])));
    (0..2).for_each(|_| assert!(!check(&limiter, &[("a", "x"), ("b", "x")])));
    assert_eq!(rule(&observe, "open"), [json!(5), json!(0), json!(0)]);
    assert_eq!(rule(&observe, "shut"), [json!(0), json!(2), json!(0)]);
    let (record, lines, passes) = records(&observe).swap_remove(0);
    assert_eq!(
        (&record["verdict"], &record["origin"], &record["rule"]),
        (&json!("deny"), &json!("fail_closed"), &json!("shut"))
    );
    assert!(
        lines.contains("once the store is available again") && !lines.contains("would have passed"),
        "{lines}"
    );
    assert_eq!(passes, None);
}

/// A denial by an emergency measure names the measure, as the response does, and when it ends.
#[test]
fn a_measure_of_an_emergency_is_named() {
    let (limiter, observe) =
        observed("{domain: d, descriptors: [{key: a, name: a, limit: 9/hour}]}", memory());
    let emergencies = Arc::new(ActiveMeasures::default());
    let until = SystemClock::new().now() + TimeDelta::from_secs(600);
    let measure = |name: &str, act, tenant: &str| Measure {
        name: name.into(),
        action: act,
        target: MeasureTarget::Tenant(tenant.into()),
        expires_at: until,
    };
    emergencies.replace([
        measure("emergency:17", MeasureAction::Block, "bad"),
        measure("emergency:18", MeasureAction::Exempt, "good"),
    ]);
    let limiter = limiter.with_measures(emergencies);
    assert!(check(&limiter, &[("a", "x"), ("tenant", "good")]));
    assert!(!check(&limiter, &[("a", "x"), ("tenant", "bad")]));
    let all = records(&observe);
    let (record, lines, passes) = &all[0];
    assert_eq!(record["emergency"], "emergency:17");
    assert!(
        lines.contains("Denied by emergency measure `emergency:17`") && !lines.contains("used the units"),
        "{lines}"
    );
    assert!(passes.as_deref() > record["at"].as_str(), "{record}");
    assert!(all[1].1.contains("Allowed by emergency measure `emergency:18`"), "{}", all[1].1);
    let top = observe.top_talkers(&limiter.rules());
    assert_eq!(top["by_denials"][0]["rule"], "emergency:17", "{top}");
    // A measure that did not decide is mentioned too.
    let (limiter, observe) =
        observed("{domain: d, descriptors: [{key: a, name: a, limit: 4/hour}]}", memory());
    let emergencies = Arc::new(ActiveMeasures::default());
    let all = |name: &str, act| Measure {
        name: name.into(),
        action: act,
        target: MeasureTarget::All,
        expires_at: until,
    };
    emergencies.replace([all("emergency:19", MeasureAction::Tighten(500))]);
    let limiter = limiter.with_measures(Arc::clone(&emergencies));
    assert_eq!((0..3).map(|_| check(&limiter, &[("a", "x")])).collect::<Vec<_>>(), [true, true, false]);
    let (_, lines, _) = &self::records(&observe)[0];
    assert!(lines.contains("Denied by rule `a`: 2 of 2 units"), "{lines}");
    assert!(lines.contains("Emergency measure `emergency:19` was active: limits were 50%"), "{lines}");
    emergencies.replace([all("emergency:20", MeasureAction::ShadowAll)]);
    assert!((0..3).all(|_| check(&limiter, &[("a", "x")])));
    let (record, lines, _) = &self::records(&observe)[0];
    assert_eq!(record["verdict"], "shadow_deny");
    assert!(lines.contains("emergency measure `emergency:20` put all rules in shadow mode"), "{lines}");
    assert!(
        lines.contains("`emergency:20` was active: all rules were in shadow mode")
            && !lines.contains("is in shadow"),
        "{lines}"
    );
    emergencies.replace([]);
    let limiter = limiter.with_global_shadow(true);
    assert!(check(&limiter, &[("a", "x")]));
    let (record, lines, _) = &self::records(&observe)[0];
    assert_eq!((&record["verdict"], &record["emergency"]), (&json!("shadow_deny"), &Value::Null));
    assert!(lines.contains("global shadow mode was on") && lines.contains("rule `a` would have"), "{lines}");
}

/// An inline limit is named as in the response, in the domain of the request; without a matching rule no rule is named.
#[test]
fn decisions_without_a_rule_name_their_origin() {
    let (limiter, observe) =
        observed("{domain: d, descriptors: [{key: a, name: a, limit: 9/hour}]}", memory());
    let own = Descriptor {
        entries: &[("user", "alice")],
        limit: Some((1, Unit::Hour.length())),
        ..Descriptor::default()
    };
    let check = |domain| pollster::block_on(limiter.check(&Check::descriptors(domain, &[own])));
    assert!(check("d").is_allowed());
    let denied = check("d");
    let (entry, lines, _) = &records(&observe)[0];
    assert_eq!(entry["rule"], denied.denied_by_name().expect("a name"), "{entry}");
    assert_eq!((&entry["verdict"], &entry["domain"]), (&json!("deny"), &json!("d")));
    assert!(lines.contains("Denied by the request's inline limit: 1 of 1 units"), "{lines}");
    let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
    observe.write(&mut page);
    let text = page.finish();
    for verdict in ["allow", "deny"] {
        let line = format!(
            "ratelimit_decisions_total{{domain=\"d\",rule=\"inline-limit\",verdict=\"{verdict}\",origin=\"store\",shadow=\"false\"}} 1\n"
        );
        assert!(text.contains(&line), "{text}");
    }
    assert!(!text.contains("rule=\"other\""), "{text}");
    assert!(check("made up").is_allowed());
    let (entry, lines, _) = &records(&observe)[0];
    assert_eq!((&entry["rule"], &entry["domain"]), (&Value::Null, &json!("made up")), "{entry}");
    assert!(lines.contains("no limit applies"), "{lines}");
}

/// It is unknown when another request completes.
#[test]
fn concurrency_limits_promise_no_retry_time() {
    let (limiter, observe) =
        observed("{domain: d, descriptors: [{key: a, name: at-once, concurrency: 2}]}", memory());
    assert_eq!((0..3).map(|_| check(&limiter, &[("a", "x")])).collect::<Vec<_>>(), [true, true, false]);
    let (entry, lines, passes) = records(&observe).swap_remove(0);
    assert!(entry["why"].as_str().is_some_and(|why| why.contains("when one of them completed")), "{entry}");
    assert!(lines.contains("at the latest at") && !lines.contains("used the units"), "{lines}");
    assert_eq!(passes, None);
}

/// Grants for `vip`.
struct Granted(Arc<Grants>);

impl QuotaProvider for Granted {
    fn lookup(&self, check: &Check<'_>, _: &Ruleset, _: &dyn Clock) -> CallerQuota {
        let is_vip = check.value("api_key") == Some("vip");
        CallerQuota { grants: is_vip.then(|| Arc::clone(&self.0)), ..CallerQuota::default() }
    }
}

/// A request covered by a grant: the limit is exhausted, and the remainder is that of the grant.
#[test]
fn requests_paid_by_a_grant_name_the_grant() {
    let (limiter, observe) =
        observed("{domain: d, descriptors: [{key: api_key, name: own, limit: 5/hour}]}", memory());
    let lasts = TimeDelta::from_secs(86_400);
    let rules = limiter.rules().find_per_caller_rules("api_key", "own");
    let grant = Grant::new("g1", 2, rules, lasts, SystemClock::new().now() + lasts).expect("a grant");
    let limiter = limiter.with_quotas(Arc::new(Granted(Arc::new(vec![Arc::new(grant)]))));
    let passed = (0..8).filter(|_| check(&limiter, &[("api_key", "vip")])).count();
    assert_eq!(passed, 7);
    let mut all = records(&observe);
    all.reverse();
    let seen: Vec<_> = all.iter().map(|(entry, ..)| (&entry["origin"], &entry["used_before"])).collect();
    let expected = [("store", 4), ("grant", 5), ("grant", 5), ("store", 5)];
    let expected = expected.map(|(origin, used)| (json!(origin), json!(used)));
    assert_eq!(seen[4..], expected.iter().map(|(a, b)| (a, b)).collect::<Vec<_>>());
    let (_, lines, _) = &all[5];
    assert!(lines.contains("5 of 5 units were in use") && lines.contains("1 left in the grant"), "{lines}");
}

/// Two descriptors may have different values for one key: both are shown.
#[test]
fn repeated_attributes_are_all_shown() {
    let (limiter, observe) =
        observed("{domain: d, descriptors: [{key: bad, name: bad, limit: 0/hour}]}", memory());
    let one = |entries| Descriptor { entries, ..Descriptor::default() };
    let all = [
        one(&[("bad", "one"), ("user", "u"), ("api_key", "sk_live_0123456789")]),
        one(&[("bad", "two")]),
        one(&[("bad", "three")]),
    ];
    pollster::block_on(limiter.check(&Check::descriptors("d", &all)));
    let (entry, lines, _) = records(&observe).swap_remove(0);
    assert_eq!(entry["attributes"]["bad"], json!(["one", "two", "three"]), "{entry}");
    assert_eq!(entry["attributes"]["user"], "u");
    assert!(!entry.to_string().contains("0123456789"), "{entry}");
    assert!(lines.contains("bad=one") && lines.contains("bad=two, bad=three"), "{lines}");
}
