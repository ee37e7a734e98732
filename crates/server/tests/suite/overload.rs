//! Overload over the protocols: the fleet's capacity answers 503 where a protocol can, and signals adapt limits.

use crate::harness::{Server, WebConnection};
use serde_json::json;
use std::sync::Arc;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::Limiter;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_server::rls;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_store::{MemoryConfig, MemoryStore};

const FLEET: &str = "
domain: d
overload:
  priorities: [{when: {path: /critical}, priority: critical}]
  fleet: {capacity: 4/day, reserve: {critical: 50%}}
";

#[test]
fn the_fleet_sheds_with_503_and_keeps_what_is_reserved() {
    let server = Server::with_rules(FLEET);
    for _ in 0..2 {
        assert_eq!(server.check("d", &json!({"path": "/x"})).status, 200);
    }
    let shed = server.check("d", &json!({"path": "/x"}));
    assert_eq!(
        (shed.status, shed.json()["denied_by"].as_str()),
        (503, Some("overload/fleet")),
        "{}",
        shed.text()
    );
    let wait = shed.header("retry-after").and_then(|wait| wait.parse::<u64>().ok());
    assert!(wait.is_some_and(|wait| (1..=10).contains(&wait)), "{wait:?}: when load ends is not known");
    // Forward authentication counts the same capacity.
    assert_eq!(server.get("/check/x").status, 503);
    for _ in 0..2 {
        assert_eq!(server.check("d", &json!({"path": "/critical"})).status, 200, "reserved");
    }
    assert_eq!(server.check("d", &json!({"path": "/critical"})).status, 503, "the whole capacity is used");
}

/// 429 would blame the caller, whichever way it asks: nobody is over a limit of its own.
#[test]
fn every_http_endpoint_sheds_with_503_and_says_when_to_come_back() {
    for capacity in ["1/day", "1 in flight, ttl: 600s"] {
        let server = Server::with_rules(&format!(
            "
domain: d
descriptors: [{{key: tenant, name: own, limit: 1/day}}]
overload: {{fleet: {{capacity: {capacity}}}}}
"
        ));
        assert_eq!(server.check("d", &json!({"tenant": "a"})).status, 200);
        let attributes = json!({"domain": "d", "attributes": {"tenant": "b"}});
        let entries = |tenant: &str| json!({"domain": "d", "descriptors": [{"entries": [{"key": "tenant", "value": tenant}]}]});
        let sheds = [
            ("/v1/check", server.post("/v1/check", &attributes)),
            ("/v1/reserve", server.post("/v1/reserve", &attributes)),
            ("/check", server.get("/check/x")),
            ("/json", server.post("/json", &entries("b"))),
        ];
        for (path, shed) in sheds {
            let case = format!("{path}, {capacity}: {}", shed.text());
            assert_eq!(shed.status, 503, "{case}");
            assert_eq!(shed.header("x-ratelimit-denied-by"), Some("overload/fleet"), "{case}");
            let wait = shed.header("retry-after").and_then(|wait| wait.parse::<u64>().ok());
            assert!(wait.is_some_and(|wait| (1..=10).contains(&wait)), "{wait:?}: {case}");
            // In a field where proxies drop the body, and in the body otherwise.
            let field = shed.header("x-ratelimit-reason");
            match path {
                "/check" => assert!(field.is_some_and(is_reason), "{field:?}: {case}"),
                _ => assert_eq!(field, None, "{case}"),
            }
            let body = shed.json();
            match path {
                "/check" => assert_eq!(body.get("reason"), None, "{case}"),
                "/json" => {
                    assert!(body["dynamicMetadata"]["reason"].as_str().is_some_and(is_reason), "{case}");
                }
                _ => assert!(body["reason"].as_str().is_some_and(is_reason), "{case}"),
            }
        }
        assert_eq!(
            server.get("/check/x?deny_status=403").status,
            503,
            "no caller is over a limit of its own"
        );
        let over = server.post("/json", &entries("a"));
        assert_eq!(over.json()["overallCode"], "OVER_LIMIT");
        assert_eq!((over.status, over.header("x-ratelimit-denied-by")), (429, Some("own")), "its own limit");
    }
}

fn is_reason(text: &str) -> bool {
    text.starts_with("shed at priority normal") && text.contains("the fleet's capacity of 1")
}

/// What operators do not want their callers to see is seen by none.
#[test]
fn a_check_of_a_proxy_says_why_only_where_it_may_say_by_what() {
    let rules = "
domain: d
descriptors: [{key: tenant, limit: 1/day}]
overload: {fleet: {capacity: 1/day}}
";
    for (settings, is_told) in [("{denied_by: true}", true), ("{denied_by: false}", false)] {
        let server = Server::start(&[rules], &format!("responses: {settings}\n"));
        let allowed = server.get("/check/x");
        assert_eq!((allowed.status, allowed.header("x-ratelimit-reason")), (200, None));
        let shed = server.get("/check/x");
        assert_eq!(shed.status, 503);
        for field in ["x-ratelimit-denied-by", "x-ratelimit-reason"] {
            assert_eq!(shed.header(field).is_some(), is_told, "{field} with {settings}");
        }
    }
}

/// Of the capacity and of what reserves leave of it, a caller is shown the one that says whether its next request passes.
#[test]
fn of_the_fleets_capacity_the_limit_that_binds_is_shown() {
    let server = Server::with_rules(&FLEET.replace("4/day", "10/day"));
    let shown = |path: &str| {
        let answer = server.check("d", &json!({"path": path}));
        let limits = answer.json()["limits"].as_array().cloned().unwrap_or_default();
        limits.iter().map(|one| (one["limit"].as_u64(), one["remaining"].as_u64())).collect::<Vec<_>>()
    };
    let one = |limit: u64, remaining: u64| vec![(Some(limit), Some(remaining))];
    assert_eq!(shown("/x"), one(5, 4), "what is not reserved");
    let critical: Vec<_> = (0..5).map(|_| shown("/critical")).collect();
    assert_eq!(critical.last(), Some(&one(10, 4)));
    assert_eq!(shown("/x"), one(5, 3), "of two with as much left the smaller");
    assert_eq!(shown("/critical"), one(10, 2));
    assert_eq!(shown("/x"), one(10, 1), "critical requests have used more than what is reserved");
    let answer = server.get("/check/x");
    let policy = answer.header("ratelimit-policy").unwrap_or_default().to_owned();
    assert_eq!(policy.matches("overload/fleet").count(), 1, "{policy}");
}

#[test]
fn over_the_redis_protocol_the_fleet_denies_by_its_name() {
    let server = Server::with_rules(FLEET);
    let client = redis::Client::open(format!("redis://{}/", server.resp)).expect("a URL");
    let mut connection = client.get_connection().expect("a connection");
    let mut check = |path: &str| {
        let reply: Vec<redis::Value> =
            redis::cmd("TG.CHECK").arg(&["d", "path", path]).query(&mut connection).expect("a reply");
        match (&reply[0], &reply[5]) {
            (redis::Value::Int(limited), redis::Value::BulkString(rule)) => {
                (*limited, String::from_utf8_lossy(rule).into_owned())
            }
            other => panic!("{other:?}"),
        }
    };
    let fleet = |limited| (limited, "overload/fleet".to_owned());
    assert_eq!([check("/x"), check("/x"), check("/x")], [fleet(0), fleet(0), fleet(1)]);
    let critical = [check("/critical"), check("/critical"), check("/critical")];
    assert_eq!(critical, [fleet(0), fleet(0), fleet(1)], "reserved, and then the whole capacity is used");
}

/// A reply has no status, so that only the reason tells a program that its caller is not over a limit of its own. Programs
/// that take lists apart by their length get one that they know, unless they ask for more.
#[test]
fn over_the_redis_protocol_replies_have_the_reason() {
    let server = Server::with_rules(FLEET);
    for version in ["2", "3"] {
        let url = format!("redis://{}/?protocol=resp{version}", server.resp);
        let mut connection =
            redis::Client::open(url).and_then(|client| client.get_connection()).expect("a connection");
        let mut reply = |words: &str| {
            let mut command = redis::cmd("TG.CHECK");
            words.split(' ').for_each(|word| {
                command.arg(word);
            });
            command.query::<redis::Value>(&mut connection).expect("a reply")
        };
        while limited(&reply("d path /x")) == 0 {}
        let shed = reason(&reply("d path /x WITHREASON")).expect("a field");
        let shed = shed.expect("a reason");
        assert!(shed.starts_with("shed at priority normal"), "{shed}");
        assert!(shed.contains("the fleet's capacity of 4/1d"), "{shed}");
        let without = reason(&reply("d path /x"));
        assert_eq!(without, (version == "3").then_some(Some(shed)), "a list is as long as before");
        assert_eq!(reason(&reply("nobody path /x COST 2 withreason")), Some(None), "allowed, as ever");
    }
}

fn limited(reply: &redis::Value) -> i64 {
    let first = match reply {
        redis::Value::Array(values) => &values[0],
        redis::Value::Map(pairs) => &pairs[0].1,
        other => panic!("{other:?}"),
    };
    redis::from_redis_value(first.clone()).expect("a number")
}

/// Returns the reason of a reply; `None` if it has no such field.
fn reason(reply: &redis::Value) -> Option<Option<String>> {
    let value = match reply {
        redis::Value::Array(values) => {
            assert!(values.len() <= 10, "{values:?}");
            values.get(9)?
        }
        redis::Value::Map(pairs) => {
            let (name, value) = pairs.get(9)?;
            assert_eq!(redis::from_redis_value::<String>(name.clone()).expect("a name"), "reason");
            value
        }
        other => panic!("{other:?}"),
    };
    Some(redis::from_redis_value(value.clone()).expect("a text"))
}

#[test]
fn over_rls_the_fleet_denies_by_its_name() {
    let rules = Ruleset::load(&[Source::new("fleet.yaml", FLEET)], &Options::default()).expect("rules");
    let clock = SystemClock::new();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a store");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::new(clock) as Arc<dyn Clock>);
    let check = |path: &str| {
        let entries = vec![Entry { key: "path".to_owned(), value: path.to_owned() }];
        let descriptor = RateLimitDescriptor { entries, ..RateLimitDescriptor::default() };
        let request = RateLimitRequest {
            domain: "d".to_owned(),
            descriptors: vec![descriptor],
            ..RateLimitRequest::default()
        };
        let decision = pollster::block_on(rls::decide(&limiter, "rls", &request, None)).expect("a decision");
        let RateLimitResponse { overall_code, response_headers_to_add: headers, statuses, .. } =
            rls::response(&decision);
        // A capacity that is a rate is one of the protocol's units, as any limit.
        let unit = statuses[0].current_limit.as_ref().expect("a limit").unit;
        assert_eq!(Unit::try_from(unit), Ok(Unit::Day));
        let by = headers.into_iter().find(|header| header.key == "x-ratelimit-denied-by");
        (Code::try_from(overall_code).expect("a code"), by.map(|header| header.value))
    };
    let shed = (Code::OverLimit, Some("overload/fleet".to_owned()));
    assert_eq!([check("/x").0, check("/x").0], [Code::Ok; 2]);
    assert_eq!(check("/x"), shed);
    assert_eq!([check("/critical").0, check("/critical").0], [Code::Ok; 2], "reserved");
    assert_eq!(check("/critical"), shed, "the whole capacity is used");
}

#[test]
fn signals_tighten_the_limits_of_a_tier() {
    let rules = "
domain: d
descriptors: [{key: user, name: per-user, limit: 10/day, algorithm: fixed_window}]
overload:
  adapt: {signals: {queue_depth: 100}, order: [free], least: 20%}
";
    let server = Server::with_rules(rules);
    let left = |user: &str| {
        let answer = server.check("d", &json!({"user": user, "tier": "free"}));
        answer.json()["limits"][0]["remaining"].as_u64()
    };
    assert_eq!(left("a"), Some(9));
    let answer = server.post("/v1/signals", &json!({"domain": "d", "signals": {"queue_depth": 150}}));
    assert_eq!(
        (answer.status, &answer.json()["limits_percent"]["free"]),
        (200, &json!(80.0)),
        "{}",
        answer.text()
    );
    assert_eq!((left("b"), left("a")), (Some(7), Some(6)), "80% of ten, and usage stays");
    for (body, wanted) in [
        (json!({"domain": "x", "signals": {"queue_depth": 1}}), "does not adapt"),
        (json!({"domain": "d", "signals": {"queue": 1}}), "queue_depth"),
        (json!({"domain": "d", "signals": {"queue_depth": -1}}), "at least 0"),
        (json!({"domain": "d", "signals": {}}), "1 to 64"),
        (json!({"domain": "d"}), "signals"),
    ] {
        let refused = server.post("/v1/signals", &body);
        assert!(refused.status == 400 && refused.text().contains(wanted), "{body}: {}", refused.text());
    }
}

/// A caller that is denied below its usual limit is told that overload is the reason, whichever way it is asked for.
#[test]
fn denials_by_tightened_limits_say_so() {
    let rules = "
domain: d
descriptors:
  - {key: user, limit: 10/day, algorithm: fixed_window}
  - {key: agent, limit: 1/day, algorithm: fixed_window}
overload:
  adapt: {signals: {queue_depth: 100}, order: [free], least: 20%}
";
    let identity = "identity: {headers: {agent: user-agent}, trusted_headers: {tier: x-tier}}\n";
    let server = Server::start(&[rules], identity);
    let said = "limits of tier free are at 80% because of overload";
    let head = "GET /check HTTP/1.1\r\nhost: t\r\nx-forwarded-for: 192.0.2.1\r\nuser-agent: a\r\nx-tier: free\r\n\r\n";
    let asked = || {
        let mut connection = WebConnection::to(server.http).expect("a connection");
        connection.send(head.as_bytes()).expect("sent");
        connection.response().expect("a response")
    };
    assert_eq!(asked().status, 200);
    let usual = asked();
    assert_eq!((usual.status, usual.header("x-ratelimit-reason")), (429, None), "its own limit");
    let answer = server.post("/v1/signals", &json!({"domain": "d", "signals": {"queue_depth": 150}}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let tightened = asked();
    assert_eq!((tightened.status, tightened.header("x-ratelimit-reason")), (429, Some(said)));
    let client = redis::Client::open(format!("redis://{}/", server.resp)).expect("a URL");
    let mut connection = client.get_connection().expect("a connection");
    let words = ["d", "user", "u", "tier", "free", "COST", "9", "WITHREASON"];
    let reply: redis::Value = redis::cmd("TG.CHECK").arg(&words).query(&mut connection).expect("a reply");
    assert_eq!((limited(&reply), reason(&reply)), (1, Some(Some(said.to_owned()))));
}
