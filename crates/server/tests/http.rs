//! The JSON API as a caller meets it: decisions, reservations, Envoy's own JSON, and health.

mod harness;

use harness::{Server, eventually};
use serde_json::{Value, json};

// An hour refills one of three in twenty minutes: no test takes as long.
const RULES: &str = "
domain: shop
descriptors:
  - key: api_key
    name: per-key
    limit: 3/hour
    descriptors:
      - key: endpoint
        value: POST /login
        name: log-ins
        limit: [2/hour, 5/day]
  - key: tokens
    name: tokens
    limit: 1000/hour
  - key: search
    name: searches
    algorithm: leaky_bucket
    action: delay
    limit: 60/hour
    burst: 3
  - key: global
    name: total
    limit: 100000/hour
";

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Without these fields a caller cannot tell its own callers what is left, or find the decision again.
#[test]
fn an_allowed_check_answers_with_the_whole_decision() {
    let server = Server::with_rules(RULES);
    let body =
        json!({"domain": "shop", "attributes": {"api_key": "a", "endpoint": "POST /login"}, "cost": 1});
    let answer = server.post("/v1/check", &body);
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("retry-after"), None);
    let body = answer.json();
    assert_eq!(
        keys(&body),
        ["allowed", "decision_id", "delay_ms", "denied_by", "limits", "origin", "retry_after_ms", "revision"]
    );
    assert_eq!(body["allowed"], true);
    assert_eq!(body["denied_by"], Value::Null);
    assert_eq!(body["retry_after_ms"], Value::Null);
    assert_eq!(body["delay_ms"], 0);
    assert_eq!(body["origin"], "store");
    assert_eq!(body["decision_id"].as_str().expect("an id").len(), 32);
    assert_eq!(body["revision"], server.get("/readyz?verbose").json()["rules"]["revision"]);
    let limits: Vec<Value> = body["limits"].as_array().expect("limits").clone();
    let of = |rule: &str| -> Vec<&Value> { limits.iter().filter(|limit| limit["rule"] == rule).collect() };
    assert_eq!(of("per-key").len(), 1);
    assert_eq!(keys(of("per-key")[0]), ["limit", "remaining", "reset_ms", "rule", "window"]);
    assert_eq!(of("per-key")[0]["limit"], 3);
    assert_eq!(of("per-key")[0]["window"], "1h");
    assert_eq!(of("per-key")[0]["remaining"], 2);
    assert_eq!(of("per-key")[0]["reset_ms"], 1_200_000);
    let windows: Vec<_> = of("log-ins").iter().map(|limit| limit["window"].clone()).collect();
    assert_eq!(windows, ["1h", "1d"]);
    assert_eq!(of("total").len(), 1, "every request counts towards the total");
}

/// Callers back off by Retry-After; a wrong one makes them hammer or sleep.
#[test]
fn a_denied_check_says_who_denied_it_and_when_to_come_back() {
    let server = Server::with_rules(RULES);
    for left in [2, 1, 0] {
        let answer = server.check("shop", &json!({"api_key": "a"}));
        assert_eq!((answer.status, &answer.json()["limits"][0]["remaining"]), (200, &json!(left)));
    }
    let answer = server.check("shop", &json!({"api_key": "a"}));
    assert_eq!(answer.status, 429);
    let body = answer.json();
    assert_eq!(body["allowed"], false);
    assert_eq!(body["denied_by"], "per-key");
    let wait = body["retry_after_ms"].as_u64().expect("a time");
    assert!((1_190_000..=1_200_000).contains(&wait), "{wait}");
    let header: u64 = answer.header("retry-after").expect("retry-after").parse().expect("seconds");
    assert_eq!(header, wait.div_ceil(1000), "whole seconds, rounded up");
    assert_eq!(body["limits"][0]["over"], true);
    let other = server.check("shop", &json!({"api_key": "b"}));
    assert_eq!(other.status, 200, "another key has its own counter");
}

/// A denied request that ate the quota of other limits would lock users out of what they have paid for.
#[test]
fn a_denied_check_takes_nothing_from_any_limit() {
    let server = Server::with_rules(RULES);
    let log_in = json!({"api_key": "a", "endpoint": "POST /login"});
    assert_eq!(server.check("shop", &log_in).status, 200);
    assert_eq!(server.check("shop", &log_in).status, 200);
    for _ in 0..5 {
        let denied = server.check("shop", &log_in);
        assert_eq!((denied.status, denied.json()["denied_by"].clone()), (429, json!("log-ins")));
    }
    let last = server.check("shop", &json!({"api_key": "a"}));
    assert_eq!((last.status, last.json()["limits"][0]["remaining"].clone()), (200, json!(0)));
}

/// A look lets a caller show what is left without spending it; a cost takes all or nothing.
#[test]
fn cost_zero_looks_and_a_cost_is_taken_whole_or_not_at_all() {
    let server = Server::with_rules(RULES);
    let check = |cost: u64| {
        let answer =
            server.post("/v1/check", &json!({"domain": "shop", "attributes": {"tokens": "t"}, "cost": cost}));
        (answer.status, answer.json()["limits"][0]["remaining"].as_u64().expect("a number"), answer)
    };
    assert_eq!(check(0).1, 1000);
    assert_eq!(check(900).1, 100);
    assert_eq!(check(101).0, 429);
    let (status, left, _) = check(0);
    assert_eq!((status, left), (200, 100));
    let (status, _, never) = check(1001);
    assert_eq!(
        (status, &never.json()["retry_after_ms"]),
        (429, &Value::Null),
        "more than the limit never passes"
    );
    assert_eq!(never.header("retry-after"), Some("3600"), "but the header must say something: the window");
    assert_eq!(check(u64::MAX).0, 429);
}

/// Callers that hold requests back need the time to hold them for.
#[test]
fn a_queue_answers_allowed_with_a_delay() {
    let server = Server::with_rules(RULES);
    let mut last = 0;
    for at in 0..3 {
        let body = server.check("shop", &json!({"search": "s"})).json();
        let delay = body["delay_ms"].as_u64().expect("a delay");
        assert_eq!(body["allowed"], true, "{at}: {body}");
        assert!(at == 0 || delay > last, "{at}: later requests wait longer: {delay} after {last}");
        last = delay;
    }
    let denied = server.check("shop", &json!({"search": "s"}));
    assert_eq!(
        (denied.status, denied.json()["denied_by"].clone()),
        (429, json!("searches")),
        "the queue is full"
    );
}

/// Envoy's users send descriptors; both spellings of an entry, overrides and hits must work over HTTP too.
#[test]
fn descriptors_can_be_checked_as_well() {
    let server = Server::with_rules(RULES);
    let body = json!({"domain": "shop", "descriptors": [
        {"entries": [["api_key", "d"]]},
        {"entries": [{"key": "api_key", "value": "d"}, {"key": "endpoint", "value": "POST /login"}], "hits": 2},
        {"entries": [["no_such_key", "x"]]},
        {"entries": [["anything", "x"]], "limit": {"requests_per_unit": 7, "unit": "day"}},
    ]});
    let answer = server.post("/v1/check", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let body = answer.json();
    let left: Vec<_> = body["limits"]
        .as_array()
        .expect("limits")
        .iter()
        .map(|l| (l["limit"].clone(), l["remaining"].clone()))
        .collect();
    assert_eq!(
        left,
        [(json!(3), json!(2)), (json!(2), json!(0)), (json!(5), json!(3)), (json!(7), json!(6))],
        "{body}"
    );
}

/// A typo in a domain must not take an API down.
#[test]
fn an_unknown_domain_is_allowed_and_says_that_nothing_matched() {
    let server = Server::with_rules(RULES);
    let answer = server.check("shoop", &json!({"api_key": "a"}));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["origin"], "unmatched");
    assert_eq!(answer.json()["limits"], json!([]));
}

/// LLM gateways charge an estimate, then the truth; without this they bill for tokens that were never used.
#[test]
fn a_reservation_is_settled_to_the_real_cost_or_given_back() {
    let server = Server::with_rules(RULES);
    let left = || {
        let look = json!({"domain": "shop", "attributes": {"tokens": "r"}, "cost": 0});
        server.post("/v1/check", &look).json()["limits"][0]["remaining"].as_u64().expect("a number")
    };
    let reserve = |cost: u64| {
        let ask =
            json!({"domain": "shop", "attributes": {"tokens": "r"}, "cost": cost, "deadline_ms": 60_000});
        server.post("/v1/reserve", &ask)
    };
    let first = reserve(400).json();
    assert_eq!((&first["allowed"], left()), (&json!(true), 600));
    let settled = server.post("/v1/settle", &json!({"reservation": first["reservation"], "cost": 100}));
    assert_eq!((settled.status, settled.json()), (200, json!({"settled": true, "cost": 100})));
    assert!((898..=901).contains(&left()), "300 came back: {}", left());

    let second = reserve(200).json();
    let cancelled = server.post("/v1/cancel", &json!({"reservation": second["reservation"]}));
    assert_eq!((cancelled.status, cancelled.json()), (200, json!({"cancelled": true})));
    assert!((898..=901).contains(&left()), "all came back: {}", left());

    let third = reserve(100).json();
    server.post("/v1/settle", &json!({"reservation": third["reservation"], "cost": 300}));
    assert!((598..=601).contains(&left()), "what was used beyond the estimate is owed: {}", left());

    let denied = reserve(5000);
    assert_eq!(
        (denied.status, &denied.json()["reservation"]),
        (429, &Value::Null),
        "nothing is held on a denial"
    );
    assert!(denied.header("retry-after").is_some());
}

/// A caller that lost the answer tries again; it must not pay twice, nor end a reservation in two ways.
#[test]
fn reservations_can_be_repeated_but_not_contradicted() {
    let server = Server::with_rules(RULES);
    let ask = json!({"domain": "shop", "attributes": {"tokens": "i"}, "cost": 400, "idempotency_key": "one"});
    let first = server.post("/v1/reserve", &ask).json();
    let again = server.post("/v1/reserve", &ask).json();
    assert_eq!(first, again, "the same key is the same reservation");
    assert_eq!(again["limits"][0]["remaining"], 600, "and is charged once");

    let settle =
        |cost: u64| server.post("/v1/settle", &json!({"reservation": first["reservation"], "cost": cost}));
    assert_eq!(settle(50).status, 200);
    assert_eq!(settle(50).status, 200, "settling to the same cost again is settling once");
    let other = settle(51);
    assert_eq!((other.status, other.header("content-type")), (409, Some("application/problem+json")));
    let cancel = server.post("/v1/cancel", &json!({"reservation": first["reservation"]}));
    assert_eq!(cancel.status, 409);

    let unknown = server.post("/v1/settle", &json!({"reservation": "0".repeat(32), "cost": 1}));
    assert_eq!((unknown.status, &unknown.json()["status"]), (404, &json!(404)));
}

/// A caller that died must not be able to change the bill later: past its deadline a reservation stands.
#[test]
fn a_reservation_past_its_deadline_stands_as_it_was_taken() {
    let server = Server::with_rules(RULES);
    let ask = json!({"domain": "shop", "attributes": {"tokens": "late"}, "cost": 400, "deadline_ms": 1,
                     "idempotency_key": "late"});
    let first = server.post("/v1/reserve", &ask).json()["reservation"].clone();
    // The same key is the same reservation until its deadline.
    eventually("the deadline", || {
        let again = server.post("/v1/reserve", &ask).json()["reservation"].clone();
        (again != first).then_some(())
    });
    for path in ["/v1/cancel", "/v1/settle"] {
        let mut ask = json!({"reservation": first});
        if path == "/v1/settle" {
            ask["cost"] = json!(1);
        }
        assert_eq!(server.post(path, &ask).status, 404, "{path}");
    }
    let look = json!({"domain": "shop", "attributes": {"tokens": "late"}, "cost": 0});
    let left = server.post("/v1/check", &look).json()["limits"][0]["remaining"].as_u64().expect("a number");
    assert!(left <= 209, "both stand: {left}");
}

/// Tools written for envoyproxy/ratelimit post this and read that; both spellings are protobuf's JSON.
#[test]
fn envoys_own_json_works_in_both_spellings() {
    let server = Server::with_rules(RULES);
    let camel = json!({"domain": "shop", "hitsAddend": "2", "descriptors": [
        {"entries": [{"key": "api_key", "value": "j"}]},
        {"entries": [{"key": "nothing", "value": "j"}]},
        {"entries": [{"key": "x", "value": "j"}], "limit": {"requestsPerUnit": 9, "unit": "HOUR"}, "hitsAddend": "4"},
    ]});
    let answer = server.post("/json", &camel);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(
        answer.header("ratelimit").is_some_and(|told| told.starts_with("\"per-key\";r=1;")),
        "{:?}",
        answer.headers
    );
    let body = answer.json();
    assert_eq!(body["overallCode"], "OK");
    assert_eq!(
        body["statuses"][0],
        json!({"code": "OK", "currentLimit": {"name": "per-key", "requestsPerUnit": 3, "unit": "HOUR"},
               "limitRemaining": 1, "durationUntilReset": "2400s"})
    );
    assert_eq!(body["statuses"][1], json!({"code": "OK"}));
    assert_eq!(body["statuses"][2]["limitRemaining"], 5);

    let snake = json!({"domain": "shop", "hits_addend": 2, "descriptors": [
        {"entries": [{"key": "api_key", "value": "j"}]},
        {"entries": [{"key": "x", "value": "j"}], "limit": {"requests_per_unit": 9, "unit": "HOUR"}, "hits_addend": 0},
    ]});
    let answer = server.post("/json", &snake);
    assert_eq!(answer.status, 429, "{}", answer.text());
    let body = answer.json();
    assert_eq!(body["overallCode"], "OVER_LIMIT");
    let codes: Vec<_> =
        body["statuses"].as_array().expect("statuses").iter().map(|s| s["code"].clone()).collect();
    assert_eq!(codes, ["OVER_LIMIT", "OK"]);
    assert_eq!(body["statuses"][1]["limitRemaining"], 5, "a look takes nothing");
    assert_eq!(body["dynamicMetadata"]["denied_by"], "per-key");

    let back = json!({"domain": "shop", "descriptors": [
        {"entries": [{"key": "api_key", "value": "j"}], "hitsAddend": 2, "isNegativeHits": true},
    ]});
    let answer = server.post("/json", &back);
    assert_eq!(
        (answer.status, &answer.json()["statuses"][0]["limitRemaining"]),
        (200, &json!(3)),
        "given back"
    );
}
