//! The recorder with a real limiter: counts match the decisions, on many threads and across rule changes; and if nothing
//! drains the buffers, decisions continue and memory stays bounded.

use std::collections::BTreeMap;
use std::sync::Arc;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{ManualClock, SystemClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter, TraceContext, WorkerPermit};
use tollgate_observe::{
    DecisionQuery, ExpositionFormat, LoggedVerdict, MetricsWriter, Telemetry, TelemetryConfig,
};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

fn rules(text: &str) -> Arc<Ruleset> {
    Arc::new(Ruleset::load(&[Source::new("r.yaml", text)], &Options::default()).expect("rules"))
}

fn observed(text: &str, settings: TelemetryConfig) -> (Limiter<MemoryStore<SystemClock>>, Arc<Telemetry>) {
    let observe = Telemetry::new(settings).expect("telemetry");
    let clock = SystemClock::new();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("memory");
    let limiter = Limiter::new(rules(text), store, Arc::new(clock)).with_observer(Arc::clone(&observe) as _);
    (limiter, observe)
}

fn decide(limiter: &Limiter<MemoryStore<SystemClock>>, pairs: &[(&str, &str)]) -> &'static str {
    let decision = pollster::block_on(limiter.check(&Check::attributes("d", pairs).with_protocol("http")));
    if decision.is_allowed() { "allow" } else { "deny" }
}

/// Returns the number of decisions by rule and verdict.
fn counted(observe: &Telemetry) -> BTreeMap<(String, String), u64> {
    let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
    observe.write(&mut page);
    let mut counts = BTreeMap::new();
    for line in page.finish().lines().filter_map(|line| line.strip_prefix("ratelimit_decisions_total{")) {
        let label = |name: &str| {
            let from = line.split(&format!("{name}=\"")).nth(1).expect("a label");
            from.split('"').next().expect("a value").to_owned()
        };
        let count: u64 = line.rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a count");
        *counts.entry((label("rule"), label("verdict"))).or_default() += count;
    }
    counts
}

/// Compares with a plain map of all decisions.
#[test]
fn counts_are_what_was_decided_on_every_thread_and_over_changes_of_rules() {
    let first =
        "{domain: d, descriptors: [{key: a, name: a, limit: 50/hour}, {key: b, name: b, limit: 7/hour}]}";
    let second =
        "{domain: d, descriptors: [{key: c, name: c, limit: 9/hour}, {key: b, name: b, limit: 700/hour}]}";
    let (limiter, observe) = observed(first, TelemetryConfig::default());
    let mut exact: BTreeMap<(String, String), u64> = BTreeMap::new();
    for round in [first, second] {
        limiter.replace_rules(rules(round));
        let verdicts: Vec<Vec<(&str, &str)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let limiter = &limiter;
                    scope.spawn(move || {
                        let keys = ["a", "b", "c"];
                        (0..300)
                            .map(|n| {
                                let key = keys[(n + thread) % 3];
                                let verdict = decide(limiter, &[(key, ["x", "y"][n % 2])]);
                                let limited = limiter.rules().rules().iter().any(|rule| rule.name == key);
                                (if limited { key } else { "" }, verdict)
                            })
                            .collect()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        for (rule, verdict) in verdicts.into_iter().flatten() {
            *exact.entry((rule.to_owned(), verdict.to_owned())).or_default() += 1;
        }
    }
    assert_eq!(counted(&observe), exact);
}

/// Without draining the buffers fill up, captures that do not fit are counted, and every decision is still made.
#[test]
fn overflow_is_dropped_and_counted() {
    let text = "{domain: d, descriptors: [{key: a, name: a, limit: 1/hour}]}";
    let (limiter, observe) =
        observed(text, TelemetryConfig { max_records: 5_000, ..TelemetryConfig::default() });
    let denials = (0..20_001).filter(|_| decide(&limiter, &[("a", "x")]) == "deny").count();
    assert_eq!(denials, 20_000);
    observe.run_once();
    let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
    observe.write(&mut page);
    let text = page.finish();
    let metric = |name: &str| -> usize {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.and_then(|value| value.parse().ok()).expect(name)
    };
    let logged = metric("ratelimit_decision_log_decisions_total");
    let dropped = metric("ratelimit_decision_log_dropped_total{where=\"memory\"}");
    assert!(logged > 0 && dropped > 0, "{logged} logged, {dropped} dropped");
    // A sample of allowed decisions may be among them.
    assert!((20_000..=20_001).contains(&(logged + dropped)), "{logged} + {dropped}");
    assert_eq!(counted(&observe)[&("a".to_owned(), "deny".to_owned())], 20_000, "counts drop nothing");
    // Draining resumes.
    decide(&limiter, &[("a", "y")]);
    decide(&limiter, &[("a", "y")]);
    observe.run_once();
    let search = DecisionQuery {
        key: Some("y".to_owned()),
        ruled: Some(LoggedVerdict::Deny),
        limit: 10,
        ..DecisionQuery::default()
    };
    assert_eq!(observe.search(&search).0.len(), 1);
    assert!(metric("ratelimit_decision_log_entries") <= 5_000);
}

#[test]
fn the_sample_of_what_is_allowed_has_its_size() {
    let text = "{domain: d, descriptors: [{key: a, name: a, limit: 1000000/hour}]}";
    for (allowed, least, most) in [(0.0, 0, 0), (1.0, 30_000, 30_000), (0.01, 200, 400)] {
        let (limiter, observe) = observed(
            text,
            TelemetryConfig { allowed_sample: allowed, max_records: 100_000, ..TelemetryConfig::default() },
        );
        let names: Vec<String> = (0..500).map(|n| format!("k{n}")).collect();
        for n in 0..30_000 {
            decide(&limiter, &[("a", &names[n % 500])]);
            if n % 1_000 == 0 {
                observe.run_once();
            }
        }
        observe.run_once();
        let found = observe.search(&DecisionQuery { limit: 100_000, ..DecisionQuery::default() }).0.len();
        assert!((least..=most).contains(&found), "{allowed}: {found}");
    }
}

/// Shares are correct with and without sampling.
#[test]
fn shares_are_right_under_load() {
    let text = "{domain: d, descriptors: [{key: api_key, name: a, limit: 100000000/hour}]}";
    let (limiter, observe) = observed(text, TelemetryConfig::default());
    for round in 0..200 {
        for n in 0..2_000 {
            let name = if n % 4 == 0 {
                "heavy-caller-1".to_owned()
            } else {
                format!("light-caller-{}", n * 31 + round)
            };
            decide(&limiter, &[("api_key", &name)]);
        }
        observe.run_once();
    }
    let top = observe.top_talkers(&limiter.rules());
    let share = top["by_rate"][0]["share"].as_f64().expect("a share");
    assert!((share - 0.25).abs() < 0.04, "{share}");
    assert!(!top.to_string().contains("heavy-caller"), "{top}");
}

/// With the collector unavailable and everything sampled, memory is bounded and every span is accounted for.
#[test]
fn spans_wait_in_bounded_room_and_none_is_lost_uncounted() {
    let settings = TelemetryConfig { service_name: Some("t".to_owned()), ..TelemetryConfig::default() };
    let (limiter, observe) = observed("{domain: d, descriptors: [{key: a, limit: 9/hour}]}", settings);
    assert!(limiter.is_traced());
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let limiter = &limiter;
            scope.spawn(move || {
                for _ in 0..5_000 {
                    let trace = TraceContext::new([thread + 1; 16], [1; 8], Timestamp::ZERO);
                    let check = Check::attributes("d", &[("a", "x")]).with_trace(Some(&trace));
                    pollster::block_on(limiter.check(&check));
                    pollster::block_on(limiter.check(&check.with_trace(None)));
                }
            });
        }
    });
    let metrics = || {
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        observe.write(&mut page);
        let text = page.finish();
        ["_total", "_sent_total", "_dropped_total{where=\"memory\"}", "_dropped_total{where=\"collector\"}"]
            .map(|name| {
                let name = format!("ratelimit_trace_spans{name} ");
                let line = text.lines().find_map(|line| line.strip_prefix(&name)).expect("a metric");
                line.parse::<u64>().expect("a number")
            })
    };
    assert_eq!(metrics(), [20_000, 0, 20_000 - 8_192, 0]);
    let traces = observe.spans().expect("tracing is enabled");
    let mut taken = Vec::new();
    while let Some(batch) = traces.drain(1_000) {
        assert!(batch.message.len() > 100 * batch.spans as usize);
        taken.push(batch.spans);
    }
    assert_eq!((taken.len(), taken.iter().sum::<u64>()), (9, 8_192));
    // `partial_success { rejected_spans: 3 }`; an empty response; one that cannot be decoded.
    traces.record_sent(taken[0], &[0x0a, 0x02, 0x08, 0x03]);
    traces.record_sent(taken[1], &[]);
    traces.record_sent(taken[2], b"<html>");
    traces.record_dropped(taken[3]);
    assert_eq!(metrics(), [20_000, 2_997, 20_000 - 8_192, 1_003]);
    // There is room again.
    let trace = TraceContext::new([1; 16], [1; 8], Timestamp::ZERO);
    pollster::block_on(limiter.check(&Check::attributes("d", &[("a", "x")]).with_trace(Some(&trace))));
    assert_eq!(traces.drain(10).map(|batch| batch.spans), Some(1));
}

/// Cached descriptions are never used for another caller, and contain no secret.
#[test]
fn callers_are_not_mistaken_for_each_other() {
    let text =
        "{domain: d, descriptors: [{key: a, name: a, limit: 0/hour}, {key: ab, name: ab, limit: 0/hour}]}";
    let (limiter, observe) =
        observed(text, TelemetryConfig { max_records: 20_000, ..TelemetryConfig::default() });
    // The same letters split differently, and more callers than the cache holds, each of them twice.
    let twins = [[("a", "bc"), ("x", "")], [("ab", "c"), ("x", "")], [("a", "b"), ("cx", "")]];
    for pairs in &twins {
        assert_eq!(decide(&limiter, pairs), "deny");
    }
    let all = 5_000;
    for n in 0..all {
        let (key, user) = (format!("sk_live_{n:08}"), format!("u{n}"));
        for _ in 0..2 {
            decide(&limiter, &[("a", "v"), ("api_key", &key), ("user", &user)]);
        }
        if n % 500 == 0 {
            observe.run_once();
        }
    }
    observe.run_once();
    let found = |key: &str| {
        observe.search(&DecisionQuery { key: Some(key.to_owned()), limit: 10, ..DecisionQuery::default() }).0
    };
    let shown = |key: &str| -> Vec<String> {
        found(key).iter().map(|entry| entry.json(observe.node_info())["attributes"].to_string()).collect()
    };
    assert_eq!(shown("bc"), ["{\"a\":\"bc\",\"x\":\"\"}"]);
    assert_eq!(shown("c"), ["{\"ab\":\"c\",\"x\":\"\"}"]);
    assert_eq!(shown("b"), ["{\"a\":\"b\",\"cx\":\"\"}"]);
    for n in [0, 1, all / 2, all - 1] {
        let own = shown(&format!("sk_live_{n:08}"));
        assert_eq!(own.len(), 2, "{n}");
        assert!(
            own.iter().all(|text| text.contains(&format!("\"user\":\"u{n}\"")) && !text.contains("sk_live_"))
        );
    }
}

/// Inline limits are counted and logged like those of rules, in batches of any size.
#[test]
fn inline_limits_are_monitored_too() {
    use tollgate_core::{Algorithm, Charge, Cost, CounterKey, KeyPart, LimitSpec, Rate, Scope, TimeDelta};
    let rules = "{domain: d, descriptors: [{key: a, name: a, limit: 50/hour}]}";
    for (share, logged_allows) in [(0.0, false), (1.0, true)] {
        let (limiter, observe) =
            observed(rules, TelemetryConfig { allowed_sample: share, ..TelemetryConfig::default() });
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(5, TimeDelta::from_secs(3_600)))
            .build()
            .expect("a limit");
        let scope = Scope::new("cl.throttle");
        let (mut allowed, mut denied) = (0_u64, 0_u64);
        // Remaining shares by tenths: each of five units is two tenths.
        let mut tenths = [0_u64; 10];
        let mut random = SplitMix64::new(7);
        for _ in 0..60 {
            let parts: Vec<[KeyPart<'_>; 1]> =
                (0..random.index(32)).map(|n| [KeyPart::Text(["x", "y", "z"][n % 3])]).collect();
            let charge = |parts| Charge::new(CounterKey { scope: &scope, parts }, &limit, Cost::ONE);
            let charges: Vec<Charge<'_>> = parts.iter().map(|parts| charge(parts)).collect();
            let mut outcomes = Vec::new();
            assert!(limiter.try_charge_inline(&charges, &mut outcomes));
            let over = outcomes.iter().filter(|outcome| outcome.verdict.is_denied()).count() as u64;
            denied += over;
            allowed += outcomes.len() as u64 - over;
            for outcome in &outcomes {
                tenths[(outcome.remaining as usize * 2).saturating_sub(1)] += 1;
            }
            // Checks by rules run on the same thread in between.
            decide(&limiter, &[("a", "x")]);
            observe.run_once();
        }
        // The 60 decisions by the rule: one unit of fifty less each time, then none.
        (0..60_usize).for_each(|n| tenths[49_usize.saturating_sub(n).saturating_sub(1) / 5] += 1);
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        observe.write(&mut page);
        let text = page.finish();
        let buckets: Vec<u64> = (text.lines())
            .filter_map(|line| line.strip_prefix("ratelimit_remaining_bucket{tier=\"none\",le=\""))
            .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
            .collect();
        let sums: Vec<u64> = (0..10).map(|tenth| tenths[..=tenth].iter().sum()).collect();
        assert_eq!(buckets[..10], sums[..], "{text}");
        assert!(allowed == 15 && denied > 100, "{allowed} {denied}");
        let counts = counted(&observe);
        let count = |verdict: &str| counts[&("cl.throttle".to_owned(), verdict.to_owned())];
        assert_eq!((count("allow"), count("deny")), (allowed, denied));
        let rule = Some("cl.throttle".to_owned());
        let all = |ruled| {
            let search = DecisionQuery {
                rule: rule.clone(),
                ruled: Some(ruled),
                limit: 10_000,
                ..DecisionQuery::default()
            };
            observe.search(&search).0
        };
        assert_eq!(all(LoggedVerdict::Deny).len() as u64, denied, "every denial is in the log");
        assert_eq!(all(LoggedVerdict::Allow).len() as u64, if logged_allows { allowed } else { 0 });
        let record = all(LoggedVerdict::Deny)[0].json(observe.node_info());
        assert_eq!((&record["protocol"], &record["used_before"]), (&"resp".into(), &5.into()), "{record}");
        // In global shadow mode would-be denials are separate.
        let limiter = limiter.with_global_shadow(true);
        let parts = [KeyPart::Text("x")];
        let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE);
        let mut outcomes = Vec::new();
        limiter.try_charge_inline(&[charge], &mut outcomes);
        assert!(outcomes[0].verdict.is_allowed());
        observe.run_once();
        assert_eq!(all(LoggedVerdict::ShadowDeny).len(), 1);
    }
}

/// A flood of callers with one request each must not hide the heavy one: every listed or logged caller can be acted on.
#[test]
fn listed_callers_can_be_blocked_during_a_flood() {
    let text =
        "{domain: d, descriptors: [{key: api_key, name: a, limit: 1000/hour}, {key: bad, limit: 0/hour}]}";
    let (limiter, observe) = observed(text, TelemetryConfig::default());
    let heavy = "sk_live_heavy_0123456789";
    for n in 0..100_000 {
        decide(&limiter, &[("api_key", &format!("sk_live_once_{n:08}"))]);
        // It starts after many thousands of others, and is still one of very many.
        if n >= 50_000 && n % 25 == 0 {
            decide(&limiter, &[("api_key", heavy)]);
        }
        if n % 100 == 99 {
            observe.run_once();
        }
    }
    assert!((0..2_000).any(|_| decide(&limiter, &[("api_key", heavy)]) == "deny"));
    observe.run_once();
    let id = |value: &serde_json::Value| {
        u64::from_str_radix(value["key_id"].as_str().expect("an id"), 16).expect("a number")
    };
    let top = observe.top_talkers(&limiter.rules());
    for list in ["by_rate", "by_denials"] {
        assert_eq!(observe.api_key(id(&top[list][0])).as_deref(), Some(heavy), "{list}");
    }
    for listed in top["by_rate"].as_array().expect("a list") {
        assert!(observe.api_key(id(listed)).is_some_and(|key| key.starts_with("sk_live_")), "{listed}");
        assert_eq!(listed["actionable"], true);
    }
    // A caller denied once among many, on no list: it is in the log.
    for n in 0..8_000 {
        decide(&limiter, &[("api_key", &format!("sk_live_denied_{n:08}")), ("bad", "")]);
        if n % 100 == 99 {
            observe.run_once();
        }
    }
    let key = "sk_live_denied_00006000";
    let search = DecisionQuery { key: Some(key.to_owned()), limit: 1, ..DecisionQuery::default() };
    let logged = observe.search(&search).0.pop().expect("a denial").json(observe.node_info());
    assert_eq!(observe.api_key(id(&logged)).as_deref(), Some(key), "{logged}");
    assert!(!format!("{observe:?}").contains("sk_live_"), "Debug output contains no keys");
}

/// Returns the top callers after draining.
fn top(limiter: &Limiter<MemoryStore<SystemClock>>, observe: &Telemetry) -> serde_json::Value {
    observe.run_once();
    observe.top_talkers(&limiter.rules())
}

/// Rare denials among many allowed requests are each counted exactly once.
#[test]
fn every_denial_of_a_caller_is_recorded_beside_other_traffic() {
    let text = "{domain: d, descriptors: [{key: user, name: many, limit: 100000000/hour}, {key: bad, limit: 0/hour}]}";
    let (limiter, observe) = observed(text, TelemetryConfig::default());
    for n in 0..60_000 {
        decide(&limiter, &[("user", "busy")]);
        if n % 3_000 == 1_500 {
            assert_eq!(decide(&limiter, &[("user", "unlucky"), ("bad", "")]), "deny");
        }
        if n % 6_000 == 0 {
            observe.run_once();
        }
    }
    let top = top(&limiter, &observe);
    let denials = top["by_denials"].as_array().expect("a list");
    assert_eq!(denials.len(), 1, "{top}");
    assert_eq!((&denials[0]["key_masked"], &denials[0]["denied"]), (&"unlucky".into(), &20.into()), "{top}");
    assert_eq!(top["by_rate"][0]["key_masked"], "busy");
}

/// After all rules are renamed, more than there are slots in total, the new ones are counted separately from zero, and the
/// totals do not decrease.
#[test]
fn counts_survive_when_every_rule_is_renamed() {
    let many = |prefix: &str| {
        let each = |n| format!("\n  - {{key: k, value: v{n}, name: {prefix}{n}, limit: 1/hour}}");
        format!("domain: d\ndescriptors:{}\n", (0..600).map(each).collect::<String>())
    };
    let (limiter, observe) = observed(&many("a"), TelemetryConfig::default());
    let ask = || (0..600).filter(|n| decide(&limiter, &[("k", &format!("v{n}"))]) == "allow").count();
    let all = |observe: &Telemetry, prefix: &str| {
        let counts = counted(observe);
        counts
            .iter()
            .filter(|((rule, _), _)| rule.starts_with(prefix))
            .map(|(_, count)| *count)
            .collect::<Vec<u64>>()
    };
    let total = |observe: &Telemetry| {
        observe.tick();
        let stats = observe.stats(3_600);
        ["allow", "deny"].map(|of| {
            stats["series"][of]
                .as_array()
                .expect("a column")
                .iter()
                .filter_map(serde_json::Value::as_u64)
                .sum::<u64>()
        })
    };
    assert_eq!((ask(), ask()), (600, 0));
    assert_eq!(all(&observe, "a"), vec![1; 1_200]);
    assert_eq!(total(&observe), [600, 600]);
    limiter.replace_rules(rules(&many("b")));
    // The same counters under other names.
    assert_eq!(ask(), 0);
    assert_eq!(all(&observe, "b"), vec![1; 600]);
    assert!(all(&observe, "other").is_empty());
    assert_eq!(total(&observe), [600, 1_200]);
}

/// History is the sum of its minutes: each decision is in one of them, once, whatever rules change between.
#[test]
fn a_minute_has_what_happened_since_the_last() {
    let text = "{domain: d, descriptors: [{key: api_key, name: a, limit: 5/hour}, {key: b, name: b, limit: 7/hour}]}";
    let (limiter, observe) = observed(text, TelemetryConfig::default());
    observe.count_minutes();
    for _ in 0..8 {
        decide(&limiter, &[("api_key", "sk-live-0123456789")]);
    }
    decide(&limiter, &[("c", "x")]);
    let first = observe.take_minute();
    assert_eq!((first.totals.allow, first.totals.deny, first.totals.unmatched), (6, 3, 1));
    assert_eq!(first.rules.len(), 1, "{:?}", first.rules);
    let rule = &first.rules[0];
    assert_eq!((&*rule.domain, &*rule.rule, rule.allow, rule.deny), ("d", "a", 5, 3));
    // The busiest first.
    let caller = &first.callers[0];
    assert!(!caller.display.contains("0123456789"), "{}", caller.display);
    assert_eq!((caller.requests, &caller.denied[..]), (8, &[("d".to_owned(), "a".to_owned(), 3)][..]));

    limiter.replace_rules(rules("{domain: d, descriptors: [{key: b, name: b, limit: 7/hour}]}"));
    decide(&limiter, &[("b", "x")]);
    let second = observe.take_minute();
    assert_eq!((second.totals.allow, second.totals.deny), (1, 0));
    assert_eq!(second.rules.iter().map(|rule| &*rule.rule).collect::<Vec<_>>(), ["b"]);
    let third = observe.take_minute();
    assert_eq!((third.totals.allow, third.rules.len(), third.callers.len()), (0, 0, 0));
}

/// A prefix finds what the log shows, and never helps to guess what it hides.
#[test]
fn decisions_are_found_by_domain_and_by_what_is_shown() {
    let text = "{domain: d, descriptors: [{key: api_key, name: a, limit: 1/hour}, {key: user_id, name: u, limit: 1/hour}]}";
    let (limiter, observe) = observed(text, TelemetryConfig::default());
    for _ in 0..2 {
        decide(&limiter, &[("api_key", "sk-live-0123456789")]);
        decide(&limiter, &[("user_id", "Maria")]);
    }
    observe.drain_buffers();
    let found = |prefix: Option<&str>, domain: Option<&str>| {
        let (prefix, domain) = (prefix.map(str::to_owned), domain.map(str::to_owned));
        let ruled = Some(LoggedVerdict::Deny);
        observe
            .search(&DecisionQuery { prefix, domain, ruled, limit: 10, ..DecisionQuery::default() })
            .0
            .len()
    };
    assert_eq!((found(None, None), found(None, Some("d")), found(None, Some("e"))), (2, 2, 0));
    assert_eq!((found(Some("mar"), None), found(Some("Maria"), None), found(Some("aria"), None)), (1, 1, 0));
    assert_eq!((found(Some("sk"), None), found(Some("sk-live-0123456"), None)), (1, 0));
}

/// The sample of allowed requests is empty: what only shadow mode lets pass is logged nevertheless, before and after a delay.
#[test]
fn what_would_be_shed_is_always_logged() {
    let settings = TelemetryConfig { allowed_sample: 0.0, ..TelemetryConfig::default() };
    let text = "{domain: d, descriptors: [{key: a, limit: 1000/hour}], overload: {workers: {limit: 1}, shadow: true}}";
    let observe = Telemetry::new(settings).expect("telemetry");
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
    let limiter = Limiter::new(rules(text), store, Arc::clone(&clock) as _);
    let limiter = limiter.with_observer(Arc::clone(&observe) as _);
    let check = Check::attributes("d", &[("a", "x")]);
    let logged = || {
        observe.run_once();
        let query = DecisionQuery { limit: 100, ..DecisionQuery::default() };
        let found: Vec<String> = observe.search(&query).0.iter().map(|entry| entry.summary()).collect();
        found
    };
    pollster::block_on(limiter.check(&check));
    assert!(logged().is_empty(), "an allowed request is not in the sample");
    pollster::block_on(limiter.check(&check.with_reason(Some("would be shed at priority normal"))));
    let [one] = &logged()[..] else { panic!("one entry: {:?}", logged()) };
    assert!(one.contains(": would be shed at priority normal"), "{one}");

    let mut held = Vec::new();
    while held.iter().all(|permit: &WorkerPermit| permit.would_be_shed().is_none()) {
        let permit = pollster::block_on(limiter.enter_upstream_after_delay(&check, "up"));
        held.push(permit.expect("nothing is shed").expect("workers are limited"));
        assert!(held.len() < 10_000, "the limit of one is exceeded");
        clock.advance(TimeDelta::from_millis(20));
    }
    let all = logged();
    assert_eq!(all.len(), 2, "{all:?}");
    assert!(all.iter().any(|one| one.starts_with("Allowed after its delay: would be shed at")), "{all:?}");
}
