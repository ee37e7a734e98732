//! Several nodes on one database: each is listed with what it is at, and those who look at one hear of what is changed at
//! another.

use crate::RULES;
use crate::databases::{Place, Postgres};
use crate::harness::{Node, WebConnection, eventually, run};
use serde_json::{Value, json};

const KEY: &str = "sk_live_PLANTED0123456789abcdef";

fn nodes(node: &Node) -> Value {
    let answer = node.ask("GET", "/admin/v1/nodes", &[], &Value::Null);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn one(all: &Value, name: &str) -> Option<Value> {
    let all: Vec<&Value> = all["nodes"].as_array()?.iter().filter(|node| node["name"] == name).collect();
    assert!(all.len() < 2, "a node is listed once: {all:?}");
    all.first().map(|node| (*node).clone())
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn nodes_of_one_server_are_listed_until_they_leave() {
    let mut postgres = Postgres::start();
    let db = postgres.database("listed");
    let start = |name: &str| Node::start(RULES, &db, &["--node", name, "--region", "eu-west-1"]);
    let (east, mut west) = (start("east"), start("west"));
    let seen = eventually("both nodes", || one(&nodes(&east), "west"));
    assert_eq!(
        (&seen["region"], &seen["stale"], &seen["is_self"], &seen["store"], &seen["version"]),
        (
            &json!("eu-west-1"),
            &json!(false),
            &json!(false),
            &json!("memory"),
            &json!(env!("CARGO_PKG_VERSION"))
        )
    );
    let own = one(&nodes(&east), "east").expect("this node");
    assert_eq!((&own["is_self"], &own["rules_revision"]), (&json!(true), &seen["rules_revision"]));

    // A change is made at one; the other reports that it is active there, and how long that took.
    let published =
        json!({"files": [{"name": "a.yaml", "text": RULES.replace("3/hour", "4/hour")}], "reason": "test"});
    let done = east.ask("POST", "/admin/v1/rules", &[], &published);
    assert_eq!(done.status, 201, "{}", done.text());
    let wanted = done.json()["revision"].clone();
    let seen = eventually("the new rules on the other node", || {
        one(&nodes(&east), "west").filter(|west| west["rules_revision"] == wanted)
    });
    assert_eq!((&seen["revision"], &seen["rules_rev"]), (&json!(1), &done.json()["rev"]));
    assert!(seen["propagation_lag_ms"].is_i64(), "{seen}");

    // While the database is unavailable, a node reports its own current state and the others' last known one; none is stale because of that.
    postgres.stop("QUIT");
    assert_eq!(east.passes("d", &json!({"api_key": "k"})), 4, "decisions go on");
    let away = eventually("that the database is away", || {
        Some(nodes(&east)).filter(|listed| listed["database_unavailable"] == true)
    });
    assert_eq!((&away["database"], &away["complete"]), (&json!("postgres"), &json!(false)), "{away}");
    let (own, other) = (one(&away, "east").expect("this node"), one(&away, "west").expect("the other"));
    assert_eq!((&own["is_self"], &own["age_ms"]), (&json!(true), &json!(0)), "{own}");
    assert_eq!((&other["stale"], &other["rules_revision"]), (&json!(false), &wanted), "{other}");
    assert!(
        away["read_at"].as_str().is_some_and(|at| at >= other["seen_at"].as_str().unwrap_or("~")),
        "{away}"
    );
    // There is most to see now; nothing can be changed.
    for path in ["/metrics", "/admin/v1/stats", "/admin/v1/top", "/admin/v1/decisions", "/admin/v1/session"] {
        assert_eq!(east.ask("GET", path, &[], &Value::Null).status, 200, "{path}");
    }
    assert_eq!(east.ask("GET", "/admin/v1/session", &[], &Value::Null).json()["role"], "viewer");
    assert_eq!(east.ask("POST", "/admin/v1/rules", &[], &published).status, 503);
    postgres.start_again();
    eventually("both nodes again", || {
        let listed = nodes(&east);
        (listed["database_unavailable"] == false
            && listed["complete"] == true
            && one(&listed, "west")?["stale"] == false)
            .then_some(())
    });
    assert_eq!(east.ask("GET", "/admin/v1/session", &[], &Value::Null).json()["role"], "admin");

    // One that shuts down removes its row; one that is killed goes stale.
    west.server.signal("TERM");
    assert!(west.server.wait().success());
    eventually("its leave", || one(&nodes(&east), "west").is_none().then_some(()));
    let west = start("west");
    eventually("the node that was started again", || one(&nodes(&east), "west"));
    west.server.signal("KILL");
    let gone = eventually("a stale node", || one(&nodes(&east), "west").filter(|west| west["stale"] == true));
    assert!(gone["age_ms"].as_i64().is_some_and(|age| age >= 15_000), "{gone}");
    assert_eq!(one(&nodes(&east), "east").map(|own| own["stale"].clone()), Some(json!(false)));
    let _back = start("west");
    eventually("it is there again, once", || {
        one(&nodes(&east), "west").filter(|west| west["stale"] == false)
    });
}

/// Recently authenticated principals may go on reading while the database is unavailable, with the same token or session; no one else may.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn known_tokens_can_read_while_the_database_is_down() {
    let mut postgres = Postgres::start();
    let db = postgres.database("let_in");
    let node = Node::start(RULES, &db, &[]);
    let make = |name: &str, role: &str| {
        let made = run(&["token", "create", "--db", &db, "--name", name, "--role", role]);
        assert_eq!(made.code, Some(0), "{}", made.err);
        made.out.trim().to_owned()
    };
    let (known, revoked, stranger) = (make("ada", "admin"), make("rex", "admin"), make("sid", "admin"));
    let replica = make("shop", "replica");
    let ask = |method: &str, path: &str, token: &str| {
        let asked = format!("Bearer {token}");
        node.ask(method, path, &[("authorization", asked.as_str())], &Value::Null).status
    };
    assert_eq!((ask("GET", "/admin/v1/nodes", &known), ask("GET", "/admin/v1/nodes", &revoked)), (200, 200));
    assert_eq!(ask("GET", "/admin/v1/replica", &replica), 200);
    let log_in = node.ask("POST", "/admin/v1/session", &[], &json!({"token": known}));
    let cookie =
        log_in.header("set-cookie").and_then(|cookie| cookie.split(';').next()).expect("a cookie").to_owned();
    assert_eq!(node.ask("GET", "/admin/v1/stats", &[("cookie", &cookie)], &Value::Null).status, 200);
    let id = revoked.split('_').nth(1).expect("an id");
    assert_eq!(run(&["token", "revoke", "--db", &db, id]).code, Some(0));
    assert_eq!(ask("GET", "/admin/v1/nodes", &revoked), 401);

    postgres.stop("QUIT");
    let away = || {
        node.ask("GET", "/admin/v1/nodes", &[("cookie", &cookie)], &Value::Null).json()["database_unavailable"]
            == true
    };
    eventually("that the database is away", || away().then_some(()));
    assert_eq!((ask("GET", "/admin/v1/nodes", &known), ask("GET", "/metrics", &known)), (200, 200));
    // Programs that follow the server read from its memory.
    let read = ["/admin/v1/replica", "/admin/v1/replica/quotas"].map(|path| ask("GET", path, &replica));
    assert_eq!(read, [200, 200]);
    assert_eq!(ask("GET", "/admin/v1/nodes", &replica), 503, "and nothing else");
    assert_eq!(ask("GET", "/admin/v1/replica", &stranger), 503);
    let forged = format!("{}{}", &known[..known.len() - 1], if known.ends_with('A') { 'B' } else { 'A' });
    for unknown in [&revoked, &stranger, &forged] {
        assert_eq!(ask("GET", "/admin/v1/nodes", unknown), 503);
    }
    assert_eq!(
        node.ask("GET", "/admin/v1/nodes", &[], &Value::Null).status,
        503,
        "no access without a token"
    );
    assert_eq!(ask("DELETE", "/admin/v1/quotas/k", &known), 503, "to look, and no more");
    assert_eq!(ask("GET", "/admin/v1/audit", &known), 503);
    let mut page = crate::crowd::listener(node.admin, &format!("cookie: {cookie}\r\n"));
    page.read_until(b": still here\n\n").expect("who listens is looked up again, and may stay");
    next_event(&mut page, "tick");
}

/// The kinds of what a page hears, with their data, until one that is waited for.
fn next_event(page: &mut WebConnection, kind: &str) -> String {
    let mut heard = page.read_until(format!("event: {kind}\n").as_bytes()).expect("an event");
    heard.extend(page.read_until(b"\n\n").expect("its data"));
    String::from_utf8_lossy(&heard).into_owned()
}

#[test]
fn pages_receive_changes_made_at_another_node() {
    let place = Place::new();
    let db = place.sqlite("heard");
    let (here, there) = (Node::start(RULES, &db, &[]), Node::start(RULES, &db, &[]));
    let mut page = WebConnection::to(here.admin).expect("a connection");
    page.send(b"GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    let mut all = next_event(&mut page, "tick");
    let ask = |method: &str, path: &str, body: &Value| {
        let answer = there.ask(method, path, &[], body);
        assert!((200..300).contains(&answer.status), "{path}: {}", answer.text());
        answer
    };
    ask("PUT", &format!("/admin/v1/quotas/{KEY}"), &json!({"tier": "pro", "reason": "test"}));
    all += &next_event(&mut page, "quota");
    let block = json!({"action": "block", "target": {"kind": "api_key", "value": KEY}, "reason": "test"});
    let declared = ask("POST", "/admin/v1/emergency", &block).json();
    all += &next_event(&mut page, "emergency");
    ask("DELETE", &format!("/admin/v1/emergency/{}", declared["id"].as_str().expect("an id")), &Value::Null);
    all += &next_event(&mut page, "emergency");
    ask("POST", &format!("/admin/v1/usage/{KEY}/grant"), &json!({"units": 5, "reason": "test"}));
    all += &next_event(&mut page, "quota");
    let files = json!([{"name": "a.yaml", "text": RULES.replace("3/hour", "4/hour")}]);
    ask("POST", "/admin/v1/rules", &json!({"files": files, "reason": "test"}));
    all += &next_event(&mut page, "rules");
    assert!(!all.contains("PLANTED") && !all.contains("sk_liv"), "no event says whom it is about: {all}");
    assert!(all.contains("\"revision\":"), "{all}");
}

/// The region is in everything that leaves a node.
#[test]
fn the_region_is_reported() {
    let place = Place::new();
    let node = Node::start(RULES, &place.sqlite("region"), &["--node", "n1", "--region", "eu-west-1"]);
    (0..4).for_each(|_| drop(node.server.check("d", &json!({"api_key": "k"}))));
    let get = |path: &str| node.ask("GET", path, &[], &Value::Null);
    let denied = eventually("a denial in the log", || {
        get("/admin/v1/decisions?verdict=deny").json()["decisions"].as_array()?.first().cloned()
    });
    assert_eq!((&denied["node"], &denied["region"]), (&json!("n1"), &json!("eu-west-1")));
    assert!(get("/metrics").text().contains("ratelimit_node_info{node=\"n1\",region=\"eu-west-1\",version="));
    assert_eq!(get("/admin/v1/stats").json()["node"]["region"], "eu-west-1");
    let wrong = run(&["serve", "--region", "two\nlines"]);
    assert!(wrong.code == Some(1) && wrong.err.contains("--region: must have 1 to 128"), "{}", wrong.err);
}
