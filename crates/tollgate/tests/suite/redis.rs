//! The binary over a real Redis: nodes share limits, an outage is answered by policy, and it heals by itself.

use crate::harness::{Folder, Redis, Server, eventually, run, run_with};
use serde_json::{Value, json};

/// Long, so that on a busy machine too the store decides while it is there; one that is dead refuses connections at once.
const DEADLINE: &str = "10000";

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: shared, limit: 10/hour}
  - {key: login, name: login, class: security, limit: 10/hour}
";

fn ask(server: &Server, attribute: &str, value: &str) -> (u16, Value) {
    let answer = server.check("d", &json!({ attribute: value }));
    (answer.status, answer.json())
}

/// A caller who has nothing left must not get the limit anew because Redis stopped; and nodes know by themselves how many
/// share what is left.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn without_redis_nodes_share_what_was_left() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = "
domain: d
descriptors:
  - {key: user, name: shared, limit: 30/day}
";
    let rules = folder.write("rules.yaml", rules);
    let url = redis.url();
    let rules = rules.to_str().expect("a plain path");
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE];
    let mut nodes = vec![Server::start(&flags), Server::start(&flags), Server::start(&flags)];
    let metric = |node: &Server, line: &str| node.get("/metrics").text().lines().any(|one| one == line);
    eventually("the nodes to count each other", || {
        nodes.iter().all(|node| metric(node, "ratelimit_nodes 3")).then_some(())
    });
    let passed = |node: &Server, user: &str, tries: usize| {
        (0..tries).filter(|_| ask(node, "user", user).0 == 200).count()
    };
    assert_eq!(passed(&nodes[0], "gone", 40), 30);
    assert_eq!(passed(&nodes[0], "half", 15), 15);
    // Each has heard of it; fifteen less two are left.
    assert_eq!(nodes.iter().skip(1).map(|node| passed(node, "half", 1)).sum::<usize>(), 2);
    drop(redis.stop());
    let away = |server: &Server| ask(server, "user", "other").1["origin"] == "local";
    eventually("the nodes without Redis", || nodes.iter().all(away).then_some(()));
    assert_eq!(passed(&nodes[0], "gone", 5), 0, "nothing was left");
    for node in &nodes {
        let share = passed(node, "half", 30);
        assert!((4..=5).contains(&share), "{share} of a third of thirteen to fifteen");
    }
    let fresh: usize = nodes.iter().map(|node| passed(node, "new", 30)).sum();
    assert_eq!(fresh, 30, "a third for each");
    nodes.clear();
}

/// A key that another program wrote concerns its own caller: no other is decided without Redis for it.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_damaged_key_concerns_its_caller_alone_and_is_reported_once() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let url = redis.url();
    let rules = rules.to_str().expect("a plain path");
    let node = Server::start(&["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE]);
    eventually("the node on Redis", || (ask(&node, "login", "bad").1["origin"] == "store").then_some(()));
    let keys = redis.cli(&["KEYS", "tg1:{bad}*"]);
    let key = keys.trim();
    redis.cli(&["DEL", key]);
    redis.cli(&["LPUSH", key, "x"]);
    for _ in 0..20 {
        assert_eq!(ask(&node, "login", "bad").1["origin"], "fail_closed");
        assert_eq!(ask(&node, "user", "good").1["origin"], "store");
    }
    // A text is as bad: it must not restore the budget.
    for text in ["no counter of ours", "12345", ""] {
        redis.cli(&["SET", key, text]);
        assert_eq!(ask(&node, "login", "bad").1["origin"], "fail_closed", "{text:?}");
        assert_eq!(ask(&node, "user", "good").1["origin"], "store");
    }
    node.wait_for_log("is not a counter");
    let log = node.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("is not a counter")).collect();
    assert!(matches!(warnings[..], [one] if one.contains("DEL") && one.contains("{bad}")), "once: {log}");
    assert!(!log.contains("circuit breaker open"), "{log}");
    redis.cli(&["DEL", key]);
    let (status, repaired) = ask(&node, "login", "bad");
    assert_eq!(repaired["origin"], "store", "it is repaired as the message says");
    assert_eq!(status, 429, "logins that were counted are not handed out again: {repaired}");
}

/// An operator must read why Redis is not used, and the breaker must not open and close in turn while it refuses.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_redis_that_refuses_to_work_is_named() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let (url, rules) = (redis.url(), rules.to_str().expect("a plain path"));
    let node = Server::start(&["--rules", rules, "--store", &url, "--store-deadline-ms", "500"]);
    eventually("the node on Redis", || (ask(&node, "user", "w").1["origin"] == "store").then_some(()));
    let shard = || node.get("/readyz?verbose").json()["store"]["shards"][0].clone();
    assert_eq!(shard()["error"], Value::Null);
    redis.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let mut user = 0;
    eventually("the breaker to open", || {
        user += 1;
        let (_, decision) = ask(&node, "user", &format!("u{user}"));
        assert_eq!(decision["origin"], "local", "{decision}");
        (shard()["breaker"] != "closed").then_some(())
    });
    let state = shard();
    assert!(state["error"].as_str().is_some_and(|error| error.contains("OOM")), "{state}");
    let metrics = node.get("/metrics").text();
    let counted = |line: &str| {
        line.contains(r#"refusals_total{"#) && line.contains(r#"code="OOM"} "#) && !line.ends_with(" 0")
    };
    assert!(metrics.lines().any(counted), "{metrics}");
    redis.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    eventually("the node on Redis again", || (ask(&node, "user", "w").1["origin"] == "store").then_some(()));
    node.wait_for_log("Redis refuses to work");
    node.wait_for_log("circuit breaker open");
    let log = node.log();
    assert_eq!(log.matches("Redis refuses to work").count(), 1, "{log}");
    assert_eq!(log.matches("circuit breaker open").count(), 1, "{log}");
    assert!(log.contains("maxmemory"), "it says what to do: {log}");
}

/// A changed password of Redis needs a changed file and no restart.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_changed_password_is_read_from_its_file() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let password = folder.write("password", "first-secret");
    redis.cli(&["CONFIG", "SET", "requirepass", "first-secret"]);
    let (url, rules) = (redis.url(), rules.to_str().expect("a plain path"));
    let file = password.to_str().expect("a plain path");
    let flags =
        ["--rules", rules, "--store", &url, "--store-password-file", file, "--store-deadline-ms", DEADLINE];
    let node = Server::start(&flags);
    eventually("the node on Redis", || (ask(&node, "user", "w").1["origin"] == "store").then_some(()));
    let admin = ["-a", "first-secret", "--no-auth-warning"];
    redis.cli(&[&admin[..], &["CONFIG", "SET", "requirepass", "second-secret"]].concat());
    let admin = ["-a", "second-secret", "--no-auth-warning"];
    redis.cli(&[&admin[..], &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]].concat());
    eventually("the reason in the log", || {
        let _ = ask(&node, "user", "w");
        node.log().contains("WRONGPASS").then_some(())
    });
    folder.write("password", "second-secret\n");
    eventually("the node on Redis again", || (ask(&node, "user", "w").1["origin"] == "store").then_some(()));
    assert!(!node.log().contains("secret"), "{}", node.log());
}

/// Three nodes that start without Redis must not admit three limits: the last count of their host is kept.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn nodes_that_start_without_redis_divide_by_the_last_count() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let (url, rules) = (redis.url(), rules.to_str().expect("a plain path"));
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE];
    let state = folder.path().join("state");
    let state = [("STATE_DIRECTORY", state.to_str().expect("a plain path"))];
    let start = || Server::start_with(&flags, &state);
    let counts = |node: &Server, nodes: u32| {
        let line = format!("ratelimit_nodes {nodes}");
        node.get("/metrics").text().lines().any(|one| one == line)
    };
    let mut nodes = vec![start(), start(), start()];
    eventually("the nodes to count each other", || nodes.iter().all(|node| counts(node, 3)).then_some(()));
    let _dead = redis.stop();
    // Killed, so that no heartbeat is given back.
    nodes.clear();
    nodes.extend([start(), start(), start()]);
    eventually("the last count", || nodes.iter().all(|node| counts(node, 3)).then_some(()));
    let passed = |node: &Server| (0..20).filter(|_| ask(node, "user", "u").0 == 200).count();
    assert_eq!(nodes.iter().map(passed).sum::<usize>(), 9, "a third of ten for each");
    // One that has never counted says so.
    let other = folder.path().join("other");
    let other = Server::start_with(&flags, &[("STATE_DIRECTORY", other.to_str().expect("a plain path"))]);
    eventually("the warning", || other.log().contains("set --nodes").then_some(()));
    assert_eq!(passed(&other), 10);
}

/// What a node admitted without Redis is known to it alone: a restart must not hand it out again.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_node_that_stops_after_an_outage_charges_what_it_admitted() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let (url, rules) = (redis.url(), rules.to_str().expect("a plain path"));
    let start =
        |deadline| Server::start(&["--rules", rules, "--store", &url, "--store-deadline-ms", deadline]);
    let mut node = start("500");
    eventually("the node on Redis", || (ask(&node, "user", "w").1["origin"] == "store").then_some(()));
    redis.signal("STOP");
    for _ in 0..6 {
        assert_eq!(ask(&node, "user", "u").1["origin"], "local");
    }
    // It is stopped while Redis still does not answer.
    node.signal("TERM");
    eventually("the drain", || node.log().contains("drained").then_some(()));
    redis.signal("CONT");
    assert!(node.wait().success());
    let next = start(DEADLINE);
    eventually("the next node on Redis", || (ask(&next, "user", "w").1["origin"] == "store").then_some(()));
    let passed = (0..20).filter(|_| ask(&next, "user", "u").0 == 200).count();
    assert_eq!(passed, 4, "ten less the six before");
}

/// Two nodes over one Redis must let through one limit, not two; when Redis dies each rule answers by its policy and
/// says so.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn nodes_share_limits_and_survive_an_outage() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let url = redis.url();
    let rules = rules.to_str().expect("a plain path");
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE, "--nodes", "2"];
    let nodes = [Server::start(&flags), Server::start(&flags)];
    let on_redis = |server: &Server| ask(server, "user", "warm-up").1["origin"] == "store";
    eventually("both nodes on Redis", || nodes.iter().all(on_redis).then_some(()));

    let passed = (0..30).filter(|n| ask(&nodes[n % 2], "user", "u").0 == 200).count();
    assert_eq!(passed, 10, "one limit for both");
    let details = nodes[0].get("/readyz?verbose").json();
    assert_eq!(details["store"]["shards"][0]["breaker"], "closed", "{details}");

    drop(redis.stop());
    let away = |server: &Server| ask(server, "login", "u").0 == 503;
    eventually("both nodes without Redis", || nodes.iter().all(away).then_some(()));
    assert_eq!(ask(&nodes[0], "login", "u").1["origin"], "fail_closed");
    let closed = nodes[0].check("d", &json!({"login": "u"}));
    assert_eq!(closed.header("retry-after"), Some("1"));
    // Envoy knows only two answers.
    let entries = json!([{"entries": [{"key": "login", "value": "u"}]}]);
    let envoy = nodes[0].post("/json", &json!({"domain": "d", "descriptors": entries})).json();
    assert_eq!(envoy["overallCode"], "OVER_LIMIT", "{envoy}");
    assert_eq!(envoy["dynamicMetadata"]["origin"], "fail_closed", "{envoy}");
    let locally: Vec<_> = (0..10).map(|_| ask(&nodes[0], "user", "v")).collect();
    assert!(locally.iter().all(|(_, decision)| decision["origin"] == "local"), "{locally:?}");
    let passed = locally.iter().filter(|(status, _)| *status == 200).count();
    assert_eq!(passed, 5, "a node's share of ten is five");
    let metrics = nodes[0].get("/metrics").text();
    let counted = r#"ratelimit_fallback_decisions_total{rule="login",origin="fail_closed"}"#;
    assert!(metrics.contains(counted), "{metrics}");
}

/// Without it no operator sees which key overloads a shard, nor that it is leased; and what a node had in hand when it stops is
/// lost to the others until the day ends.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn leases_are_reported_and_returned_when_a_node_stops() {
    let redis = Redis::start();
    let folder = Folder::new();
    let rules = "
domain: d
descriptors:
  - {key: api_key, limit: 1000 per 3650d, algorithm: fixed_window, mode: leased}
";
    let rules = folder.write("rules.yaml", rules);
    let rules = rules.to_str().expect("a plain path");
    let url = redis.url();
    let flags = ["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE, "--hot-per-second", "1"];
    let ask = |server: &Server| server.check("d", &json!({"api_key": "sk_live_4242424242"}));
    let mut first = Server::start(&flags);
    let mut passed = 0;
    eventually("a lease in hand", || {
        passed += u64::from(ask(&first).status == 200);
        let metrics = first.get("/metrics").text();
        let line = metrics.lines().find(|line| line.starts_with("ratelimit_lease_units "))?;
        (!line.ends_with(" 0")).then_some(())
    });
    let hot = eventually("a rate", || {
        passed += u64::from(ask(&first).status == 200);
        let hot = first.get("/v1/hot").json();
        (hot["hot"][0]["per_second"].as_u64() > Some(0)).then_some(hot)
    });
    assert_eq!(hot["hot"][0]["state"], "leased", "{hot}");
    let text = hot.to_string();
    assert!(
        text.contains("sk_l") && !text.contains("4242"),
        "a key that may be a secret is shown unmasked: {text}"
    );
    let admin = format!("http://{}", first.admin.expect("an admin address"));
    let (key, text) = eventually("a hot key on the screen", || {
        passed += u64::from(ask(&first).status == 200);
        let top = |args: &[&str]| run_with(args, &[("TOLLGATE_ADMIN_URL", &admin)]).out;
        let seen: Value = serde_json::from_str(&top(&["top", "--format", "json"])).expect("JSON");
        let (hot, most) = (&seen["top"]["hot"][0]["values"][0], &seen["top"]["by_rate"][0]["key_masked"]);
        let text = top(&["top"]);
        (text.contains("HOT KEY") && hot.is_string()).then(|| (hot.clone(), (most.clone(), text)))
    });
    assert_eq!(key, text.0, "one caller has two names");
    assert!(key.as_str().is_some_and(|key| text.1.matches(key).count() == 2), "{key}: {}", text.1);
    first.signal("TERM");
    assert!(first.wait().success());
    let second = Server::start(&flags);
    let answer = eventually("the second node on Redis", || {
        let answer = ask(&second);
        passed += u64::from(answer.status == 200);
        (answer.json()["origin"] == "store").then(|| answer.json())
    });
    assert_eq!(answer["limits"][0]["remaining"], 1_000 - passed, "{answer}");
}

/// A node that starts before its Redis must answer by policy and take to Redis when it comes.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_node_starts_without_redis_and_heals() {
    let dead = Redis::start().stop();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let flags = [
        "--rules",
        rules.to_str().expect("a plain path"),
        "--store",
        &dead.url(),
        "--store-deadline-ms",
        DEADLINE,
    ];
    let node = Server::start(&flags);
    assert_eq!(ask(&node, "login", "u").0, 503);
    let _redis = dead.start_again();
    eventually("the node on Redis", || (ask(&node, "user", "u").1["origin"] == "store").then_some(()));
}

const CLASSES: &str = "
domain: d
descriptors:
  - {key: comfort, name: comfort, limit: 3/hour}
  - {key: security, name: security, class: security, algorithm: sliding_log, limit: 3 per 10s}
  - {key: strict, name: strict, class: strict, limit: 3 per 3650d, algorithm: fixed_window}
";

/// A caller that has used up its logins must not get new ones because Redis crashed; a limit that is there for comfort
/// goes on.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_crash_of_redis_hands_out_no_fresh_log_ins() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", CLASSES);
    let rules = rules.to_str().expect("a plain path");
    let redis = Redis::start();
    let url = redis.url();
    let common = ["--rules", rules, "--store", &url, "--store-deadline-ms", DEADLINE];
    let common = [&common[..], &["--store-breaker-failures", "1000000"]].concat();
    let careful = Server::start(&common);
    let careless = Server::start(&[&common[..], &["--store-caution-ms", "0"]].concat());
    let passed = |server: &Server, class: &str, user: &str| {
        (0..6).filter(|_| ask(server, class, user).0 == 200).count()
    };
    eventually("both nodes on Redis", || {
        let on_redis = |server: &Server| ask(server, "comfort", "warm-up").1["origin"] == "store";
        (on_redis(&careful) && on_redis(&careless)).then_some(())
    });
    for (server, user) in [(&careful, "u"), (&careless, "v")] {
        for class in ["comfort", "security", "strict"] {
            assert_eq!(passed(server, class, user), 3, "{class}");
        }
    }
    let _redis = redis.stop().start_again();
    let back = |server: &Server| (ask(server, "comfort", "back").1["origin"] == "store").then_some(());
    eventually("the first node on the new Redis", || back(&careful));
    // One whom no node remembers to have denied: nothing is known of him, so he may have used it all up.
    let answered = |class: &str, user: &str| {
        let (status, decision) = ask(&careful, class, user);
        (decision["origin"] == "store").then_some(status)
    };
    assert_eq!(eventually("an answer", || answered("security", "w")), 429);
    let shard = careful.get("/readyz?verbose").json()["store"]["shards"][0].clone();
    assert!(shard["lost_writes_at"].as_u64().is_some_and(|at| at > 0), "{shard}");
    let metrics = careful.get("/metrics").text();
    let metric =
        format!("lost_writes_timestamp_seconds{{shard={}}} {}", shard["address"], shard["lost_writes_at"]);
    assert!(metrics.contains(&metric), "{metric}: {metrics}");
    eventually("comfort goes on when the last denial is no longer remembered", || {
        (ask(&careful, "comfort", "u").0 == 200).then_some(())
    });
    assert_eq!(eventually("an answer", || answered("strict", "w")), 429);
    eventually("security is served after its period", || {
        (ask(&careful, "security", "w").0 == 200).then_some(())
    });
    assert_eq!(ask(&careful, "strict", "w").0, 429, "its day is not over");
    eventually("the other node on the new Redis", || back(&careless));
    let served = eventually("an answer", || {
        let (status, decision) = ask(&careless, "strict", "x");
        (decision["origin"] == "store").then_some(status)
    });
    assert_eq!(served, 200, "switched off");
}

/// When Redis is back, what was let through without it is paid for first: no burst beyond the limit, however soon.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn an_outage_ends_without_a_burst() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let redis = Redis::start();
    let url = redis.url();
    let flags = ["--rules", rules.to_str().expect("a plain path"), "--store", &url, "--nodes", "2"];
    let settings = ["--store-deadline-ms", "2000", "--store-breaker-failures", "1"];
    let settings = [&settings[..], &["--store-breaker-open-ms", "1500"]].concat();
    let node = Server::start(&[&flags[..], &settings].concat());
    eventually("the node on Redis", || (ask(&node, "user", "w").1["origin"] == "store").then_some(()));
    let passed = |decisions: &[(u16, Value)]| decisions.iter().filter(|(status, _)| *status == 200).count();
    let before: Vec<_> = (0..4).map(|_| ask(&node, "user", "u")).collect();
    redis.signal("STOP");
    let during: Vec<_> = (0..20).map(|_| ask(&node, "user", "u")).collect();
    assert!(during.iter().all(|(_, decision)| decision["origin"] == "local"), "{during:?}");
    assert_eq!(
        (passed(&before), passed(&during)),
        (4, 3),
        "a node's share of the six that were left is three"
    );
    redis.signal("CONT");
    let mut after = Vec::new();
    eventually("the node on Redis again", || {
        after.push(ask(&node, "user", "u"));
        (after.iter().filter(|(_, decision)| decision["origin"] == "store").count() > 20).then_some(())
    });
    node.wait_for_log("circuit breaker open");
    node.wait_for_log("circuit breaker closed");
    let all = passed(&before) + passed(&during) + passed(&after);
    assert!(all <= 10, "{all} passed of ten: {after:?}");
}

/// Breaker settings take effect.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn breakers_follow_their_settings() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let redis = Redis::start();
    let settings = format!(
        "rules: [{}]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\nstore: {}\nstore_deadline_ms: {DEADLINE}\nstore_breaker_failures: 1\nstore_breaker_open_ms: 3600000\n",
        rules.display(),
        redis.url()
    );
    let url = redis.url();
    let config = folder.write("config.yaml", &settings);
    let node = Server::start(&["--config", config.to_str().expect("a plain path")]);
    eventually("the node on Redis", || (ask(&node, "user", "u").1["origin"] == "store").then_some(()));
    let breaker = || node.get("/readyz?verbose").json()["store"]["shards"][0]["breaker"].clone();
    assert_eq!(breaker(), "closed");
    let dead = redis.stop();
    assert_eq!(ask(&node, "login", "u").0, 503);
    assert_eq!(breaker(), "open", "one failure was enough");
    let state = node.get("/metrics").text();
    let state = state.lines().find(|line| line.starts_with("ratelimit_circuit_state{")).map(str::to_owned);
    assert!(state.as_ref().is_some_and(|line| line.ends_with("} 2")), "{state:?}");
    // It is probed in the background, by no caller's request, long before the longest pause.
    let _redis = dead.start_again();
    eventually("the breaker to close", || (breaker() == "closed").then_some(()));
    let shard = url.trim_start_matches("redis://");
    let is_warning =
        |line: &&str| line.contains("WARN tollgate_store::redis") && line.contains("circuit breaker open");
    node.wait_for_log("circuit breaker open");
    let log = node.log();
    let warnings: Vec<&str> = log.lines().filter(is_warning).collect();
    assert!(
        matches!(warnings[..], [one] if one.contains(shard) && one.contains("connection")),
        "once: {log}"
    );
    let wrong = folder.write("wrong.yaml", "store: redis://127.0.0.1:1\nstore_breaker_failures: 0\n");
    let refused = run(&["serve", "--config", wrong.to_str().expect("a plain path")]);
    assert!(
        refused.err.contains("store_breaker_failures") && refused.err.contains("between 1 and"),
        "{}",
        refused.err
    );
}

/// Passwords come by the address, the environment or a file, and show up nowhere.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_password_opens_the_store_and_is_in_no_log() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let redis = Redis::start();
    // No more than docs/deployment/redis.md says.
    let may = "+info +time +eval +evalsha +get +mget +set +incrby +del +pexpire +@sortedset";
    redis.command(&format!("ACL SETUSER gate on >sesame ~tg1:* {may}"));
    redis.command("CONFIG SET requirepass sesame");
    let secret = folder.write("secret", "sesame\n");
    let place = redis.url().replace("redis://", "");
    let common = ["--rules", rules.to_str().expect("a plain path"), "--log", "trace"];
    let common = [&common[..], &["--store-deadline-ms", DEADLINE]].concat();
    let start = |store: &str, more: &[&str], environment: &[(&str, &str)]| {
        Server::start_with(&[&common[..], &["--store", store], more].concat(), environment)
    };
    let file = ["--store-password-file", secret.to_str().expect("a plain path")];
    let nodes = [
        start(&format!("redis://gate:sesame@{place}"), &[], &[]),
        start(&redis.url(), &[], &[("TOLLGATE_STORE_PASSWORD", "sesame")]),
        start(&redis.url(), &file, &[]),
    ];
    for node in &nodes {
        eventually("the node on Redis", || (ask(node, "user", "u").1["origin"] == "store").then_some(()));
        assert!(!node.log().contains("sesame"), "{}", node.log());
        assert!(!node.get("/readyz?verbose").text().contains("sesame"));
    }
    let stranger = start(&format!("redis://:hunter2@{place}"), &[], &[]);
    for _ in 0..6 {
        assert_eq!(ask(&stranger, "login", "u").0, 503);
    }
    assert!(!stranger.log().contains("hunter2"), "{}", stranger.log());
}

const PLACES: &str = "
domain: d
descriptors:
  - {key: user, name: shared, limit: 5/hour}
  - {key: host, name: own, mode: local, limit: 3 per 3650d, algorithm: fixed_window}
";

/// A limit of each node and one of all: a request takes of both or of none, and what is local needs no Redis.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn local_limits_stand_beside_shared_ones() {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", PLACES);
    let redis = Redis::start();
    let url = redis.url();
    let flags = ["--rules", rules.to_str().expect("a plain path"), "--store", &url];
    let flags = [&flags[..], &["--store-deadline-ms", DEADLINE]].concat();
    let nodes = [Server::start(&flags), Server::start(&flags)];
    let on_redis = |server: &Server| ask(server, "user", "warm-up").1["origin"] == "store";
    eventually("both nodes on Redis", || nodes.iter().all(on_redis).then_some(()));
    let passed = |node: &Server, attributes: Value, tries: usize| {
        (0..tries).filter(|_| node.check("d", &attributes).status == 200).count()
    };
    let both = |user: &str| json!({"user": user, "host": "h"});
    assert_eq!(passed(&nodes[0], both("u"), 10), 3, "the node's own three");
    assert_eq!(passed(&nodes[1], both("u"), 10), 2, "five in all: what was refused has taken nothing");
    assert_eq!(passed(&nodes[1], both("v"), 10), 1, "the third of this node's own");
    // A reservation that is cancelled gives its unit back where it was taken.
    let reserved =
        nodes[0].post("/v1/reserve", &json!({"domain": "d", "attributes": {"host": "r"}, "cost": 3}));
    assert_eq!(reserved.status, 200, "{}", reserved.text());
    assert_eq!(passed(&nodes[0], json!({"host": "r"}), 1), 0);
    let id = reserved.json()["reservation"].clone();
    let cancelled = nodes[0].post("/v1/cancel", &json!({"reservation": id}));
    assert_eq!(cancelled.status, 200, "{} {}", reserved.text(), cancelled.text());
    assert_eq!(passed(&nodes[0], json!({"host": "r"}), 9), 3);
    drop(redis.stop());
    assert_eq!(passed(&nodes[0], json!({"host": "other"}), 9), 3, "without Redis");
}

/// A password in an address must not end up in a terminal or a log.
#[test]
fn a_bad_address_is_refused_without_repeating_it() {
    let refused = run(&["serve", "--store", "redis://:hunter2@host:notaport"]);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("--store"), "{}", refused.err);
    assert!(!refused.err.contains("hunter2"), "{}", refused.err);
}
