//! Rules as revisions, through the real binary: published over HTTP, on all nodes at once, across kills and outages.

use crate::databases::{Place, Postgres};
use crate::harness::{self, Folder, Node, Server, WebResponse, eventually, run};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

fn rules(limit: &str) -> String {
    format!("domain: d\ndescriptors:\n  - key: api_key\n    limit: {limit}\n")
}

fn sent(limit: &str) -> Value {
    json!({"files": [{"name": "d.yaml", "text": rules(limit)}], "reason": format!("now {limit}")})
}

fn start(db: &str) -> Node {
    Node::start(&rules("3/hour"), db, &[])
}

fn publish(node: &Node, body: &Value) -> WebResponse {
    node.ask("POST", "/admin/v1/rules", &[], body)
}

fn get(node: &Node, path: &str) -> Value {
    node.ask("GET", path, &[], &Value::Null).json()
}

/// What decisions of this node say they were made by. Of no caller that rules limit: previews look at recent requests.
fn revision(node: &Node) -> String {
    let decided = node.server.check("d", &json!({"watcher": "w"})).json();
    decided["revision"].as_str().expect("a revision").to_owned()
}

#[test]
fn published_rules_apply_and_survive_a_restart() {
    let place = Place::new();
    let db = place.sqlite("rules");
    let mut node = start(&db);
    let before = get(&node, "/admin/v1/rules");
    assert_eq!((&before["active"]["source"], &before["active"]["rev"]), (&json!("files"), &Value::Null));
    assert_eq!(before["revisions"], json!([]));
    assert_eq!(get(&node, "/admin/v1/rules/current")["files"][0]["text"], rules("3/hour"));

    let checked =
        node.ask("POST", "/admin/v1/rules/preview", &[], &json!({"files": sent("5/hour")["files"]}));
    assert_eq!(checked.status, 200, "{}", checked.text());
    let diff = &checked.json()["diff"][0];
    assert_eq!((&diff["rule"], &diff["change"]), (&json!("d: api_key"), &json!("changed")));
    assert!(diff["before"].as_str().is_some_and(|before| before.contains("3/1h")), "{diff}");
    assert_eq!(get(&node, "/admin/v1/rules")["revisions"], json!([]), "a check changes nothing");

    let made = publish(&node, &sent("5/hour"));
    assert_eq!(made.status, 201, "{}", made.text());
    let made = made.json();
    assert_eq!(
        (&made["rev"], &made["status"], &made["author"]),
        (&json!(2), &json!("active"), &json!("loopback"))
    );
    assert_eq!(json!(revision(&node)), made["revision"], "it acts before it is answered");
    assert_eq!(node.passes("d", &json!({"api_key": "k"})), 5);
    assert_eq!(publish(&node, &sent("5/hour")).status, 200, "the same again is nothing new");

    // Who has not seen what acts does not overwrite it.
    let mut late = sent("9/hour");
    late["base_rev"] = json!(1);
    let refused = publish(&node, &late);
    assert_eq!((refused.status, &refused.json()["active_rev"]), (412, &json!(2)), "{}", refused.text());
    late["base_rev"] = json!(2);
    assert_eq!(publish(&node, &late).status, 409, "it would allow what was denied");
    late["confirm"] = json!(true);
    assert_eq!(publish(&node, &late).status, 201);
    assert_eq!(node.passes("d", &json!({"api_key": "k"})), 4, "what was used stays used, and no more");

    let back = node.ask("POST", "/admin/v1/rules/2/rollback", &[], &json!({"reason": "too much"}));
    assert_eq!((back.status, &back.json()["rev"]), (201, &json!(4)), "{}", back.text());
    assert_eq!(get(&node, "/admin/v1/rules/current")["files"][0]["text"], rules("5/hour"));
    let all = get(&node, "/admin/v1/rules");
    let statuses: Vec<_> =
        all["revisions"].as_array().expect("revisions").iter().map(|one| &one["status"]).collect();
    assert_eq!(statuses, ["active", "rolled_back", "superseded", "superseded"]);
    assert_eq!(all["revisions"][1]["rolled_back_because"], "too much");
    assert_eq!(get(&node, "/admin/v1/rules/1")["files"][0]["text"], rules("3/hour"), "the files' own");
    let ready = node.server.get("/readyz?verbose").json();
    assert_eq!((&ready["rules"]["source"], &ready["rules"]["rev"]), (&json!("database"), &json!(4)));
    let schema = node.ask("GET", "/admin/v1/rules/schema", &[], &Value::Null).json();
    assert!(schema["properties"]["domain"].is_object());

    // Files act no more, here and after a start.
    node.rules.write("rules.yaml", rules("1/hour"));
    eventually("a word about it", || {
        node.server.log().contains("published rules are active; publish them").then_some(())
    });
    let acts = revision(&node);
    node.server.signal("TERM");
    node.server.wait();
    let node = start(&db);
    assert_eq!(revision(&node), acts);
    node.server.wait_for_log("rule files are ignored");
    let files = Node::start(&rules("3/hour"), &db, &["--rules-from", "files"]);
    assert_eq!(files.passes("d", &json!({"api_key": "k"})), 3);
    assert_eq!(publish(&files, &sent("8/hour")).status, 409, "{}", files.server.log());
    let verified = run(&["audit", "verify", "--db", &db]);
    assert!(verified.out.contains("intact: 3 entries"), "{}{}", verified.out, verified.err);
}

#[test]
fn bad_rules_are_refused_with_their_place() {
    let place = Place::new();
    let node = start(&place.sqlite("rules"));
    let bad = json!({"files": [
        {"name": "good.yaml", "text": rules("1/hour")},
        {"name": "bad.yaml", "text": "domain: e\ndescriptors:\n  - key: api_key\n    limit: lots\n"},
    ], "reason": "try"});
    let refused = publish(&node, &bad);
    assert_eq!(refused.status, 422, "{}", refused.text());
    assert_eq!(refused.json()["field"], "bad.yaml:4:12", "{}", refused.text());
    assert_eq!(refused.json()["errors"][0]["line"], 4);
    let checked = node.ask("POST", "/admin/v1/rules/check", &[], &json!({"files": bad["files"]}));
    assert_eq!((checked.status, &checked.json()["errors"][0]["file"]), (200, &json!("bad.yaml")));
    let file = json!([{"name": "d.yaml", "text": rules("1/hour")}]);
    for (body, status, says) in [
        (json!({"files": [], "reason": "none"}), 400, "must not be empty"),
        (json!({"files": file}), 400, "1 to 1024 bytes"),
        (json!({"files": file, "reason": "x".repeat(2_000)}), 400, "1 to 1024 bytes"),
        (json!({"files": file, "reason": "r", "bse_rev": 1}), 400, "unknown field `bse_rev`"),
        (json!({"files": [{"name": "", "text": ""}], "reason": "r"}), 400, "files[0].name"),
        (json!({"files": [{"name": "a", "text": "\u{0}"}], "reason": "r"}), 400, "NUL byte"),
    ] {
        let answer = publish(&node, &body);
        assert_eq!(answer.status, status, "{}", answer.text());
        assert!(answer.text().contains(says), "{}", answer.text());
    }
    let why = json!({"reason": "r"});
    for (method, path, body, status) in [
        ("GET", "/admin/v1/rules/7", &Value::Null, 404),
        ("GET", "/admin/v1/rules/x", &Value::Null, 400),
        ("POST", "/admin/v1/rules/7/rollback", &why, 404),
        ("POST", "/admin/v1/rules/7/approve", &Value::Null, 404),
    ] {
        assert_eq!(node.ask(method, path, &[], body).status, status, "{method} {path}");
    }
    assert_eq!(get(&node, "/admin/v1/rules")["revisions"], json!([]), "nothing of this was done");
    assert_eq!(node.passes("d", &json!({"api_key": "k"})), 3);
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn nodes_that_share_a_server_converge() {
    let postgres = Postgres::start();
    let db = postgres.database("rules");
    let (one, two) = (start(&db), start(&db));
    let made = publish(&one, &sent("7/hour")).json();
    eventually("what the other has published", || (json!(revision(&two)) == made["revision"]).then_some(()));
    let made = publish(&two, &sent("8/hour")).json();
    assert_eq!(made["rev"], 3, "{made}");
    eventually("the way back", || (json!(revision(&one)) == made["revision"]).then_some(()));
    assert_eq!(one.passes("d", &json!({"api_key": "k"})), 8);
}

/// A caller whose requests no single node has enough of: only all together pass what the new rules allow.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL and redis-server: make test")]
fn rules_are_previewed_on_the_samples_of_all_nodes() {
    let postgres = Postgres::start();
    let redis = harness::Redis::start();
    let store = redis.url();
    let db = postgres.database("rules");
    let start = |name: &str| Node::start(&rules("100/hour"), &db, &["--store", &store, "--node", name]);
    let (one, two) = (start("one"), start("two"));
    for node in [&one, &two] {
        for _ in 0..4 {
            assert_eq!(node.server.check("d", &json!({"api_key": "sk_live_split"})).status, 200);
        }
    }
    eventually("both nodes", || {
        (get(&one, "/admin/v1/nodes")["nodes"].as_array().map_or(0, Vec::len) == 2).then_some(())
    });
    let refused = publish(&one, &sent("6/hour"));
    assert_eq!(refused.status, 409, "{}", refused.text());
    let impact = &refused.json()["impact"];
    assert_eq!(
        (&impact["nodes"], &impact["nodes_missing"]),
        (&json!(["one", "two"]), &json!([])),
        "{impact}"
    );
    assert_eq!((&impact["weight"], &impact["newly_denied_share"]), (&json!(8), &json!(0.25)), "{impact}");
    let file = one.rules.write("new.yaml", rules("6/hour"));
    let admin = format!("http://{}", two.admin);
    let differs = run(&["rules", "diff", file.to_str().expect("a plain path"), "--admin", &admin]);
    assert!(differs.out.contains("on 2 nodes: 25.00% newly denied"), "{}{}", differs.out, differs.err);
    // A node that has died is named; the preview does not wait for it for long.
    let mut two = two;
    two.server.signal("KILL");
    two.server.wait();
    let impact = publish(&one, &sent("3/hour")).json()["impact"].clone();
    assert_eq!((&impact["nodes"], &impact["nodes_missing"]), (&json!(["one"]), &json!(["two"])), "{impact}");
}

/// A log or a database beside the rule file stirs its folder all the time: only what the file says is worth a word.
#[test]
fn rule_files_count_as_changed_only_if_their_rules_differ() {
    let folder = Folder::new();
    let path = folder.write("rules.yaml", rules("3/hour"));
    let db = format!("sqlite:{}", folder.join("tollgate.db").display());
    let flags = ["--rules", path.to_str().expect("a plain path"), "--db", &db];
    let node = Node::from(Server::start(&flags), folder);
    assert_eq!(publish(&node, &sent("5/hour")).status, 201);
    let warned = || node.server.log().matches("rule files changed").count();
    let stir = || {
        for _ in 0..40 {
            assert_eq!(node.put("other", &json!({"overrides": [{"descriptor": "default", "requests_per_unit": 9, "unit": "hour"}], "reason": "again"})).status, 200);
            let new = node.rules.write("rules.yaml.new", std::fs::read(&path).expect("rules"));
            std::fs::rename(new, &path).expect("the same once more");
        }
    };
    stir();
    node.rules.write("rules.yaml", rules("4/hour"));
    eventually("a word about it", || (warned() > 0).then_some(()));
    stir();
    node.server.signal("HUP");
    eventually("an answer to who asked", || (warned() > 1).then_some(()));
    assert_eq!(warned(), 2, "{}", node.server.log());
    assert_eq!(node.passes("d", &json!({"api_key": "k"})), 5, "what was published acts");
}

/// Two requests of each of ten callers.
fn some_traffic(node: &Node) {
    for i in 0..20 {
        assert_eq!(node.server.check("d", &json!({"api_key": format!("caller-{}", i % 10)})).status, 200);
    }
}

#[test]
fn publishing_that_denies_much_needs_confirmation_or_approval() {
    let place = Place::new();
    let db = place.sqlite("rules");
    let node = Node::start(&rules("100/hour"), &db, &[]);
    some_traffic(&node);
    let refused = publish(&node, &sent("1/hour"));
    assert_eq!(refused.status, 409, "{}", refused.text());
    let rehearsal = &refused.json()["impact"];
    assert_eq!((&rehearsal["weight"], &rehearsal["newly_denied_share"]), (&json!(20), &json!(0.5)));
    assert_eq!(rehearsal["callers_affected_share"], 1.0);
    let top = &rehearsal["top"][0];
    let masked = top["key_masked"].as_str().unwrap_or_default();
    let id = masked.strip_prefix("api_key=ca…").unwrap_or_else(|| panic!("{top}"));
    assert!(id.len() == 8 && top["key_id"].as_str().is_some_and(|whole| whole.starts_with(id)), "{top}");
    assert_eq!((&top["after_denied"], &top["rule"]), (&json!(1), &json!("api_key")));
    assert!(!refused.text().contains("caller-"), "no key is shown: {}", refused.text());
    assert_eq!(get(&node, "/admin/v1/rules")["revisions"], json!([]));
    let mut confirmed = sent("1/hour");
    confirmed["confirm"] = json!(true);
    assert_eq!(publish(&node, &confirmed).status, 201);

    // A change that denies all needs a second operator, and an open loopback has none.
    let none =
        json!({"files": [{"name": "d.yaml", "text": rules("0/hour")}], "reason": "none", "confirm": true});
    let mut wide = json!({"files": [{"name": "d.yaml", "text": rules("100/hour")}], "reason": "as before"});
    assert_eq!(publish(&node, &wide).status, 409, "what was denied is not allowed by accident either");
    wide["confirm"] = json!(true);
    assert_eq!(publish(&node, &wide).status, 201);
    let waits = publish(&node, &none);
    assert_eq!(
        (waits.status, &waits.json()["status"]),
        (202, &json!("pending_approval")),
        "{}",
        waits.text()
    );
    let alone = node.ask("POST", "/admin/v1/rules/4/approve", &[], &Value::Null);
    assert_eq!(alone.status, 403, "{}", alone.text());
    assert!(alone.text().contains("tollgate token create"), "{}", alone.text());
    assert_eq!(node.server.check("d", &json!({"api_key": "somebody"})).status, 200, "it does not act");

    let token = |name: &str| {
        let made = run(&["token", "create", "--db", &db, "--name", name, "--role", "operator"]);
        format!("Bearer {}", made.out.trim())
    };
    let (ada, bob) = (token("ada"), token("bob"));
    let sends = |authorization: &str, path: &str, body: &Value| {
        node.ask("POST", path, &[("authorization", authorization)], body)
    };
    let waits = sends(&ada, "/admin/v1/rules", &none);
    assert_eq!((waits.status, &waits.json()["author"]), (202, &json!("ada")), "{}", waits.text());
    assert_eq!(sends(&ada, "/admin/v1/rules/5/approve", &Value::Null).status, 403);
    let around = sends(&ada, "/admin/v1/rules/5/rollback", &json!({"reason": "mine"}));
    assert_eq!(around.status, 409, "{}", around.text());
    assert!(around.text().contains("was never active (it is pending_approval)"), "{}", around.text());
    assert_eq!(node.server.check("d", &json!({"api_key": "somebody"})).status, 200, "it does not act");
    let approved = sends(&bob, "/admin/v1/rules/5/approve", &Value::Null);
    assert_eq!(
        (approved.status, &approved.json()["approved_by"]),
        (200, &json!("bob")),
        "{}",
        approved.text()
    );
    assert_eq!(node.server.check("d", &json!({"api_key": "somebody"})).status, 429);
    let all = node.ask("GET", "/admin/v1/rules", &[("authorization", &ada)], &Value::Null).json();
    assert_eq!(all["revisions"][1]["status"], "rejected", "what waited beside it: {all}");
}

/// Peeks are never denied, and would make every rule look harmless.
#[test]
fn looks_are_not_rehearsed_on() {
    let place = Place::new();
    let node = Node::start(&rules("1000/hour"), &place.sqlite("rules"), &[]);
    let look = json!({"domain": "d", "attributes": {"api_key": "k"}, "cost": 0});
    for _ in 0..20 {
        assert_eq!(node.server.post("/v1/check", &look).status, 200);
    }
    assert_eq!(node.server.check("d", &json!({"api_key": "k"})).status, 200);
    let waits = publish(&node, &sent("0/minute"));
    assert_eq!((waits.status, &waits.json()["impact"]["weight"]), (202, &json!(1)), "{}", waits.text());
}

#[test]
fn rules_that_hurt_a_caller_are_rolled_back() {
    let place = Place::new();
    let flags = ["--rules-rollback-for-ms", "1800", "--rules-rollback-within-ms", "600000"];
    let node = Node::start(&rules("100000/hour"), &place.sqlite("rules"), &flags);
    let guard = |state: &str| {
        let now = node.server.get("/readyz?verbose").json()["rules"]["guard"].clone();
        (now == state).then_some(())
    };
    eventually("a guard that knows what is usual", || guard("ready"));
    let mut confirmed = sent("1/hour");
    confirmed["confirm"] = true.into();
    assert_eq!(publish(&node, &confirmed).status, 201);
    eventually("a guard that watches", || guard("watching"));
    eventually("a way back", || {
        node.server.check("d", &json!({"api_key": "unlucky-caller"}));
        (get(&node, "/admin/v1/rules/2")["status"] == "rolled_back").then_some(())
    });
    let because = get(&node, "/admin/v1/rules/2")["rolled_back_because"].as_str().expect("why").to_owned();
    assert!(because.contains("denials of api_key=unl…"), "{because}");
    eventually("the old rules", || {
        (node.server.check("d", &json!({"api_key": "unlucky-caller"})).status == 200).then_some(())
    });
    assert_eq!(get(&node, "/admin/v1/rules/current")["author"], "guard");
    let audit = get(&node, "/admin/v1/audit");
    assert_eq!(
        (&audit["entries"][0]["action"], &audit["entries"][0]["actor"]),
        (&json!("rules.rollback"), &json!("guard"))
    );
    assert!(audit["entries"][0]["after"].to_string().contains("unl…"), "{audit}");
    node.server.wait_for_log("published rules rolled back");
    let log = node.server.log();
    let rolled_back = log.lines().find(|line| line.contains("published rules rolled back"));
    assert!(rolled_back.is_some_and(|line| line.contains("ERROR")), "{log}");
    let metrics = node.ask("GET", "/metrics", &[], &Value::Null).text();
    assert!(metrics.contains("\nratelimit_rules_rollbacks_total 1\n"), "{metrics}");
}

#[test]
fn the_command_line_publishes_and_goes_back() {
    let place = Place::new();
    let node = Node::start(&rules("100/hour"), &place.sqlite("rules"), &[]);
    some_traffic(&node);
    let admin = format!("http://{}", node.admin);
    let command = |words: &[&str]| run(&[&["rules"], words, &["--admin", &admin]].concat());
    let file = node.rules.write("new.yaml", rules("1/hour"));
    let file = file.to_str().expect("a plain path");
    let differs = command(&["diff", file]);
    assert_eq!(differs.code, Some(0), "{}", differs.err);
    for says in ["changed d: api_key", "- gcra 100/1h", "+ gcra 1/1h", "50.00% newly denied", "api_key=ca…"]
    {
        assert!(differs.out.contains(says), "{says}: {}", differs.out);
    }
    let refused = command(&["publish", file, "--reason", "less"]);
    assert_eq!(refused.code, Some(1), "{}", refused.out);
    assert!(refused.err.contains("add --confirm"), "{}", refused.err);
    let made = command(&["publish", file, "--reason", "less", "--confirm"]);
    assert_eq!((made.code, made.out.contains("revision 2 (")), (Some(0), true), "{}{}", made.out, made.err);
    let late = command(&["publish", file, "--reason", "less", "--base", "1"]);
    assert!(late.code == Some(1) && late.err.contains("revision 2 is now active"), "{}", late.err);
    let back = command(&["rollback", "1", "--reason", "too little"]);
    assert_eq!(back.code, Some(0), "{}", back.err);
    let list = command(&["list"]);
    assert!(list.out.contains("rolled_back") && list.out.contains("too little"), "{}", list.out);
    let list: Value = serde_json::from_str(&command(&["list", "--json"]).out).expect("JSON");
    assert_eq!(list["active"]["rev"], 3);
    assert!(command(&["show", "2"]).out.contains("limit: 1/hour"));
    assert!(command(&["show", "current"]).out.contains("limit: 100/hour"));
    assert_eq!(command(&["approve", "2"]).code, Some(1));
    let wrong = node.rules.write("wrong.yaml", rules("lots"));
    let wrong = command(&["diff", wrong.to_str().expect("a plain path")]);
    assert!(wrong.code == Some(1) && wrong.out.contains("wrong.yaml:4:12"), "{}", wrong.out);
}

/// Whoever edits a rule file after a publication is not limited by it: every place that shows the rules says so.
#[test]
fn files_that_differ_from_published_rules_are_shown() {
    let place = Place::new();
    let node = Node::start(&rules("100/hour"), &place.sqlite("rules"), &[]);
    let admin = format!("http://{}", node.admin);
    let diff = |words: &[&str]| run(&[&["rules", "diff", "--admin", &admin], words].concat());
    let drift = || get(&node, "/readyz?verbose")["rules"]["drift"].clone();
    let metric = || node.ask("GET", "/metrics", &[], &Value::Null).text();
    assert_eq!((drift(), diff(&[]).code), (Value::Null, Some(0)), "the files are active");

    assert_eq!(publish(&node, &sent("200/hour")).status, 201);
    let shown = drift();
    assert_eq!(
        (&shown["rev"], &shown["changed_rules"], &shown["error"]),
        (&json!(2), &json!(1), &Value::Null)
    );
    assert!(metric().contains("\nratelimit_rules_drift 1\n"), "{}", metric());
    let state = get(&node, "/admin/v1/rules/files");
    assert_eq!(state["drift"]["diff"][0]["rule"], "d: api_key", "{state}");
    let differs = diff(&[]);
    assert_eq!(differs.code, Some(1), "{}", differs.err);
    for says in [
        "changed d: api_key",
        "- gcra 200/1h",
        "+ gcra 100/1h",
        "revision 2 is published",
        "differ in 1 rule",
    ] {
        assert!(differs.out.contains(says), "{says}: {}", differs.out);
    }
    let local = node.rules.write("local.yaml", rules("200/hour"));
    let local = local.to_str().expect("a plain path");
    assert_eq!(diff(&[local, "--exit-code"]).code, Some(0));
    node.rules.write("local.yaml", rules("300/hour"));
    assert_eq!((diff(&[local]).code, diff(&[local, "--exit-code"]).code), (Some(0), Some(1)));

    node.rules.write("rules.yaml", "domain: d\ndescriptors: [{key: api_key, limit: lots}]\n");
    eventually("the broken file", || {
        drift()["error"].as_str().filter(|error| error.contains("rules.yaml:2")).map(drop)
    });
    node.rules.write("rules.yaml", rules("200/hour"));
    eventually("the same rules", || drift().is_null().then_some(()));
    assert!(metric().contains("\nratelimit_rules_drift 0\n"), "{}", metric());
    assert_eq!(diff(&[]).code, Some(0));
}

/// A node that could not start while its database is away would make every outage of the one an outage of the other.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn a_node_starts_without_its_database_and_finds_it_again() {
    let mut postgres = Postgres::start();
    let db = postgres.database("rules");
    let place = Place::new();
    let file = place.path().join("state").join("snapshot");
    let flags = ["--snapshot", file.to_str().expect("a plain path")];
    let mut node = Node::start(&rules("3/hour"), &db, &flags);
    let own = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 9, "unit": "hour"}]});
    assert_eq!(node.ask("PUT", "/admin/v1/quotas/k", &[], &own).status, 200);
    assert_eq!(publish(&node, &sent("5/hour")).status, 201);
    let block = |key: &str, lasts: u64| json!({"action": "block", "target": {"kind": "api_key", "value": key}, "reason": "abuse", "ttl_seconds": lasts});
    assert_eq!(node.ask("POST", "/admin/v1/emergency", &[], &block("stolen", 3_600)).status, 201);
    let short = node.ask("POST", "/admin/v1/emergency", &[], &block("forgiven", 1));
    assert_eq!(short.status, 201);
    let more = json!({"units": 2, "reason": "ticket 3"});
    assert_eq!(node.ask("POST", "/admin/v1/usage/granted/grant", &[], &more).status, 201);
    let quotas = place.path().join("state").join("snapshot.quotas");
    let known = node.server.get("/readyz?verbose").json()["control"]["revision"].to_string();
    eventually("a snapshot with all of it", || {
        let acts = std::fs::read_to_string(&file).ok()?;
        let title = std::fs::read(&quotas).ok()?;
        let title = String::from_utf8_lossy(title.split(|byte| *byte == b'\n').next()?).into_owned();
        let all = ["5/hour", "abuse", "\"units\":2"].iter().all(|word| acts.contains(word));
        (all && title.contains(&format!("\"revision\":{known}"))).then_some(())
    });
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
    let acts = revision(&node);
    node.server.signal("KILL");
    node.server.wait();
    postgres.stop("QUIT");

    let node = Node::start(&rules("3/hour"), &db, &flags);
    assert_eq!(revision(&node), acts, "the published rules act");
    assert_eq!(node.passes("d", &json!({"api_key": "k"})), 9, "and what is agreed with callers");
    assert_eq!(node.passes("d", &json!({"api_key": "other"})), 5);
    assert_eq!(node.passes("d", &json!({"api_key": "granted"})), 7, "extra quota too");
    assert_eq!(node.passes("d", &json!({"api_key": "stolen"})), 0, "what was blocked is blocked");
    eventually("the end of a measure", || {
        (node.passes("d", &json!({"api_key": "forgiven"})) == 5).then_some(())
    });
    node.server.wait_for_log("starting from the snapshot");
    assert_eq!(node.server.get("/readyz?verbose").json()["control"]["from_snapshot"], true);
    assert_eq!(publish(&node, &sent("6/hour")).status, 503);

    postgres.start_again();
    let mut more = sent("6/hour");
    more["confirm"] = json!(true);
    eventually("the database", || (publish(&node, &more).status == 201).then_some(()));
    assert_eq!(node.server.get("/readyz?verbose").json()["control"]["from_snapshot"], false);
    let other = start(&db);
    assert_eq!(revision(&other), revision(&node));
}

/// Kills a node again and again while rules are published: what was acknowledged is there afterwards, and acts.
fn kills_lose_nothing(db: &str) {
    let mut acknowledged: Vec<(i64, String)> = Vec::new();
    for round in 0..3 {
        let node = start(db);
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let mut done = Vec::new();
                for i in 1.. {
                    let limit = format!("{}/hour", round * 1_000 + i);
                    match node.try_ask("POST", "/admin/v1/rules", &[], &sent(&limit)) {
                        Ok(answer) if answer.status == 201 => {
                            done.push((answer.json()["rev"].as_i64().expect("a number"), rules(&limit)));
                        }
                        _ => break,
                    }
                    if done.len() == 3 {
                        enough.store(true, Ordering::Relaxed);
                    }
                }
                done
            });
            eventually("some revisions", || enough.load(Ordering::Relaxed).then_some(()));
            node.server.signal("KILL");
            acknowledged.extend(writing.join().expect("a writer"));
        });
    }
    let node = start(db);
    for (rev, text) in &acknowledged {
        assert_eq!(get(&node, &format!("/admin/v1/rules/{rev}"))["files"][0]["text"], *text, "{rev}");
    }
    let acts = get(&node, "/admin/v1/rules")["active"]["rev"].as_i64().expect("a number");
    let last = acknowledged.last().expect("some").0;
    // The kill may have come between the writing and the answer.
    assert!((last..=last + 1).contains(&acts), "{acts} acts, {last} was acknowledged");
    let verified = run(&["audit", "verify", "--db", db]);
    assert!(verified.out.contains("audit log intact"), "{}{}", verified.out, verified.err);
}

#[test]
fn kills_lose_no_revision_on_sqlite() {
    let place = Place::new();
    kills_lose_nothing(&place.sqlite("killed"));
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn kills_lose_no_revision_on_postgres() {
    let postgres = Postgres::start();
    kills_lose_nothing(&postgres.database("killed"));
}
