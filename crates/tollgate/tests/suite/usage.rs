//! Usage of a caller's limits: reported, reset, extended by grants, over memory and over Redis; and limits that change
//! while traffic flows.

use crate::databases::Place;
use crate::harness::{self, Node, Operator, Redis, Server};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    limit: 4/hour
    tiers: {pro: 6/hour}
    descriptors:
      - {key: endpoint, value: POST /orders, limit: 2 per 3650d, algorithm: fixed_window, name: orders}
";

/// A plan that comes with the request is in no quota: what is shown is what its latest request was decided by.
#[test]
fn the_plan_of_the_latest_request_is_shown() {
    let place = Place::new();
    let node = Node::start(RULES, &place.sqlite("usage"), &[]);
    let usage = |key: &str| node.ask("GET", &format!("/admin/v1/usage/{key}"), &[], &Value::Null).json();
    let first = |usage: &Value| (usage["limits"][0]["limit"].clone(), usage["limits"][0]["source"].clone());
    for (request, tier, limit, source) in [
        (json!({"api_key": "acme", "tier": "pro"}), json!("pro"), 6, "tier"),
        (json!({"api_key": "acme"}), Value::Null, 4, "rule"),
    ] {
        assert_eq!(node.server.check("d", &request).status, 200);
        let shown = usage("acme");
        assert_eq!((&shown["tier"], &shown["tier_source"]), (&tier, &json!("last_request")), "{shown}");
        assert_eq!(first(&shown), (json!(limit), json!(source)), "{shown}");
        assert_eq!(shown["tiers"], json!([]), "it is known");
    }
    let unknown = usage("stranger");
    assert_eq!((&unknown["tier"], &unknown["tier_source"]), (&Value::Null, &Value::Null));
    let tier = &unknown["tiers"][0];
    assert_eq!((&tier["tier"], &tier["limits"]), (&json!("pro"), &json!(["gcra 6/1h"])), "{unknown}");
    let admin = format!("http://{}", node.admin);
    let printed = harness::run(&["usage", "stranger", "--admin", &admin]).out;
    assert!(printed.contains("tier unknown") && printed.contains("pro: api_key gcra 6/1h"), "{printed}");
    // A quota's tier holds, whatever its requests state.
    assert_eq!(node.put("acme", &json!({"tier": "pro", "reason": "test"})).status, 200);
    assert_eq!(usage("acme")["tier_source"], "quota");
}

fn usage_reset_and_grant(node: &Operator) {
    let request = json!({"api_key": "k/1", "endpoint": "POST /orders"});
    assert_eq!(node.passes(&request), 2);
    let usage = "/admin/v1/usage/k%2F1";
    for _ in 0..3 {
        let report = node.get(usage);
        assert_eq!(report["limits"].as_array().map(Vec::len), Some(2), "{report}");
        let limit = &report["limits"][0];
        assert_eq!(
            (&limit["rule"], &limit["used"], &limit["remaining"], &limit["limit"]),
            (&json!("api_key"), &json!(2), &json!(2), &json!(4)),
            "reading charges nothing"
        );
        assert_eq!((&limit["source"], &limit["window"]), (&json!("rule"), &json!("1h")));
        // A rule on a fixed endpoint is read without being asked for.
        assert_eq!(
            (&report["limits"][1]["rule"], &report["limits"][1]["used"]),
            (&json!("orders"), &json!(2))
        );
        assert_eq!(report["needs"], json!([]));
    }
    let order = format!("{usage}?attr.endpoint=POST%20/orders&domain=d");
    let report = node.get(&order);
    assert_eq!((&report["limits"][1]["rule"], &report["limits"][1]["used"]), (&json!("orders"), &json!(2)));
    assert_eq!(report["needs"], json!([]));

    // One rule, then all.
    let reset = order.replace('?', "/reset?");
    let report = node.post(&reset, &json!({"rule": "orders", "reason": "our mistake"}));
    assert_eq!(
        (report["limits"].as_array().map(Vec::len), &report["limits"][0]["used"]),
        (Some(1), &json!(0))
    );
    assert_eq!(node.passes(&request), 2, "and the key's own limit is used up by that");
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 0);
    node.post(&reset, &json!({"reason": "our mistake"}));
    assert_eq!((node.passes(&request), node.passes(&json!({"api_key": "k/1"}))), (2, 2));

    // Extra quota, once: of the key's own limit, then of the endpoint's.
    let granted = node.ask("POST", &format!("{usage}/grant"), &json!({"units": 3, "reason": "ticket 5"}));
    assert_eq!(granted.status, 201, "{}", granted.text());
    let first = node.server.check("d", &json!({"api_key": "k/1"})).json();
    assert_eq!((&first["allowed"], &first["origin"]), (&json!(true), &json!("grant")), "{first}");
    assert_eq!(node.get(usage)["grants"][0]["remaining"], 2);
    assert_eq!(node.passes(&request), 0, "the endpoint's limit was not extended");
    assert_eq!(node.get(usage)["grants"][0]["remaining"], 2, "and nothing was taken");
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 2);
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 0);

    // What is agreed wins, and says so.
    let own = json!({"tier": "pro"});
    assert_eq!(node.ask("PUT", "/admin/v1/quotas/k%2F1", &own).status, 200);
    let report = node.get(usage);
    assert_eq!((&report["tier"], &report["limits"][0]["source"]), (&json!("pro"), &json!("tier")));
    let own = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 40, "unit": "hour"}]});
    assert_eq!(node.ask("PUT", "/admin/v1/quotas/k%2F1", &own).status, 200);
    let report = node.get(usage);
    assert_eq!(
        (&report["limits"][0]["limit"], &report["limits"][0]["source"]),
        (&json!(40), &json!("override"))
    );

    for (path, body, status, says) in [
        (format!("{usage}/reset"), json!({}), 400, "missing field `reason`"),
        (format!("{usage}/reset"), json!({"reason": ""}), 422, "reason"),
        (format!("{usage}/reset"), json!({"reason": "r", "rule": "nope"}), 422, "is called `nope`"),
        (format!("{usage}/grant"), json!({"reason": "r", "units": 0}), 422, "units"),
        (format!("{usage}/reset?domain=x"), json!({"reason": "r"}), 400, "there is d"),
        (format!("{usage}/reset?attr.api_key=x"), json!({"reason": "r"}), 400, "the path already contains"),
        (format!("{usage}/reset?atr.x=x"), json!({"reason": "r"}), 400, "known parameters: domain"),
    ] {
        let refused = node.ask("POST", &path, &body);
        assert_eq!(refused.status, status, "{path}: {}", refused.text());
        assert!(refused.text().contains(says), "{path}: {}", refused.text());
    }
    let audit = node.ask("GET", "/admin/v1/audit", &Value::Null).text();
    for action in ["usage.reset", "usage.grant", "our mistake", "ticket 5"] {
        assert!(audit.contains(action), "{audit}");
    }
    assert!(!audit.contains("k/1"), "no key is kept: {audit}");
}

#[test]
fn usage_over_memory() {
    let place = Place::new();
    usage_reset_and_grant(&Operator::start(RULES, &place.sqlite("usage"), &[]));
}

/// Windows that hardly end while a test runs.
const RULES_FOR_USERS: &str = "
domain: d
descriptors:
  - key: tenant
    limit: 100/hour
    name: tenants
    descriptors:
      - {key: user_id, limit: 9/hour, burst: 20, name: members}
  - key: user_id
    limit: 10/day
    algorithm: fixed_window
    tiers: {pro: 12/day}
    name: users
    descriptors:
      - {key: endpoint, value: POST /orders, limit: 1/day, name: orders}
  - {key: remote_address, limit: 3/day, name: clients}
";

/// Users, tenants and networks are customers as API keys are.
#[test]
fn quotas_and_usage_of_users() {
    let place = Place::new();
    let node = Operator::start(RULES_FOR_USERS, &place.sqlite("users"), &[]);
    let user = "/admin/v1/quotas/u-1?key=user_id";
    let put = node.ask("PUT", user, &json!({"tier": "pro", "reason": "upgrade"}));
    assert_eq!(put.status, 200, "{}", put.text());
    let (put, got) = (put.json(), node.get(user));
    assert_eq!(
        (&put["key"], &put["value"], &put["api_key"]),
        (&json!("user_id"), &json!("u-1"), &Value::Null)
    );
    assert_eq!(put, got);
    assert_eq!(
        node.ask("GET", "/admin/v1/quotas/u-1", &Value::Null).status,
        404,
        "an API key has another quota"
    );
    let request = json!({"user_id": "u-1"});
    assert_eq!(node.passes(&request), 12, "the tier's");
    assert_eq!(node.passes(&json!({"user_id": "u-2"})), 10);

    // Every limit that can bind the user, with its window; limits with a burst are listed apart.
    let usage = node.get("/admin/v1/usage/u-1?key=user_id&attr.tenant=acme");
    assert_eq!((&usage["key"], &usage["value"]), (&json!("user_id"), &json!("u-1")));
    let limits = usage["limits"].as_array().expect("limits");
    let listed: Vec<_> = limits
        .iter()
        .map(|one| {
            json!([
                one["rule"],
                one["used"],
                one["remaining"],
                one["limit"],
                one["count"],
                one["burst"],
                one["shared"]
            ])
        })
        .collect();
    assert_eq!(
        json!(listed),
        json!([
            ["tenants", 0, 100, 100, 100, null, true],
            ["members", 0, 20, 20, 9, 20, null],
            ["users", 12, 0, 12, 12, null, null],
            ["orders", 0, 1, 1, 1, null, null],
        ]),
        "{usage}"
    );
    let window = &limits[2]["current_window"];
    let second = |at: &Value| at.as_str().and_then(|at| at.get(17..19)).map(str::to_owned);
    assert_eq!(
        (second(&window["start"]), second(&window["end"])),
        (Some("00".to_owned()), Some("00".to_owned())),
        "{window}"
    );
    assert!(
        usage["current_window"]["start"].is_string() && usage["current_window"]["end"].is_string(),
        "{usage}"
    );
    assert_eq!(
        usage["needs"],
        json!([{"rule": "clients", "descriptor": "remote_address", "attributes": ["remote_address"]}])
    );

    // Reset, grant, revoke.
    let reset =
        node.post("/admin/v1/usage/u-1/reset?key=user_id&attr.tenant=acme", &json!({"reason": "ticket 1"}));
    assert_eq!(reset["limits"][2]["used"], 0, "{reset}");
    let granted = node.ask(
        "POST",
        "/admin/v1/usage/u-2/grant?key=user_id",
        &json!({"units": 2, "rule": "users", "reason": "sorry"}),
    );
    assert_eq!((granted.status, &granted.json()["key"]), (201, &json!("user_id")), "{}", granted.text());
    let id = granted.json()["id"].as_str().expect("an id").to_owned();
    let grant = format!("/admin/v1/usage/u-2/grant/{id}?key=user_id&confirm=true");
    assert_eq!(node.ask("DELETE", &grant, &Value::Null).status, 204);

    // A network, and the guard that asks before a caller loses what it uses.
    let network = node.ask(
        "PUT",
        "/admin/v1/quotas/10.0.0.0%2F8?key=remote_address",
        &json!({"overrides": [{"descriptor": "default", "requests_per_unit": 5, "unit": "day"}]}),
    );
    assert_eq!(
        (network.status, &network.json()["key_prefix"]),
        (200, &json!("10.0.0.0/8")),
        "{}",
        network.text()
    );
    assert_eq!(node.passes(&json!({"remote_address": "10.7.7.7"})), 5);
    assert_eq!(node.passes(&json!({"remote_address": "11.7.7.7"})), 3);
    assert_eq!(node.passes(&request), 12);
    let less = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 2, "unit": "day"}]});
    let guarded = node.ask("PUT", user, &less);
    assert_eq!(guarded.status, 409, "{}", guarded.text());
    assert!(guarded.text().contains("the caller has used"), "{}", guarded.text());
    assert_eq!(node.ask("DELETE", &format!("{user}&confirm=true"), &Value::Null).status, 204);

    // A list by attribute.
    let listed = node.get("/admin/v1/quotas?key=remote_address");
    assert_eq!(
        (listed["quotas"].as_array().map(Vec::len), &listed["quotas"][0]["key"]),
        (Some(1), &json!("remote_address"))
    );
    for (method, path, body, status, says) in [
        (
            "PUT",
            "/admin/v1/quotas/x?key=email",
            json!({"tier": "pro"}),
            422,
            "the rules count by remote_address, tenant, user_id",
        ),
        ("GET", "/admin/v1/usage/x?key=email", Value::Null, 422, "the rules count by"),
        ("GET", "/admin/v1/usage/10.0.0.0%2F8?key=remote_address", Value::Null, 422, "name an address"),
        ("PUT", "/admin/v1/quotas/x?key=user_id&key=tenant", json!({"tier": "pro"}), 400, "must occur once"),
        ("PUT", "/admin/v1/quotas/x?key=%00", json!({"tier": "pro"}), 400, "the attribute"),
        (
            "GET",
            "/admin/v1/usage/u-1?key=user_id&attr.user_id=x",
            Value::Null,
            400,
            "the path already contains",
        ),
    ] {
        let refused = node.ask(method, path, &body);
        assert_eq!(refused.status, status, "{path}: {}", refused.text());
        assert!(refused.text().contains(says), "{path}: {}", refused.text());
    }
}

/// A busy machine is no reason to decide without the store.
/// An IPv6 client is found by its address, as the HTTP servers count it; with `/128` as a descriptor contains it.
#[test]
fn usage_of_an_ipv6_client_is_found_by_its_address() {
    let place = Place::new();
    let node = Operator::start(RULES_FOR_USERS, &place.sqlite("clients"), &[]);
    let head = json!({"peer": "2001:db8::1", "method": "GET", "target": "/"});
    let checked = node.server.post("/v1/check", &json!({"domain": "d", "request": head}));
    assert_eq!(checked.json()["allowed"], true, "{}", checked.text());
    let used = |value: &str| {
        node.get(&format!("/admin/v1/usage/{value}?key=remote_address"))["limits"][0]["used"].clone()
    };
    assert_eq!(used("2001:db8::1"), 1);
    assert_eq!(used("2001:db8::"), 1);
    assert_eq!(used("2001:db8::1%2F128"), 0, "no descriptor contained it");
    assert_eq!(node.passes(&json!({"remote_address": "2001:db8::1"})), 3);
    assert_eq!(used("2001:db8::1%2F128"), 3);
    node.post("/admin/v1/usage/2001:db8::1/reset?key=remote_address", &json!({"reason": "our mistake"}));
    assert_eq!((used("2001:db8::1"), used("2001:db8::1%2F128")), (json!(0), json!(3)));
}

fn over(redis: &Redis, rules: &str, db: &str) -> Operator {
    Operator::start(rules, db, &["--store", &redis.url(), "--store-deadline-ms", "10000"])
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn usage_over_redis() {
    let (place, redis) = (Place::new(), Redis::start());
    usage_reset_and_grant(&over(&redis, RULES, &place.sqlite("usage")));
}

/// Windows of a day that may turn while the test runs would let more through.
const CHANGING: &str = "
domain: d
descriptors:
  - {key: api_key, limit: 30/day, algorithm: ALGORITHM}
";

fn hammer(server: &Server, passed: &AtomicU64, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        if server.check("d", &json!({"api_key": "k"})).status == 200 {
            passed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Ends the traffic, also when the test fails.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// However a limit is changed while it is used, no more passes than the largest that it ever was, and what was used
/// counts against whatever it is at the end.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn changes_during_traffic_over_redis_give_nothing_back() {
    let redis = Redis::start();
    for algorithm in ["gcra", "strict_window", "sliding_log"] {
        let place = Place::new();
        let rules = CHANGING.replace("ALGORITHM", algorithm);
        redis.command("FLUSHALL");
        let node = over(&redis, &rules, &place.sqlite("changing"));
        let (passed, done) = (AtomicU64::new(0), AtomicBool::new(false));
        let put = |count: u64| {
            let own = json!({"overrides": [{"descriptor": "default", "requests_per_unit": count, "unit": "day"}], "confirm": true});
            assert_eq!(node.ask("PUT", "/admin/v1/quotas/k", &own).status, 200);
        };
        std::thread::scope(|scope| {
            let _ended = Ended(&done);
            let hammers = [(); 2].map(|()| scope.spawn(|| hammer(&node.server, &passed, &done)));
            for count in [40, 10, 60, 5, 60, 20, 60, 90] {
                put(count);
                let before = passed.load(Ordering::Relaxed);
                harness::eventually("traffic, or nothing left", || {
                    let usage = node.get("/admin/v1/usage/k");
                    let over = usage["limits"][0]["remaining"] == 0;
                    (over || passed.load(Ordering::Relaxed) > before + 3).then_some(())
                });
            }
            harness::eventually("the end of the quota", || {
                (node.get("/admin/v1/usage/k")["limits"][0]["remaining"] == 0).then_some(())
            });
            done.store(true, Ordering::Relaxed);
            hammers.into_iter().for_each(|hammer| hammer.join().expect("a hammer"));
        });
        let passed = passed.load(Ordering::Relaxed);
        // A bucket counts in time: what was taken at another size weighs as much as it did then.
        let fits = if algorithm == "gcra" { passed <= 90 } else { passed == 90 };
        assert!(fits, "{algorithm}: {passed} passed of 90");
    }
}

#[test]
fn the_command_line_does_it_too() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("usage"), &[]);
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 4);
    let output = node.run(&["usage", "k/1"]);
    assert_eq!(output.code, Some(0), "{}{}", output.out, output.err);
    assert!(
        output.out.contains("4 / 1h") && output.out.contains("orders   2 / 3650d  0     2"),
        "{}",
        output.out
    );
    let output = node.run(&["usage", "k/1", "--attr", "endpoint=POST /orders", "--domain", "d", "--json"]);
    let report: Value = serde_json::from_str(&output.out).expect("JSON for programs");
    assert_eq!(report["limits"].as_array().map(Vec::len), Some(2), "{report}");
    let granted = node.run(&["usage", "grant", "k/1", "--units", "2", "--reason", "ticket 9"]);
    assert_eq!(granted.code, Some(0), "{}{}", granted.out, granted.err);
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 2);
    let reset = node.run(&["usage", "reset", "k/1", "--rule", "default", "--reason", "ticket 9"]);
    assert_eq!(reset.code, Some(0), "{}{}", reset.out, reset.err);
    assert!(reset.out.contains("0 of 2 units left"), "{}", reset.out);
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 4);
    node.run(&["usage", "grant", "k/1", "--units", "5", "--reason", "the wrong one"]);
    let report: Value = serde_json::from_str(&node.run(&["usage", "k/1", "--json"]).out).expect("JSON");
    let id = report["grants"][1]["id"].as_str().expect("an id").to_owned();
    assert!(node.run(&["usage", "k/1"]).out.contains(&id), "people read it too");
    let revoked = node.run(&["usage", "revoke", "k/1", &id, "--confirm"]);
    assert_eq!((revoked.code, revoked.out), (Some(0), format!("revoked {id}\n")), "{}", revoked.err);
    assert_eq!(node.passes(&json!({"api_key": "k/1"})), 0);
    assert_eq!(node.run(&["usage", "revoke", "k/1", &id]).code, Some(1), "it has been taken back already");
    let granted =
        node.run(&["usage", "grant", "k/1", "--units", "1", "--reason", "another", "--format", "json"]);
    let granted: Value = serde_json::from_str(&granted.out).expect("JSON");
    let id = granted["id"].as_str().expect("an id");
    let revoked = node.run(&["usage", "revoke", "k/1", id, "--format", "json", "--confirm"]);
    assert_eq!(
        serde_json::from_str::<Value>(&revoked.out).ok(),
        Some(json!({"revoked": id})),
        "{}",
        revoked.err
    );
    let wrong = node.run(&["usage", "reset", "k/1", "--rule", "nope", "--reason", "r"]);
    assert!(wrong.code == Some(1) && wrong.err.contains("(at rule)"), "{}", wrong.err);
    assert!(node.run(&["usage"]).err.contains("API_KEY"));
}

#[test]
fn the_command_line_is_about_any_attribute() {
    let place = Place::new();
    let node = Operator::start(RULES_FOR_USERS, &place.sqlite("users"), &[]);
    let run = |words: &[&str]| {
        let output = node.run(words);
        assert_eq!(output.code, Some(0), "{words:?}: {}{}", output.out, output.err);
        output.out
    };
    let set = run(&["quota", "set", "u-1", "--key", "user_id", "--tier", "pro"]);
    assert!(set.contains("user_id") && set.contains("u-1"), "{set}");
    assert!(run(&["quota", "get", "u-1", "--key", "user_id"]).contains("pro"));
    let listed = run(&["quota", "list", "--key", "user_id"]);
    assert!(listed.contains("user_id") && listed.contains("u…") && !listed.contains("u-1"), "{listed}");
    assert!(run(&["quota", "list", "--key", "tenant"]).contains("no quotas"));
    assert_eq!(node.passes(&json!({"user_id": "u-1"})), 12);
    let usage = run(&["usage", "u-1", "--key", "user_id"]);
    assert!(usage.contains("12 / 1d") && usage.contains("members: add --attr tenant=…"), "{usage}");
    for _ in 0..3 {
        node.server.check("d", &json!({"user_id": "u-3", "tenant": "acme"}));
    }
    let usage = run(&["usage", "u-3", "--key", "user_id", "--attr", "tenant=acme"]);
    assert!(usage.contains("tenants (shared)") && usage.contains("9 / 1h, burst 20  3 of 20"), "{usage}");
    run(&["usage", "grant", "u-1", "--key", "user_id", "--units", "2", "--reason", "r"]);
    run(&["usage", "reset", "u-1", "--key", "user_id", "--reason", "r"]);
    run(&["usage", "u-1", "--key", "user_id", "reset", "--reason", "r"]);
    run(&["quota", "delete", "u-1", "--key", "user_id", "--confirm"]);
    let unknown = node.run(&["quota", "set", "u-1", "--key", "email", "--tier", "pro"]);
    assert!(unknown.code == Some(1) && unknown.err.contains("the rules count by"), "{}", unknown.err);
}
