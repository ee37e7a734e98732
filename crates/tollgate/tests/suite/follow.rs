//! The Rust SDK following the control plane of a real server: what operators decide is felt in another process, also while
//! the server is away.

#[path = "../../../../examples/follow/src/main.rs"]
#[allow(dead_code, unreachable_pub, reason = "a program's main is not called here")]
mod example;
use crate::databases::Place;
use crate::harness::{self, Cuttable, Folder, LONG, Operator};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tollgate_core::SystemClock;
use tollgate_rules::Options;
use tollgate_sdk::{CheckRequest, Decider, FollowConfig, FollowError, FollowStatus, Follower, InProcess};
use tollgate_store::{LeaseConfig, MemoryStore, RedisConfig};

const RULES: &str = "
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: 2/hour}
  - {key: user_id, name: per-user, limit: 2/hour}
";

type Limits = InProcess<MemoryStore<SystemClock>>;

fn settings(admin: impl std::fmt::Display) -> FollowConfig {
    FollowConfig {
        poll: Duration::from_millis(100),
        timeout: LONG,
        ..FollowConfig::new(format!("http://{admin}"))
    }
}

fn with_snapshot(admin: impl std::fmt::Display, folder: &Folder) -> FollowConfig {
    FollowConfig { snapshot: Some(folder.join("state.json")), ..settings(admin) }
}

async fn follow(config: FollowConfig) -> (Follower, Limits) {
    let follower = Follower::start(config).await.expect("a state");
    let limits = follower.limits("shop").expect("the domain");
    (follower, limits)
}

/// Waits until the follower reports this.
async fn until(follower: &Follower, what: &str, is_so: impl Fn(&FollowStatus) -> bool) -> FollowStatus {
    let mut status = follower.subscribe();
    let found = tokio::time::timeout(LONG, status.wait_for(|status| is_so(status))).await;
    found.unwrap_or_else(|_| panic!("{what}: {:?}", follower.status())).expect("a follower").clone()
}

/// Waits until the follower knows what the server knows.
async fn caught_up(follower: &Follower, node: &Operator) -> FollowStatus {
    let revision = node.get("/admin/v1/replica")["revision"].as_i64().expect("a number");
    until(follower, "caught up", |status| status.revision >= revision && status.error.is_none()).await
}

/// How many requests in a row pass, up to twenty.
async fn passes(limits: &impl Decider, key: &str, value: &str) -> usize {
    for count in 0..20 {
        let request = CheckRequest::attributes([(key.to_owned(), value.to_owned())]);
        if !limits.decide(request).await.is_allowed {
            return count;
        }
    }
    20
}

fn override_of(count: u64) -> Value {
    json!({"overrides": [{"descriptor": "default", "requests_per_unit": count, "unit": "hour"}], "reason": "test"})
}

fn publish(node: &Operator, rules: &str) {
    let body = json!({"files": [{"name": "rules.yaml", "text": rules}], "reason": "test", "confirm": true});
    node.post("/admin/v1/rules", &body);
}

/// Without this a fleet would go on by old limits, and a blocked attacker would pass.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_operators_decide_reaches_the_process() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("follow"), &[]);
    assert_eq!(node.put("known", &override_of(5)).status, 200);
    let (follower, limits) = follow(settings(node.admin)).await;
    assert_eq!(passes(&limits, "api_key", "known").await, 5, "quotas are pulled at the start");
    assert_eq!(passes(&limits, "api_key", "other").await, 2);

    // Quotas: one of an API key, one of a user, one that ends.
    assert_eq!(node.put("later", &override_of(7)).status, 200);
    assert_eq!(node.put("ann?key=user_id", &override_of(4)).status, 200);
    assert_eq!(node.ask("DELETE", "/admin/v1/quotas/known?reason=test", &Value::Null).status, 204);
    until(&follower, "quotas", |status| status.quotas == 2 && status.revision >= 4).await;
    assert_eq!(passes(&limits, "api_key", "later").await, 7);
    assert_eq!(passes(&limits, "user_id", "ann").await, 4);
    assert_eq!(passes(&limits, "user_id", "ben").await, 2);
    assert_eq!(passes(&limits, "api_key", "known").await, 0, "its own limit of 5 has ended, and 5 are used");

    // Published rules.
    publish(&node, &RULES.replace("2/hour", "3/hour"));
    let status = until(&follower, "rules", |status| status.rev.is_some()).await;
    assert_eq!(status.rules, limits.limiter().rules().revision());
    assert_eq!(passes(&limits, "api_key", "other").await, 1, "two of three are used");

    // Emergency measures, and their end.
    let id = node.declare("block", "api_key", "attacker");
    until(&follower, "a measure", |status| status.measures == 1).await;
    assert_eq!(passes(&limits, "api_key", "attacker").await, 0);
    assert_eq!(passes(&limits, "api_key", "friend").await, 3);
    assert_eq!(node.ask("DELETE", &format!("/admin/v1/emergency/{id}"), &Value::Null).status, 204);
    until(&follower, "no measure", |status| status.measures == 0).await;
    assert_eq!(passes(&limits, "api_key", "attacker").await, 3);

    // Grants.
    let grant = json!({"units": 2, "reason": "test"});
    assert!(matches!(node.ask("POST", "/admin/v1/usage/attacker/grant", &grant).status, 200 | 201));
    until(&follower, "a grant", |status| status.grants == 1).await;
    assert_eq!(passes(&limits, "api_key", "attacker").await, 2);

    // Nothing identifies a caller but keyed hashes.
    let sent = node.ask("GET", "/admin/v1/replica", &Value::Null).text();
    let changed = node.ask("GET", "/admin/v1/replica/changes", &Value::Null).text();
    let all = node.ask("GET", "/admin/v1/replica/quotas", &Value::Null).text();
    for secret in ["later", "\"ann\"", "attacker"] {
        assert!(![&sent, &changed, &all].iter().any(|text| text.contains(secret)), "{secret}");
    }
    assert_eq!(follower.status().full_reads, 1, "changes alone were read");
}

/// An unknown domain has no limits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_without_the_domain_of_this_process_are_not_used() {
    let rules = "domain: shop\ndescriptors:\n  - {key: user, limit: 2/hour}\n";
    let place = Place::new();
    let node = Operator::start(rules, &place.sqlite("domain"), &[]);
    let (follower, limits) = follow(settings(node.admin)).await;
    publish(&node, &rules.replace("shop", "store"));
    let status = until(&follower, "an error", |status| status.rules_error.is_some()).await;
    assert!(status.rules_error.is_some_and(|error| error.contains("`shop`")));
    assert_eq!(passes(&limits, "user", "ann").await, 2, "not without a limit");
    publish(&node, &rules.replace("2/hour", "3/hour"));
    until(&follower, "the domain again", |status| status.rules_error.is_none()).await;
    assert_eq!(passes(&limits, "user", "bob").await, 3);
}

/// A state that is still the same costs a response without a body; everything is compared now and then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_unchanged_is_not_read_again() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("follow"), &[]);
    (0..30).for_each(|number| assert_eq!(node.put(&format!("key-{number}"), &override_of(5)).status, 200));
    let config = FollowConfig { reconcile: Duration::from_millis(200), ..settings(node.admin) };
    let (follower, limits) = follow(config).await;
    until(&follower, "comparisons", |status| status.reconciliations >= 3).await;
    assert_eq!(node.put("key-3", &override_of(6)).status, 200);
    let before = follower.status().reconciliations;
    until(&follower, "comparisons", |status| status.reconciliations >= before + 3).await;
    let status = caught_up(&follower, &node).await;
    assert_eq!((status.full_reads, status.quotas, status.error), (1, 30, None));
    assert_eq!(passes(&limits, "api_key", "key-3").await, 6);

    // Between two comparisons the server sends a state only when it has changed.
    let (follower, _) = follow(settings(node.admin)).await;
    let mut confirmed = follower.status().confirmed_at;
    for _ in 0..5 {
        confirmed = until(&follower, "polls", |status| status.confirmed_at > confirmed).await.confirmed_at;
    }
    let status = follower.status();
    assert_eq!((status.states, status.full_reads, status.error), (1, 1, None));
    assert_eq!(node.put("key-5", &override_of(6)).status, 200);
    let status = caught_up(&follower, &node).await;
    assert_eq!((status.states, status.full_reads), (2, 1));

    let answer = node.ask("GET", "/admin/v1/replica", &Value::Null);
    let tag = answer.header("etag").expect("a tag").to_owned();
    let (node, path) = (&*node, "/admin/v1/replica");
    let same = harness::Node::ask(node, "GET", path, &[("if-none-match", &tag)], &Value::Null);
    assert_eq!((same.status, same.text().len()), (304, 0));
    assert_eq!(node.put("key-4", &override_of(6)).status, 200);
    let other = harness::Node::ask(node, "GET", path, &[("if-none-match", &tag)], &Value::Null);
    assert_eq!(other.status, 200, "a quota has changed");
}

/// The server is no part of a decision: without it everything goes on, also after a restart, and what was decided
/// meanwhile arrives when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_go_on_without_the_server() {
    let (place, folder) = (Place::new(), Folder::new());
    let db = place.sqlite("follow");
    let node = Operator::start(RULES, &db, &[]);
    node.put("known", &override_of(5));
    let link = Cuttable::to(node.admin.port());
    let (follower, limits) = follow(with_snapshot(link.address, &folder)).await;
    node.declare("block", "api_key", "attacker");
    publish(&node, &RULES.replace("2/hour", "3/hour"));
    until(&follower, "all of it", |status| status.measures == 1 && status.rev.is_some()).await;
    harness::eventually("a snapshot", || {
        let text = std::fs::read_to_string(folder.join("state.json")).ok()?;
        (text.contains("3/hour") && folder.join("state.json.quotas").exists()).then_some(())
    });
    let is_private = |path: PathBuf| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path).expect("a file").permissions().mode() & 0o777 == 0o600
    };
    assert!(is_private(folder.join("state.json")) && is_private(folder.join("state.json.quotas")));

    drop(node);
    link.cut();
    link.heal();
    until(&follower, "a failure", |status| status.error.is_some()).await;
    assert_eq!(passes(&limits, "api_key", "known").await, 5);
    assert_eq!(passes(&limits, "api_key", "attacker").await, 0);
    drop((follower, limits));

    // A start without the server.
    let (follower, limits) = follow(with_snapshot(link.address, &folder)).await;
    let status = follower.status();
    assert!(status.is_from_snapshot && status.has_quotas && status.error.is_some(), "{status:?}");
    assert_eq!(passes(&limits, "api_key", "known").await, 5);
    assert_eq!(passes(&limits, "api_key", "other").await, 3, "the published rules");
    assert_eq!(passes(&limits, "api_key", "attacker").await, 0);

    // It is back.
    let node = Operator::start(RULES, &db, &[]);
    node.put("new", &override_of(9));
    link.lead_to(node.admin.port());
    let status = until(&follower, "the server", |status| status.quotas == 2 && status.error.is_none()).await;
    assert!(!status.is_from_snapshot && status.confirmed_at.is_some());
    assert_eq!(status.full_reads, 0, "only what has changed since the snapshot was read");
    assert_eq!(passes(&limits, "api_key", "new").await, 9);
}

/// A database that was restored from a backup is older than what the process knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_database_is_followed() {
    let place = Place::new();
    let db = place.sqlite("follow");
    let backup = || {
        let files: Vec<PathBuf> = std::fs::read_dir(place.path())
            .expect("a folder")
            .map(|one| one.expect("a file").path())
            .collect();
        files.into_iter().map(|path| (std::fs::read(&path).expect("a file"), path)).collect::<Vec<_>>()
    };
    let mut node = Operator::start(RULES, &db, &[]);
    node.put("known", &override_of(5));
    let link = Cuttable::to(node.admin.port());
    stop(node);
    let saved = backup();
    node = Operator::start(RULES, &db, &[]);
    link.lead_to(node.admin.port());
    node.put("gone", &override_of(5));
    let (follower, limits) = follow(settings(link.address)).await;
    assert_eq!(follower.status().quotas, 2);
    stop(node);
    backup().into_iter().for_each(|(_, path)| std::fs::remove_file(path).expect("a file"));
    saved.into_iter().for_each(|(bytes, path)| std::fs::write(path, bytes).expect("a file"));
    let node = Operator::start(RULES, &db, &[]);
    link.lead_to(node.admin.port());
    until(&follower, "the older database", |status| status.quotas == 1).await;
    assert_eq!(passes(&limits, "api_key", "gone").await, 2);
    assert_eq!(follower.status().full_reads, 2);

    // Another database is refused: its hashes are of another secret.
    stop(node);
    let other = Operator::start(RULES, &place.sqlite("other"), &[]);
    link.lead_to(other.admin.port());
    let status = until(&follower, "another database", |status| {
        status.error.as_ref().is_some_and(|error| error.contains("another database"))
    });
    assert_eq!(status.await.quotas, 1, "what was known stays");
    assert_eq!(passes(&limits, "api_key", "known").await, 5);
}

/// Ends a server as an operator would, so that its database is complete.
fn stop(mut node: Operator) {
    node.server.signal("TERM");
    assert!(node.server.wait().success(), "{}", node.server.log());
}

/// The state contains the secret that API keys are hashed with: who may only read must not have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_replicas_and_administrators_may_follow() {
    let (place, folder) = (Place::new(), Folder::new());
    let db = place.sqlite("follow");
    let make = |role: &str| {
        let made = harness::run(&["token", "create", "--db", &db, "--name", role, "--role", role]);
        let token = made.out.split_whitespace().find(|word| word.starts_with("tg_"));
        token.unwrap_or_else(|| panic!("{} {}", made.out, made.err)).to_owned()
    };
    let [replica, viewer, operator, admin] = ["replica", "viewer", "operator", "admin"].map(make);
    let node = Operator::start(RULES, &db, &[]);
    let with = |token: Option<&str>| FollowConfig { token: token.map(str::to_owned), ..settings(node.admin) };
    for token in [&replica, &admin] {
        Follower::start(with(Some(token))).await.expect("a state");
    }
    for (token, expected) in
        [(None, 401), (Some("tg_wrong"), 401), (Some(viewer.as_str()), 403), (Some(operator.as_str()), 403)]
    {
        let error = Follower::start(with(token)).await.expect_err("refused");
        let FollowError::NoState { server, .. } = &error else { panic!("{error}") };
        assert!(matches!(**server, FollowError::Refused { status, .. } if status == expected), "{error}");
        assert!(!error.to_string().contains("tg_"), "{error}");
    }
    // A replica may read nothing else.
    let token = format!("Bearer {replica}");
    for path in ["/admin/v1/quotas", "/admin/v1/audit", "/admin/v1/rules", "/metrics", "/admin/v1/tokens"] {
        let answer = harness::Node::ask(&node, "GET", path, &[("authorization", &token)], &Value::Null);
        assert_eq!(answer.status, 403, "{path}");
    }
    // A token that is revoked ends what arrives, not what is known.
    let config = FollowConfig { snapshot: Some(folder.join("state.json")), ..with(Some(&replica)) };
    let (follower, limits) = follow(config.clone()).await;
    let id = harness::run(&["token", "list", "--db", &db, "--json"]).out;
    let tokens: Value = id.parse().unwrap_or_else(|_| panic!("JSON: {id}"));
    let all = tokens["tokens"].as_array().or(tokens.as_array()).expect("tokens");
    let id = all.iter().find(|one| one["name"] == "replica").expect("a token")["id"].as_str().expect("an id");
    harness::run(&["token", "revoke", "--db", &db, id]);
    until(&follower, "a refusal", |status| status.error.as_ref().is_some_and(|error| error.contains("401")))
        .await;
    assert_eq!(passes(&limits, "api_key", "any").await, 2);
    drop((follower, limits));
    let (follower, limits) = follow(config).await;
    assert!(follower.status().is_from_snapshot);
    assert_eq!(passes(&limits, "api_key", "any").await, 2);
}

/// A file that was damaged is never half of the truth.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_snapshots_are_not_used() {
    let (place, folder) = (Place::new(), Folder::new());
    let node = Operator::start(RULES, &place.sqlite("follow"), &[]);
    (0..50).for_each(|number| assert_eq!(node.put(&format!("key-{number}"), &override_of(5)).status, 200));
    let (state, quotas) = (folder.join("state.json"), folder.join("state.json.quotas"));
    let (follower, limits) = follow(with_snapshot(node.admin, &folder)).await;
    harness::eventually("a snapshot", || quotas.exists().then_some(()));
    drop((follower, limits));
    let whole = [&state, &quotas].map(|path| std::fs::read(path).expect("a file"));
    let restore = || {
        [&state, &quotas]
            .iter()
            .zip(&whole)
            .for_each(|(path, bytes)| std::fs::write(path, bytes).expect("a file"));
    };
    let link = Cuttable::to(node.admin.port());
    link.cut();
    let config =
        || FollowConfig { timeout: Duration::from_millis(300), ..with_snapshot(link.address, &folder) };

    let damage = |path: &Path, change: fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(path).expect("a file");
        change(&mut bytes);
        std::fs::write(path, bytes).expect("a file");
    };
    let halve: fn(&mut Vec<u8>) = |bytes| bytes.truncate(bytes.len() / 2);
    for change in [
        halve,
        |bytes| bytes.clear(),
        |bytes| bytes[0] = b'x',
        |bytes| *bytes = b"{\"version\": 99}".to_vec(),
        |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        },
        // It could still be read, and would allow more.
        |bytes| {
            let limit = bytes.windows(6).position(|text| text == b"2/hour").expect("a limit");
            bytes[limit] = b'9';
        },
    ] {
        damage(&state, change);
        let error = Follower::start(config()).await.expect_err("no state").to_string();
        assert!(error.contains("state.json") && error.contains("unavailable"), "{error}");
        assert!(!error.contains("key_secret\":"), "{error}");
        restore();
    }
    let error = Follower::start(FollowConfig { snapshot: Some(folder.join("none.json")), ..config() }).await;
    assert!(error.expect_err("no file").to_string().contains("none.json"));
    let error = Follower::start(FollowConfig { snapshot: None, ..config() }).await;
    assert!(error.expect_err("no snapshot").to_string().contains("none is configured"));

    // Rules without their quotas are better than nothing, and known to be incomplete.
    for change in [
        halve,
        |bytes| bytes.clear(),
        |bytes| *bytes.last_mut().expect("bytes") ^= 1,
        |bytes| bytes[400] ^= 1,
    ] {
        damage(&quotas, change);
        let (follower, limits) = follow(config()).await;
        let status = follower.status();
        assert!(!status.has_quotas && status.quotas == 0, "{status:?}");
        assert!(status.error.is_some_and(|error| error.contains(".quotas")));
        assert_eq!(passes(&limits, "api_key", "key-3").await, 2);
        restore();
    }
    // Once the server is back, nothing is missing.
    damage(&quotas, halve);
    let (follower, limits) = follow(FollowConfig { timeout: Duration::from_secs(3), ..config() }).await;
    link.heal();
    let status = until(&follower, "the quotas", |status| status.has_quotas && status.error.is_none()).await;
    assert_eq!((status.quotas, status.full_reads), (50, 1));
    assert_eq!(passes(&limits, "api_key", "key-3").await, 5);
}

/// A server that sends too much, or is no Tollgate, harms nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_server_sends_is_bounded_and_checked() {
    let place = Place::new();
    let node = Operator::start(RULES, &place.sqlite("follow"), &[]);
    (0..20).for_each(|number| assert_eq!(node.put(&format!("key-{number}"), &override_of(5)).status, 200));
    let start = async |config: FollowConfig| Follower::start(config).await.expect_err("an error").to_string();
    let error = start(FollowConfig { max_state_bytes: 100, ..settings(node.admin) }).await;
    assert!(error.contains("max_state_bytes"), "{error}");
    let error = start(FollowConfig { max_quota_bytes: 100, ..settings(node.admin) }).await;
    assert!(error.contains("max_quota_bytes"), "{error}");
    let error = start(settings(node.server.http)).await;
    assert!(error.contains("404"), "the HTTP address is no admin address: {error}");
    for address in ["127.0.0.1:1", "ftp://127.0.0.1", "http://user@127.0.0.1", "http://127.0.0.1/path"] {
        let error = start(FollowConfig { address: address.to_owned(), ..settings(node.admin) }).await;
        assert!(error.contains("not a URL"), "{error}");
    }
    let address = "http://user:hunter2@127.0.0.1".to_owned();
    let config = FollowConfig { address, ..settings(node.admin) };
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(!start(config).await.contains("hunter2"));
    let error = start(FollowConfig { poll: Duration::ZERO, ..settings(node.admin) }).await;
    assert!(error.contains("`poll`"), "{error}");
    let follower = Follower::start(settings(node.admin)).await.expect("a state");
    assert!(matches!(follower.limits("other"), Err(FollowError::UnknownDomain(_))));

    // Without a database there is nothing to follow.
    let alone = harness::Server::start_with_rules(RULES, &["--admin", "127.0.0.1:0"]);
    let alone = harness::Node::from(alone, Folder::new());
    let error = start(settings(alone.admin)).await;
    assert!(error.contains("503") && error.contains("--db"), "{error}");
}

/// The example of the documentation does what it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_decides_by_the_servers_rules() {
    let (place, folder) = (Place::new(), Folder::new());
    let node = Operator::start(RULES, &place.sqlite("follow"), &[]);
    node.put("vip", &override_of(5));
    let mut out = Vec::new();
    let keys = ["ann", "ann", "ann", "vip", "vip", "vip"].map(|key| Ok(key.to_owned()));
    let done = example::decide(with_snapshot(node.admin, &folder), "shop", keys.into_iter(), &mut out).await;
    done.expect("decisions");
    let out = String::from_utf8(out).expect("text");
    let words: Vec<&str> = out.lines().filter_map(|line| line.split(' ').nth(1)).collect();
    assert_eq!(words, ["allowed", "allowed", "denied", "allowed", "allowed", "allowed"], "{out}");
}

/// A fleet whose processes decide by themselves must still not exceed a limit together, nor beside its servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Redis: make test")]
async fn processes_and_servers_share_counters_in_redis() {
    const SHARED: &str = "
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: 6/hour}
  - {key: busy, name: leased, mode: leased, limit: 100000/hour}
";
    let (place, redis) = (Place::new(), harness::Redis::start());
    let node = Operator::start(
        SHARED,
        &place.sqlite("follow"),
        &["--store", &redis.url(), "--store-deadline-ms", "10000"],
    );
    let config = settings(node.admin);
    let options = Options { lease_shared: true, ..config.options.clone() };
    let follower = Follower::start(FollowConfig { options, ..config }).await.expect("a state");
    let limits = || {
        let mut redis = RedisConfig::parse(&redis.url()).expect("an address");
        redis.deadline = LONG;
        follower.limits_by_leases(redis, LeaseConfig::default(), "shop").expect("limits")
    };
    let (one, two) = (limits(), limits());
    assert_eq!(node.server.check("shop", &json!({"api_key": "k"})).status, 200);
    assert!(one.decide(CheckRequest::attributes([("api_key", "k")])).await.is_allowed);
    assert!(two.decide(CheckRequest::attributes([("api_key", "k")])).await.is_allowed);
    assert_eq!(passes(&one, "api_key", "k").await, 3, "three of six are used");
    assert_eq!(passes(&two, "api_key", "k").await, 0);
    assert_eq!(node.server.check("shop", &json!({"api_key": "k"})).status, 429);

    // A leased limit is decided here, once units have arrived.
    let began = harness::Stopwatch::start();
    while one.limiter().store().stats().local == 0 {
        assert!(began.elapsed() < LONG, "{:?}", one.limiter().store().stats());
        assert!(one.decide(CheckRequest::attributes([("busy", "k")])).await.is_allowed);
    }
    one.return_leases().await;
    assert_eq!(one.limiter().store().stats().available, 0);
}
