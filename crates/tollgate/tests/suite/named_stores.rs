//! The binary over several stores by name: rules say which one keeps their counters, and the death of one touches only its
//! own.

use crate::harness::{Folder, Redis, Server, eventually, run};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: main, limit: 10/day}
  - key: tenant
    value: acme
    store: acme
    descriptors:
      - {key: user, name: acme, limit: 10/day}
      - {key: login, name: acme-login, class: security, limit: 10/day}
  - {key: plan, name: open, store: acme, on_error: open, mode: central, limit: 10/day}
";

fn ask(server: &Server, attributes: &Value) -> (u16, Value) {
    let answer = server.check("d", attributes);
    (answer.status, answer.json())
}

fn passed(server: &Server, attributes: &Value, tries: usize) -> usize {
    (0..tries).filter(|_| ask(server, attributes).0 == 200).count()
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn the_death_of_one_store_touches_only_its_own_rules() {
    let (main, acme) = (Redis::start(), Redis::start());
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let rules = rules.to_str().expect("a plain path");
    let config = format!(
        "store: {}\nstores: {{acme: {}}}\nstore_deadline_ms: 10000\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\nresp: off\n\
         admin: off\n",
        main.url(),
        acme.url()
    );
    let config = folder.write("tollgate.yaml", &config);
    let flags = ["--rules", rules, "--config", config.to_str().expect("a plain path")];
    let nodes = [Server::start(&flags), Server::start(&flags)];
    let node = &nodes[0];
    let metric = |line: &str| node.get("/metrics").text().lines().any(|one| one == line);
    eventually("the nodes to count each other", || metric("ratelimit_nodes 2").then_some(()));
    let origin = |attributes: &Value| ask(node, attributes).1["origin"].clone();
    eventually("both stores", || {
        (origin(&json!({"user": "w"})) == "store" && origin(&json!({"plan": "w"})) == "store").then_some(())
    });

    // Each keeps its own counters, and a request in both is decided once: what one denies, the other does not count.
    assert_eq!(passed(node, &json!({"tenant": "acme", "user": "b"}), 4), 4);
    assert!(main.cli(&["KEYS", "*"]).contains("{b}"), "the rule without a store");
    assert!(acme.cli(&["KEYS", "*"]).contains("{b}"), "the rule with one");
    assert_eq!(passed(&nodes[1], &json!({"tenant": "acme", "user": "b"}), 12), 6, "shared by the nodes");
    assert_eq!(passed(node, &json!({"plan": "both", "user": "c"}), 3), 3);
    assert_eq!(passed(node, &json!({"plan": "both"}), 20), 7);
    assert_eq!(passed(node, &json!({"plan": "both", "user": "c"}), 5), 0, "the plan is used up");
    assert_eq!(passed(node, &json!({"user": "c"}), 20), 7, "and nothing was taken from the user for it");

    let acme = acme.stop();
    eventually("the node without one store", || (origin(&json!({"plan": "w"})) == "fail_open").then_some(()));
    let ready = node.get("/readyz?verbose").json();
    let shards = ready["store"]["shards"].as_array().expect("shards").clone();
    let shard = |store: Value| shards.iter().find(|shard| shard["store"] == store).expect("a shard").clone();
    assert_eq!(shard(Value::Null)["breaker"], "closed");
    assert_eq!(node.get("/readyz").status, 200);
    eventually("the breaker of that store alone", || {
        let _ = ask(node, &json!({"plan": "w"}));
        let page = node.get("/metrics").text();
        let state = |line: &&str| line.starts_with("ratelimit_circuit_state{");
        let states: Vec<&str> = page.lines().filter(state).collect();
        let (named, plain): (Vec<&str>, Vec<&str>) =
            states.into_iter().partition(|line| line.contains(r#"store="acme""#));
        (named.len() == 1 && named[0].ends_with(" 2") && plain.len() == 1 && plain[0].ends_with(" 0"))
            .then_some(())
    });

    // The rules of the default store: exact, and from the store.
    for user in ["x", "y"] {
        let exact: usize = nodes.iter().map(|node| passed(node, &json!({"user": user}), 8)).sum();
        assert_eq!(exact, 10, "no more and no less");
        assert_eq!(origin(&json!({"user": user})), "store");
    }
    // Those of the other: by their policy, each for itself.
    assert_eq!(origin(&json!({"tenant": "acme", "login": "z"})), "fail_closed");
    // A request in both: the user's limit is exact, the other's rule decides by its policy.
    assert_eq!(passed(node, &json!({"plan": "w", "user": "v"}), 20), 10);
    assert_eq!(
        origin(&json!({"plan": "w", "user": "v"})),
        "store",
        "denied by the limit that can be decided"
    );
    // Without the plan's store nothing was taken from the user for a request that was charged twice.
    assert_eq!(passed(&nodes[1], &json!({"user": "v"}), 5), 0);

    let _acme = acme.start_again();
    eventually("the store again", || (origin(&json!({"plan": "again"})) == "store").then_some(()));
}

/// A tenant that moves to a Redis of its own must not need a restart of every node.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn stores_are_added_while_the_server_runs() {
    let (main, acme) = (Redis::start(), Redis::start());
    let folder = Folder::new();
    folder.write("rules.yaml", "{domain: d, descriptors: [{key: user, limit: 10/day}]}");
    let write = |stores: &str| {
        let settings = format!(
            "rules: [rules.yaml]\nstore: {}\nstores: {{{stores}}}\nstore_deadline_ms: 10000\nhttp: 127.0.0.1:0\n\
             grpc: 127.0.0.1:0\nresp: off\nadmin: off\n",
            main.url()
        );
        folder.write("tollgate.yaml", settings)
    };
    let path = write("");
    let node = Server::start(&["--config", path.to_str().expect("a plain path")]);
    let charged = |key: &str| {
        eventually("the store", || {
            let (status, answer) = ask(&node, &json!({"user": key, "tier": "pro"}));
            (status == 200 && answer["origin"] == "store").then_some(())
        });
    };
    charged("before");
    assert_eq!(acme.cli(&["KEYS", "*"]).trim(), "");

    // Rules that name a store which is not there yet change nothing, until it is.
    let tier =
        "{domain: d, descriptors: [{key: user, limit: 10/day, tiers: {pro: {limit: 10/day, store: acme}}}]}";
    folder.write("rules.yaml", tier);
    node.wait_for_log("no store is named `acme`");
    write(&format!("acme: {}", acme.url()));
    node.wait_for_log("store added");
    node.wait_for_log("rules reloaded");
    let rules_error = || node.get("/readyz?verbose").json()["rules"]["error"].clone();
    eventually("the rules", || rules_error().is_null().then_some(()));
    charged("warm");
    assert_eq!(passed(&node, &json!({"user": "after", "tier": "pro"}), 20), 10);
    assert!(acme.cli(&["KEYS", "*"]).contains("after"), "{}", acme.cli(&["KEYS", "*"]));
    assert!(!main.cli(&["KEYS", "*"]).contains("after"), "{}", main.cli(&["KEYS", "*"]));
    assert_eq!(
        passed(&node, &json!({"user": "after"}), 20),
        10,
        "callers of other tiers stay in the default store"
    );
    assert!(main.cli(&["KEYS", "*"]).contains("after"));
    let shards = node.get("/readyz?verbose").json()["store"]["shards"].as_array().expect("shards").len();
    assert_eq!(shards, 2);

    // A store's address does not change under its counters.
    let other = Redis::start();
    write(&format!("acme: {}, more: {}", other.url(), other.url()));
    node.wait_for_log("the settings of `stores.acme` changed");
    let error = || node.get("/readyz?verbose").json()["settings"]["error"].as_str().map(ToOwned::to_owned);
    let error = eventually("the error", error);
    assert!(error.contains("restart") && !error.contains(&other.port().to_string()), "{error}");
    assert_eq!(
        passed(&node, &json!({"user": "after", "tier": "pro"}), 3),
        0,
        "its counters are where they were"
    );
    // The store beside it was added, and a signal reads the file too.
    folder.write("rules.yaml", tier.replace("store: acme", "store: more"));
    node.signal("HUP");
    eventually("the rules of the other store", || {
        let _ = ask(&node, &json!({"user": "moved", "tier": "pro"}));
        other.cli(&["KEYS", "*"]).contains("moved").then_some(())
    });
}

#[test]
fn names_that_are_not_configured_are_refused() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let rules = rules.to_str().expect("a plain path");
    let fails = |more: &[&str], expected: &str| {
        let flags =
            ["serve", "--rules", rules, "--http", "off", "--grpc", "off", "--resp", "off", "--admin", "off"];
        let output = run(&[&flags[..], more].concat());
        assert_ne!(output.code, Some(0), "{more:?} starts");
        let error = output.err;
        assert!(error.contains(expected), "{more:?}: {error}");
        assert!(!error.contains("hunter2"), "a password is in {error}");
    };
    fails(&[], "rules.yaml:7:12");
    fails(&[], "no store is named `acme`");
    fails(
        &["--store", "redis://:hunter2@127.0.0.1:1", "--store-named", "acne=redis://:hunter2@127.0.0.1:1"],
        "did you mean `acne`?",
    );
    fails(&["--store-named", "acme=redis://:hunter2@127.0.0.1:1"], "set --store to the address of Redis");
    let both = ["--store", "redis://127.0.0.1:1", "--store-named"];
    fails(&[&both[..], &["default=redis://127.0.0.1:1"]].concat(), "`default` is no name of a store");
    fails(&[&both[..], &["acme"]].concat(), "write them as in eu=redis://127.0.0.1:6379");
    fails(&[&both[..], &["acme=hunter2"]].concat(), "not a name and an address");
}
