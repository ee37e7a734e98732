//! The command line as a person meets it: what it prints, where, and how it ends.

use crate::harness::{Folder, Run, Server, eventually, run, run_with};
use serde_json::{Value, json};

const GOOD: &str = "domain: d\ndescriptors:\n  - {key: k, name: per-k, limit: 3/hour}\n";

fn text(folder: &Folder, name: &str) -> String {
    folder.join(name).to_str().expect("a plain path").to_owned()
}

fn ended(run: &Run, code: i32) {
    assert_eq!(run.code, Some(code), "out: {}\nerr: {}", run.out, run.err);
}

/// A pre-commit hook stands on the exit code, and its user on the place.
#[test]
fn validate_points_at_what_is_wrong() {
    let folder = Folder::new();
    folder.write("good.yaml", GOOD);
    let good = run(&["validate", &text(&folder, "good.yaml")]);
    ended(&good, 0);
    assert_eq!(good.out, "1 rule in 1 file: no errors, 0 warnings\n");
    assert_eq!(run(&["check", &text(&folder, "good.yaml")]).out, good.out, "the former name");

    let path = folder.write(
        "bad.yaml",
        "domain: d\ndescriptors:\n  - key: k\n    rate_limit: {unit: fortnight, requests_per_unit: 5}\n",
    );
    let bad = run(&["validate", &text(&folder, "bad.yaml")]);
    ended(&bad, 1);
    for part in [
        "error: unknown unit `fortnight`",
        &format!("{}:4:24", path.display()),
        "4 |     rate_limit: {unit: fortnight, requests_per_unit: 5}",
        "  |                        ^^^^^^^^^",
        "second, minute, hour",
    ] {
        assert!(bad.out.contains(part), "`{part}` is not in\n{}", bad.out);
    }
    assert_eq!(bad.err, "", "the report is the output");
}

/// A rule that never bites gives a false sense of safety; a warning is not an error.
#[test]
fn validate_warns_of_rules_without_effect() {
    let folder = Folder::new();
    let rules = "domain: d\ndescriptors:\n  - {key: a, value: x*, limit: 1/hour}\n  - {key: a, value: xy*, limit: 1/hour}\n";
    folder.write("rules.yaml", rules);
    let warned = run(&["validate", &text(&folder, "rules.yaml")]);
    ended(&warned, 0);
    assert!(warned.out.contains("warning"), "{}", warned.out);
    assert!(warned.out.contains("rules.yaml:4:"), "the second can never match: {}", warned.out);
}

/// `--port` is what other servers have.
#[test]
fn flags_of_other_servers_are_answered_by_ours() {
    for flag in ["--port", "--listen", "--host"] {
        let refused = run(&["serve", flag, "9000"]);
        ended(&refused, 2);
        for part in [flag, "--http 127.0.0.1:8080", "--grpc"] {
            assert!(refused.err.contains(part), "`{part}` is not in {}", refused.err);
        }
    }
    let other = run(&["serve", "--colour"]);
    ended(&other, 2);
    assert!(!other.err.contains("--http"), "{}", other.err);
}

/// Paths that are wrong are the commonest mistake of all.
#[test]
fn validate_reads_files_and_folders_and_reports_missing_ones() {
    let folder = Folder::new();
    std::fs::create_dir(folder.join("rules")).expect("a folder");
    folder.write("rules/a.yaml", GOOD);
    folder.write("rules/b.yml", GOOD.replace("domain: d", "domain: e"));
    folder.write("rules/readme.md", "# not rules");
    let both = run(&["validate", &text(&folder, "rules")]);
    ended(&both, 0);
    assert!(both.out.contains("2 rules in 2 files"), "{}", both.out);

    let twice = run(&["validate", &text(&folder, "rules/a.yaml"), &text(&folder, "rules/a.yaml")]);
    ended(&twice, 1);
    assert!(twice.out.contains("duplicate domain `d`"), "{}", twice.out);

    let missing = run(&["validate", &text(&folder, "nowhere.yaml")]);
    ended(&missing, 1);
    assert!(missing.err.contains("cannot read") && missing.err.contains("nowhere.yaml"), "{}", missing.err);

    std::fs::create_dir(folder.join("empty")).expect("a folder");
    let empty = run(&["validate", &text(&folder, "empty")]);
    ended(&empty, 1);
    assert!(empty.err.contains("no .yaml or .yml rule file in"), "{}", empty.err);

    folder.write("binary.yaml", b"domain: \xff\xfe\n");
    let binary = run(&["validate", &text(&folder, "binary.yaml")]);
    ended(&binary, 1);
    assert!(
        binary.err.contains("binary.yaml") || binary.out.contains("binary.yaml"),
        "{}{}",
        binary.out,
        binary.err
    );
}

/// Editors complete and check rule files by this.
#[test]
fn schema_is_valid_json_schema() {
    let schema = run(&["schema"]);
    ended(&schema, 0);
    let schema: Value = serde_json::from_str(&schema.out).expect("JSON");
    assert!(
        schema["$schema"].as_str().is_some_and(|dialect| dialect.contains("json-schema.org")),
        "{schema:#}"
    );
    let text = schema.to_string();
    for word in ["domain", "descriptors", "rate_limit", "requests_per_unit", "shadow_mode", "tiers", "burst"]
    {
        assert!(text.contains(&format!("\"{word}\"")), "{word}");
    }
}

/// "Why was I limited?", and "why not?", without a server.
#[test]
fn explain_goes_through_the_rules_clause_by_clause() {
    let folder = Folder::new();
    folder.write(
        "rules.yaml",
        "domain: d\ndescriptors:\n  - key: api_key\n    name: per-key\n    limit: 3/hour\n    descriptors:\n      \
         - {key: endpoint, value: POST /login, name: logins, limit: 2/hour}\n  - {key: global, name: total, limit: 9/hour}\n",
    );
    let rules = text(&folder, "rules.yaml");
    let explained = run(&["explain", "--rules", &rules, "--attr", "api_key=a", "--attr", "endpoint=GET /"]);
    ended(&explained, 0);
    for part in [
        "2 of 3 rules match",
        "per-key (",
        "rules.yaml:3): matches",
        "logins (",
        "no match",
        "endpoint",
        "total (",
    ] {
        assert!(explained.out.contains(part), "`{part}` is not in\n{}", explained.out);
    }
    let no_value = run(&["explain", "--rules", &rules, "--attr", "api_key"]);
    ended(&no_value, 2);
    assert!(no_value.err.contains("expected KEY=VALUE"), "{}", no_value.err);
    let no_domain = run(&["explain", "--rules", &rules, "--domain", "x"]);
    ended(&no_domain, 1);
    assert!(no_domain.err.contains("no domain `x`; the files have d"), "{}", no_domain.err);
}

/// Wrong words end at once, with what to write.
/// What a program reads is JSON, however it asks for it; exit codes are the same.
#[test]
fn programs_read_json() {
    let folder = Folder::new();
    folder.write("good.yaml", GOOD);
    folder.write("bad.yaml", "domain: d\ndescriptors:\n  - {key: k, limit: 3/fortnight}\n");
    folder.write(
        "test.yaml",
        "- {name: fits, rules_file: good.yaml, steps: [{attributes: {k: a}, expect: {overall: OK}}]}\n\
         - {name: fails, rules_file: good.yaml, steps: [{attributes: {k: a}, expect: {overall: OVER_LIMIT}}]}\n",
    );
    let json = |args: &[&str], code: i32| -> Value {
        let ran = run(args);
        ended(&ran, code);
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{args:?}: {error}\n{}", ran.out))
    };
    let (good, bad) = (text(&folder, "good.yaml"), text(&folder, "bad.yaml"));
    let checked = json(&["validate", &good, "--format", "json"], 0);
    assert_eq!((&checked["ok"], &checked["rules"]), (&json!(true), &json!(1)));
    assert_eq!(checked, json(&["validate", "--json", &good], 0), "the short form is the same");
    let checked = json(&["validate", &bad, "--format=json"], 1);
    assert_eq!((&checked["ok"], &checked["errors"][0]["line"]), (&json!(false), &json!(3)), "{checked}");
    let explained = json(&["explain", "--rules", &good, "--attr", "k=a", "--format", "json"], 0);
    let first = &explained["rules"][0];
    assert_eq!((&first["rule"], &first["finding"]), (&json!("per-k"), &json!("limited")), "{explained}");
    assert!(first["charged"][0]["limit"].is_string() && first["clauses"][0]["holds"] == true, "{explained}");
    let tested = json(&["test", &text(&folder, "test.yaml"), "--json"], 1);
    assert_eq!((&tested["passed"], &tested["failed"]), (&json!(1), &json!(1)));
    assert!(
        tested["cases"][1]["difference"].as_str().is_some_and(|text| text.contains("OVER_LIMIT")),
        "{tested}"
    );

    let db = format!("sqlite:{}", text(&folder, "t.db"));
    let made =
        json(&["token", "create", "--db", &db, "--name", "otto", "--role", "viewer", "--format", "json"], 0);
    assert!(made["token"].as_str().is_some_and(|token| token.starts_with("tg_")), "{made}");
    let id = made["id"].as_str().expect("an id");
    assert_eq!(json(&["token", "--format", "json", "list", "--db", &db], 0)[0]["id"], id);
    assert_eq!(json(&["token", "revoke", "--db", &db, id, "--json"], 0), json!({"revoked": id}));
    let verified = json(&["audit", "verify", "--db", &db, "--format", "json"], 0);
    assert_eq!((&verified["whole"], &verified["entries"]), (&json!(true), &json!(2)));

    let both = run(&["validate", &good, "--json", "--format", "text"]);
    ended(&both, 2);
    assert!(both.err.contains("cannot be used with"), "{}", both.err);
    assert_eq!(run(&["validate", &good, "--format", "text"]).out, run(&["validate", &good]).out);
}

#[test]
fn flags_that_are_wrong_are_named() {
    let cases: [(&[&str], &str); 5] = [
        (&["serve", "--memory", "5parsecs"], "use one such as 512MiB"),
        (&["serve", "--http", "nowhere"], "--http"),
        (&["serve", "--profile", "nginx"], "envoy"),
        (&["serve", "--rulse", "x"], "--rules"),
        (&["sreve"], "serve"),
    ];
    for (args, part) in cases {
        let wrong = run(args);
        ended(&wrong, 2);
        assert!(wrong.err.contains(part), "{args:?}: `{part}` is not in\n{}", wrong.err);
    }
    let little = run(&["serve", "--memory", "1KiB", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
    ended(&little, 1);
    assert!(little.err.contains("--memory") && little.err.contains("at least"), "{}", little.err);
    let nowhere = run(&["serve", "--store", "cloud"]);
    ended(&nowhere, 1);
    assert!(nowhere.err.contains("--store") && nowhere.err.contains("`memory`"), "{}", nowhere.err);
    let folder = Folder::new();
    folder.write("bad.yaml", "domain: d\ndescriptor: []\n");
    let bad = run(&["serve", "--rules", &text(&folder, "bad.yaml")]);
    ended(&bad, 1);
    assert!(bad.err.contains("bad.yaml:2:1") && bad.err.contains("`descriptors`"), "{}", bad.err);
}

/// Two servers on one machine is how everyone meets this error first.
#[test]
fn a_busy_port_error_names_the_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    for (busy, free) in [("--http", "--grpc"), ("--grpc", "--http")] {
        let refused = run(&["serve", busy, &address, free, "127.0.0.1:0"]);
        ended(&refused, 1);
        let wanted = format!("cannot listen on {address}; set {busy} to another");
        assert!(refused.err.contains(&wanted), "{}", refused.err);
        assert!(!refused.out.contains("listening"), "{}", refused.out);
    }
}

/// The first minute: no flags, and something to try that works.
#[test]
fn without_rules_it_starts_with_sample_rules() {
    let server = Server::start(&[]);
    let lines: Vec<&str> =
        server.greeting.lines().filter(|line| line.trim_start().starts_with("curl")).collect();
    let all = server.greeting.matches("curl -s").count();
    assert!(all >= 3, "three lines to try: {}", server.greeting);
    assert!(!lines.is_empty());
    assert!(server.greeting.contains(&server.http.to_string()));
    let page = format!("  dashboard: http://{}/", server.admin.expect("an admin address"));
    assert!(server.greeting.contains(&page), "{}", server.greeting);
    let log_in = json!({"api_key": "abc", "endpoint": "POST /login"});
    let statuses: Vec<u16> = (0..6).map(|_| server.check("sample", &log_in).status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429], "the second line to try shows a limit that bites");
}

/// Containers are set up by variables; a flag still wins.
#[test]
fn everything_can_be_set_by_environment_variables() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", GOOD);
    let environment = [
        ("TOLLGATE_HTTP", "127.0.0.1:0"),
        ("TOLLGATE_GRPC", "127.0.0.1:0"),
        ("TOLLGATE_RULES", rules.to_str().expect("a plain path")),
        ("TOLLGATE_MEMORY", "1KiB"),
        ("TOLLGATE_STORE", "memory"),
        ("TOLLGATE_PROFILE", "envoy"),
        ("TOLLGATE_GLOBAL_SHADOW", "true"),
        ("TOLLGATE_LOG", "debug"),
    ];
    // 1 KiB would be refused: the flag wins.
    let server = Server::start_with(&["--memory", "32MiB"], &environment);
    assert!(server.get("/metrics").text().contains(&format!("ratelimit_memory_cap_bytes {}", 32 << 20)));
    for _ in 0..5 {
        assert_eq!(server.check("d", &json!({"k": "v"})).status, 200, "shadow mode denies nothing");
    }
    let wrong = run_with(&["serve"], &[("TOLLGATE_HTTP", "nowhere")]);
    ended(&wrong, 2);
    assert!(wrong.err.contains("nowhere"), "{}", wrong.err);
}

/// One file instead of many flags, whose paths are relative to it and whose typos are found.
#[test]
fn a_config_file_is_applied_and_unknown_keys_are_rejected() {
    let folder = Folder::new();
    folder.write("rules.yaml", GOOD);
    let config = "rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\nmemory: 16MiB\nstore: memory\nprofile: native\nglobal_shadow: false\n";
    folder.write("tollgate.yaml", config);
    let path = text(&folder, "tollgate.yaml");
    let server = Server::start(&["--config", &path]);
    assert_eq!(server.get("/readyz?verbose").json()["rules"]["domains"], json!(["d"]));
    drop(server);
    folder.write("tollgate.yaml", config.replace("[rules.yaml]", "rules.yaml"));
    let server = Server::start(&["--config", &path]);
    assert_eq!(server.get("/readyz?verbose").json()["rules"]["domains"], json!(["d"]), "one needs no list");
    drop(server);

    for (wrong, part, place) in [
        (config.replace("memory:", "memmory:"), "memmory", "4"),
        (config.replace("127.0.0.1:0\ngrpc", "here\ngrpc"), "`here` is not an address", "2"),
        (config.replace("[rules.yaml]", "{a: b}"), "a list of them such as `rules: [rules.yaml]`", "1"),
    ] {
        folder.write("tollgate.yaml", &wrong);
        let refused = run(&["serve", "--config", &path]);
        ended(&refused, 1);
        assert!(refused.err.contains("tollgate.yaml"), "{}", refused.err);
        assert!(refused.err.contains(part), "{}", refused.err);
        assert!(refused.err.contains(&format!("tollgate.yaml:{place}:")), "the line: {}", refused.err);
    }
    folder.write("tollgate.yaml", config.replace("16MiB", "much"));
    let refused = run(&["serve", "--config", &path]);
    ended(&refused, 1);
    assert!(refused.err.contains("memory") && refused.err.contains("much"), "{}", refused.err);
    let missing = run(&["serve", "--config", &text(&folder, "nowhere.yaml")]);
    ended(&missing, 1);
    assert!(missing.err.contains("nowhere.yaml"), "{}", missing.err);
}

/// Scripts ask for these without reading.
#[test]
fn help_and_version_are_there() {
    let version = run(&["--version"]);
    ended(&version, 0);
    assert_eq!(version.out, format!("tollgate {}\n", env!("CARGO_PKG_VERSION")));
    let help = run(&["--help"]);
    ended(&help, 0);
    for command in ["serve", "validate", "schema", "explain", "test"] {
        assert!(help.out.contains(command), "{command}");
    }
    let help = run(&["serve", "--help"]);
    for flag in
        ["--config", "--rules", "--store", "--memory", "--grpc", "--http", "--profile", "TOLLGATE_RULES"]
    {
        assert!(help.out.contains(flag), "{flag}");
    }
}

/// A full disk must not end in a panic.
#[test]
fn an_output_that_takes_nothing_is_an_error() {
    let folder = Folder::new();
    let (rules, tests) = (text(&folder, "rules.yaml"), text(&folder, "tests.yaml"));
    folder.write("rules.yaml", GOOD);
    folder.write(
        "tests.yaml",
        "- rules_file: rules.yaml\n  steps: [{attributes: {k: x}, expect: {overall: OK}}]\n",
    );
    for args in [
        &["validate", &rules][..],
        &["validate", &rules, "--json"],
        &["test", &tests],
        &["schema"],
        &["schema", "--json"],
        &["explain", "--rules", &rules, "--attr", "k=x"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("there is one");
        let printed = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(args)
            .stdout(full)
            .output()
            .expect("it runs");
        let error = String::from_utf8_lossy(&printed.stderr);
        assert!(
            printed.status.code() == Some(1) && error.contains("No space left"),
            "{args:?}: {:?} {error}",
            printed.status
        );
        ended(&run(args), 0);
    }
}

/// `| head` closes its end; the rest is not an error, whatever prints it.
#[test]
fn a_reader_that_has_enough_is_no_error() {
    let folder = Folder::new();
    folder.write("rules.yaml", GOOD);
    let (rules, db) = (text(&folder, "rules.yaml"), format!("sqlite:{}", text(&folder, "t.db")));
    ended(&run(&["token", "create", "--db", &db, "--name", "otto", "--role", "viewer"]), 0);
    for args in [
        &["schema"][..],
        &["completions", "bash"],
        &["man"],
        &["validate", &rules],
        &["validate", &rules, "--json"],
        &["explain", "--rules", &rules, "--attr", "k=x"],
        &["token", "list", "--db", &db],
        &["audit", "list", "--db", &db],
        &["audit", "list", "--db", &db, "--json"],
        &["audit", "export", "--db", &db],
        &["audit", "verify", "--db", &db],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"));
        let printed = command.args(args).stdout(writer).output().expect("it runs");
        let err = String::from_utf8_lossy(&printed.stderr);
        assert!(printed.status.code() == Some(0) && err.is_empty(), "{args:?}: {:?} {err}", printed.status);
    }
    // The exit code of these is their verdict, however little of the report was read.
    folder.write("bad.yaml", "domain: d\ndescriptors: [{key: k, limit: 3/fortnight}]\n");
    folder.write("bad.test.yaml", "rules_file: bad.yaml\nsteps: [{attributes: {k: v}}]\n");
    let (bad, test) = (text(&folder, "bad.yaml"), text(&folder, "bad.test.yaml"));
    for args in
        [&["validate", &bad][..], &["validate", &bad, "--json"], &["test", &test], &["test", &test, "--json"]]
    {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"));
        let printed = command.args(args).stdout(writer).output().expect("it runs");
        assert_eq!(printed.status.code(), Some(1), "{args:?}");
    }
}

/// Completions and manual pages name every command.
#[test]
fn completions_and_manual_pages_are_generated() {
    for (shell, part) in
        [("bash", "complete -F _tollgate"), ("zsh", "#compdef tollgate"), ("fish", "complete -c tollgate")]
    {
        let script = run(&["completions", shell]);
        ended(&script, 0);
        assert!(script.out.contains(part), "{shell}: {}", script.out);
        for word in ["validate", "emergency", "rules-confirm-threshold", "max-results"] {
            assert!(script.out.contains(word), "{shell} does not complete {word}");
        }
        assert!(!script.out.contains("rules-confirm-over"), "former names stay hidden");
    }
    ended(&run(&["completions", "tcsh"]), 2);
    let page = run(&["man"]);
    ended(&page, 0);
    assert!(page.out.contains(".TH tollgate 1") && page.out.contains("tollgate\\-serve"), "{}", page.out);
    let page = run(&["man", "quota", "set"]);
    ended(&page, 0);
    assert!(page.out.contains(".TH tollgate-quota-set 1") && page.out.contains("until"), "{}", page.out);
    ended(&run(&["man", "quota", "sat"]), 1);
    let folder = Folder::new();
    ended(&run(&["man", "--dir", &text(&folder, "man1")]), 0);
    for name in ["tollgate.1", "tollgate-serve.1", "tollgate-audit-list.1"] {
        assert!(folder.join("man1").join(name).exists(), "{name}");
    }
}

/// Color is for terminals: pipes and `NO_COLOR` get none.
#[test]
fn color_is_only_where_it_is_wanted() {
    let folder = Folder::new();
    folder.write("bad.yaml", "domain: d\ndescriptors:\n  - {key: k, limit: 3/fortnight}\n");
    let path = text(&folder, "bad.yaml");
    let args = ["validate", path.as_str()];
    let plain = run(&args);
    assert!(!plain.out.contains('\u{1b}') && plain.out.starts_with("error: "), "{:?}", plain.out);
    let colored = run_with(&args, &[("CLICOLOR_FORCE", "1")]);
    assert!(colored.out.starts_with("\u{1b}[") && colored.out.len() > plain.out.len(), "{:?}", colored.out);
    let off = run_with(&args, &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]);
    assert_eq!(off.out, plain.out);
    let json = run_with(&["validate", &path, "--json"], &[("CLICOLOR_FORCE", "1")]);
    assert!(!json.out.contains('\u{1b}'), "{:?}", json.out);
    let error = run_with(&["validate", "nowhere.yaml"], &[("CLICOLOR_FORCE", "1")]);
    assert!(error.err.starts_with("\u{1b}["), "{:?}", error.err);
}

/// An operator who has no server at hand reads who changed what, newest first.
#[test]
fn audit_list_shows_the_newest_changes_first() {
    let folder = Folder::new();
    let db = format!("sqlite:{}", text(&folder, "t.db"));
    let list = |more: &[&str]| {
        let mut args = vec!["audit", "list", "--db", &db];
        args.extend(more);
        run(&args)
    };
    let create = |name: &str, more: &[&str]| {
        let mut args = vec!["token", "create", "--db", &db, "--name", name, "--role", "viewer", "--json"];
        args.extend(more);
        let made = run(&args);
        ended(&made, 0);
        serde_json::from_str::<Value>(&made.out).expect("JSON")["id"].as_str().expect("an id").to_owned()
    };
    let first = create("anna", &["--until", "2d"]);
    ended(&run(&["token", "revoke", "--db", &db, &first]), 0);
    create("otto", &["--until", "2099-12-31"]);
    let all = list(&[]);
    ended(&all, 0);
    let lines: Vec<&str> = all.out.lines().collect();
    assert!(lines.len() == 4 && lines[0].starts_with("seq  time "), "{}", all.out);
    assert!(lines[1].starts_with("3 ") && lines[1].contains("token.create"), "{}", all.out);
    assert!(lines[2].starts_with("2 ") && lines[2].contains("token.revoke"), "{}", all.out);
    let one = list(&["--max-results", "1"]);
    assert!(one.out.lines().count() == 2 && one.err.contains("--max-results"), "{}{}", one.out, one.err);
    let revoked: Value =
        serde_json::from_str(&list(&["--action", "token.revoke", "--json"]).out).expect("JSON");
    assert_eq!(revoked["entries"].as_array().map(Vec::len), Some(1), "{revoked}");
    assert_eq!(list(&["--action", "token"]).out, all.out);
    for none in [&["--action", "tok"][..], &["--actor", "nobody-of-this-name"]] {
        assert_eq!(list(none).out, "no audit entries\n");
    }
    let tokens: Value =
        serde_json::from_str(&run(&["token", "list", "--db", &db, "--json"]).out).expect("JSON");
    let expiries: Vec<&str> =
        tokens.as_array().expect("a list").iter().filter_map(|token| token["expires_at"].as_str()).collect();
    assert!(expiries.iter().any(|at| at.starts_with("2099-12-31T00:00:0")), "{tokens}");
    for (until, part) in [
        ("yesterday", "use 2d, 2026-12-31"),
        ("2001-01-01", "in the past"),
        ("2999-12-31", "within 36500 days"),
    ] {
        let wrong =
            run(&["token", "create", "--db", &db, "--name", "x", "--role", "viewer", "--until", until]);
        assert!(wrong.code != Some(0) && wrong.err.contains(part), "{until}: {}", wrong.err);
    }
}

/// Empty lists are words, not a blank line or a lone title.
#[test]
fn empty_lists_say_so() {
    let folder = Folder::new();
    folder.write("rules.yaml", GOOD);
    let db = format!("sqlite:{}", text(&folder, "t.db"));
    let server = Server::start(&["--rules", &text(&folder, "rules.yaml"), "--db", &db]);
    let admin = format!("http://{}", server.admin.expect("an admin address"));
    let shown = |args: &[&str]| {
        let mut all = args.to_vec();
        all.extend(["--admin", &admin]);
        let shown = run(&all);
        ended(&shown, 0);
        shown.out
    };
    assert_eq!(shown(&["quota", "list"]), "no quotas\n");
    assert_eq!(shown(&["emergency", "list"]), "no active measures\n");
    assert!(shown(&["rules", "list"]).ends_with("no published revisions\n"));
    assert!(shown(&["usage", "abc"]).starts_with("no matching limits\n"));
    assert!(shown(&["top"]).contains("\nno traffic yet\n"));
    assert_eq!(run(&["token", "list", "--db", &db]).out, "no tokens\n");
    assert_eq!(run(&["audit", "list", "--db", &db]).out, "no audit entries\n");
}

/// Flags and variables of the former names still work, with a warning where there is a log.
#[test]
fn former_names_of_flags_and_keys_are_accepted() {
    let folder = Folder::new();
    folder.write("rules.yaml", GOOD);
    let config = "rules: rules.yaml\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\nwho: {trusted: []}\nanswers: {legacy: delta}\n\
                  forward_auth: {hold_ms: 100, held: 5}\nleases: {most: 7}\ndecision_log: {allowed: 0.5, hide: [user], hidden_as: mask}\n\
                  guardrails: {confirm_over: 0.2}\n";
    folder.write("old.yaml", config);
    let flags = ["--config", &text(&folder, "old.yaml"), "--rules-approval-over", "0.9"];
    let server = Server::start_with(&flags, &[("TOLLGATE_RULES_ROLLBACK_RISE", "5")]);
    for (old, new) in [
        ("who", "identity"),
        ("answers", "responses"),
        ("forward_auth.hold_ms", "forward_auth.max_delay_ms"),
        ("forward_auth.held", "forward_auth.max_delayed"),
        ("leases.most", "leases.max_keys"),
        ("decision_log.allowed", "decision_log.allowed_sample"),
        ("decision_log.hide", "decision_log.mask"),
        ("decision_log.hidden_as", "decision_log.mask_style"),
        ("guardrails.confirm_over", "guardrails.confirm_threshold"),
    ] {
        server.wait_for_log(&format!("`{old}` is deprecated; use `{new}`"));
    }
    server.wait_for_log("TOLLGATE_RULES_ROLLBACK_RISE is deprecated");
    drop(server);
    let new = config
        .replace("who", "identity")
        .replace("answers", "responses")
        .replace("hold_ms", "max_delay_ms")
        .replace("held", "max_delayed")
        .replace("most", "max_keys")
        .replace("{allowed", "{allowed_sample")
        .replace("hide", "mask")
        .replace("hidden_as", "mask_style")
        .replace("confirm_over", "confirm_threshold");
    folder.write("new.yaml", new);
    let flags = ["--config", &text(&folder, "new.yaml"), "--rules-approval-threshold", "0.9"];
    let server = Server::start(&flags);
    assert!(!server.log().contains("deprecated"), "{}", server.log());
    let wrong = run(&["serve", "--rules-confirm-threshold", "7"]);
    ended(&wrong, 1);
    assert!(wrong.err.contains("--rules-confirm-threshold: must be between 0 and 1, got 7"), "{}", wrong.err);
}

/// A rule has the same name in all commands.
#[test]
fn a_rule_has_one_name_in_usage_why_and_top() {
    let folder = Folder::new();
    folder.write(
        "rules.yaml",
        "domain: d\ndescriptors:\n  - key: api_key\n    descriptors:\n      - {key: endpoint, value: POST /orders, name: orders, limit: 1/hour}\n",
    );
    let server = Server::start(&["--rules", &text(&folder, "rules.yaml")]);
    let admin = format!("http://{}", server.admin.expect("an admin address"));
    let request = json!({"api_key": "abc", "endpoint": "POST /orders"});
    assert_eq!([200, 429], [(); 2].map(|()| server.check("d", &request).status));
    let shown = |args: &[&str]| {
        let mut all = args.to_vec();
        all.extend(["--admin", &admin]);
        let shown = run(&all);
        ended(&shown, 0);
        shown.out
    };
    let used = shown(&["usage", "abc", "--attr", "endpoint=POST /orders"]);
    assert!(used.lines().any(|line| line.starts_with("orders  ")), "{used}");
    let alone = shown(&["usage", "abc"]);
    assert!(alone.lines().any(|line| line.starts_with("orders  ")), "{alone}");
    let why = eventually("the denial in the log", || {
        let why = run(&["why", "--key", "abc", "--admin", &admin]);
        (why.code == Some(0) && why.out.contains("orders")).then_some(why.out)
    });
    for once in ["per 1h", "would have passed"] {
        assert_eq!(why.matches(once).count(), 1, "{why}");
    }
    eventually("the rule in top", || {
        let top = shown(&["top"]);
        let rules = top.lines().skip_while(|line| !line.starts_with("RULE"));
        rules.take_while(|line| !line.is_empty()).any(|line| line.starts_with("orders  ")).then_some(())
    });
}

/// Times are written the same way wherever something expires.
#[test]
fn expiries_are_durations_dates_or_instants() {
    let folder = Folder::new();
    folder.write("rules.yaml", "domain: d\ndescriptors:\n  - {key: api_key, limit: 3/hour}\n");
    let db = format!("sqlite:{}", text(&folder, "t.db"));
    let server = Server::start(&["--rules", &text(&folder, "rules.yaml"), "--db", &db]);
    let admin = format!("http://{}", server.admin.expect("an admin address"));
    let json = |args: &[&str]| -> Value {
        let mut all = args.to_vec();
        all.extend(["--json", "--admin", &admin]);
        let ran = run(&all);
        ended(&ran, 0);
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{args:?}: {error}\n{}", ran.out))
    };
    let set = json(&["quota", "set", "abc", "--limit", "9/hour", "--until", "2099-12-31"]);
    assert!(set["expires_at"].as_str().is_some_and(|at| at.starts_with("2099-12-31T00:00:00")), "{set}");
    let set = json(&["quota", "set", "abc", "--limit", "9/hour", "--from", "1d", "--until", "2d"]);
    let time = |name: &str| -> i64 {
        let text = set[name].as_str().expect("a time");
        text.parse::<jiff::Timestamp>().expect("RFC 3339").as_second()
    };
    assert_eq!(time("expires_at") - time("effective_at"), 86_400, "{set}");
    let granted = json(&["usage", "grant", "abc", "--units", "5", "--reason", "r", "--until", "2d"]);
    assert!(granted["expires_at"].is_string(), "{granted}");
    assert_eq!(granted["rules"], serde_json::json!(["api_key"]), "by the name that usage shows");
    // The key stands before the command or after it.
    assert_eq!(json(&["usage", "abc", "reset", "--reason", "r"])["api_key"], "abc");
    assert_eq!(json(&["usage", "reset", "abc", "--reason", "r"])["api_key"], "abc");
    assert_eq!(json(&["usage", "abc", "grant", "--units", "5", "--reason", "r"])["units"], 5);
    let blocked = json(&["emergency", "block", "--api-key", "x", "--reason", "r", "--until", "2h"]);
    assert!(blocked["expires_at"].is_string(), "{blocked}");
    let id = blocked["id"].as_str().expect("an id");
    json(&["emergency", "renew", id, "--for", "1h30m"]);
    for (args, part) in [
        (&["emergency", "allow-all", "--reason", "r", "--until", "2001-01-01"][..], "in the past"),
        (&["emergency", "allow-all", "--reason", "r", "--until", "2h", "--for", "1h"], "cannot be used with"),
        (&["quota", "set", "abc", "--until", "tomorrow"], "is not a time; use 2d, 2026-12-31"),
        (&["usage", "reset", "--reason", "r"], "missing API key"),
    ] {
        let mut all = args.to_vec();
        all.extend(["--admin", &admin]);
        let wrong = run(&all);
        assert!(wrong.code != Some(0) && wrong.err.contains(part), "{args:?}: {}", wrong.err);
    }
}
