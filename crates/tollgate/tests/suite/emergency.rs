//! Emergency measures, through the real binary: applied by every protocol server, on every node, until they expire.

use crate::databases::{Place, Postgres};
use crate::harness::{Operator, eventually, foreign_client, note};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, limit: 8/hour, name: per-key}
  - {key: remote_address/24, limit: 100/hour, name: per-network}
";

fn denied_by(node: &Operator, attributes: &Value) -> Value {
    node.server.check("d", attributes).json()["denied_by"].clone()
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn every_protocol_explains_emergency_denials() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("emergency"), &[]);
    let id = node.declare("block", "api_key", "attacker-key");
    let name = format!("emergency:{id}");

    let denied = node.server.check("d", &json!({"api_key": "attacker-key"}));
    assert_eq!(denied.status, 429, "{}", denied.text());
    let decision = denied.json();
    assert_eq!((&decision["denied_by"], &decision["origin"]), (&json!(name), &json!("emergency")));
    assert_eq!(decision["emergency"], json!(name));
    assert_eq!(denied.header("x-ratelimit-denied-by"), Some(name.as_str()));
    let wait: u64 = denied.header("retry-after").expect("a time").parse().expect("seconds");
    assert!((3_590..=3_600).contains(&wait), "until it ends: {wait}");

    // The Redis protocol.
    let mut redis = TcpStream::connect(node.server.resp.expect("RESP")).expect("a server");
    let command =
        ["TG.CHECK", "d", "api_key", "attacker-key"].map(|word| format!("${}\r\n{word}\r\n", word.len()));
    redis.write_all(format!("*4\r\n{}", command.concat()).as_bytes()).expect("a server");
    let mut answer = [0; 512];
    let read = redis.read(&mut answer).expect("an answer");
    let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
    assert!(answer.contains(&name), "{answer}");

    // Envoy's protocol, by a third-party client: a blocked caller, an exempt one, and another.
    let friend = node.declare("exempt", "api_key", "friend-key");
    let transcript = foreign_client("emergency.py", &node.server);
    let replies: Vec<Value> = transcript.lines().map(|line| line.parse().expect("JSON")).collect();
    let codes: Vec<_> = replies.iter().map(|one| one["code"].as_str().unwrap_or("")).collect();
    assert_eq!(codes, ["OVER_LIMIT", "OK", "OK"], "{transcript}");
    let (blocked, exempt) = (&replies[0]["metadata"], &replies[1]["metadata"]);
    assert_eq!((&blocked["emergency"], &blocked["denied_by"]), (&json!(name), &json!(name)), "{transcript}");
    assert_eq!(blocked["origin"], "emergency", "{transcript}");
    assert_eq!(exempt["emergency"], format!("emergency:{friend}"), "{transcript}");
    assert_eq!(exempt.get("denied_by"), None, "{transcript}");
    assert_eq!(replies[2]["metadata"].get("emergency"), None, "{transcript}");

    // No other caller is affected, and its end takes effect at once.
    let other = node.server.check("d", &json!({"api_key": "customer"})).json();
    assert_eq!((&other["allowed"], other.get("emergency")), (&json!(true), None));
    assert_eq!(node.ask("DELETE", &format!("/admin/v1/emergency/{id}"), &Value::Null).status, 204);
    assert_eq!(node.ask("DELETE", &format!("/admin/v1/emergency/{id}"), &Value::Null).status, 404);
    assert_eq!(denied_by(&node, &json!({"api_key": "attacker-key"})), Value::Null);
    let audit = node.ask("GET", "/admin/v1/audit", &Value::Null).text();
    assert!(audit.contains("emergency.declare") && audit.contains("emergency.end"), "{audit}");
    assert!(!audit.contains("attacker-key"), "no key is kept: {audit}");
}

#[test]
fn each_measure_has_its_effect() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("emergency"), &[]);
    let end = |id: &str| {
        assert_eq!(node.ask("DELETE", &format!("/admin/v1/emergency/{id}"), &Value::Null).status, 204);
    };
    let id = node.declare("exempt", "tenant", "acme");
    assert_eq!(node.passes(&json!({"api_key": "a", "tenant": "acme"})), 50);
    assert_eq!(
        node.server.check("d", &json!({"api_key": "a", "tenant": "acme"})).json()["origin"],
        "emergency"
    );
    end(&id);
    assert_eq!(node.passes(&json!({"api_key": "a", "tenant": "acme"})), 8, "nothing was counted");
    let id = node.declare("block", "address", "203.0.113.0/24");
    assert_eq!(node.passes(&json!({"remote_address": "203.0.113.9"})), 0);
    assert_eq!(node.passes(&json!({"remote_address": "203.0.114.9"})), 50);
    end(&id);
    let sent = json!({"action": "tighten", "factor": 0.25, "reason": "load", "target": {"kind": "all"}});
    let id = node.post("/admin/v1/emergency", &sent)["id"].as_str().expect("an id").to_owned();
    assert_eq!(node.passes(&json!({"api_key": "b"})), 2);
    end(&id);
    let id = node.declare("disable_rule", "rule", "per-key");
    assert_eq!(node.passes(&json!({"api_key": "a"})), 50);
    end(&id);
    assert_eq!(node.passes(&json!({"api_key": "a"})), 0);
    for switch in ["allow_all", "shadow_all"] {
        let sent = json!({"action": switch, "reason": "the rules are wrong", "ttl_seconds": 60});
        let id = node.post("/admin/v1/emergency", &sent)["id"].as_str().expect("an id").to_owned();
        assert_eq!(node.passes(&json!({"api_key": "a"})), 50, "{switch}");
        let on = node.get("/admin/v1/emergency");
        assert_eq!(
            (&on["active"][0]["action"], &on["active"][0]["target"]["kind"]),
            (&json!(switch), &json!("all"))
        );
        end(&id);
    }
    // A short one ends by itself.
    let sent = json!({"action": "allow_all", "reason": "short", "ttl_seconds": 1});
    let id = node.post("/admin/v1/emergency", &sent)["id"].as_str().expect("an id").to_owned();
    eventually("the end", || (denied_by(&node, &json!({"api_key": "a"})) == "per-key").then_some(()));
    assert_eq!(node.ask("POST", &format!("/admin/v1/emergency/{id}/renew"), &Value::Null).status, 404);
    for (sent, status, says) in [
        (json!({"action": "explode", "reason": "r"}), 400, "unknown variant"),
        (json!({"action": "allow_all"}), 400, "missing field `reason`"),
        (
            json!({"action": "block", "reason": "r", "target": {"kind": "api_key", "value": ""}}),
            422,
            "target.value",
        ),
        (json!({"action": "tighten", "reason": "r", "factor": 2}), 422, "factor"),
    ] {
        let refused = node.ask("POST", "/admin/v1/emergency", &sent);
        assert_eq!(refused.status, status, "{}", refused.text());
        assert!(refused.text().contains(says), "{}", refused.text());
    }
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn both_nodes_apply_a_quota_and_survive_a_database_outage() {
    let mut postgres = Postgres::start();
    let db = postgres.database("emergency");
    let (one, two) = (Operator::start(RULES, &db, &[]), Operator::start(RULES, &db, &[]));
    let a = one.declare("block", "api_key", "key-of-one");
    let b = two.declare("block", "api_key", "key-of-two");
    for node in [&one, &two] {
        for (key, id) in [("key-of-one", &a), ("key-of-two", &b)] {
            eventually("the block", || {
                (denied_by(node, &json!({"api_key": key})) == json!(format!("emergency:{id}"))).then_some(())
            });
        }
    }
    postgres.stop("INT");
    for node in [&one, &two] {
        assert_eq!(denied_by(node, &json!({"api_key": "key-of-one"})), json!(format!("emergency:{a}")));
        assert_eq!(node.server.check("d", &json!({"api_key": "other"})).status, 200);
        let sent = json!({"action": "allow_all", "reason": "too late"});
        let refused = node.ask("POST", "/admin/v1/emergency", &sent);
        assert_eq!(refused.status, 503, "{}", refused.text());
        let refused = node.ask("POST", "/admin/v1/usage/other/reset", &json!({"reason": "r"}));
        assert_eq!(refused.status, 503, "{}", refused.text());
    }
    note(&format!("{a} and {b} went on without the database"));
}

#[test]
fn the_command_line_does_it_too() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("emergency"), &[]);
    let key = json!({"api_key": "attacker-key"});
    let blocked =
        node.run(&["emergency", "block", "--api-key", "attacker-key", "--reason", "flood", "--for", "30m"]);
    assert_eq!(blocked.code, Some(0), "{}{}", blocked.out, blocked.err);
    assert!(blocked.out.contains("api_key att…") && blocked.out.contains("flood"), "{}", blocked.out);
    assert_eq!(node.passes(&key), 0);
    let listed = node.run(&["emergency", "list", "--json"]);
    let listed: Value = serde_json::from_str(&listed.out).expect("JSON for programs");
    let id = listed["active"][0]["id"].as_str().expect("an id").to_owned();
    let renewed = node.run(&["emergency", "renew", &id, "--for", "2h", "--json"]);
    let renewed: Value = serde_json::from_str(&renewed.out).expect("JSON for programs");
    assert!(renewed["expires_at"].as_str() > listed["active"][0]["expires_at"].as_str(), "{renewed}");
    assert_eq!(node.run(&["emergency", "end", &id]).code, Some(0));
    let again = node.run(&["emergency", "end", &id]);
    assert_eq!((again.code, again.err.contains("Not found")), (Some(1), true), "{}", again.err);
    for args in [
        &["emergency", "exempt", "--endpoint", "GET /*", "--reason", "r"][..],
        &["emergency", "tighten", "--all", "--factor", "0.5", "--reason", "r"],
        &["emergency", "tighten", "--tenant", "t", "--factor", "0.5", "--reason", "r"],
        &["emergency", "disable-rule", "per-key", "--reason", "r"],
        &["emergency", "shadow-all", "--reason", "r"],
        &["emergency", "allow-all", "--reason", "r"],
    ] {
        let output = node.run(args);
        assert_eq!(output.code, Some(0), "{args:?}: {}{}", output.out, output.err);
    }
    assert_eq!(node.passes(&key), 50);
    for (args, says) in [
        (&["emergency", "block", "--reason", "r"][..], "--api-key"),
        (&["emergency", "block", "--api-key", "k", "--tenant", "t", "--reason", "r"], "cannot be used with"),
        (&["emergency", "block", "--api-key", "k"], "--reason"),
        (&["emergency", "block", "--address", "10.0.0.1/8", "--reason", "r"], "target.value"),
        (&["emergency", "allow-all", "--reason", "r", "--for", "5"], "use one such as"),
    ] {
        let output = node.run(args);
        assert!(
            output.code != Some(0) && output.err.contains(says),
            "{args:?}: {}{}",
            output.out,
            output.err
        );
    }
}

/// Rules count by more than API keys, and so do attackers.
#[test]
fn measures_are_about_any_attribute() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("emergency"), &[]);
    let user = |id: &str| json!({"api_key": "k", "user_id": id});
    let declare = |body: &Value| node.ask("POST", "/admin/v1/emergency", body);
    let block = json!({"action": "block", "target": {"kind": "attribute", "key": "user_id", "value": "u-1"}, "reason": "r"});
    let made = declare(&block);
    assert_eq!(made.status, 201, "{}", made.text());
    assert_eq!(made.json()["target"], json!({"kind": "attribute", "key": "user_id", "value": "u-1"}));
    assert_eq!(
        denied_by(&node, &user("u-1")),
        json!(format!("emergency:{}", made.json()["id"].as_str().expect("an id")))
    );
    assert_eq!(node.server.check("d", &user("u-2")).status, 200);
    let blocked = node.run(&["emergency", "block", "--attr", "session=very-secret-session", "--reason", "r"]);
    assert_eq!(blocked.code, Some(0), "{}", blocked.err);
    assert!(blocked.out.contains("session ver") && !blocked.out.contains("very-s"), "{}", blocked.out);
    assert_eq!(node.server.check("d", &json!({"session": "very-secret-session"})).status, 429);
    assert_eq!(node.server.check("d", &json!({"session": "another"})).status, 200);
    let known = node.run(&["emergency", "block", "--attr", "tenant=t", "--reason", "r", "--json"]);
    assert!(
        known.out.contains("\"kind\": \"tenant\"") || known.out.contains("\"kind\":\"tenant\""),
        "{}",
        known.out
    );
}

#[test]
fn an_exemption_can_be_permanent() {
    let place = Place::new();
    let database = place.sqlite("emergency");
    let key = json!({"api_key": "monitoring"});
    {
        let node = Operator::start(RULES, &database, &[]);
        let made =
            node.run(&["emergency", "exempt", "--api-key", "monitoring", "--permanent", "--reason", "ours"]);
        assert!(made.code == Some(0) && made.out.contains("never"), "{}{}", made.out, made.err);
        let listed = node.get("/admin/v1/emergency");
        assert_eq!(
            (&listed["active"][0]["expires_at"], &listed["active"][0]["reason"]),
            (&Value::Null, &json!("ours"))
        );
        let id = listed["active"][0]["id"].as_str().expect("an id").to_owned();
        let renewed = node.run(&["emergency", "renew", &id, "--for", "1h"]);
        assert!(renewed.out.contains("never"), "it is no shorter: {}", renewed.out);
    }
    let node = Operator::start(RULES, &database, &[]);
    for _ in 0..200 {
        let answer = node.server.check("d", &key).json();
        assert_eq!((&answer["allowed"], &answer["origin"]), (&json!(true), &json!("emergency")), "{answer}");
    }
    let audit = node.ask("GET", "/admin/v1/audit", &Value::Null).text();
    assert!(audit.contains("emergency.declare") && audit.contains("ours"), "{audit}");
}
