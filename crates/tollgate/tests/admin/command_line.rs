//! Operators at the command line: tables for people, JSON for programs, and refusals that say what to do.

use crate::databases::Place;
use crate::harness::{Folder, Run, run, run_with};
use crate::node;
use serde_json::{Value, json};

fn ended(run: &Run, code: i32) {
    assert_eq!(run.code, Some(code), "out: {}\nerr: {}", run.out, run.err);
}

#[test]
fn quotas_are_set_shown_listed_and_deleted() {
    let place = Place::new();
    let node = node(&place.sqlite("quotas"));
    let url = format!("http://{}", node.admin);
    let quota = |args: &[&str]| run(&[&["quota"], args, &["--admin", &url]].concat());

    let limit = "endpoint:POST /orders=4/hour";
    let set = quota(&[
        "set", "abc/1 x", "--tier", "pro", "--limit", limit, "--limit", "9/hour", "--reason", "ticket",
    ]);
    ended(&set, 0);
    assert!(
        set.out.contains("abc/1 x") && set.out.contains(limit) && set.out.contains("default=9/hour"),
        "{}",
        set.out
    );

    let got = quota(&["get", "abc/1 x", "--format", "json"]);
    ended(&got, 0);
    let got: Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(got["overrides"][1], json!({"descriptor": "default", "requests_per_unit": 9, "unit": "hour"}));
    assert_eq!(node.passes("d", &json!({"api_key": "abc/1 x"})), 9);

    // More than a page.
    for i in 0..101 {
        assert_eq!(node.put(&format!("k{i}"), &json!({"tier": "free"})).status, 200);
    }
    let all = quota(&["list", "--json", "--most", "0"]);
    let all: Value = serde_json::from_str(&all.out).expect("JSON");
    assert_eq!(all["quotas"].as_array().map(Vec::len), Some(102));
    let some = quota(&["list"]);
    assert_eq!(some.out.lines().count(), 101, "titles, and a hundred");
    assert!(some.err.contains("more results; use --max-results"), "{}", some.err);
    let pro = quota(&["list", "--tier", "pro"]);
    assert_eq!(pro.out.lines().count(), 2, "{}", pro.out);
    assert!(!pro.out.contains("abc/1 x") && pro.err.is_empty(), "{}{}", pro.out, pro.err);

    let revision = got["revision"].to_string();
    ended(&quota(&["set", "abc/1 x", "--tier", "pro", "--revision", &revision]), 1);
    ended(&quota(&["set", "abc/1 x", "--tier", "pro", "--revision", &revision, "--confirm"]), 0);
    let late = quota(&["delete", "abc/1 x", "--revision", &revision]);
    ended(&late, 1);
    assert!(late.err.contains("Precondition failed"), "{}", late.err);
    let deleted = quota(&["delete", "abc/1 x", "--format", "json", "--confirm"]);
    ended(&deleted, 0);
    assert_eq!(serde_json::from_str::<Value>(&deleted.out).expect("JSON"), json!({"deleted": true}));
    let gone = quota(&["get", "abc/1 x"]);
    ended(&gone, 1);
    assert!(gone.err.contains("Not found: this caller has no quota"), "{}", gone.err);
    let wrong = quota(&["set", "k", "--limit", "nope=1/hour"]);
    ended(&wrong, 1);
    assert!(wrong.err.contains("(at --limit, overrides[0].descriptor)"), "{}", wrong.err);
}

#[test]
fn tokens_come_from_the_environment_or_a_file_and_are_not_shown() {
    let place = Place::new();
    let db = place.sqlite("tokens");
    let node = node(&db);
    let made = run(&["token", "create", "--db", &db, "--name", "otto", "--role", "operator"]);
    let token = made.out.trim();
    let url = format!("http://{}", node.admin);
    let list = ["quota", "list", "--admin", &url];
    let refused = run(&list);
    ended(&refused, 1);
    assert!(
        refused.err.contains("Unauthorized") && refused.err.contains("tollgate token create"),
        "{}",
        refused.err
    );
    ended(&run_with(&list, &[("TOLLGATE_TOKEN", token)]), 0);
    let folder = Folder::new();
    let file = folder.write("token", format!("{token}\n"));
    let file = file.to_str().expect("a plain path");
    ended(&run(&[&list[..], &["--token-file", file]].concat()), 0);

    let refused = run(&["quota", "list", "--admin", "http://127.0.0.1:1"]);
    ended(&refused, 1);
    assert!(
        refused.err.contains("http://127.0.0.1:1: connection refused; is the server running?"),
        "{}",
        refused.err
    );
    for wrong in ["foo", "ftp://x", "http://", "http://h/path", "http://u:secret@h:1"] {
        let wrong = run(&["quota", "list", "--admin", wrong]);
        ended(&wrong, 1);
        assert!(wrong.err.contains("not a URL such as"), "{}", wrong.err);
    }
    let web = run(&["quota", "list", "--admin", &format!("http://{}/", node.server.http)]);
    ended(&web, 1);
    assert!(web.err.contains("this is not the admin address"), "{}", web.err);
    // The other ports of the same server, and the other scheme.
    let resp = node.server.resp.expect("a port");
    for (other, advice) in [
        (format!("http://{}", node.server.grpc), "not its gRPC or Redis address"),
        (format!("http://{resp}"), "not its gRPC or Redis address"),
        (format!("https://{}", node.admin), "use http://"),
    ] {
        let wrong = run(&["quota", "list", "--admin", &other]);
        ended(&wrong, 1);
        assert!(wrong.err.contains(advice) && wrong.err.contains(&other), "{other}: {}", wrong.err);
    }
    let wrong = run_with(&list, &[("TOLLGATE_TOKEN", "tg_wrong")]);
    ended(&wrong, 1);
    assert!(wrong.err.contains("the token of TOLLGATE_TOKEN is not valid"), "{}", wrong.err);
    let admin = run(&["token", "create", "--db", &db, "--name", "ada", "--role", "admin"]);
    let remote = run_with(
        &["audit", "list", "--limit", "1", "--admin", &url],
        &[("TOLLGATE_TOKEN", admin.out.trim())],
    );
    ended(&remote, 0);
    assert!(remote.out.contains("token.create") && remote.out.contains("name ada"), "{}", remote.out);
    let unknown = run(&["token", "revoke", "zzz", "--db", &db]);
    assert!(unknown.err.contains("see `tollgate token list`"), "{}", unknown.err);
}

/// A log that was never there is not whole, and a path that was mistyped is no new database.
#[test]
fn a_database_that_is_not_there_is_not_made() {
    let folder = Folder::new();
    let (gone, empty) = (folder.join("mistyped.db"), folder.write("empty.db", ""));
    let exported = folder.join("audit.ndjson");
    for path in [&gone, &empty] {
        let db = format!("sqlite:{}", path.display());
        for args in [
            &["audit", "verify"][..],
            &["audit", "export", "--file", exported.to_str().expect("plain")],
            &["token", "list"],
            &["token", "revoke", "abc"],
        ] {
            let refused = run(&[args, &["--db", &db]].concat());
            ended(&refused, 1);
            assert!(
                refused.err.contains("no such database: ") && refused.out.is_empty(),
                "{}{}",
                refused.err,
                refused.out
            );
        }
    }
    assert!(!gone.exists() && !exported.exists());
    assert_eq!(std::fs::metadata(&empty).expect("it stays").len(), 0);

    let db = format!("sqlite:{}", gone.display());
    let made = run(&["token", "create", "--name", "me", "--role", "viewer", "--db", &db]);
    ended(&made, 0);
    let (_, command) = made.err.split_once("Revoke it with: tollgate ").expect("how to");
    let words: Vec<&str> = command.split_whitespace().map(|word| word.trim_matches('\'')).collect();
    ended(&run(&words), 0);
    ended(&run(&["audit", "verify", "--db", &db]), 0);
}

/// Which database, and why, once, and without its password.
#[test]
fn a_database_that_does_not_answer_is_named() {
    let refused = run(&["token", "list", "--db", "postgres://me:PLANTED@127.0.0.1:1/limits"]);
    ended(&refused, 1);
    let error = &refused.err;
    assert!(error.contains("cannot reach PostgreSQL at postgres://me@127.0.0.1:1/limits"), "{error}");
    assert_eq!(error.matches("refused").count(), 1, "{error}");
    assert!(!error.contains("PLANTED") && !error.contains("pool timed out"), "{error}");
}
