//! What operators decide, through the real binary: over HTTP, by the command line, across kills and outages.

#[path = "../../../control/tests/databases/mod.rs"]
mod databases;
#[path = "../harness/mod.rs"]
mod harness;

mod bulk;
mod command_line;
mod crowd;
mod described;
mod listed;
mod nodes;
mod tls;

use databases::{Place, Postgres};
use harness::{Node, Server, eventually, run};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    limit: 3/hour
    tiers: {pro: 5/hour}
    descriptors:
      - {key: endpoint, value: POST /orders, limit: 2/hour}
";

/// A node that decides by these rules and keeps what operators decide there.
pub(crate) fn node(db: &str) -> Node {
    Node::start(RULES, db, &[])
}

fn own(count: u64) -> Value {
    json!({"overrides": [{"descriptor": "default", "requests_per_unit": count, "unit": "hour"}], "reason": "test", "confirm": true})
}

#[test]
fn quotas_act_and_are_remembered() {
    let place = Place::new();
    let db = place.sqlite("admin");
    let node = node(&db);
    assert_eq!(node.passes("d", &json!({"api_key": "plain"})), 3);

    let put = node.put(
        "abc%2F123",
        &json!({"tier": "pro", "overrides": [
            {"descriptor": "endpoint:POST /orders", "requests_per_unit": 4, "unit": "hour"},
        ]}),
    );
    assert_eq!(put.status, 200, "{}", put.text());
    let tag = put.header("etag").expect("an ETag").to_owned();
    let got = node.ask("GET", "/admin/v1/quotas/abc%2F123", &[], &Value::Null);
    assert_eq!((got.json(), got.header("etag")), (put.json(), Some(tag.as_str())));
    assert_eq!(got.json()["api_key"], "abc/123");
    assert_eq!(got.header("cache-control"), Some("no-store"));
    assert_eq!(node.passes("d", &json!({"api_key": "abc/123", "endpoint": "POST /orders"})), 4);
    assert_eq!(node.passes("d", &json!({"api_key": "abc/123"})), 1, "of five by its tier");

    // Who has not seen a change does not overwrite it.
    let path = "/admin/v1/quotas/abc%2F123";
    assert_eq!(node.ask("PUT", path, &[("if-match", &tag)], &own(9)).status, 200);
    assert_eq!(node.ask("PUT", path, &[("if-match", &tag)], &own(8)).status, 412);
    assert_eq!(node.ask("PUT", path, &[("if-none-match", "*")], &own(8)).status, 412);
    assert_eq!(node.ask("PUT", path, &[("if-match", "r1")], &own(8)).status, 400);
    assert_eq!(node.ask("DELETE", path, &[("if-match", &tag)], &Value::Null).status, 412);

    let list = node.ask("GET", "/admin/v1/quotas?tier=pro", &[], &Value::Null).json();
    assert_eq!(list["quotas"], json!([]), "its tier is gone");
    let list = node.ask("GET", "/admin/v1/quotas", &[], &Value::Null);
    assert_eq!(list.json()["quotas"][0]["overrides"][0]["requests_per_unit"], 9);
    assert!(!list.text().contains("abc/123"), "a list shows no key: {}", list.text());

    // Who knows only the list has its ids.
    let id = list.json()["quotas"][0]["id"].as_str().expect("an id").to_owned();
    let by_id = format!("/admin/v1/quotas/by-id/{id}");
    let put = node.ask("PUT", &by_id, &[], &own(7));
    assert_eq!(
        (put.status, put.json()["key_prefix"].clone()),
        (200, list.json()["quotas"][0]["key_prefix"].clone())
    );
    assert!(put.json().get("api_key").is_none());
    assert_eq!(node.ask("GET", path, &[], &Value::Null).json()["overrides"][0]["requests_per_unit"], 7);
    let unknown = format!("/admin/v1/quotas/by-id/{}", "0".repeat(64));
    assert_eq!(node.ask("PUT", &unknown, &[], &own(7)).status, 404, "the caller is unknown");
    assert_eq!(node.ask("GET", "/admin/v1/quotas/by-id/abc", &[], &Value::Null).status, 400);

    let ready = node.server.get("/readyz?verbose").json();
    assert_eq!((&ready["control"]["database"], &ready["control"]["quotas"]), (&json!("sqlite"), &json!(1)));
    let metrics = node.ask("GET", "/metrics", &[], &Value::Null).text();
    assert!(metrics.contains("\nratelimit_quotas 1\n"), "{metrics}");

    assert_eq!(node.ask("DELETE", &format!("{path}?confirm=true"), &[], &Value::Null).status, 204);
    assert_eq!(node.ask("DELETE", path, &[], &Value::Null).status, 404);
    assert_eq!(node.ask("GET", path, &[], &Value::Null).status, 404);
    let audit = node.ask("GET", "/admin/v1/audit", &[], &Value::Null).json();
    let actions: Vec<_> =
        audit["entries"].as_array().expect("entries").iter().map(|entry| &entry["action"]).collect();
    assert_eq!(actions, ["quota.delete", "quota.put", "quota.put", "quota.put"]);
    assert_eq!(
        (&audit["entries"][0]["actor"], &audit["entries"][0]["origin"]),
        (&json!("loopback"), &json!("127.0.0.1"))
    );
    let verified = run(&["audit", "verify", "--db", &db]);
    assert_eq!(verified.code, Some(0), "{}{}", verified.out, verified.err);
    assert!(verified.out.contains("intact: 4 entries"), "{}", verified.out);
}

#[test]
fn errors_name_the_place_and_the_remedy() {
    let place = Place::new();
    let node = node(&place.sqlite("admin"));
    let quotas = "/admin/v1/quotas";
    let key = "/admin/v1/quotas/k";
    let long = format!("{quotas}/{}", "x".repeat(600));
    for (method, path, body, status, says) in [
        ("PUT", key, json!({"teir": "pro"}), 400, "unknown field `teir`"),
        ("PUT", key, json!([]), 400, "an object"),
        ("PUT", key, json!({"tier": 5}), 400, "\"field\":\"tier\""),
        ("PUT", key, json!({"overrides": [{"descriptor": "default"}]}), 400, "overrides[0]"),
        (
            "PUT",
            key,
            json!({"overrides": [{"descriptor": "default", "requests_per_unit": -1, "unit": "s"}]}),
            400,
            "requests_per_unit",
        ),
        (
            "PUT",
            key,
            json!({"overrides": [{"descriptor": "nope", "requests_per_unit": 1, "unit": "s"}]}),
            422,
            "overrides[0].descriptor",
        ),
        ("PUT", &long, own(1), 400, "1 to 512 bytes"),
        ("PUT", "/admin/v1/quotas/", own(1), 400, "1 to 512 bytes"),
        ("PUT", "/admin/v1/quotas/%zz", own(1), 400, "percent-encoded"),
        ("POST", key, own(1), 405, "use GET"),
        ("GET", "/admin/v1/quotas?teir=pro", Value::Null, 400, "known parameters: tier, prefix, key, cursor"),
        ("GET", "/admin/v1/quotas?cursor=zzz", Value::Null, 400, "next_cursor"),
        ("GET", "/admin/v1/audit?limit=0", Value::Null, 400, "between 1 and 1000"),
        ("GET", "/admin/v1/nothing", Value::Null, 404, "try GET /admin/v1/quotas"),
        ("PUT", key, json!({"tier": "pro", "reason": "x".repeat(70_000)}), 413, "exceeds 65536 bytes"),
    ] {
        let answer = node.ask(method, path, &[], &body);
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        assert!(answer.text().contains(says), "{method} {path}: {}", answer.text());
    }
    // Pages of browsers: neither from another site, nor by a foreign name that resolves to this server.
    for headers in [[("origin", "http://evil.example")], [("sec-fetch-site", "cross-site")]] {
        assert_eq!(node.ask("PUT", key, &headers, &own(1)).status, 403, "{headers:?}");
    }
    assert_eq!(node.ask("GET", quotas, &[("host", "evil.example:8082")], &Value::Null).status, 401);
    assert_eq!(node.ask("GET", quotas, &[("host", "127.0.0.1:8082")], &Value::Null).status, 200);
    let entries = node.ask("GET", "/admin/v1/audit", &[], &Value::Null).json();
    assert_eq!(entries["entries"], json!([]), "nothing of this was done");
    // A tier that rules will name later is no error.
    let stored = node.ask("PUT", key, &[], &json!({"tier": "gold"}));
    assert_eq!(stored.status, 200, "{}", stored.text());
    assert!(stored.text().contains("no rule has limits for tier `gold`"), "{}", stored.text());
}

/// Without a database there is still somewhere to look; what would need one says so, and changes nothing.
#[test]
fn without_a_database_operators_can_look() {
    let server = Server::start(&["--resp", "off"]);
    let admin = server.admin.expect("an admin address");
    let ask = |method: &str, path: &str| {
        let asked = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        harness::exchange(admin, asked.as_bytes()).expect("an answer")
    };
    assert_eq!(ask("GET", "/readyz").status, 200);
    assert!(ask("GET", "/metrics").text().contains("ratelimit_memory_slots"));
    for (method, path) in
        [("GET", "/admin/v1/quotas"), ("DELETE", "/admin/v1/quotas/k"), ("GET", "/admin/v1/audit")]
    {
        let refused = ask(method, path);
        assert_eq!(refused.status, 503, "{method} {path}");
        assert!(refused.text().contains("--db sqlite:"), "{}", refused.text());
    }
    assert!(Server::start(&["--admin", "off"]).admin.is_none());
}

#[test]
fn roles_restrict_what_tokens_can_do() {
    let place = Place::new();
    let db = place.sqlite("admin");
    let refused = run(&["serve", "--db", &db, "--admin", "0.0.0.0:0", "--http", "127.0.0.1:0"]);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("requires tokens"), "{}", refused.err);
    let alone = run(&["serve", "--admin", "0.0.0.0:0", "--http", "127.0.0.1:0"]);
    assert!(alone.code == Some(1) && alone.err.contains("set --db, or listen on 127.0.0.1"), "{}", alone.err);

    let node = node(&db);
    assert_eq!(node.put("k", &own(9)).status, 200, "on loopback, before there is a token");
    let make = |name: &str, role: &str| {
        let made = run(&["token", "create", "--db", &db, "--name", name, "--role", role]);
        assert_eq!(made.code, Some(0), "{}", made.err);
        format!("Bearer {}", made.out.trim())
    };
    let (viewer, operator, admin) = (make("vera", "viewer"), make("otto", "operator"), make("ada", "admin"));
    let key = "/admin/v1/quotas/k";
    let ask = |method: &str, path: &str, token: &str, body: &Value| {
        node.ask(method, path, &[("authorization", token)], body).status
    };
    assert_eq!(node.put("k", &own(8)).status, 401, "from the first token on everybody needs one");
    assert_eq!(node.ask("GET", key, &[], &Value::Null).header("www-authenticate"), Some("Bearer"));
    assert_eq!(node.ask("GET", "/metrics", &[], &Value::Null).status, 401);
    assert_eq!(node.ask("GET", "/healthz", &[], &Value::Null).status, 200);
    for (token, may) in [(&viewer, [200, 403, 403]), (&operator, [200, 200, 403]), (&admin, [200, 200, 200])]
    {
        assert_eq!(ask("GET", key, token, &Value::Null), may[0]);
        assert_eq!(ask("PUT", key, token, &own(7)), may[1]);
        assert_eq!(ask("GET", "/admin/v1/audit", token, &Value::Null), may[2]);
    }
    for wrong in ["Bearer nonsense", "Basic YTpi", &format!("{viewer}x")] {
        assert_eq!(ask("GET", key, wrong, &Value::Null), 401, "{wrong}");
    }
    let listed = run(&["token", "list", "--json", "--db", &db]);
    let listed: Value = serde_json::from_str(&listed.out).expect("JSON");
    assert_eq!(listed[1]["name"], "otto");
    let id = listed[1]["id"].as_str().expect("an id");
    assert_eq!(run(&["token", "revoke", "--db", &db, id]).code, Some(0));
    assert_eq!(ask("GET", key, &operator, &Value::Null), 401, "revoked by another process, at once");
    let audit = node.ask("GET", "/admin/v1/audit", &[("authorization", &admin)], &Value::Null);
    assert_eq!(audit.json()["entries"][0]["action"], "token.revoke");
    assert!(
        audit.json()["entries"].as_array().expect("entries").iter().any(|entry| entry["actor"] == "otto")
    );
    for token in [&viewer, &operator, &admin] {
        assert!(!node.server.log().contains(&token[30..]) && !audit.text().contains(&token[30..]));
    }
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn nodes_share_a_server_and_outlive_its_outages() {
    let mut postgres = Postgres::start();
    let db = postgres.database("shared");
    let (one, two) = (node(&db), node(&db));
    assert_eq!(one.put("k", &own(7)).status, 200);
    assert_eq!(two.put("l", &own(6)).status, 200);
    let knows = |node: &Node| node.server.get("/readyz?verbose").json()["control"]["quotas"].clone();
    eventually("both quotas on both nodes", || (knows(&one) == 2 && knows(&two) == 2).then_some(()));
    assert_eq!(two.passes("d", &json!({"api_key": "k"})), 7);

    postgres.stop("QUIT");
    assert_eq!(one.passes("d", &json!({"api_key": "l"})), 6, "decisions go on by what is known");
    let away = one.put("m", &own(5));
    assert_eq!(away.status, 503, "{}", away.text());
    assert!(away.text().contains("decisions continue"), "{}", away.text());
    postgres.start_again();
    eventually("a change once the database is back", || (two.put("m", &own(5)).status == 200).then_some(()));
    eventually("that change on the other node", || (knows(&one) == 3).then_some(()));
}

/// Kills a node again and again while it is changed: what was acknowledged is there afterwards.
fn kills_lose_nothing(db: &str) {
    let mut acknowledged: Vec<String> = Vec::new();
    for round in 0..4 {
        let node = node(db);
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let mut done = Vec::new();
                for i in 0.. {
                    let key = format!("key-{round}-{i}");
                    match node.try_ask("PUT", &format!("/admin/v1/quotas/{key}"), &[], &own(9)) {
                        Ok(answer) if answer.status == 200 => done.push(key),
                        _ => break,
                    }
                    if done.len() == 3 + round {
                        enough.store(true, Ordering::Relaxed);
                    }
                }
                done
            });
            eventually("some changes", || enough.load(Ordering::Relaxed).then_some(()));
            node.server.signal("KILL");
            acknowledged.extend(writing.join().expect("a writer"));
        });
    }
    let node = node(db);
    for key in &acknowledged {
        let got = node.ask("GET", &format!("/admin/v1/quotas/{key}"), &[], &Value::Null);
        assert_eq!(got.status, 200, "{key} was acknowledged: {}", got.text());
    }
    assert!(acknowledged.len() >= 18);
    let verified = run(&["audit", "verify", "--db", db]);
    assert!(verified.out.contains("audit log intact"), "{}{}", verified.out, verified.err);
}

#[test]
fn kills_lose_nothing_on_sqlite() {
    let place = Place::new();
    kills_lose_nothing(&place.sqlite("killed"));
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn kills_lose_nothing_on_postgres() {
    let postgres = Postgres::start();
    kills_lose_nothing(&postgres.database("killed"));
}

/// Who looks for a fault turns one module's messages on, without a restart that would take the fault away.
#[test]
fn the_log_level_changes_while_it_runs() {
    let place = Place::new();
    let node = Node::start(RULES, &place.sqlite("log.db"), &["--log-format", "json", "--log", "off"]);
    assert_eq!(node.server.log(), "", "nothing was asked for");
    let now = node.ask("GET", "/admin/v1/log", &[], &Value::Null);
    assert_eq!(now.json(), json!({"level": "off", "modules": {}}));
    for (wrong, place) in [
        (json!({"level": "loud"}), "level"),
        (json!({"level": "info", "modules": {"a b": "debug"}}), "modules.a b"),
        (json!({"level": "info", "modules": {"tollgate": "loud"}}), "modules.tollgate"),
        (json!({"modules": {"tollgate": "loud"}}), "modules.tollgate"),
    ] {
        let refused = node.ask("PUT", "/admin/v1/log", &[], &wrong);
        assert_eq!((refused.status, refused.json()["field"].as_str()), (422, Some(place)), "{wrong}");
    }
    assert_eq!(node.ask("PUT", "/admin/v1/log", &[], &json!({})).status, 400);
    let one = node.ask("PUT", "/admin/v1/log", &[], &json!({"modules": {"tollgate_engine": "info"}}));
    assert_eq!(one.json(), json!({"level": "off", "modules": {"tollgate_engine": "info"}}), "as it was");
    let wanted = json!({"level": "error", "modules": {"tollgate_admin": "info"}});
    assert_eq!(node.ask("PUT", "/admin/v1/log", &[], &wanted).json(), wanted);
    eventually("a message as JSON", || {
        let log = node.server.log();
        let line = log.lines().next().and_then(|line| serde_json::from_str::<Value>(line).ok());
        let line = line?;
        (line["level"] == "WARN" && line["fields"]["message"] == "log level changed").then_some(())
    });
}
