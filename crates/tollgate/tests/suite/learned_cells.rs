//! Cells that learn of each other from the node list of their database: real nodes with counters in memory that join, leave
//! and die, on both databases.

use crate::databases::{Place, Postgres};
use crate::harness::{self, Node, Redis, Server, eventually, run};
use serde_json::{Value, json};
use tollgate_testing::ports;

/// Limits that time does not restore while a test runs.
const RULES: &str = "
domain: d
descriptors:
  - {key: shared, limit: 90/day}
  - {key: owned, limit: 90/day, on_error: closed, region: {mode: owner, owner: eu}}
";

const REGIONS: [&str; 3] = ["eu", "us", "ap"];

fn free_ports<const N: usize>() -> [u16; N] {
    [(); N].map(|()| ports::free())
}

/// Returns the number of peers, and of those that answer.
fn peers(server: &Server) -> (usize, usize) {
    let page = server.get("/metrics").text();
    let up = || page.lines().filter(|line| line.starts_with("ratelimit_region_peer_up{"));
    (up().count(), up().filter(|line| line.ends_with(" 1")).count())
}

fn wait_for_peers(node: &Node, count: usize) {
    let is_whole =
        || node.server.get("/metrics").text().lines().any(|line| line == "ratelimit_region_share 1");
    let what = format!("{count} other nodes in the list of {}", node.server.http);
    eventually(&what, || (peers(&node.server) == (count, count) && is_whole()).then_some(()));
}

fn remaining(server: &Server, attributes: &Value) -> u64 {
    let peek = json!({"domain": "d", "attributes": attributes, "cost": 0});
    let answer = server.post("/v1/check", &peek).json();
    answer["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

fn admitted(server: &Server, attributes: &Value, times: usize) -> usize {
    (0..times).filter(|_| server.check("d", attributes).status == 200).count()
}

/// Without it, an operator writes every cell's address into every other cell's flags, and again with each new one.
fn cells_learn_of_each_other(db: &str) {
    let cells = free_ports::<3>().map(|port| format!("127.0.0.1:{port}"));
    let start = |at: usize| {
        let flags = ["--region", REGIONS[at], "--node", REGIONS[at], "--cell", &cells[at]];
        Node::start(RULES, db, &[&flags[..], &["--cell-deadline-ms", "5000"]].concat())
    };
    let mut nodes = vec![start(0), start(1)];
    assert!(nodes[0].server.greeting.contains("peers from the node list"), "{}", nodes[0].server.greeting);
    nodes.iter().for_each(|node| wait_for_peers(node, 1));
    let caller = json!({"shared": "a"});
    assert_eq!(admitted(&nodes[0].server, &caller, 60), 60);
    eventually("its debit", || (remaining(&nodes[1].server, &caller) == 30).then_some(()));
    assert_eq!(admitted(&nodes[1].server, &json!({"owned": "a"}), 30), 30);
    assert_eq!(remaining(&nodes[0].server, &json!({"owned": "a"})), 60, "eu decides");

    // One that joins shares the limit in both directions.
    nodes.push(start(2));
    nodes.iter().for_each(|node| wait_for_peers(node, 2));
    let caller = json!({"shared": "b"});
    assert_eq!(admitted(&nodes[2].server, &caller, 50), 50);
    for node in &nodes[..2] {
        eventually("the new cell's consumption", || (remaining(&node.server, &caller) == 40).then_some(()));
    }
    assert_eq!(admitted(&nodes[0].server, &caller, 40), 40);
    eventually("what the new cell learns", || (remaining(&nodes[2].server, &caller) == 0).then_some(()));
    let listed = nodes[0].ask("GET", "/admin/v1/nodes", &[], &Value::Null).json();
    let listed = listed["nodes"].as_array().expect("nodes");
    let urls: Vec<&str> = listed.iter().filter_map(|node| node["cell"]["url"].as_str()).collect();
    assert_eq!(urls.len(), 3, "{listed:?}");

    // One that ends is dropped, and one that dies as soon as its heartbeats are overdue.
    let mut gone = nodes.remove(2);
    gone.server.signal("TERM");
    gone.server.wait();
    nodes.iter().for_each(|node| wait_for_peers(node, 1));
    let mut dead = nodes.remove(1);
    dead.server.signal("KILL");
    dead.server.wait();
    eventually("its silence", || (peers(&nodes[0].server) == (1, 0)).then_some(()));
    wait_for_peers(&nodes[0], 0);
    assert_eq!(admitted(&nodes[0].server, &json!({"shared": "c"}), 100), 90, "the whole limit");

    // It returns under the same name and address, and nothing that it reports is taken for a repetition.
    let back = start(1);
    wait_for_peers(&nodes[0], 1);
    wait_for_peers(&back, 1);
    let caller = json!({"shared": "d"});
    assert_eq!(admitted(&back.server, &caller, 20), 20);
    eventually("its consumption", || (remaining(&nodes[0].server, &caller) == 70).then_some(()));
    assert_eq!(admitted(&nodes[0].server, &caller, 20), 20);
    eventually("the other's", || (remaining(&back.server, &caller) == 50).then_some(()));
}

#[test]
fn cells_learn_of_each_other_from_sqlite() {
    let place = Place::new();
    cells_learn_of_each_other(&place.sqlite("cells"));
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn cells_learn_of_each_other_from_postgres() {
    let postgres = Postgres::start();
    cells_learn_of_each_other(&postgres.database("cells"));
}

/// Without it, a database that restarts cuts the cells off from each other.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn learned_cells_stay_while_the_database_is_away() {
    let mut postgres = Postgres::start();
    let db = postgres.database("cells");
    let cells = free_ports::<2>().map(|port| format!("127.0.0.1:{port}"));
    let start = |at: usize| {
        Node::start(RULES, &db, &["--region", REGIONS[at], "--node", REGIONS[at], "--cell", &cells[at]])
    };
    let nodes = [start(0), start(1)];
    nodes.iter().for_each(|node| wait_for_peers(node, 1));
    let listed = || nodes[0].ask("GET", "/admin/v1/nodes", &[], &Value::Null).json();
    assert_eq!(listed()["database_unavailable"], false);
    postgres.stop("QUIT");
    eventually("the loss of the database", || (listed()["database_unavailable"] == true).then_some(()));
    let caller = json!({"shared": "a"});
    assert_eq!(admitted(&nodes[0].server, &caller, 30), 30);
    eventually("its debit", || (remaining(&nodes[1].server, &caller) == 60).then_some(()));
    nodes.iter().for_each(|node| wait_for_peers(node, 1));
}

/// Without it, the nodes of a region that share a Redis debit each other, or are counted as cells of their own.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn learned_nodes_that_share_a_store_are_one_cell() {
    let (place, stores) = (Place::new(), [Redis::start(), Redis::start()]);
    let (db, ports) = (place.sqlite("cells"), free_ports::<3>());
    let regions = ["eu", "eu", "us"];
    let rules = "
domain: d
descriptors:
  - {key: shared, limit: 90/day}
  - {key: split, limit: 90/day, region: {mode: split, weights: {eu: 2, us: 1}}}
";
    let start = |at: usize| {
        let (cell, store) = (format!("127.0.0.1:{}", ports[at]), stores[usize::from(at == 2)].url());
        let name = format!("n{at}");
        let flags = ["--region", regions[at], "--node", &name, "--cell", &cell, "--store", &store];
        Node::start(rules, &db, &[&flags[..], &["--store-deadline-ms", "5000"]].concat())
    };
    let nodes = [start(0), start(1), start(2)];
    for (node, others) in nodes.iter().zip([1, 1, 2]) {
        wait_for_peers(node, others);
    }
    let caller = json!({"shared": "r"});
    assert_eq!(admitted(&nodes[0].server, &caller, 20) + admitted(&nodes[1].server, &caller, 10), 30);
    eventually("eu's consumption in us", || (remaining(&nodes[2].server, &caller) == 60).then_some(()));
    assert_eq!(admitted(&nodes[2].server, &caller, 20), 20);
    for node in &nodes[..2] {
        eventually("us's consumption, once", || (remaining(&node.server, &caller) == 40).then_some(()));
    }
    assert_eq!(remaining(&nodes[2].server, &json!({"split": "r"})), 30, "by the weights that the rule has");
}

/// Without it, parts of a limit or owners change with each cell that is learned, and the limit is exceeded.
#[test]
fn rules_that_need_to_know_all_cells_are_refused() {
    let place = Place::new();
    let [port] = free_ports();
    let cell = format!("127.0.0.1:{port}");
    for (rule, message) in [
        ("{key: a, limit: 9/day, region: split}", "is divided among the cells, and they are learned"),
        ("{key: a, limit: 9/day, region: owner}", "without an owner: the cells are learned"),
        ("{key: a, concurrency: 9}", "is divided among the cells, and they are learned"),
        ("{key: a, limit: 9/day, region: {mode: split, weights: {eu: 1, us: 1}}}", "their number may change"),
    ] {
        let folder = harness::Folder::new();
        let rules = folder.write("r.yaml", format!("{{domain: d, descriptors: [{rule}]}}"));
        let (rules, db) = (rules.to_str().expect("a plain path"), place.sqlite("refused"));
        let ended = run(&["serve", "--rules", rules, "--db", &db, "--region", "eu", "--cell", &cell]);
        assert!(ended.code == Some(1) && ended.err.contains(message), "{rule}: {}", ended.err);
    }
}
