//! Regions with a Redis each: their nodes are one cell, owners by hash move while one is away, and what a region knows of its
//! counters outlives its nodes.

use super::cells::{REGIONS, RULES, free_ports, peek, remaining};
use crate::harness::{Redis, Server, eventually};
use serde_json::json;

/// Without it, what one region consumes is debited once for each node of another.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn the_nodes_of_a_region_with_redis_are_one_cell() {
    let (stores, ports) = ([Redis::start(), Redis::start()], free_ports::<3>());
    // Two nodes in eu, one in us.
    let regions = ["eu", "eu", "us"];
    let start = |node: usize| {
        let others = (0..3).filter(|other| regions[*other] != regions[node]);
        let peers: Vec<String> =
            others.map(|other| format!("{}=http://127.0.0.1:{}", regions[other], ports[other])).collect();
        let (cell, store) = (format!("127.0.0.1:{}", ports[node]), stores[usize::from(node == 2)].url());
        let mut flags = vec!["--region", regions[node], "--cell", &cell, "--store", &store];
        flags.extend(["--store-deadline-ms", "5000", "--cell-deadline-ms", "5000"]);
        peers.iter().for_each(|peer| flags.extend(["--peer", peer]));
        Server::start_with_rules(RULES, &flags)
    };
    let mut nodes = [start(0), start(1), start(2)];
    for node in &nodes {
        let line = "ratelimit_region_share 1";
        eventually(line, || node.get("/metrics").text().lines().any(|one| one == line).then_some(()));
    }
    let caller = json!({"shared": "r"});
    let spend = |node: &Server, times: usize| {
        assert_eq!((0..times).filter(|_| node.check("d", &caller).status == 200).count(), times);
    };
    spend(&nodes[0], 20);
    spend(&nodes[1], 10);
    eventually("eu's consumption in us", || (remaining(&nodes[2], &caller) == 60).then_some(()));
    spend(&nodes[2], 20);
    for node in &nodes[..2] {
        eventually("us's consumption in eu, once", || (remaining(node, &caller) == 40).then_some(()));
    }
    assert_eq!(nodes[2].check("d", &json!({"split": "r"})).status, 200);
    assert_eq!(remaining(&nodes[2], &json!({"split": "r"})), 44, "two cells, not three");
    // The other node of the region takes over: it is informed, and it decides.
    nodes[0].signal("TERM");
    nodes[0].wait();
    spend(&nodes[2], 5);
    eventually("the consumption at the other node", || (remaining(&nodes[1], &caller) == 35).then_some(()));
    let owned = json!({"owned": "r"});
    eventually("the owner's other node", || (nodes[2].check("d", &owned).status == 200).then_some(()));
    assert_eq!(remaining(&nodes[1], &caller), 35, "counted once");
}

/// Without it, a third of all callers in all regions are decided by `on_error` for as long as the Redis of one region is dead.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn owners_by_hash_move_while_the_redis_of_a_region_is_dead() {
    let (stores, ports) = ([(); 3].map(|()| Redis::start()), free_ports::<3>());
    let start = |node: usize| {
        let (cell, store) = (format!("127.0.0.1:{}", ports[node]), stores[node].url());
        let mut flags = vec!["--region", REGIONS[node], "--cell", &cell, "--store", &store];
        flags.extend([
            "--cell-deadline-ms",
            "5000",
            "--cell-silence-ms",
            "1000",
            "--store-breaker-silence-ms",
            "100",
        ]);
        let others = (0..3).filter(|other| *other != node);
        let peers: Vec<String> =
            others.map(|other| format!("{}=http://127.0.0.1:{}", REGIONS[other], ports[other])).collect();
        peers.iter().for_each(|peer| flags.extend(["--peer", peer]));
        Server::start_with_rules(RULES, &flags)
    };
    let nodes = [start(0), start(1), start(2)];
    // What each node decides of forty counters.
    let decided = |of: &str| {
        let is_decided = |node: &Server, n: usize| {
            // A cell whose Redis is dead refuses the batches that report this.
            node.check("d", &json!({"shared": format!("{of}{n}")}));
            let answer = node.check("d", &json!({"hashed": format!("{of}{n}")}));
            answer.status == 200 && answer.json()["origin"] == "store"
        };
        nodes.each_ref().map(|node| (0..40).filter(|n| is_decided(node, *n)).count())
    };
    let says = |node: &Server, line: &str| {
        eventually(line, || node.get("/metrics").text().lines().any(|one| one == line).then_some(()));
    };
    eventually("owners by hash", || (decided("warm") == [40; 3]).then_some(()));

    stores[2].signal("STOP");
    eventually("the outage", || (decided("early") != [40; 3]).then_some(()));
    eventually("the others to decide in its place", || (decided("away") == [40; 3]).then_some(()));
    says(&nodes[2], "ratelimit_region_joined 0");

    stores[2].signal("CONT");
    says(&nodes[2], "ratelimit_region_joined 1");
    eventually("owners by hash", || (decided("back") == [40; 3]).then_some(()));
    let admitted = |of: &str| {
        let status = || nodes.iter().map(|node| node.check("d", &json!({"hashed": of})).status);
        (0..40).flat_map(|_| status().collect::<Vec<_>>()).filter(|status| *status == 200).count()
    };
    for key in ["x", "y", "z", "u", "v", "w"] {
        assert_eq!(admitted(key), 90, "one cell decides, whichever it is");
    }
}

/// Without it, each deployment locks out the callers of strict limits, or a region that was away trusts what is left in its Redis.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn a_replaced_node_knows_what_its_region_knew_and_a_region_that_was_away_does_not() {
    const RULES: &str = "
domain: d
descriptors:
  - {key: login, limit: {count: 10, period: 10s}, class: security, region: owner}
";
    let (stores, ports) = ([(); 3].map(|()| Redis::start()), free_ports::<4>());
    // Two nodes in ap.
    let regions = ["eu", "us", "ap", "ap"];
    let start = |node: usize| {
        let cell = format!("127.0.0.1:{}", ports[node]);
        let store = stores[node.min(2)].url();
        let mut flags = vec!["--region", regions[node], "--cell", &cell, "--store", &store];
        flags.extend([
            "--store-deadline-ms",
            "5000",
            "--cell-deadline-ms",
            "5000",
            "--cell-silence-ms",
            "1000",
        ]);
        let others = (0..4).filter(|other| regions[*other] != regions[node]);
        let peers: Vec<String> =
            others.map(|other| format!("{}=http://127.0.0.1:{}", regions[other], ports[other])).collect();
        peers.iter().for_each(|peer| flags.extend(["--peer", peer]));
        Server::start_with_rules(RULES, &flags)
    };
    // What is left of forty counters, those that cells decide.
    let left = |node: &Server| -> Vec<Option<u64>> {
        let one = |n: usize| {
            let answer = peek(node, &json!({"login": format!("k{n}")}));
            (answer["origin"] == "store").then(|| answer["limits"][0]["remaining"].as_u64()).flatten()
        };
        (0..40).map(one).collect()
    };
    let joined = |node: &Server| {
        let line = "ratelimit_region_joined 1";
        eventually(line, || node.get("/metrics").text().lines().any(|one| one == line).then_some(()));
    };
    let all = vec![Some(10); 40];
    let (near, other) = ([start(0), start(1)], start(2));
    let mut replaced = start(3);
    eventually("all counters restored", || (left(&replaced) == all).then_some(()));

    replaced.signal("KILL");
    replaced.wait();
    let replaced = start(3);
    joined(&replaced);
    assert_eq!(left(&replaced), all, "nobody has decided in its place");

    drop((replaced, other));
    let moved = eventually("the others to decide", || {
        let left = left(&near[0]);
        let moved: Vec<usize> = (0..40).filter(|n| left[*n].is_some_and(|left| left < 10)).collect();
        (!moved.is_empty() && left.iter().all(Option::is_some)).then_some(moved)
    });
    assert!(moved.len() < 40, "those of others stay");
    eventually("all counters restored", || (left(&near[0]) == all).then_some(()));
    let back = start(2);
    joined(&back);
    let locked = || {
        let left = left(&back);
        moved.iter().all(|n| left[*n].is_some_and(|left| left < 10))
    };
    assert!(locked(), "others have decided");

    eventually("all counters restored", || (left(&back) == all).then_some(()));
    let client = redis::Client::open(stores[2].url()).expect("an address");
    let mut connection = client.get_connection().expect("a connection");
    redis::cmd("FLUSHALL").exec(&mut connection).expect("an empty Redis");
    eventually("the loss", || locked().then_some(()));
}
