//! Gateways over one real Redis: together they let one limit through, and when Redis is gone each rule does as it says.

use crate::harness::{self, Gateway, Origin, Redis, WebConnection, eventually, plain};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: shared, limit: 20/hour}
  - {key: path, value: /login, name: login, limit: 1000/hour, on_error: closed}
  - {key: path, value: /open, name: open, limit: 10/hour, on_error: open}
  - {key: path, value: /hold, name: slots, concurrency: {limit: 2, ttl: 60s}}
";

fn get(path: &str, key: Option<&str>) -> Vec<u8> {
    let key = key.map(|key| format!("x-api-key: {key}\r\n")).unwrap_or_default();
    format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{key}\r\n").into_bytes()
}

fn both(redis: &Redis, origin: &Origin) -> [Gateway; 2] {
    let store = format!(
        "store: {}\nstore_deadline_ms: 10000\nstore_breaker_failures: 1\nstore_breaker_open_ms: 300\nnodes: 2",
        redis.url()
    );
    let gateways = [(); 2].map(|()| {
        let section = plain(origin.address, ", timeout: 1h");
        Gateway::start_in(harness::Folder::new(), RULES, &store, &section)
    });
    // What fails closed passes as soon as Redis is there.
    eventually("both on Redis", || {
        gateways.iter().all(|gateway| gateway.exchange(&get("/login", None)).status == 200).then_some(())
    });
    gateways
}

/// A caller that spreads its requests over all gateways must not get a limit at each.
#[test]
fn gateways_share_limits_and_slots() {
    let (redis, origin) = (Redis::start(), Origin::start());
    let gateways = both(&redis, &origin);
    let before = origin.requests();
    let passed: usize = std::thread::scope(|scope| {
        let asking = gateways.each_ref().map(|gateway| {
            scope.spawn(|| (0..30).filter(|_| gateway.exchange(&get("/a", Some("k"))).status == 200).count())
        });
        asking.into_iter().map(|asking| asking.join().expect("no request failed")).sum()
    });
    assert_eq!(passed, 20, "one limit for both");
    assert_eq!(origin.requests() - before, 20);
    // One slot taken at each: there is none left at either, until one of the callers leaves.
    let before = origin.requests();
    let mut held: Vec<WebConnection> = gateways
        .iter()
        .map(|gateway| {
            let mut open = gateway.open();
            open.send(&get("/hold", None)).expect("sent");
            open
        })
        .collect();
    eventually("both at the upstream", || (origin.requests() == before + 2).then_some(()));
    for gateway in &gateways {
        let denied = gateway.exchange(&get("/hold", None));
        assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("slots")));
    }
    drop(held.pop());
    // Two: the request whose caller has left may still be there to take one.
    origin.release(2);
    assert_eq!(held.pop().expect("one").response().expect("an answer").status, 200);
    origin.release(1);
    eventually("a slot that came back", || {
        (gateways[0].exchange(&get("/hold", None)).status == 200).then_some(())
    });
}

/// An outage of Redis must not be one of the API, nor a way past what guards it.
#[test]
fn without_redis_each_rule_applies_its_fail_policy() {
    let (redis, origin) = (Redis::start(), Origin::start());
    let gateways = both(&redis, &origin);
    let dead = redis.stop();
    for gateway in &gateways {
        eventually("Redis to be missed", || {
            (gateway.exchange(&get("/login", None)).status == 503).then_some(())
        });
        let before = origin.requests();
        let closed = gateway.exchange(&get("/login", None));
        assert_eq!((closed.status, closed.header("retry-after")), (503, Some("1")));
        assert_eq!(origin.requests(), before, "it did not reach the upstream");
        for _ in 0..15 {
            assert_eq!(gateway.exchange(&get("/open", None)).status, 200);
        }
        let passed = (0..15).filter(|_| gateway.exchange(&get("/a", Some("v"))).status == 200).count();
        assert_eq!(passed, 10, "a node's share of twenty is ten");
    }
    let _redis = dead.start_again();
    for gateway in &gateways {
        eventually("Redis again", || (gateway.exchange(&get("/login", None)).status == 200).then_some(()));
    }
    // What was let through without it is charged: the whole limit is used up.
    eventually("what was let through to be charged", || {
        gateways.iter().all(|gateway| gateway.exchange(&get("/a", Some("v"))).status == 429).then_some(())
    });
}
