//! Reservations over a real Redis: what one node reserves another settles, also when the first was killed.

use crate::harness::{Folder, Redis, Server, eventually};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/day, algorithm: fixed_window}
  - {key: api_key, name: slow, limit: 5/hour}
";

fn reserve(server: &Server, user: &str, cost: u64, key: Option<&str>) -> (u16, Value) {
    let mut body = json!({"domain": "d", "attributes": {"user": user}, "cost": cost});
    if let Some(key) = key {
        body["idempotency_key"] = key.into();
    }
    let answer = server.post("/v1/reserve", &body);
    (answer.status, answer.json())
}

fn close(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let answer = server.post(path, body);
    (answer.status, answer.json())
}

/// A client's retry and its settlement reach whichever node is alive; no caller is charged twice or passes for free.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_reservation_outlives_the_node_that_made_it() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let (url, rules) = (redis.url(), rules.to_str().expect("a plain path"));
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", "10000"];
    let (first, second) = (Server::start(&flags), Server::start(&flags));
    let warm = |server: &Server| server.check("d", &json!({"user": "warm-up"})).json()["origin"] == "store";
    eventually("both nodes on Redis", || (warm(&first) && warm(&second)).then_some(()));

    let (status, made) = reserve(&first, "ann", 300, Some("job-1"));
    assert_eq!((status, made["allowed"].as_bool()), (200, Some(true)), "{made}");
    let (_, other) = reserve(&first, "ann", 100, None);
    let secret = json!({"domain": "d", "attributes": {"api_key": "sk_live_4242"}});
    let keyed = first.post("/v1/reserve", &secret).json();
    drop(first);

    // A retry that reaches the other node finds the same one; with other contents it is refused.
    let (status, again) = reserve(&second, "ann", 300, Some("job-1"));
    assert_eq!((status, &again["reservation"]), (200, &made["reservation"]), "{again}");
    assert_eq!(reserve(&second, "bob", 300, Some("job-1")).0, 422);
    assert_eq!(reserve(&second, "ann", 1, Some("job-1")).0, 422);

    let settle = json!({"reservation": made["reservation"], "cost": 120});
    for _ in 0..2 {
        let (status, settled) = close(&second, "/v1/settle", &settle);
        assert_eq!(
            (status, settled["cost"].as_u64(), settled["remaining"].as_u64()),
            (200, Some(120), Some(780)),
            "{settled}"
        );
    }
    let (status, ended) = reserve(&second, "ann", 300, Some("job-1"));
    assert_eq!(status, 409, "{ended}");
    assert!(ended["detail"].as_str().is_some_and(|text| text.contains("settled")), "{ended}");
    let (status, canceled) = close(&second, "/v1/cancel", &json!({"reservation": other["reservation"]}));
    assert_eq!((status, canceled["remaining"].as_u64()), (200, Some(880)), "{canceled}");
    assert_eq!(close(&second, "/v1/settle", &json!({"reservation": other["reservation"], "cost": 1})).0, 409);
    let (status, canceled) = close(&second, "/v1/cancel", &json!({"reservation": keyed["reservation"]}));
    assert_eq!((status, canceled["remaining"].as_u64()), (200, Some(5)), "{canceled}");
    // One that was never made.
    let unknown = json!({"reservation": "00000000000000000000000000000001"});
    assert_eq!(close(&second, "/v1/cancel", &unknown).0, 404);
}

/// A reservation during an outage follows its rules as a check does, and is every node's when Redis is back.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn reservations_follow_their_rules_through_an_outage() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/day, algorithm: fixed_window}
  - {key: login, name: login, class: security, limit: 10/day}
";
    let rules = folder.write("rules.yaml", rules);
    let (url, rules) = (redis.url(), rules.to_str().expect("a plain path"));
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", "10000", "--nodes", "2"];
    let (first, second) = (Server::start(&flags), Server::start(&flags));
    let warm = |server: &Server| server.check("d", &json!({"user": "warm-up"})).json()["origin"] == "store";
    eventually("both nodes on Redis", || (warm(&first) && warm(&second)).then_some(()));
    let (_, shared) = reserve(&first, "ann", 100, None);
    let dead = redis.stop();
    let away = |server: &Server| server.check("d", &json!({"user": "x"})).json()["origin"] == "local";
    eventually("both nodes without Redis", || (away(&first) && away(&second)).then_some(()));

    let closed = first.post("/v1/reserve", &json!({"domain": "d", "attributes": {"login": "u"}}));
    assert_eq!((closed.status, closed.header("retry-after")), (503, Some("1")), "{}", closed.text());
    assert_eq!(closed.json()["origin"], "fail_closed");
    let (status, made) = reserve(&first, "bob", 300, Some("job"));
    assert_eq!((status, &made["origin"]), (200, &json!("local")), "{made}");
    assert!(made["reservation"].is_string(), "{made}");
    assert_eq!(reserve(&first, "bob", 300, Some("job")).1["reservation"], made["reservation"]);
    let (_, other) = reserve(&first, "bob", 100, None);
    let settle = json!({"reservation": other["reservation"], "cost": 40});
    let (status, settled) = close(&first, "/v1/settle", &settle);
    assert_eq!((status, settled["cost"].as_u64()), (200, Some(40)), "{settled}");
    let elsewhere = second.post("/v1/settle", &json!({"reservation": made["reservation"], "cost": 1}));
    assert_eq!((elsewhere.status, elsewhere.header("retry-after")), (503, Some("1")), "{}", elsewhere.text());
    let lost = first.post("/v1/cancel", &json!({"reservation": shared["reservation"]}));
    assert_eq!((lost.status, lost.header("retry-after")), (503, Some("1")), "{}", lost.text());

    let _redis = dead.start_again();
    eventually("both nodes on Redis again", || (warm(&first) && warm(&second)).then_some(()));
    let settle = json!({"reservation": made["reservation"], "cost": 200});
    let settled = eventually("the reservation on the other node", || {
        let (status, settled) = close(&second, "/v1/settle", &settle);
        (status == 200).then_some(settled)
    });
    assert_eq!(settled["remaining"].as_u64(), Some(1_000 - 200 - 40), "{settled}");
}
