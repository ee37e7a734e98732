//! Durable limits through the real binary: a node with counters in memory that is killed, and a Redis that comes back empty
//! under two nodes, on both databases.

use crate::databases::{Place, Postgres};
use crate::harness::{Node, Redis, Server, eventually};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: monthly, limit: 1000/month in UTC}
  - {key: user, name: paid, class: cost, limit: 500/day}
  - {key: team, name: said, durable: true, limit: {count: 400, period: 100d, algorithm: fixed_window}}
  - {key: visitor, name: short, limit: 300/day}
  - {key: free, name: unsaid, durable: false, limit: 1000/month in UTC}
";

const KEY: &str = "sk_live_4242424242424242";

fn callers() -> [Value; 5] {
    [
        json!({"api_key": KEY}),
        json!({"user": "u"}),
        json!({"team": "t"}),
        json!({"visitor": "v"}),
        json!({"free": "f"}),
    ]
}

fn remaining(server: &Server, attributes: &Value) -> u64 {
    let peek = json!({"domain": "d", "attributes": attributes, "cost": 0});
    let answer = server.post("/v1/check", &peek).json();
    answer["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

fn spend(server: &Server, attributes: &Value, cost: u64) {
    let answer = server.post("/v1/check", &json!({"domain": "d", "attributes": attributes, "cost": cost}));
    assert_eq!(answer.status, 200, "{}", answer.text());
}

fn metric(server: &Server, name: &str) -> Option<f64> {
    let page = server.get("/metrics").text();
    page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

fn wait_until_written(server: &Server, rows: usize) {
    // Collected and written: the gauge alone is zero before anything is collected.
    eventually("consumption in the database", || {
        (metric(server, "ratelimit_durable_written_rows_total ")? >= rows as f64
            && metric(server, "ratelimit_durable_pending_rows ")? == 0.0)
            .then_some(())
    });
}

/// Without it, a restart gives every customer a second month.
#[test]
fn a_node_with_counters_in_memory_keeps_durable_limits_over_a_kill() {
    let place = Place::new();
    let db = place.sqlite("durable");
    let mut node = Node::start(RULES, &db, &["--node", "n1"]);
    for caller in &callers() {
        spend(&node.server, caller, 120);
    }
    wait_until_written(&node.server, 3);
    node.server.signal("KILL");
    node.server.wait();

    let mut node = Node::start(RULES, &db, &["--node", "n1"]);
    let left = callers().map(|caller| remaining(&node.server, &caller));
    assert_eq!((left[0], left[2], left[3], left[4]), (880, 280, 300, 1_000));
    assert!((380..=385).contains(&left[1]), "a day restores a unit each three minutes: {}", left[1]);
    // A shutdown writes what has just been counted.
    spend(&node.server, &callers()[0], 80);
    node.server.signal("TERM");
    assert!(node.server.wait().success(), "{}", node.server.log());
    let node = Node::start(RULES, &db, &["--node", "n1"]);
    assert_eq!(remaining(&node.server, &callers()[0]), 800);
    // Another node with counters of its own has consumed nothing.
    let other = Node::start(RULES, &db, &["--node", "n2"]);
    assert_eq!(remaining(&other.server, &callers()[0]), 1_000);
}

/// A Redis without persistence that restarts, or is emptied by hand, must not reset what customers have paid for.
fn a_redis_that_comes_back_empty_is_restored(db: &str) {
    let redis = Redis::start();
    let url = redis.url();
    // A charge that is answered too late is counted by Redis alone: no record has it, and none could restore it.
    let flags = ["--store", url.as_str(), "--store-deadline-ms", "5000"];
    let nodes = [Node::start(RULES, db, &flags), Node::start(RULES, db, &flags)];
    for node in &nodes {
        for caller in &callers() {
            let check = |cost: u64| {
                let body = json!({"domain": "d", "attributes": caller, "cost": cost});
                node.server.post("/v1/check", &body).json()
            };
            eventually("the store", || (check(0)["origin"] == "store").then_some(()));
            let charged = check(60);
            assert_eq!(charged["origin"], "store", "{charged}");
        }
    }
    let before = callers().map(|caller| remaining(&nodes[0].server, &caller));
    for node in &nodes {
        wait_until_written(&node.server, 3);
    }
    let lost = |node: &Node| metric(&node.server, "ratelimit_durable_store_losses_total ").unwrap_or(0.0);

    redis.command("FLUSHALL");
    eventually("both nodes to notice", || nodes.iter().all(|node| lost(node) >= 1.0).then_some(()));
    let restored = |before: &[u64; 5]| {
        for which in [0, 2] {
            let caller = &callers()[which];
            for node in nodes.iter().chain(&nodes) {
                assert_eq!(remaining(&node.server, caller), before[which], "{caller}");
            }
        }
        assert_eq!(remaining(&nodes[0].server, &callers()[4]), 1_000, "not durable");
    };
    restored(&before);
    // Consumption goes on, and the next loss is restored as well.
    let rows = nodes.each_ref().map(|node| metric(&node.server, "ratelimit_durable_written_rows_total "));
    spend(&nodes[0].server, &callers()[0], 10);
    spend(&nodes[1].server, &callers()[0], 5);
    for (node, rows) in nodes.iter().zip(rows) {
        wait_until_written(&node.server, rows.map_or(0, |rows| rows as usize) + 1);
    }
    let mut before = before;
    before[0] -= 15;
    let redis = redis.stop().start_again();
    eventually("both nodes to notice", || nodes.iter().all(|node| lost(node) >= 2.0).then_some(()));
    restored(&before);
    drop(redis);
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_redis_that_comes_back_empty_is_restored_from_sqlite() {
    let place = Place::new();
    a_redis_that_comes_back_empty_is_restored(&place.sqlite("durable"));
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server and PostgreSQL: make test")]
fn a_redis_that_comes_back_empty_is_restored_from_postgres() {
    let postgres = Postgres::start();
    a_redis_that_comes_back_empty_is_restored(&postgres.database("durable"));
}

/// An upgrade of Redis and Tollgate together must not reset what busy callers have paid for.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_redis_that_is_emptied_before_its_node_restarts_is_restored() {
    for signal in ["KILL", "TERM"] {
        let (place, redis) = (Place::new(), Redis::start());
        let (db, url) = (place.sqlite("durable"), redis.url());
        let flags = ["--store", url.as_str(), "--store-deadline-ms", "5000"];
        let mut node = Node::start(RULES, &db, &flags);
        spend(&node.server, &callers()[0], 900);
        wait_until_written(&node.server, 1);
        redis.command("FLUSHALL");
        // It finds an unused counter, unless the node has noticed already.
        spend(&node.server, &callers()[0], 1);
        node.server.signal(signal);
        node.server.wait();
        let node = Node::start(RULES, &db, &flags);
        let left = remaining(&node.server, &callers()[0]);
        assert!((99..=100).contains(&left), "{signal}: {left}");
    }
}

/// Requests must not wait for a database that is away, nor forget what they have consumed meanwhile.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn consumption_waits_for_a_database_that_is_away() {
    let mut postgres = Postgres::start();
    let db = postgres.database("durable");
    let mut node = Node::start(RULES, &db, &["--node", "n1"]);
    spend(&node.server, &callers()[0], 100);
    wait_until_written(&node.server, 1);
    postgres.stop("QUIT");
    spend(&node.server, &callers()[0], 200);
    eventually("a failed write", || {
        (metric(&node.server, "ratelimit_durable_write_failures_total ")? > 0.0).then_some(())
    });
    spend(&node.server, &callers()[0], 50);
    assert_eq!(metric(&node.server, "ratelimit_durable_dropped_units_total "), Some(0.0));
    postgres.start_again();
    wait_until_written(&node.server, 2);
    eventually("all of it", || {
        (metric(&node.server, "ratelimit_durable_behind_seconds ")? == 0.0).then_some(())
    });
    node.server.signal("KILL");
    node.server.wait();
    let node = Node::start(RULES, &db, &["--node", "n1"]);
    assert_eq!(remaining(&node.server, &callers()[0]), 650);
}

/// A setting that does nothing must say so.
#[test]
fn durable_without_a_database_is_a_warning() {
    let server = Server::with_rules(RULES);
    server.wait_for_log("set --db");
}
