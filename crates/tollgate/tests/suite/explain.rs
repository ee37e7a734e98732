//! A request is explained by a running server before it is made, over HTTP and by the command line: on the published
//! rules, quotas, measures and counters, or on a draft. Nothing is charged by it.

use crate::databases::Place;
use crate::harness::{self, Operator, Redis, Run};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    name: per-key
    limit: 40 per 3650d
    algorithm: fixed_window
    tiers: {pro: 60 per 3650d}
    descriptors:
      - {key: endpoint, value: POST /login, name: logins, limit: 2 per 3650d, algorithm: fixed_window}
  - {key: endpoint, name: each, limit: 3 per 3650d, shadow: true, algorithm: fixed_window}
  - {key: tenant, name: tenants, limit: 9/hour}
";

const KEY: &str = "sk_live_0123456789";

fn rule<'v>(explanation: &'v Value, name: &str) -> &'v Value {
    let rules = explanation["rules"].as_array().expect("rules");
    rules.iter().find(|rule| rule["rule"] == name).unwrap_or_else(|| panic!("no {name} in {explanation:#}"))
}

fn explain(node: &Operator, sent: &Value) -> Value {
    node.post("/admin/v1/explain", sent)
}

fn foretells(node: &Operator) {
    let attributes = json!({"api_key": KEY, "endpoint": "POST /login"});
    let sent = json!({"attributes": attributes});
    let explanation = explain(node, &sent);
    assert_eq!(
        (&explanation["outcome"]["verdict"], &explanation["explained_by"]),
        (&json!("allow"), &json!("active")),
        "{explanation:#}"
    );
    assert_eq!(node.passes(&attributes), 2);
    for _ in 0..5 {
        let explanation = explain(node, &sent);
        let outcome = &explanation["outcome"];
        assert_eq!(
            (&outcome["verdict"], &outcome["rule"]),
            (&json!("deny"), &json!("logins")),
            "{explanation:#}"
        );
        assert!(outcome["retry_after_ms"].as_u64().is_some_and(|wait| wait > 3_600_000), "{outcome}");
        let logins = &rule(&explanation, "logins")["charged"][0];
        assert_eq!((&logins["used"], &logins["remaining"]), (&json!(2), &json!(0)), "{logins}");
        assert_eq!((&logins["answer"], &logins["source"]), (&json!("denies"), &json!("rule")));
        let per_key = &rule(&explanation, "per-key")["charged"][0];
        assert_eq!(
            (&per_key["used"], &per_key["remaining"]),
            (&json!(2), &json!(38)),
            "charges nothing: {per_key}"
        );
        assert_eq!(per_key["answer"], "fits");
        let each = &rule(&explanation, "each")["charged"][0];
        assert_eq!(
            (&each["role"], &each["used"], &each["enforced"]),
            (&json!("shadow"), &json!(3), &json!(false)),
            "{each}"
        );
        assert_eq!(rule(&explanation, "tenants")["finding"], "no_match");
        assert_eq!(rule(&explanation, "tenants")["clauses"][0]["answer"], "the request has no `tenant`");
        assert!(!explanation.to_string().contains(KEY), "the key is masked: {explanation:#}");
    }
    let usage = node.get(&format!("/admin/v1/usage/{KEY}"));
    assert_eq!(usage["limits"][0]["used"], 2, "{usage}");

    // A real caller: its tier, its own limit, its grant.
    node.ask("PUT", &format!("/admin/v1/quotas/{KEY}"), &json!({"tier": "pro", "reason": "test"}));
    let explanation = harness::eventually("the quota", || {
        let explanation = explain(node, &json!({"attributes": {"api_key": KEY}}));
        (explanation["tier"] == "pro").then_some(explanation)
    });
    assert_eq!(explanation["tier_source"], "quota");
    let per_key = &rule(&explanation, "per-key")["charged"][0];
    assert_eq!(
        (&per_key["source"], &per_key["count"], &per_key["used"]),
        (&json!("tier"), &json!(60), &json!(2)),
        "{per_key}"
    );
    let grant = json!({"units": 3, "rule": "logins", "reason": "test"});
    node.post(&format!("/admin/v1/usage/{KEY}/grant"), &grant);
    let explanation = harness::eventually("the grant", || {
        let explanation = explain(node, &sent);
        (explanation["outcome"]["origin"] == "grant").then_some(explanation)
    });
    assert_eq!(
        (&explanation["outcome"]["verdict"], &explanation["grants"][0]["remaining"]),
        (&json!("allow"), &json!(3)),
        "{explanation:#}"
    );
    assert_eq!(rule(&explanation, "logins")["charged"][0]["granted"], true);

    // What operators decide in an emergency.
    let id = node.declare("block", "api_key", KEY);
    let explanation = harness::eventually("the block", || {
        let explanation = explain(node, &sent);
        (explanation["outcome"]["origin"] == "emergency").then_some(explanation)
    });
    assert_eq!(explanation["outcome"]["verdict"], "deny");
    assert_eq!(rule(&explanation, "per-key")["charged"][0]["answer"], "not_asked");
    assert_eq!(
        rule(&explanation, "per-key")["charged"][0]["measure"],
        format!("emergency:{id}"),
        "{explanation:#}"
    );
}

#[test]
fn a_server_foretells_its_decisions() {
    let place = Place::new();
    foretells(&Operator::start(RULES, &place.sqlite("explain"), &[]));
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_server_over_redis_foretells_its_decisions_and_writes_nothing() {
    let (place, redis) = (Place::new(), Redis::start());
    let flags = ["--store", &redis.url(), "--store-deadline-ms", "10000"];
    let node = Operator::start(RULES, &place.sqlite("explain"), &flags);
    let rules = "domain: r\ndescriptors:\n  - {key: k, limit: 5/hour}\n  - {key: k, value: x, limit: 5/hour, algorithm: sliding_log}\n";
    let sent = json!({"domain": "r", "attributes": {"k": "fresh-value"}, "files": [{"name": "r.yaml", "text": rules}]});
    assert_eq!(explain(&node, &sent)["outcome"]["verdict"], "allow");
    let keys = redis.cli(&["keys", "tg1:*"]);
    assert!(!keys.contains("fresh-value"), "nothing is written: {keys}");
    foretells(&node);
}

/// A limit of each algorithm and kind, at most three requests long, and one with each thing that a limit may have.
const FORMS: [&str; 18] = [
    "limit: 3 per 3650d",
    "limit: 3 per 3650d, algorithm: token_bucket",
    "limit: 3 per 3650d, algorithm: leaky_bucket",
    "limit: 3 per 3650d, algorithm: fixed_window",
    "limit: 3 per 3650d, algorithm: sliding_window",
    "limit: 3 per 3650d, algorithm: strict_window",
    "limit: 3 per 3650d, algorithm: sliding_log",
    "limit: 3/month, algorithm: fixed_window",
    "limit: 3/hour, algorithm: fixed_window, jitter: true",
    "limit: [3/hour, 9 per 3650d], algorithm: fixed_window",
    "limit: 3 per 3650d, algorithm: fixed_window, candidate: 1 per 3650d",
    "limit: 3 per 3650d, algorithm: fixed_window, shadow: true",
    "limit: 3 per 3650d, algorithm: fixed_window, action: degrade",
    "limit: 3 per 3650d, algorithm: fixed_window, soft: {at: 1}",
    "limit: 3 per 3650d, algorithm: fixed_window, enforce: 1%",
    "limit: 3 per 3650d, algorithm: fixed_window, split: 2",
    "limit: 6 per 3650d, algorithm: fixed_window, cost: 2",
    "concurrency: 3",
];

/// Every request is explained before it is made, to a limit alone and to the same limit beside another.
fn foretells_all_forms(flags: &[&str]) {
    let place = Place::new();
    let rules = FORMS.iter().enumerate().map(|(at, form)| {
        format!("  - {{key: k{at}, name: r{at}, {form}}}\n  - {{key: both{at}, name: both{at}, {form}}}\n")
    });
    let rules: String = rules.collect();
    let text = format!(
        "domain: d\ndescriptors:\n{rules}  - {{key: other, limit: 5 per 3650d, algorithm: fixed_window}}\n"
    );
    let node = Operator::start(&text, &place.sqlite("explain"), flags);
    for (at, form) in FORMS.iter().enumerate() {
        let alone = json!({format!("k{at}"): "v"});
        let both = json!({format!("both{at}"): "v", "other": format!("of {at}")});
        for attributes in [&alone, &both].into_iter().cycle().take(14) {
            let explained = explain(&node, &json!({"attributes": attributes}));
            let outcome = &explained["outcome"];
            let answer = node.server.check("d", attributes);
            let body = answer.json();
            let passes = outcome["verdict"] != "deny";
            assert_eq!(passes, answer.status == 200, "{form}: {explained:#} {body:#}");
            assert_eq!(
                outcome["rule"].as_str().filter(|_| !passes),
                body["denied_by"].as_str().filter(|_| !passes)
            );
            let wait = |value: &Value| value["retry_after_ms"].as_u64();
            let (foretold, told) = (wait(outcome), wait(&body));
            let is_near = foretold.zip(told).is_none_or(|(foretold, told)| foretold.abs_diff(told) < 60_000);
            assert!(is_near && foretold.is_some() == told.is_some(), "{form}: {outcome} {body}");
        }
    }
}

#[test]
fn explanations_are_the_decisions_that_follow() {
    foretells_all_forms(&[]);
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn explanations_over_redis_are_the_decisions_that_follow() {
    let redis = Redis::start();
    foretells_all_forms(&["--store", &redis.url(), "--store-deadline-ms", "10000"]);
}

#[test]
fn a_draft_is_explained_with_its_differences() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("explain"), &[]);
    let attributes = json!({"api_key": KEY, "endpoint": "POST /login"});
    assert_eq!(node.passes(&attributes), 2);
    let draft = RULES
        .replace("limit: 2 per 3650d", "limit: 4 per 3650d")
        .replace("key: tenant", "key: endpoint, value: POST /login");
    let files = json!([{"name": "rules.yaml", "text": draft}]);
    let explanation = explain(&node, &json!({"attributes": attributes, "files": files}));
    assert_eq!(
        (&explanation["explained_by"], &explanation["outcome"]["verdict"]),
        (&json!("draft"), &json!("allow")),
        "{explanation:#}"
    );
    assert_eq!(
        (&explanation["active_outcome"]["verdict"], &explanation["active_outcome"]["rule"]),
        (&json!("deny"), &json!("logins"))
    );
    let changed: Vec<&Value> =
        explanation["changes"].as_array().expect("changes").iter().map(|one| &one["rule"]).collect();
    assert_eq!(changed, ["each", "logins", "tenants"], "{:#}", explanation["changes"]);
    assert_eq!(rule(&explanation, "logins")["charged"][0]["used"], 2, "on the live counters");
    assert_eq!(node.passes(&attributes), 0, "the active rules are as they were");

    for (sent, status, says) in [
        (json!({}), 400, "write `attributes`, `descriptors` or `request`, one of them"),
        (json!({"attributes": {}, "descriptors": []}), 400, "one of them"),
        (json!({"attributes": {"k": 5}}), 400, "attributes.k"),
        (json!({"attributes": {}, "costs": 5}), 400, "costs"),
        (json!({"attributes": {"k": "v".repeat(9_000)}}), 400, "at most 8192 bytes"),
        (json!({"descriptors": vec![json!({"entries": [["a", "b"]]}); 65]}), 400, "at most 64"),
        (json!({"attributes": {}, "files": [{"name": "a.yaml", "text": "domain: ["}]}), 422, "a.yaml:2:1"),
    ] {
        let answer = node.ask("POST", "/admin/v1/explain", &sent);
        assert_eq!(answer.status, status, "{}", answer.text());
        assert!(answer.text().contains(says), "`{says}` is not in {}", answer.text());
    }
    let explanation = explain(&node, &json!({"descriptors": [{"entries": [["tenant", "t"]], "hits": 4}]}));
    assert_eq!(
        (&rule(&explanation, "tenants")["finding"], &rule(&explanation, "per-key")["finding"]),
        (&json!("limited"), &json!("no_match"))
    );
    assert_eq!(rule(&explanation, "tenants")["charged"][0]["cost"], 4);
    let head = json!({"method": "POST", "target": "/login?x=1", "peer": "192.0.2.7", "headers": [["X-API-Key", KEY]]});
    let explanation = explain(&node, &json!({"request": head}));
    assert_eq!(
        (&explanation["attributes"]["endpoint"], &explanation["outcome"]["rule"]),
        (&json!("POST /login"), &json!("logins")),
        "{explanation:#}"
    );
    assert!(!explanation.to_string().contains(KEY), "masked: {explanation:#}");
    let explanation = explain(&node, &json!({"domain": "nowhere", "attributes": {}}));
    assert_eq!((&explanation["rules"], &explanation["outcome"]["origin"]), (&json!([]), &json!("unmatched")));

    // Several domains, and more rules than anybody reads.
    let many: String = (0..1_500).map(|at| format!("  - {{key: k{at}, limit: 5/hour}}\n")).collect();
    let files = json!([
        {"name": "a.yaml", "text": format!("domain: a\ndescriptors:\n{many}")},
        {"name": "b.yaml", "text": "domain: b"},
    ]);
    let answer =
        node.ask("POST", "/admin/v1/explain", &json!({"attributes": {"k1499": "v"}, "files": files}));
    assert_eq!((answer.status, &answer.json()["field"]), (400, &json!("domain")), "{}", answer.text());
    assert!(answer.text().contains("name one of a, b"), "{}", answer.text());
    let explanation = explain(&node, &json!({"domain": "a", "attributes": {"k1499": "v"}, "files": files}));
    assert_eq!(
        (explanation["rules"].as_array().map(Vec::len), &explanation["omitted"]),
        (Some(1_001), &json!(499))
    );
    assert_eq!(
        (&rule(&explanation, "k1499")["finding"], &explanation["outcome"]["verdict"]),
        (&json!("limited"), &json!("allow"))
    );
}

#[test]
fn the_command_line_explains_by_a_server_or_by_files() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("explain"), &[]);
    let ended = |run: &Run, code: i32| assert_eq!(run.code, Some(code), "out: {}\nerr: {}", run.out, run.err);
    let says = |run: &Run, parts: &[&str]| {
        for part in parts {
            assert!(run.out.contains(part), "`{part}` is not in\n{}", run.out);
        }
    };
    let request = ["--attr", &format!("api_key={KEY}"), "--attr", "endpoint=POST /login"];
    let explain = |more: &[&str]| node.run(&[&["explain"], &request[..], more].concat());
    assert_eq!(node.passes(&json!({"api_key": KEY, "endpoint": "POST /login"})), 2);
    let output = explain(&[]);
    ended(&output, 0);
    says(
        &output,
        &[
            "It would be denied by `logins`; it passes in ",
            "domain d: 3 of 4 rules match\n",
            "fixed_window 40/3650d by the rule: 2 used, 38 left; 1 fits\n",
            "by the rule: 2 used, 0 left; denies 1 for ",
            "in shadow mode\n",
            "tenants (",
            "  no   tenant: the request has no `tenant`\n",
        ],
    );
    assert!(!output.out.contains(KEY), "{}", output.out);
    let json = explain(&["--json"]);
    ended(&json, 0);
    let json: Value = serde_json::from_str(&json.out).expect("JSON");
    assert_eq!(json["outcome"]["rule"], "logins");

    // The variable of the server does not make an offline explanation one of the server; the flag does.
    let path = node.rules.write("draft.yaml", RULES.replace("limit: 2 per 3650d", "limit: 7 per 3650d"));
    let path = path.to_str().expect("a plain path");
    let offline = explain(&["--rules", path]);
    ended(&offline, 0);
    says(&offline, &["domain d: 3 of 4 rules match\n", "counter "]);
    assert!(!offline.out.contains("It would be"), "{}", offline.out);
    let url = format!("http://{}", node.admin);
    let draft = explain(&["--rules", path, "--admin", &url, "--cost", "5"]);
    ended(&draft, 0);
    says(
        &draft,
        &[
            "It would be allowed",
            "By the active rules: It would be denied by `logins`; it can never pass",
            "  logins: fixed_window 2/3650d -> fixed_window 7/3650d\n",
            "2 used, 5 left; 5 fits",
        ],
    );
    let wrong = explain(&["--rules", path, "--cost", "5"]);
    ended(&wrong, 1);
    assert!(wrong.err.contains("--cost is for a server"), "{}", wrong.err);
    let wrong = explain(&["--rules", path, "--signal", "queue_depth=1"]);
    ended(&wrong, 1);
    assert!(wrong.err.contains("--signal is for a server"), "{}", wrong.err);
    let wrong = explain(&["--profile", "envoy"]);
    ended(&wrong, 1);
    assert!(wrong.err.contains("--profile is for rule files"), "{}", wrong.err);
}

const ADAPTED: &str = "
domain: d
descriptors: [{key: user, name: per-user, limit: 10 per 3650d, algorithm: fixed_window}]
overload: {adapt: {signals: {queue_depth: 100}, order: [free], least: 50%, step: 1h}}
";

/// An operator sees what a signal would do before it does.
#[test]
fn signals_are_supposed_and_not_recorded() {
    let place = Place::new();
    let node = Operator::start(ADAPTED, &place.sqlite("explain"), &[]);
    let attributes = json!({"user": "u", "tier": "free"});
    let loud = json!({"attributes": attributes, "signals": {"queue_depth": 150}});
    let limit = |explanation: &Value| rule(explanation, "per-user")["charged"][0]["remaining"].clone();
    let explanation = explain(&node, &loud);
    assert_eq!(
        (limit(&explanation), &explanation["outcome"]["reason"]),
        (json!(8), &json!("limits of tier free are at 80% because of overload")),
        "{explanation:#}"
    );
    let explanation = explain(&node, &json!({"attributes": attributes}));
    assert_eq!((limit(&explanation), explanation["outcome"].get("reason")), (json!(10), None));
    let wrong = node.ask("POST", "/admin/v1/explain", &json!({"attributes": {}, "signals": {"queue": 1}}));
    assert_eq!(wrong.status, 400, "{}", wrong.text());
    assert!(wrong.text().contains("unknown signal `queue`; the rules use: queue_depth"), "{}", wrong.text());

    // A draft with a signal that the active rules do not have.
    let draft = ADAPTED.replace("queue_depth", "errors");
    let files = json!([{"name": "rules.yaml", "text": draft}]);
    let explanation =
        explain(&node, &json!({"attributes": attributes, "signals": {"errors": 150}, "files": files}));
    assert_eq!(limit(&explanation), 8, "{explanation:#}");
    assert_eq!(explanation["active_outcome"].get("reason"), None, "{explanation:#}");

    let run = |more: &[&str]| {
        node.run(&[&["explain", "--attr", "user=u", "--attr", "tier=free"][..], more].concat())
    };
    let output = run(&["--signal", "queue_depth=150"]);
    assert_eq!(output.code, Some(0), "{}", output.err);
    let says = "Reason: limits of tier free are at 80% because of overload.\n";
    assert!(output.out.contains(says), "{}", output.out);
    assert!(
        output.out.contains("\noverload: priority normal (no entry of `priorities` matches); shed after "),
        "{}",
        output.out
    );
    for (signal, code, says) in [
        ("queue=1", 1, "unknown signal `queue`"),
        ("queue_depth", 2, "expected NAME=VALUE"),
        ("queue_depth=many", 2, "`many` is not a number"),
        ("queue_depth=-1", 2, "at least 0"),
    ] {
        let output = run(&["--signal", signal]);
        assert_eq!(output.code, Some(code), "{signal}: {}", output.err);
        assert!(output.err.contains(says), "{signal}: {}", output.err);
    }
}
