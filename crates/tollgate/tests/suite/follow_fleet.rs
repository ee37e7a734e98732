//! Programs that follow a fleet of servers: which counters are hot is known everywhere, and a server that dies is replaced by
//! another one.

use crate::databases::{Place, Postgres};
use crate::harness::{self, LONG, Operator, Redis, Stopwatch};
use serde_json::json;
use std::time::Duration;
use tollgate_sdk::{CheckRequest, Decider, FollowConfig, FollowStatus, Follower, InProcess, LeasedRedis};
use tollgate_store::{LeaseConfig, LeaseStats, RedisConfig};

const RULES: &str = "
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: 1000000/second}
";

/// Units per second at which a key is hot, also on a machine that is busy.
const HOT: u64 = 4;
/// Units per second that no test reaches.
const NEVER: u64 = 1_000_000;

fn settings(admin: impl std::fmt::Display) -> FollowConfig {
    FollowConfig {
        poll: Duration::from_millis(100),
        timeout: LONG,
        ..FollowConfig::new(format!("http://{admin}"))
    }
}

fn server(db: &str, redis: &Redis, name: &str, hot: u64) -> Operator {
    let (url, hot) = (redis.url(), hot.to_string());
    let flags = ["--store", &url, "--store-deadline-ms", "10000", "--hot-per-second", &hot, "--node", name];
    Operator::start(RULES, db, &flags)
}

/// Limits by leases of a process that finds keys hot at this rate.
fn limits(follower: &Follower, redis: &Redis, hot: u64) -> InProcess<LeasedRedis> {
    let mut redis = RedisConfig::parse(&redis.url()).expect("an address");
    redis.deadline = LONG;
    let leases = LeaseConfig { hot: Some(hot), ..LeaseConfig::default() };
    follower.limits_by_leases(redis, leases, "shop").expect("limits")
}

fn stats(limits: &InProcess<LeasedRedis>) -> LeaseStats {
    limits.limiter().store().stats()
}

async fn decide(limits: &InProcess<LeasedRedis>, key: &str) {
    let request = CheckRequest::attributes([("api_key", key.to_owned())]);
    assert!(limits.decide(request).await.is_allowed);
}

/// Waits until the follower reports this.
async fn until(follower: &Follower, what: &str, is_so: impl Fn(&FollowStatus) -> bool) -> FollowStatus {
    let mut status = follower.subscribe();
    let found = tokio::time::timeout(LONG, status.wait_for(|status| is_so(status))).await;
    found.unwrap_or_else(|_| panic!("{what}: {:?}", follower.status())).expect("a follower").clone()
}

/// Sends requests with this key to a server until the follower's hot list has it.
fn heat(node: &Operator, key: &str, follower: &Follower) {
    let began = Stopwatch::start();
    while follower.status().hot == 0 {
        assert!(began.elapsed() < LONG, "{:?}", follower.status());
        assert_eq!(node.server.check("shop", &json!({"api_key": key})).status, 200);
    }
}

/// A process that has to learn by itself what the rest of the fleet knows sends the hottest key to Redis meanwhile; one that
/// never forgets leases keys that nobody uses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_hot_at_a_server_is_leased_by_its_followers_at_once() {
    let (place, redis) = (Place::new(), Redis::start());
    let node = server(&place.sqlite("fleet"), &redis, "east", HOT);
    let follower = Follower::start(settings(node.admin)).await.expect("a state");
    // It never finds a key hot by itself.
    let limits = limits(&follower, &redis, NEVER);
    decide(&limits, "busy").await;
    assert_eq!(stats(&limits).promoted, 0, "nobody has found it hot");

    heat(&node, "busy", &follower);
    decide(&limits, "busy").await;
    let leased = stats(&limits);
    assert_eq!((leased.promoted, leased.listed, leased.leases), (1, 1, 1), "{leased:?}");
    decide(&limits, "calm").await;
    assert_eq!(stats(&limits).promoted, 1, "only that key");
    let began = Stopwatch::start();
    while stats(&limits).local == 0 {
        assert!(began.elapsed() < LONG, "{:?}", stats(&limits));
        decide(&limits, "busy").await;
    }
    // Names of counters travel, never their values.
    let sent = node.post("/admin/v1/replica/hot", &json!({"hot": []}));
    assert!(sent["hot"].as_array().is_some_and(|hot| hot.len() == 1 && hot[0].is_u64()), "{sent}");

    // Nobody uses the key any more.
    until(&follower, "an empty list", |status| status.hot == 0).await;
    harness::eventually("no leases", || (stats(&limits).leases == 0).then_some(()));
    decide(&limits, "busy").await;
    assert_eq!(stats(&limits).promoted, 1, "it is forgotten");
    assert_eq!(node.get("/admin/v1/top")["hot"], json!([]), "and was not kept hot by its followers");
}

/// Most traffic of a fleet of gateways never reaches a server: what one of them finds hot, the others must learn too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_hot_in_one_process_is_leased_in_the_others_and_by_the_server() {
    let (place, redis) = (Place::new(), Redis::start());
    let node = server(&place.sqlite("fleet"), &redis, "east", NEVER);
    let [one, two] = [settings(node.admin), settings(node.admin)];
    let (one, two) =
        (Follower::start(one).await.expect("a state"), Follower::start(two).await.expect("a state"));
    let (busy, idle) = (limits(&one, &redis, HOT), limits(&two, &redis, NEVER));
    let began = Stopwatch::start();
    while two.status().hot == 0 {
        assert!(began.elapsed() < LONG, "{:?} {:?}", two.status(), stats(&busy));
        decide(&busy, "busy").await;
    }
    assert_eq!((stats(&busy).promoted, stats(&busy).listed), (1, 0), "it has learned it by itself");
    decide(&idle, "busy").await;
    assert_eq!((stats(&idle).promoted, stats(&idle).listed), (1, 1));
    // The server leases it at the first request, too.
    let promoted = || {
        let page = node.ask("GET", "/metrics", &json!(null)).text();
        let line = page.lines().find(|line| line.starts_with("ratelimit_hot_list_promotions_total "));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).expect("a metric")
    };
    assert_eq!(promoted(), 0);
    let began = Stopwatch::start();
    while promoted() == 0 {
        assert!(began.elapsed() < LONG, "the server does not know it");
        decide(&busy, "busy").await;
        assert_eq!(node.server.check("shop", &json!({"api_key": "busy"})).status, 200);
    }
}

/// A report of another size, or of somebody else, changes nothing.
#[test]
fn reports_of_hot_counters_are_bounded() {
    let (place, redis) = (Place::new(), Redis::start());
    let node = server(&place.sqlite("fleet"), &redis, "east", HOT);
    let report = |many: u64| json!({"hot": (0..many).map(|name| (name, 5)).collect::<Vec<_>>()});
    let refused = node.ask("POST", "/admin/v1/replica/hot", &report(1_001));
    assert_eq!((refused.status, &refused.json()["field"]), (400, &json!("hot")), "{}", refused.text());
    assert_eq!(node.ask("POST", "/admin/v1/replica/hot", &json!({"hot": [[1]]})).status, 400);
    assert_eq!(node.ask("POST", "/admin/v1/replica/hot", &json!({"hot": [], "more": 1})).status, 400);
    assert_eq!(node.post("/admin/v1/replica/hot", &json!({"hot": []}))["hot"], json!([]));
    let answer = node.ask("POST", "/admin/v1/replica/hot", &report(1_000));
    assert_eq!(answer.json()["hot"].as_array().map(Vec::len), Some(1_000));
    let tag = answer.header("etag").expect("a tag").to_owned();
    let empty = json!({"hot": []});
    let same = harness::Node::ask(&node, "POST", "/admin/v1/replica/hot", &[("if-none-match", &tag)], &empty);
    assert_eq!((same.status, same.text().len()), (304, 0));
    let all = node.ask("POST", "/admin/v1/replica/hot", &json!({"hot": [[5_000, 9]]}));
    let names = all.json()["hot"].as_array().cloned().expect("names");
    assert!(names.len() == 1_000 && names.contains(&json!(5_000)), "the busiest have a place");
}

/// A program must not lose its control plane because one server of it dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_server_is_replaced_by_another_one() {
    let (postgres, redis) = (Postgres::start(), Redis::start());
    let db = postgres.database("fleet");
    let (east, west) = (server(&db, &redis, "east", HOT), server(&db, &redis, "west", HOT));
    let follower = Follower::start(FollowConfig {
        other_addresses: vec![format!("http://{}", west.admin)],
        ..settings(east.admin)
    });
    let follower = follower.await.expect("a state");
    let limits = limits(&follower, &redis, NEVER);
    // What the other server finds hot is known here, by way of the one that is followed.
    heat(&west, "busy", &follower);
    decide(&limits, "busy").await;
    assert_eq!(stats(&limits).listed, 1);

    let quota = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 3, "unit": "hour"}], "reason": "test"});
    assert_eq!(east.put("one", &quota).status, 200);
    until(&follower, "a quota by way of the first server", |status| status.quotas == 1).await;
    east.server.signal("KILL");
    assert_eq!(west.put("two", &quota).status, 200);
    let rules = format!("{RULES}  - {{key: user_id, name: per-user, limit: 7/hour}}\n");
    let body = json!({"files": [{"name": "rules.yaml", "text": rules}], "reason": "test", "confirm": true});
    let published = west.post("/admin/v1/rules", &body);
    until(&follower, "what was decided at the second server", |status| {
        status.quotas == 2 && status.rev == published["rev"].as_i64() && status.error.is_none()
    })
    .await;
    let passed = async |key: &'static str, value: &str| {
        let mut count = 0;
        while limits.decide(CheckRequest::attributes([(key, value.to_owned())])).await.is_allowed {
            count += 1;
            assert!(count < 100, "there is a limit");
        }
        count
    };
    assert_eq!(passed("api_key", "two").await, 3);
    assert_eq!(passed("user_id", "new").await, 7);

    // A program that starts now finds the second server as well.
    let config =
        FollowConfig { other_addresses: vec![format!("http://{}", west.admin)], ..settings(east.admin) };
    let late = Follower::start(config).await.expect("a state");
    assert_eq!((late.status().quotas, late.status().rev), (2, published["rev"].as_i64()));
}
