//! The JSON API from a client's view: decisions, reservations, and the JSON of Envoy's rate limit service.

use crate::harness::{self, Server, WebResponse, eventually, request};
use serde_json::{Value, json};
use tollgate_core::conformance::DeadStore;

// `3/hour` refills one unit in twenty minutes; no test takes that long.
const RULES: &str = "
domain: shop
descriptors:
  - key: api_key
    name: per-key
    limit: 3/hour
    descriptors:
      - key: endpoint
        value: POST /login
        name: logins
        limit: [2/hour, 5/day]
  - key: tokens
    name: tokens
    limit: 1000/day
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

/// Posts a body as it is written, for numbers that `json!` would rewrite.
fn post_text(server: &Server, path: &str, body: &str) -> WebResponse {
    server.exchange(&request("POST", path, body.as_bytes()))
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Without these fields a client cannot report what remains to its own callers, or look up the decision.
#[test]
fn an_allowed_check_returns_the_complete_decision() {
    let server = Server::with_rules(RULES);
    let body =
        json!({"domain": "shop", "attributes": {"api_key": "a", "endpoint": "POST /login"}, "cost": 1});
    let response = server.post("/v1/check", &body);
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("retry-after"), None);
    let body = response.json();
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
    let windows: Vec<_> = of("logins").iter().map(|limit| limit["window"].clone()).collect();
    assert_eq!(windows, ["1h", "1d"]);
    assert_eq!(of("total").len(), 1, "every request counts towards the total");
}

/// Clients back off by `Retry-After`; a wrong value makes them retry too often or too late.
#[test]
fn a_denied_check_names_the_rule_and_the_time_to_retry() {
    let server = Server::with_rules(RULES);
    for left in [2, 1, 0] {
        let response = server.check("shop", &json!({"api_key": "a"}));
        assert_eq!((response.status, &response.json()["limits"][0]["remaining"]), (200, &json!(left)));
    }
    let response = server.check("shop", &json!({"api_key": "a"}));
    assert_eq!(response.status, 429);
    let body = response.json();
    assert_eq!(body["allowed"], false);
    assert_eq!(body["denied_by"], "per-key");
    let wait = body["retry_after_ms"].as_u64().expect("a time");
    assert!((1_190_000..=1_200_000).contains(&wait), "{wait}");
    let header: u64 = response.header("retry-after").expect("retry-after").parse().expect("seconds");
    assert_eq!(header, wait.div_ceil(1000), "whole seconds, rounded up");
    assert_eq!(body["limits"][0]["over"], true);
    let other = server.check("shop", &json!({"api_key": "b"}));
    assert_eq!(other.status, 200, "another key has its own counter");
}

/// A denied request must not use up the other limits that it matched.
#[test]
fn a_denied_check_charges_no_limit() {
    let server = Server::with_rules(RULES);
    let log_in = json!({"api_key": "a", "endpoint": "POST /login"});
    assert_eq!(server.check("shop", &log_in).status, 200);
    assert_eq!(server.check("shop", &log_in).status, 200);
    for _ in 0..5 {
        let denied = server.check("shop", &log_in);
        assert_eq!((denied.status, denied.json()["denied_by"].clone()), (429, json!("logins")));
    }
    let last = server.check("shop", &json!({"api_key": "a"}));
    assert_eq!((last.status, last.json()["limits"][0]["remaining"].clone()), (200, json!(0)));
}

/// A peek shows what remains without charging; a cost is charged completely or not at all.
#[test]
fn cost_zero_is_a_peek_and_a_cost_is_charged_all_or_nothing() {
    let server = Server::with_rules(RULES);
    let check = |cost: u64| {
        let response =
            server.post("/v1/check", &json!({"domain": "shop", "attributes": {"tokens": "t"}, "cost": cost}));
        (response.status, response.json()["limits"][0]["remaining"].as_u64().expect("a number"), response)
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
    assert_eq!(never.header("retry-after"), None, "no time would be true");
    assert_eq!(check(u64::MAX).0, 429);
}

/// Clients that delay requests themselves need the delay.
#[test]
fn a_delay_queue_allows_with_a_delay() {
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

/// Other libraries' limits have windows of any length.
#[test]
fn inline_limits_have_any_period() {
    let server = Server::with_rules(RULES);
    let check = |unit: &str| {
        let limit = json!({"requests_per_unit": 2, "unit": unit});
        let body =
            json!({"domain": "shop", "descriptors": [{"entries": [["anything", "p"]], "limit": limit}]});
        server.post("/v1/check", &body)
    };
    let statuses = |unit: &str| [check(unit).status, check(unit).status, check(unit).status];
    assert_eq!(statuses("15m"), [200, 200, 429]);
    assert_eq!(statuses("900000ms"), [429, 429, 429], "the same length is the same counter");
    assert_eq!(statuses("7 hours"), [200, 200, 429]);
    assert_eq!(check("15m").json()["limits"][0]["window"], "15m");
    for unit in ["0s", "1us", "11y", "1.5h", "15", "-1s", "M", "15 fortnights"] {
        let refused = check(unit);
        assert_eq!(
            (refused.status, refused.json()["field"].as_str()),
            (400, Some("descriptors[0].limit.unit")),
            "{unit}"
        );
        assert!(refused.text().contains("15m"), "it says what to write: {}", refused.text());
    }
}

/// Envoy's users send descriptors; both forms of an entry, inline limits and hits must work over HTTP too.
#[test]
fn descriptors_can_be_checked() {
    let server = Server::with_rules(RULES);
    let body = json!({"domain": "shop", "descriptors": [
        {"entries": [["api_key", "d"]]},
        {"entries": [{"key": "api_key", "value": "d"}, {"key": "endpoint", "value": "POST /login"}], "hits": 2},
        {"entries": [["no_such_key", "x"]]},
        {"entries": [["anything", "x"]], "limit": {"requests_per_unit": 7, "unit": "day"}},
    ]});
    let response = server.post("/v1/check", &body);
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
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

/// A typo in a domain must not cause an outage.
#[test]
fn an_unknown_domain_is_allowed_as_unmatched() {
    let server = Server::with_rules(RULES);
    let response = server.check("shoop", &json!({"api_key": "a"}));
    assert_eq!(response.status, 200);
    assert_eq!(response.json()["origin"], "unmatched");
    assert_eq!(response.json()["limits"], json!([]));
}

/// A program has tokens as a number. What is equal as a number is one value, and what JSON cannot tell exactly is refused.
#[test]
fn numbers_are_attribute_values_in_one_form() {
    let rules = "{domain: llm, descriptors: [{key: user, limit: [60/hour, {count: 1000, period: day, cost: tokens}]}]}";
    let server = Server::with_rules(rules);
    let left = |attributes: &str| {
        let body = format!("{{\"domain\": \"llm\", \"attributes\": {attributes}}}");
        let response = post_text(&server, "/v1/check", &body);
        let body = response.json();
        assert_eq!(response.status, 200, "{attributes}: {body}");
        (body["limits"][0]["remaining"].as_u64(), body["limits"][1]["remaining"].as_u64())
    };
    for (attributes, requests, tokens) in [
        (r#"{"user": 7, "tokens": 100}"#, 59, 900),
        (r#"{"user": 7.0, "tokens": 1e2}"#, 58, 800),
        (r#"{"user": "7", "tokens": "100"}"#, 57, 700),
        (r#"{"user": 0.7e1, "tokens": 100.0}"#, 56, 600),
        (r#"{"user": -0.0, "tokens": 1}"#, 59, 999),
        (r#"{"user": 0, "tokens": 1}"#, 58, 998),
        (r#"{"user": 1.50, "tokens": 1}"#, 59, 999),
        (r#"{"user": "1.5", "tokens": 1}"#, 58, 998),
        (r#"{"user": 9007199254740992, "tokens": 1}"#, 59, 999),
        (r#"{"user": -9007199254740992, "tokens": 1}"#, 59, 999),
    ] {
        assert_eq!(left(attributes), (Some(requests), Some(tokens)), "{attributes}");
    }
    let body = server.check("llm", &json!({"user": "names"})).json();
    assert_eq!((&body["limits"][0]["cost"], &body["limits"][1]["cost"]), (&Value::Null, &json!("tokens")));
    for (value, why) in [
        ("9007199254740993", "beyond 2^53"),
        ("-9007199254740993", "beyond 2^53"),
        ("1e300", "beyond 2^53"),
        ("1e999", "number out of range"),
        ("true", "a string or a number"),
        ("null", "a string or a number"),
        ("[1]", "a string or a number"),
    ] {
        for path in ["/v1/check", "/v1/reserve"] {
            let response = post_text(
                &server,
                path,
                &format!("{{\"domain\": \"llm\", \"attributes\": {{\"user\": {value}}}}}"),
            );
            assert_eq!(response.status, 400, "{value}");
            assert!(response.text().contains(why), "{value}: {}", response.text());
        }
    }
    // A fraction of a token cannot be charged, and neither can a negative number.
    for tokens in ["1.5", "-1"] {
        let body = format!("{{\"domain\": \"llm\", \"attributes\": {{\"user\": 7, \"tokens\": {tokens}}}}}");
        assert_eq!(post_text(&server, "/v1/check", &body).status, 400, "{tokens}");
    }
}

/// The actual tokens replace the estimate, and the request stays one request.
#[test]
fn settling_corrects_tokens_and_not_requests() {
    let rules = "{domain: llm, descriptors: [{key: user, algorithm: fixed_window, limit: [60/year, {count: 1000, period: year, cost: tokens}]}]}";
    let server = Server::with_rules(rules);
    let left = || {
        let body =
            server.post("/v1/check", &json!({"domain": "llm", "attributes": {"user": 1}, "cost": 0})).json();
        [0, 1].map(|at| body["limits"][at]["remaining"].as_u64().expect("a number"))
    };
    let body = json!({"domain": "llm", "attributes": {"user": 1, "tokens": 400}});
    let reserved = server.post("/v1/reserve", &body).json();
    assert_eq!(left(), [59, 600]);
    server.post("/v1/settle", &json!({"reservation": reserved["reservation"], "cost": 150}));
    assert_eq!(left(), [59, 850]);
    let reserved = server.post("/v1/reserve", &body).json();
    server.post("/v1/settle", &json!({"reservation": reserved["reservation"], "cost": 900}));
    assert_eq!(left(), [58, 0], "what was used beyond the estimate counts, even beyond the limit");
    let reserved = server
        .post("/v1/reserve", &json!({"domain": "llm", "attributes": {"user": 2, "tokens": 400}}))
        .json();
    server.post("/v1/cancel", &json!({"reservation": reserved["reservation"]}));
    let body =
        server.post("/v1/check", &json!({"domain": "llm", "attributes": {"user": 2}, "cost": 0})).json();
    assert_eq!(
        (&body["limits"][0]["remaining"], &body["limits"][1]["remaining"]),
        (&json!(60), &json!(1000))
    );
}

/// LLM gateways charge an estimate, then the actual cost; without this they charge for tokens that were never used.
#[test]
fn a_reservation_is_settled_to_the_actual_cost_or_refunded() {
    let server = Server::with_rules(RULES);
    let left = || {
        let peek = json!({"domain": "shop", "attributes": {"tokens": "r"}, "cost": 0});
        server.post("/v1/check", &peek).json()["limits"][0]["remaining"].as_u64().expect("a number")
    };
    let reserve = |cost: u64| {
        let body =
            json!({"domain": "shop", "attributes": {"tokens": "r"}, "cost": cost, "deadline_ms": 60_000});
        server.post("/v1/reserve", &body)
    };
    let first = reserve(400).json();
    assert_eq!((&first["allowed"], left()), (&json!(true), 600));
    let settled = server.post("/v1/settle", &json!({"reservation": first["reservation"], "cost": 100}));
    let body = settled.json();
    assert_eq!((settled.status, &body["settled"], &body["cost"]), (200, &json!(true), &json!(100)));
    assert!((898..=901).contains(&body["remaining"].as_u64().expect("a number")), "{body}");
    assert_eq!(body["limits"][0]["remaining"], body["remaining"], "{body}");
    assert!((898..=901).contains(&left()), "300 were refunded: {}", left());

    let second = reserve(200).json();
    let canceled = server.post("/v1/cancel", &json!({"reservation": second["reservation"]}));
    let body = canceled.json();
    assert_eq!((canceled.status, &body["cancelled"]), (200, &json!(true)));
    assert!((898..=901).contains(&body["remaining"].as_u64().expect("a number")), "{body}");
    assert!((898..=901).contains(&left()), "all were refunded: {}", left());

    let third = reserve(100).json();
    server.post("/v1/settle", &json!({"reservation": third["reservation"], "cost": 300}));
    assert!((598..=601).contains(&left()), "the cost beyond the estimate is charged: {}", left());

    assert_eq!(reserve(5000).header("retry-after"), None, "more than the limit never passes");
    let denied = reserve(900);
    assert_eq!(
        (denied.status, &denied.json()["reservation"]),
        (429, &Value::Null),
        "a denial reserves nothing"
    );
    assert!(denied.header("retry-after").is_some());
}

/// A client that lost the response retries; it must not be charged twice, nor end a reservation in two ways.
#[test]
fn reservations_are_idempotent_and_reject_contradictions() {
    let server = Server::with_rules(RULES);
    let body =
        json!({"domain": "shop", "attributes": {"tokens": "i"}, "cost": 400, "idempotency_key": "one"});
    let first = server.post("/v1/reserve", &body).json();
    let again = server.post("/v1/reserve", &body).json();
    assert_eq!(first, again, "the same key is the same reservation");
    assert_eq!(again["limits"][0]["remaining"], 600, "charged once");

    let settle =
        |cost: u64| server.post("/v1/settle", &json!({"reservation": first["reservation"], "cost": cost}));
    assert_eq!(settle(50).status, 200);
    assert_eq!(settle(50).status, 200, "settling again at the same cost is idempotent");
    let other = settle(51);
    assert_eq!((other.status, other.header("content-type")), (409, Some("application/problem+json")));
    let cancel = server.post("/v1/cancel", &json!({"reservation": first["reservation"]}));
    assert_eq!(cancel.status, 409);

    let unknown = server.post("/v1/settle", &json!({"reservation": "0".repeat(32), "cost": 1}));
    assert_eq!((unknown.status, &unknown.json()["status"]), (404, &json!(404)));
}

/// One idempotency key must not give free passes to everybody, nor fill memory with what holds nothing.
#[test]
fn an_idempotency_key_is_bound_to_its_contents() {
    let server = Server::with_rules(RULES);
    let reserve = |domain: &str, tenant: &str, cost: u64| {
        let body = json!({"domain": domain, "attributes": {"tokens": tenant}, "cost": cost, "idempotency_key": "bound"});
        server.post("/v1/reserve", &body)
    };
    let nothing = reserve("nowhere", "a", 400);
    assert_eq!((nothing.status, &nothing.json()["reservation"]), (200, &Value::Null), "{}", nothing.text());
    assert_eq!(reserve("shop", "a", 400).status, 200);
    for (domain, tenant, cost) in [("shop", "b", 400), ("shop", "a", 1), ("nowhere", "a", 400)] {
        let other = reserve(domain, tenant, cost);
        assert_eq!(other.status, 422, "{domain} {tenant} {cost}: {}", other.text());
        assert_eq!(other.json()["field"], "idempotency_key", "{}", other.text());
    }
    assert_eq!(reserve("shop", "a", 400).status, 200, "its own contents");
}

/// A client that crashed must not change the charge later: after its deadline a reservation is final.
#[test]
fn a_reservation_is_final_after_its_deadline() {
    let server = Server::with_rules(RULES);
    let body = json!({"domain": "shop", "attributes": {"tokens": "late"}, "cost": 400, "deadline_ms": 1,
                     "idempotency_key": "late"});
    let first = server.post("/v1/reserve", &body).json()["reservation"].clone();
    // The same key is the same reservation until its deadline.
    eventually("the deadline", || {
        let again = server.post("/v1/reserve", &body).json()["reservation"].clone();
        (again != first).then_some(())
    });
    let ended = server.post("/v1/reserve", &body);
    assert_eq!(ended.status, 409, "an expired reservation is not replayed");
    assert!(ended.text().contains("expired"), "{}", ended.text());
    let fresh =
        json!({"domain": "shop", "attributes": {"tokens": "late"}, "cost": 400, "idempotency_key": "fresh"});
    assert_eq!(server.post("/v1/reserve", &fresh).status, 200);
    for path in ["/v1/cancel", "/v1/settle"] {
        let mut body = json!({"reservation": first});
        if path == "/v1/settle" {
            body["cost"] = json!(1);
        }
        assert_eq!(server.post(path, &body).status, 404, "{path}");
    }
    let peek = json!({"domain": "shop", "attributes": {"tokens": "late"}, "cost": 0});
    let left = server.post("/v1/check", &peek).json()["limits"][0]["remaining"].as_u64().expect("a number");
    assert!(left <= 209, "both charges stay: {left}");
}

/// Tools for envoyproxy/ratelimit use this format; protobuf JSON allows camel case and snake case.
#[test]
fn protobuf_json_works_in_camel_case_and_snake_case() {
    let server = Server::with_rules(RULES);
    let camel = json!({"domain": "shop", "hitsAddend": "2", "descriptors": [
        {"entries": [{"key": "api_key", "value": "j"}]},
        {"entries": [{"key": "nothing", "value": "j"}]},
        {"entries": [{"key": "x", "value": "j"}], "limit": {"requestsPerUnit": 9, "unit": "HOUR"}, "hitsAddend": "4"},
    ]});
    let response = server.post("/json", &camel);
    assert_eq!(response.status, 200, "{}", response.text());
    assert!(
        response.header("ratelimit").is_some_and(|value| value.starts_with("\"per-key\";r=1;")),
        "{:?}",
        response.headers
    );
    let body = response.json();
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
    let response = server.post("/json", &snake);
    assert_eq!(response.status, 429, "{}", response.text());
    let body = response.json();
    assert_eq!(body["overallCode"], "OVER_LIMIT");
    let codes: Vec<_> =
        body["statuses"].as_array().expect("statuses").iter().map(|s| s["code"].clone()).collect();
    assert_eq!(codes, ["OVER_LIMIT", "OK"]);
    assert_eq!(body["statuses"][1]["limitRemaining"], 5, "a peek charges nothing");
    assert_eq!(body["dynamicMetadata"]["denied_by"], "per-key");

    let refund = json!({"domain": "shop", "descriptors": [
        {"entries": [{"key": "api_key", "value": "j"}], "hitsAddend": 2, "isNegativeHits": true},
    ]});
    let response = server.post("/json", &refund);
    assert_eq!(
        (response.status, &response.json()["statuses"][0]["limitRemaining"]),
        (200, &json!(3)),
        "refunded"
    );
}

/// A proxy's filters read a rule's metadata as the struct that the rule file has, not as a flat list of texts.
#[test]
fn metadata_is_returned_as_it_is_written() {
    let server = Server::with_rules(
        "
domain: d
descriptors:
  - key: a
    limit: 9/hour
    metadata:
      text: payments
      quoted: \"3\"
      count: 3
      ratio: 0.25
      on: true
      nothing: null
      big: 12345678901234567890
      zip: 00123
      deep: {owner: {name: ada, pagers: [1, two, {night: false}]}}
      empty: [{}, []]
",
    );
    let body = json!({"domain": "d", "descriptors": [{"entries": [{"key": "a", "value": "x"}]}]});
    assert_eq!(
        server.post("/json", &body).json()["dynamicMetadata"],
        json!({
            "text": "payments", "quoted": "3", "count": 3, "ratio": 0.25, "on": true, "nothing": null,
            "big": "12345678901234567890", "zip": "00123",
            "deep": {"owner": {"name": "ada", "pagers": [1, "two", {"night": false}]}}, "empty": [{}, []],
        })
    );
}

/// Envoy's users send limits with a descriptor beside rules for it; one counter serves both, in either order.
#[test]
fn an_override_of_the_same_unit_continues_the_rules_count_under_the_envoy_profile() {
    let server = Server::with_rules(
        "{domain: d, profile: envoy, descriptors: [{key: a, rate_limit: {unit: year, requests_per_unit: 3}}]}",
    );
    let ask = |limit: Option<(u32, &str)>, hits: u32| {
        let mut descriptor = json!({"entries": [{"key": "a", "value": "x"}]});
        if let Some((count, unit)) = limit {
            descriptor["limit"] = json!({"requests_per_unit": count, "unit": unit});
        }
        let body = json!({"domain": "d", "hits_addend": hits, "descriptors": [descriptor]});
        let response = server.post("/json", &body).json();
        (
            response["overallCode"].as_str().expect("a code").to_owned(),
            response["statuses"][0]["limitRemaining"].as_u64().unwrap_or(0),
        )
    };
    assert_eq!(ask(None, 2), ("OK".to_owned(), 1));
    assert_eq!(ask(Some((10, "YEAR")), 3), ("OK".to_owned(), 5), "the rule's 2 and these 3 are used");
    assert_eq!(ask(None, 1), ("OVER_LIMIT".to_owned(), 0), "6 of 3");
    assert_eq!(ask(Some((10, "DAY")), 1), ("OK".to_owned(), 9), "another unit has a counter of its own");
}

/// A peek charges nothing, whichever way a request is described.
#[test]
fn a_cost_of_zero_is_a_peek_for_attributes_and_descriptors() {
    let server = Server::with_rules("{domain: d, descriptors: [{key: a, limit: 3/hour}]}");
    let remaining = |subject: &str, cost: u32| {
        let input = match subject {
            "attributes" => json!({"a": "x"}),
            _ => json!([{"entries": [["a", "x"]]}]),
        };
        let body = json!({"domain": "d", subject: input, "cost": cost});
        server.post("/v1/check", &body).json()["limits"][0]["remaining"].clone()
    };
    for (subject, cost, left) in [
        ("descriptors", 0, 3),
        ("attributes", 0, 3),
        ("descriptors", 2, 1),
        ("descriptors", 0, 1),
        ("attributes", 0, 1),
    ] {
        assert_eq!(remaining(subject, cost), left, "{subject} {cost}");
    }
}

/// A page that a browser shows must not spend the limits of others, nor read them, also not by pointing its own name at
/// a loopback address. What a proxy passes on to forward auth, and probes, are not concerned.
#[test]
fn pages_of_other_sites_are_rejected() {
    let server = Server::with_rules(RULES);
    let send = |path: &str, host: &str, more: &str| {
        let body = json!({"domain": "shop", "attributes": {"api_key": "browser"}}).to_string();
        let method = if path.starts_with("/v1/check") || path == "/json" { "POST" } else { "GET" };
        let length = if method == "POST" { body.len() } else { 0 };
        let head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\n{more}content-length: {length}\r\n");
        let request = format!("{head}connection: close\r\n\r\n{}", if length > 0 { &body } else { "" });
        harness::exchange(server.http, request.as_bytes()).expect("a response").status
    };
    let own = server.http.to_string();
    for more in [
        "origin: https://evil.example\r\n",
        "origin: null\r\n",
        "sec-fetch-site: cross-site\r\n",
        "sec-fetch-site: same-site\r\n",
    ] {
        for path in ["/v1/check", "/json", "/metrics", "/v1/hot", "/no-such-path"] {
            assert_eq!(send(path, &own, more), 403, "{path} {more}");
        }
        for path in ["/check", "/check/anything", "/healthz", "/readyz"] {
            assert_eq!(send(path, &own, more), 200, "{path} {more}");
        }
    }
    for host in ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"] {
        assert_eq!(send("/v1/check", host, ""), 421, "{host}");
        assert_eq!(send("/metrics", host, ""), 421, "{host}");
        assert_eq!(send("/check", host, ""), 200, "{host}");
        assert_eq!(send("/healthz", host, ""), 200, "{host}");
    }
    let left =
        server.post("/v1/check", &json!({"domain": "shop", "attributes": {"api_key": "browser"}, "cost": 0}));
    assert_eq!(left.json()["limits"][0]["remaining"], 3, "none of them was charged");
    for host in [&own[..], "localhost", "LOCALHOST:80", "[::1]:80"] {
        assert_eq!(
            send("/metrics", host, &format!("origin: http://{host}\r\nsec-fetch-site: same-origin\r\n")),
            200
        );
    }
}

/// Every way to ask rejects a cost that it cannot read, instead of charging one unit.
#[test]
fn a_malformed_cost_is_a_bad_request_in_every_protocol() {
    let server = Server::with_rules(
        "{domain: d, descriptors: [{key: user, limit: 10/year, cost: tokens, descriptors: [{key: tokens, limit: 10/year, cost: \
         tokens}]}]}",
    );
    let attributes = json!({"user": "u", "tokens": "many"});
    for path in ["/v1/check", "/v1/reserve"] {
        let response = server.post(path, &json!({"domain": "d", "attributes": attributes}));
        assert_eq!(response.status, 400, "{path}: {}", response.text());
        assert!(response.text().contains("attributes.tokens"), "{}", response.text());
        let peek = server.post(path, &json!({"domain": "d", "attributes": attributes, "cost": 0}));
        assert_eq!(peek.status, 400, "a peek at {path}: {}", peek.text());
        for cost in
            [json!("5"), json!(-1), json!(1.5), json!("x"), json!(null), json!(18446744073709551616.0)]
        {
            let body = json!({"domain": "d", "attributes": {"user": "u"}, "cost": cost});
            let response = server.post(path, &body);
            assert_eq!(response.status, 400, "{path} {cost}");
            let detail = response.json()["detail"].as_str().expect("text").to_owned();
            assert!(detail.contains("`cost` must be a whole number"), "{detail}");
        }
    }
    let entries = json!([{"key": "user", "value": "u"}, {"key": "tokens", "value": "-3"}]);
    let descriptors = json!([{"entries": entries}]);
    for path in ["/json", "/v1/check"] {
        let response = server.post(path, &json!({"domain": "d", "descriptors": descriptors}));
        assert_eq!(response.status, 400, "{path}: {}", response.text());
    }
    let body = json!({"domain": "d", "hits_addend": "x", "descriptors": [{"entries": [{"key": "user", "value": "u"}]}]});
    assert_eq!(server.post("/json", &body).status, 400);
    let command = b"*6\r\n$8\r\nTG.CHECK\r\n$1\r\nd\r\n$4\r\nuser\r\n$1\r\nu\r\n$6\r\ntokens\r\n$1\r\nx\r\n";
    let mut connection = std::net::TcpStream::connect(server.resp).expect("a connection");
    std::io::Write::write_all(&mut connection, command).expect("sent");
    let mut reply = [0; 256];
    let length = std::io::Read::read(&mut connection, &mut reply).expect("a reply");
    let reply = String::from_utf8_lossy(&reply[..length]);
    assert!(reply.starts_with("-ERR the cost in attribute `tokens`"), "{reply}");
    let peek = json!({"domain": "d", "attributes": {"user": "u"}, "cost": 0});
    assert_eq!(server.post("/v1/check", &peek).json()["limits"][0]["remaining"], 10, "nothing was charged");
}

/// Where the store fails, every protocol reports the rule that fails closed, not another one that matched.
#[test]
fn the_rule_that_fails_closed_is_reported_in_every_protocol() {
    let rules = "{domain: d, descriptors: [{key: a, name: open, limit: 5/minute, on_error: open}, \
                 {key: b, name: closed, limit: 7/minute, on_error: closed}]}";
    let local = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start_over(DeadStore, 1, &[rules], "", local);
    let response = server.check("d", &json!({"a": "x", "b": "x"}));
    assert_eq!((response.status, response.header("retry-after")), (503, Some("1")));
    assert_eq!(response.header("ratelimit"), Some(r#""closed";r=0;t=1"#));
    let body = response.json();
    assert_eq!(body["denied_by"], "closed");
    assert_eq!(
        body["limits"],
        json!([
            {"rule": "open", "limit": 5, "window": "1m", "remaining": 0, "reset_ms": 0, "unread": true},
            {"rule": "closed", "limit": 7, "window": "1m", "remaining": 0, "reset_ms": 0, "unread": true},
        ])
    );
    let entries = |key: &str| json!({"entries": [{"key": key, "value": "x"}]});
    let both = json!({"domain": "d", "descriptors": [entries("a"), entries("b")]});
    let response = server.post("/json", &both).json();
    assert_eq!(response["overallCode"], "OVER_LIMIT");
    assert_eq!(response["statuses"][0]["code"], "OK");
    assert_eq!(response["statuses"][1]["code"], "OVER_LIMIT");
    assert_eq!(response["statuses"][1]["currentLimit"]["requestsPerUnit"], 7);
    let command = b"*6\r\n$8\r\nTG.CHECK\r\n$1\r\nd\r\n$1\r\na\r\n$1\r\nx\r\n$1\r\nb\r\n$1\r\nx\r\n";
    let mut connection = std::net::TcpStream::connect(server.resp).expect("a connection");
    std::io::Write::write_all(&mut connection, command).expect("sent");
    let mut reply = [0; 256];
    let length = std::io::Read::read(&mut connection, &mut reply).expect("a reply");
    let reply = String::from_utf8_lossy(&reply[..length]);
    assert!(reply.starts_with("*9\r\n:1\r\n:7\r\n:0\r\n:1\r\n"), "{reply}");
    assert!(reply.contains("closed"), "{reply}");
}

/// Where the name of the counter is chosen, every answer has it, and the same one for the same counter.
#[test]
fn every_http_answer_names_its_counter() {
    let rules = "{domain: d, descriptors: [{key: user, name: per-user, limit: 5/hour}]}";
    let server = Server::start(&[rules], "responses: {bucket: true}");
    let attributes = json!({"domain": "d", "attributes": {"user": "u"}});
    let descriptors = json!({"domain": "d", "descriptors": [{"entries": [{"key": "user", "value": "u"}]}]});
    let bucket = |path: &str, body: &Value| {
        let response = server.post(path, body);
        response.header("x-ratelimit-bucket").unwrap_or_else(|| panic!("{path} has none")).to_owned()
    };
    let checked = bucket("/v1/check", &attributes);
    assert_eq!(bucket("/v1/reserve", &attributes), checked);
    assert_eq!(bucket("/json", &descriptors), checked);
}
