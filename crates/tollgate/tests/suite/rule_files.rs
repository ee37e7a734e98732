//! Rule files that people change or break, through the real binary: what they change is logged, what needs confirmation is
//! kept out if asked, and a restart with a broken file is no outage.

use crate::harness::{Folder, Run, Server, eventually, run};
use serde_json::json;

const LOGIN: &str = "  - {key: endpoint, value: POST /login, class: security, limit: 5/minute}\n";

fn rules(limit: u64, more: &str) -> String {
    format!("domain: d\ndescriptors:\n  - {{key: api_key, limit: {limit}/hour}}\n{more}")
}

fn start(folder: &Folder, flags: &[&str]) -> Server {
    let path = folder.join("rules.yaml");
    let mut all = vec!["--rules", path.to_str().expect("a plain path")];
    all.extend(flags);
    Server::start(&all)
}

fn limit(server: &Server) -> u64 {
    let look = json!({"domain": "d", "attributes": {"api_key": "look"}, "cost": 0});
    server.post("/v1/check", &look).json()["limits"][0]["limit"].as_u64().expect("a limit")
}

fn logged(server: &Server, says: &str) {
    eventually(says, || server.log().contains(says).then_some(()));
}

#[test]
fn a_restart_with_a_broken_file_uses_the_last_good_rules() {
    let folder = Folder::new();
    folder.write("rules.yaml", rules(10, ""));
    let mut server = start(&folder, &[]);
    folder.write("rules.yaml", rules(11, ""));
    eventually("the reload", || (limit(&server) == 11).then_some(()));
    folder.write("rules.yaml", "domain: d\ndescriptors: [{key: api_key, limit: lots}]\n");
    logged(&server, "rule reload failed");
    server.signal("TERM");
    server.wait();

    let server = start(&folder, &[]);
    assert_eq!(limit(&server), 11, "the last rules that were valid");
    server.wait_for_log("RULE FILES ARE BROKEN");
    assert!(server.greeting.contains("  rules last good copy of "), "{}", server.greeting);
    let rules_now = || server.get("/readyz?verbose").json()["rules"].clone();
    assert_eq!(rules_now()["last_good"], true);
    assert!(
        rules_now()["error"].as_str().is_some_and(|error| error.contains("rules.yaml:2")),
        "{}",
        rules_now()
    );
    assert!(server.get("/metrics").text().contains("\nratelimit_rules_last_good 1\n"));

    folder.write("rules.yaml", rules(11, ""));
    logged(&server, "rule files repaired");
    assert_eq!((&rules_now()["last_good"], &rules_now()["error"]), (&json!(false), &json!(null)));
    folder.write("rules.yaml", rules(12, ""));
    eventually("the next change", || (limit(&server) == 12).then_some(()));
}

#[test]
fn what_a_file_changes_is_logged() {
    let folder = Folder::new();
    folder.write("rules.yaml", rules(10, LOGIN));
    let server = start(&folder, &[]);
    folder.write("rules.yaml", rules(20, "  - {key: user, limit: 1/s}\n"));
    logged(&server, "rules reloaded");
    for says in [
        "rule changed",
        "gcra 10/1h",
        "gcra 20/1h",
        "rule added",
        "rule removed",
        "protect less: security rule",
    ] {
        server.wait_for_log(says);
    }
}

#[test]
fn files_pass_the_guard_when_asked() {
    let folder = Folder::new();
    folder.write("rules.yaml", rules(10, LOGIN));
    let server = start(&folder, &["--guard-files"]);
    folder.write("rules.yaml", "domain: other\n");
    logged(&server, "changed rule files not applied by --guard-files: domain `d` is removed");
    assert_eq!(limit(&server), 10);
    let error = server.get("/readyz?verbose").json()["rules"]["error"].to_string();
    assert!(error.contains("--guard-files") && error.contains("SIGHUP"), "{error}");
    // What is harmless is applied; what would deny a caller is not.
    folder.write("rules.yaml", rules(9, LOGIN));
    eventually("a harmless change", || (limit(&server) == 9).then_some(()));
    for _ in 0..8 {
        assert_eq!(server.check("d", &json!({"api_key": "busy"})).status, 200);
    }
    folder.write("rules.yaml", rules(2, LOGIN));
    logged(&server, "of recent requests would be newly denied");
    assert_eq!(limit(&server), 9);
    server.signal("HUP");
    eventually("the operator's word", || (limit(&server) == 2).then_some(()));
    logged(&server, "rule files confirmed");
    server.signal("HUP");
    logged(&server, "rule files unchanged");
    assert!(!server.log().contains("repaired"), "nothing was broken: {}", server.log());
}

/// Whatever the traffic: an edited file that admits nothing waits, and what was meant is confirmed.
#[test]
fn a_file_that_admits_nothing_waits() {
    let folder = Folder::new();
    folder.write("rules.yaml", rules(100, ""));
    let server = start(&folder, &["--guard-files"]);
    for (count, says) in [(0, "admits nothing"), (10, "admits 10 times less")] {
        folder.write("rules.yaml", rules(count, ""));
        logged(&server, says);
        assert_eq!(limit(&server), 100);
    }
    folder.write("rules.yaml", rules(0, ""));
    eventually("the reason", || confirm(&server, &[]).out.contains("admits nothing").then_some(()));
    let diff =
        || run(&["rules", "diff", "--admin", &format!("http://{}", server.admin.expect("an admin address"))]);
    assert_eq!(diff().code, Some(1), "the files are not what is active");
    let waits = pending(&server).expect("files that wait");
    assert_eq!(confirm(&server, &[&waits]).code, Some(0));
    assert_eq!((limit(&server), diff().code), (0, Some(0)));
}

fn confirm(server: &Server, hash: &[&str]) -> Run {
    let admin = format!("http://{}", server.admin.expect("an admin address"));
    run(&[&["rules", "confirm-files"], hash, &["--admin", &admin]].concat())
}

/// Returns the rules hash of the files that wait for confirmation.
fn pending(server: &Server) -> Option<String> {
    let shown = confirm(server, &[]).out;
    Some(shown.split("confirm-files ").nth(1)?.split('`').next()?.to_owned())
}

/// Machines restart by themselves: what the guard keeps out must not become active by that.
#[test]
fn a_restart_does_not_confirm_files() {
    let folder = Folder::new();
    let restart = |server: &mut Server| {
        server.signal("TERM");
        server.wait();
        start(&folder, &["--guard-files"])
    };
    folder.write("rules.yaml", rules(10, LOGIN));
    let mut server = start(&folder, &["--guard-files"]);
    assert_eq!(confirm(&server, &[]).out, "no rule files wait for confirmation\n");
    folder.write("rules.yaml", rules(20, ""));
    logged(&server, "changed rule files not applied by --guard-files");

    server = restart(&mut server);
    assert_eq!(limit(&server), 10, "the accepted rules");
    server.wait_for_log("RULE FILES ARE NOT CONFIRMED");
    server.wait_for_log("is removed");
    assert!(server.greeting.contains("  rules last accepted copy of "), "{}", server.greeting);
    let rules_now = server.get("/readyz?verbose").json()["rules"].clone();
    assert_eq!(rules_now["last_good"], true);
    assert!(rules_now["error"].as_str().is_some_and(|error| error.contains("confirm-files")), "{rules_now}");

    // Changed again while the server is down, to something that would pass: there is no traffic to judge it by.
    let before = pending(&server).expect("files that wait");
    folder.write("rules.yaml", rules(30, LOGIN));
    eventually("what passes the guard", || (limit(&server) == 30).then_some(()));
    folder.write("rules.yaml", rules(20, ""));
    eventually("the same files", || (pending(&server).as_ref() == Some(&before)).then_some(()));
    server.signal("TERM");
    server.wait();
    folder.write("rules.yaml", rules(31, LOGIN));
    server = start(&folder, &["--guard-files"]);
    assert_eq!(limit(&server), 30);
    server.wait_for_log("changed again while changes waited");

    // What is confirmed is what was seen.
    let other = confirm(&server, &[&before]);
    assert_eq!(other.code, Some(1), "{}", other.out);
    let waits = pending(&server).expect("files that wait");
    assert!(other.err.contains(&waits), "{}", other.err);
    let confirmed = confirm(&server, &[&waits]);
    assert_eq!(confirmed.code, Some(0), "{}{}", confirmed.out, confirmed.err);
    assert_eq!(limit(&server), 31);
    assert_eq!(server.get("/readyz?verbose").json()["rules"]["last_good"], false);
    assert_eq!(confirm(&server, &[&waits]).code, Some(1), "nothing waits any more");
    server = restart(&mut server);
    assert_eq!(limit(&server), 31);
    assert!(!server.log().contains("NOT CONFIRMED"), "{}", server.log());
}

/// A change that was made while the server was down is judged by the rules alone.
#[test]
fn a_change_while_the_server_is_down_is_judged() {
    let folder = Folder::new();
    folder.write("rules.yaml", rules(10, LOGIN));
    let mut server = start(&folder, &["--guard-files"]);
    server.signal("TERM");
    server.wait();
    folder.write("rules.yaml", rules(11, LOGIN));
    let mut server = start(&folder, &["--guard-files"]);
    assert_eq!(limit(&server), 11, "what weakens nothing is applied");
    server.signal("TERM");
    server.wait();
    folder.write("rules.yaml", rules(12, &LOGIN.replace("5/minute", "40/minute")));
    let mut server = start(&folder, &["--guard-files"]);
    assert_eq!(limit(&server), 12, "a step of eight times is applied");
    server.signal("TERM");
    server.wait();
    folder.write("rules.yaml", rules(13, &LOGIN.replace("5/minute", "90/minute")));
    let server = start(&folder, &["--guard-files"]);
    assert_eq!(limit(&server), 12, "two such steps in a day are not");
    server.wait_for_log("allows 18 times as much as a day ago");
}

/// What `rules show` writes is what was loaded: the same text, and from a directory the same rules hash.
#[test]
fn shown_rules_load_again_unchanged() {
    let folder = Folder::new();
    let text = format!("# About the limits\n{}\n\n", rules(10, LOGIN));
    folder.write("rules.yaml", &text);
    let server = start(&folder, &[]);
    let admin = format!("http://{}", server.admin.expect("an admin address"));
    let show = |more: &[&str]| run(&[&["rules", "show", "current", "--admin", &admin], more].concat());
    // Lines end in one way on every system that reads them.
    assert_eq!(show(&[]).out.trim_end(), text.trim_end());
    let revision = |server: &Server| server.get("/readyz?verbose").json()["rules"]["revision"].clone();

    std::fs::create_dir(folder.join("many")).expect("a directory");
    folder.write("many/a.yaml", &text);
    folder.write("many/b.yaml", "domain: e\ndescriptors: [{key: a, limit: 1/s}]");
    let many = Server::start(&["--rules", folder.join("many").to_str().expect("a plain path")]);
    let admin = format!("http://{}", many.admin.expect("an admin address"));
    let target = folder.join("copy");
    let target = target.to_str().expect("a plain path");
    let write = || run(&["rules", "show", "current", "--dir", target, "--admin", &admin]);
    let wrote = write();
    assert_eq!((wrote.code, wrote.out.as_str()), (Some(0), format!("wrote 2 files to {target}\n").as_str()));
    assert_eq!(write().code, Some(1), "nothing is overwritten");
    let copy = Server::start(&["--rules", target]);
    assert_eq!(revision(&copy), revision(&many));
}

/// A directory holds rules in YAML and JSON beside their tests; what is not read is named.
#[test]
fn a_directory_of_rules_holds_their_tests_too() {
    let folder = Folder::new();
    std::fs::create_dir(folder.join("rules")).expect("a directory");
    std::fs::create_dir(folder.join("rules/more")).expect("a directory");
    folder.write("rules/a.yaml", rules(10, ""));
    folder
        .write("rules/a.test.yaml", "- {name: t, rules_file: a.yaml, steps: [{attributes: {api_key: k}}]}\n");
    folder.write(
        "rules/b.json",
        "{\"domain\": \"j\",\n\t\"descriptors\": [{\"key\": \"k\", \"limit\": \"3/hour\"}]}\n",
    );
    folder.write("rules/c.yaml.bak", "not rules\n");
    let path = folder.join("rules");
    let path = path.to_str().expect("a plain path");

    let ran = run(&["check", path]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("2 rules in 2 files: no errors"), "{}", ran.out);
    assert!(
        ran.out.contains("c.yaml.bak is not read; rule files are called *.yaml, *.yml or *.json"),
        "{}",
        ran.out
    );
    assert!(ran.out.contains("more is not read; directories"), "{}", ran.out);
    assert!(!ran.out.contains("a.test.yaml"), "{}", ran.out);
    let ran = run(&["check", "--format", "json", path]);
    let report: serde_json::Value = serde_json::from_str(&ran.out).expect("JSON");
    assert_eq!(report["ignored"].as_array().map(Vec::len), Some(2), "{report}");

    let server = Server::start(&["--rules", path]);
    let look = json!({"domain": "j", "attributes": {"k": "v"}, "cost": 0});
    assert_eq!(server.post("/v1/check", &look).json()["limits"][0]["limit"], 3, "the JSON file");
    logged(&server, "c.yaml.bak is not read");
    folder.write("rules/d.yml.old", "not rules\n");
    logged(&server, "d.yml.old is not read");
    server.wait_for_log("c.yaml.bak is not read");
    assert_eq!(server.log().matches("c.yaml.bak is not read").count(), 1, "once: {}", server.log());

    folder.write("rules/e.json", "{\"some\": \"other tool's\"}\n");
    let ran = run(&["check", path]);
    assert_eq!(ran.code, Some(1), "JSON that is not rules is refused, not skipped: {}", ran.out);
    assert!(ran.out.contains("e.json:1:"), "{}", ran.out);
}
