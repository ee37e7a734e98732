//! A cluster without Redis: three real nodes with counters in memory, each the others' peer, keep one limit in each mode;
//! through links that are cut and healed.

use crate::harness::{Cuttable, Folder, Node, Server, certificate, eventually, run};
use serde_json::{Value, json};
use tollgate_testing::ports;

/// Limits that time does not restore while a test runs.
pub(crate) const RULES: &str = "
domain: d
descriptors:
  - {key: shared, limit: 90/day, region: shared}
  - {key: split, limit: 90/day, region: split}
  - {key: weighted, limit: 90/day, region: {mode: split, weights: {eu: 4, us: 1, ap: 1}}}
  - {key: owned, limit: 90/day, on_error: closed, region: {mode: owner, owner: eu}}
  - {key: local, limit: 90/day, on_error: local, region: {mode: owner, owner: eu}}
  - {key: hashed, limit: 90/day, on_error: closed, region: owner}
  - {key: homed, limit: 90/day, on_error: closed, region: {mode: owner, home: home_region}}
  - {key: leased, limit: 90/day, on_error: closed, region: {mode: leased, owner: eu}}
  - {key: api_key, limit: 90/day, on_error: closed, region: {mode: owner, owner: eu}}
  - {key: both, limit: 5/day}
  - {key: token, value: secret_pattern_*, share_threshold: true, limit: 90/day, region: shared}
";

pub(crate) const REGIONS: [&str; 3] = ["eu", "us", "ap"];

pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    [(); N].map(|()| ports::free())
}

/// Three nodes, and the link from each to each other.
struct Cluster {
    nodes: Vec<Server>,
    links: Vec<(usize, usize, Cuttable)>,
}

impl Cluster {
    fn start() -> Self {
        let ports = free_ports::<3>();
        let pairs = (0..3).flat_map(|from| (0..3).filter(move |to| *to != from).map(move |to| (from, to)));
        let links: Vec<_> = pairs.map(|(from, to)| (from, to, Cuttable::to(ports[to]))).collect();
        let start = |node: usize| {
            let peers = links.iter().filter(|(from, ..)| *from == node);
            let peers: Vec<String> =
                peers.map(|(_, to, link)| format!("{}=http://{}", REGIONS[*to], link.address)).collect();
            let cell = format!("127.0.0.1:{}", ports[node]);
            let mut flags = vec!["--region", REGIONS[node], "--cell", &cell, "--cell-deadline-ms", "5000"];
            peers.iter().for_each(|peer| flags.extend(["--peer", peer]));
            Server::start_with_rules(RULES, &flags)
        };
        let nodes = (0..3).map(start).collect();
        let cluster = Self { nodes, links };
        cluster.wait_for_shares(["1", "1", "1"]);
        cluster
    }

    fn wait_for_shares(&self, shares: [&str; 3]) {
        for (node, share) in self.nodes.iter().zip(shares) {
            let line = format!("ratelimit_region_share {share}");
            eventually(&line, || node.get("/metrics").text().lines().any(|one| one == line).then_some(()));
        }
    }

    /// Cuts or heals all links of one node.
    fn isolate(&self, node: usize, is_cut: bool) {
        for (from, to, link) in &self.links {
            if *from == node || *to == node {
                if is_cut { link.cut() } else { link.heal() }
            }
        }
    }

    /// Sends this many requests to each node in turn; returns how many each admits.
    fn spread(&self, attributes: &Value, each: usize) -> [usize; 3] {
        let mut admitted = [0; 3];
        for _ in 0..each {
            for (node, admitted) in self.nodes.iter().zip(&mut admitted) {
                *admitted += usize::from(node.check("d", attributes).status == 200);
            }
        }
        admitted
    }
}

pub(crate) fn peek(node: &Server, attributes: &Value) -> Value {
    node.post("/v1/check", &json!({"domain": "d", "attributes": attributes, "cost": 0})).json()
}

pub(crate) fn remaining(node: &Server, attributes: &Value) -> u64 {
    let answer = peek(node, attributes);
    answer["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

/// Without it, three nodes admit three times what an operator has written.
#[test]
fn three_nodes_keep_one_limit_in_each_mode() {
    let cluster = Cluster::start();
    let sum = |admitted: [usize; 3]| admitted.iter().sum::<usize>();

    assert_eq!(cluster.spread(&json!({"split": "a"}), 40), [30, 30, 30], "each has a third");
    assert_eq!(cluster.spread(&json!({"weighted": "a"}), 70), [60, 15, 15], "each has its weight");
    assert_eq!(sum(cluster.spread(&json!({"owned": "a"}), 40)), 90, "one cell decides");

    for node in &cluster.nodes {
        let decided = |key: &str| node.check("d", &json!({"hashed": key})).json()["origin"] == "store";
        eventually("owners by hash", || (0..20).all(|n| decided(&format!("warm{n}"))).then_some(()));
    }
    for key in 0..6 {
        let admitted = cluster.spread(&json!({"hashed": format!("k{key}")}), 40);
        assert_eq!(sum(admitted), 90, "one cell decides, whichever it is: {admitted:?}");
    }
    for home in ["us", "ap", "nowhere"] {
        let admitted = cluster.spread(&json!({"homed": "a", "home_region": home}), 40);
        assert_eq!(sum(admitted), 90, "the caller's home decides: {home} {admitted:?}");
    }

    let admitted = sum(cluster.spread(&json!({"leased": "a"}), 120));
    assert!((60..=90).contains(&admitted), "what is leased was deducted: {admitted}");

    // Shared: decided here at once, debited there.
    let caller = json!({"shared": "a"});
    let first = (0..100).filter(|_| cluster.nodes[0].check("d", &caller).status == 200).count();
    assert_eq!(first, 90);
    for node in &cluster.nodes[1..] {
        eventually("the others to debit it", || (remaining(node, &caller) == 0).then_some(()));
        assert_eq!(node.check("d", &caller).status, 429);
    }

    // All or none: what the own limit denies is not charged at the owner, and the other way round.
    let both = json!({"owned": "b", "both": "x"});
    assert_eq!(cluster.nodes[1].check("d", &both).status, 200);
    let before = remaining(&cluster.nodes[1], &json!({"owned": "b"}));
    (0..10).for_each(|_| drop(cluster.nodes[1].check("d", &both)));
    assert_eq!(
        before - remaining(&cluster.nodes[1], &json!({"owned": "b"})),
        4,
        "5 in all, by the limit of 5"
    );
    (0..90).for_each(|_| drop(cluster.nodes[0].check("d", &json!({"owned": "b"}))));
    let left = remaining(&cluster.nodes[2], &json!({"both": "y"}));
    assert_eq!(cluster.nodes[2].check("d", &json!({"owned": "b", "both": "y"})).status, 429);
    assert_eq!(remaining(&cluster.nodes[2], &json!({"both": "y"})), left, "undone where the owner denies");

    // An API key is decided by its owner, and never leaves its cell.
    let key = json!({"api_key": "sk_live_4242424242424242"});
    assert_eq!(sum(cluster.spread(&key, 40)), 90);
    for node in &cluster.nodes {
        assert!(!node.log().contains("sk_live_4242"), "{}", node.log());
    }

    // Neither do what a rule has of one, and keys whose meaning the server is not given.
    let token = json!({"token": "secret_pattern_1"});
    assert_eq!(cluster.nodes[0].check("d", &token).status, 200);
    let throttle = |node: &Server| -> Vec<i64> {
        let address = node.resp.expect("RESP is on");
        let client = redis::Client::open(format!("redis://{address}")).expect("an address");
        let mut command = redis::cmd("CL.THROTTLE");
        command.arg(&["throttled_key", "89", "90", "86400"]);
        command.query(&mut client.get_connection().expect("a connection")).expect("a reply")
    };
    assert_eq!(throttle(&cluster.nodes[0])[..3], [0, 90, 89]);
    for node in &cluster.nodes[1..] {
        eventually("the token's counter", || (remaining(node, &token) == 89).then_some(()));
        eventually("the throttled key", || (throttle(node)[2] < 87).then_some(()));
    }
    let links = || cluster.links.iter().map(|(_, _, link)| link);
    assert!(links().any(|link| link.has_carried(b"shared|")), "links carry names of counters");
    for secret in ["sk_live_4242", "secret_pattern_", "throttled_key"] {
        assert!(!links().any(|link| link.has_carried(secret.as_bytes())), "{secret}");
    }
}

/// Without it, a partition doubles the limit, or its end leaves the cells with different counts.
#[test]
fn a_partition_divides_the_limit_and_its_end_debits_what_was_missed() {
    let cluster = Cluster::start();
    let caller = json!({"shared": "p"});
    cluster.isolate(2, true);
    cluster.wait_for_shares(["0.666666", "0.666666", "0.333333"]);
    let said = cluster.nodes[2].check("d", &json!({"shared": "said"})).json();
    assert_eq!(said["origin"], "regional", "{said}");
    let split = cluster.nodes[2].check("d", &json!({"split": "said"})).json();
    assert_eq!(split["origin"], "store", "whose part is the same whoever answers: {split}");
    let alone = (0..60).filter(|_| cluster.nodes[2].check("d", &caller).status == 200).count();
    assert!((28..=30).contains(&alone), "a third of the limit: {alone}");
    let first = (0..100).filter(|_| cluster.nodes[0].check("d", &caller).status == 200).count();
    assert!((58..=60).contains(&first), "two thirds: {first}");
    assert_eq!(cluster.nodes[0].check("d", &json!({"owned": "p"})).status, 200, "the owner itself");
    let cut_off = cluster.nodes[2].check("d", &json!({"owned": "p"}));
    assert_eq!((cut_off.status, &cut_off.json()["origin"]), (503, &json!("fail_closed")));
    let local = cluster.nodes[2].check("d", &json!({"local": "p"}));
    assert_eq!((local.status, &local.json()["origin"]), (200, &json!("local")));
    let hashed = |node: usize| {
        let one = |n: usize| cluster.nodes[node].check("d", &json!({"hashed": format!("{node}/{n}")})).json();
        (0..20).filter(|n| one(*n)["origin"] == "store").count()
    };
    eventually("the majority to own all counters", || (hashed(0) == 20 && hashed(1) == 20).then_some(()));
    assert_eq!(hashed(2), 0, "a cell without a majority decides nothing by hash");

    cluster.isolate(2, false);
    cluster.wait_for_shares(["1", "1", "1"]);
    for node in &cluster.nodes {
        eventually("all that was consumed", || (remaining(node, &caller) <= 2).then_some(()));
    }
    eventually("the owner", || {
        (cluster.nodes[2].check("d", &json!({"owned": "p"})).status == 200).then_some(())
    });
}

/// Without it, an operator cannot tell why a caller of 30 requests has 40 used, or which region answers for it.
#[test]
fn usage_and_explanations_tell_how_cells_share_a_limit() {
    let [eu, us] = free_ports::<2>().map(|port| format!("127.0.0.1:{port}"));
    let place = Folder::new();
    let start = |region: &str, cell: &str, peer: &str| {
        let db = format!("sqlite:{}", place.join(format!("{region}.db")).display());
        let flags = ["--region", region, "--cell", cell, "--peer", peer, "--cell-deadline-ms", "5000"];
        Node::start(RULES, &db, &flags)
    };
    let nodes = [start("eu", &eu, &format!("us=http://{us}")), start("us", &us, &format!("eu=http://{eu}"))];
    for node in &nodes {
        let is_whole = || node.server.get("/metrics").text().contains("ratelimit_region_share 1\n");
        eventually("the other cell", || is_whole().then_some(()));
    }
    let caller = json!({"shared": "seen"});
    for (node, cost) in nodes.iter().zip([30, 10]) {
        let body = json!({"domain": "d", "attributes": caller, "cost": cost});
        assert_eq!(node.server.post("/v1/check", &body).status, 200);
    }
    let region = |node: &Node, key: &str| {
        let answer = node.ask("GET", &format!("/admin/v1/usage/seen?key={key}"), &[], &Value::Null);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["limits"][0].clone()
    };
    for (node, others) in nodes.iter().zip([10, 30]) {
        eventually("what the other cell has used", || {
            let used = region(node, "shared");
            (used["used"] == 40 && used["region"]["used_by_others"] == others).then_some(())
        });
    }
    let shared = &region(&nodes[1], "shared")["region"];
    assert_eq!(
        (&shared["mode"], &shared["used_by_others"], &shared["regional_only"], &shared["decided_here"]),
        (&json!("shared"), &json!(30), &json!(false), &json!(true))
    );
    assert!(shared["lag_ms"].is_u64(), "{shared}");
    let owned = &region(&nodes[1], "owned")["region"];
    assert_eq!((&owned["owner"], &owned["decided_here"]), (&json!("eu"), &json!(false)), "{owned}");
    let explain = json!({"domain": "d", "attributes": caller});
    let explained = nodes[0].ask("POST", "/admin/v1/explain", &[], &explain).json();
    let rules = explained["rules"].as_array().expect("rules");
    let charge = &rules.iter().find(|rule| rule["finding"] == "limited").expect("a match")["charged"][0];
    assert_eq!(charge["region"]["used_by_others"], 10, "{charge}");
    let admin = format!("http://{}", nodes[0].admin);
    let printed = run(&["usage", "seen", "--key", "shared", "--admin", &admin]).out;
    assert!(printed.contains("region shared, 10 used by other cells, lag "), "{printed}");
    // So does the explanation of a decision, with what was so when it was made.
    let why = |node: &Node, attributes: &Value| {
        let body = json!({"domain": "d", "attributes": attributes, "cost": 60});
        let denied = || node.server.post("/v1/check", &body).json();
        let id = eventually("a denial", || {
            let denied = denied();
            (denied["allowed"] == false).then(|| denied["decision_id"].as_str().expect("an id").to_owned())
        });
        let path = format!("/admin/v1/decisions/{id}/why");
        let logged = eventually("its record", || {
            let answer = node.ask("GET", &path, &[], &Value::Null);
            (answer.status == 200).then(|| answer.json())
        });
        (logged, run(&["why", &id, "--admin", &format!("http://{}", node.admin)]).out)
    };
    let (logged, printed) = why(&nodes[0], &caller);
    let cells = &logged["cells"];
    assert_eq!((&cells["mode"], &cells["used_by_others"]), (&json!("shared"), &json!(10)), "{logged}");
    assert!(cells["lag_ms"].is_u64() && cells["regional_only"] == false, "{cells}");
    assert!(printed.contains("other cells had reported 10 used units"), "{printed}");
    let (logged, printed) = why(&nodes[1], &json!({"owned": "why"}));
    let cells = &logged["cells"];
    assert_eq!((&cells["owner"], &cells["decided_here"]), (&json!("eu"), &json!(false)), "{logged}");
    assert!(printed.contains("A cell of region `eu` decides the limit (`region: owner`)"), "{printed}");
    let top = run(&["top", "--admin", &admin]).out;
    assert!(top.contains("cell eu/") && top.contains(&format!("us {us}  lag ")), "{top}");
}

/// Without it, the others wait for a dead owner, or a restarted cell is taken for the one before.
#[test]
fn a_cell_that_dies_and_returns_is_noticed() {
    let mut cluster = Cluster::start();
    let dead = cluster.nodes.remove(0);
    let flags: Vec<String> = {
        let line = dead.greeting.lines().find(|line| line.contains("cell eu/")).expect("a banner").to_owned();
        let listen = line.split(" on ").nth(1).and_then(|rest| rest.split(',').next()).expect("an address");
        let peers = line.split("peers ").nth(1).expect("peers").split(", ");
        let mut flags = vec!["--region".to_owned(), "eu".to_owned(), "--cell".to_owned(), listen.to_owned()];
        for peer in peers {
            flags.extend(["--peer".to_owned(), peer.replacen('=', "=http://", 1)]);
        }
        flags
    };
    let owned = json!({"owned": "d"});
    assert_eq!(cluster.nodes[0].check("d", &owned).status, 200);
    dead.signal("KILL");
    drop(dead);
    eventually("the owner's death", || {
        (cluster.nodes[0].check("d", &owned).json()["origin"] == "fail_closed").then_some(())
    });
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let back = Server::start_with_rules(RULES, &flags);
    eventually("the owner's return", || (cluster.nodes[0].check("d", &owned).status == 200).then_some(()));
    // Consumption is exchanged with the new process as well.
    let shared = json!({"shared": "d"});
    let admitted = (0..100).filter(|_| cluster.nodes[1].check("d", &shared).status == 200).count();
    assert!(admitted > 0);
    eventually("its debit", || (remaining(&back, &shared) <= 90 - admitted as u64).then_some(()));
}

/// Without it, any client that reaches the port can debit any counter.
#[test]
fn links_are_encrypted_and_both_sides_show_certificates() {
    let folder = Folder::new();
    certificate(&folder, "cell");
    let path = |name: &str| folder.join(name).to_str().expect("a plain path").to_owned();
    let (crt, key) = (path("cell.crt"), path("cell.key"));
    let ports = free_ports::<2>();
    let start = |own: usize| {
        let (cell, url) = (format!("127.0.0.1:{}", ports[own]), format!("https://localhost:{}", ports[own]));
        let peer = format!("{}=https://localhost:{}", REGIONS[1 - own], ports[1 - own]);
        let flags = ["--region", REGIONS[own], "--cell", &cell, "--cell-url", &url, "--peer", &peer];
        let tls = ["--cell-cert", &crt, "--cell-key", &key, "--cell-ca", &crt, "--cell-deadline-ms", "5000"];
        Server::start_with_rules(
            "{domain: d, descriptors: [{key: owned, limit: 9/day, on_error: closed, region: {mode: owner, owner: eu}}]}",
            &[&flags[..], &tls[..]].concat(),
        )
    };
    let (eu, us) = (start(0), start(1));
    let caller = json!({"owned": "a"});
    eventually("the link", || (us.check("d", &caller).status == 200).then_some(()));
    eu.check("d", &caller);
    assert!(remaining(&us, &caller) <= 7);
    // A client without a certificate gets no reply.
    use std::io::{Read, Write};
    let mut plain = std::net::TcpStream::connect(("127.0.0.1", ports[0])).expect("a connection");
    plain.write_all(&[5, 0, 0, 0, 1, 0, 1, 0, 0]).expect("written");
    let mut reply = Vec::new();
    let _ = plain.read_to_end(&mut reply);
    assert!(!reply.windows(2).any(|bytes| bytes == b"eu"), "{reply:?}");
}

/// Without it, an operator finds out in production.
#[test]
fn settings_that_cannot_work_are_refused() {
    for (flags, message) in [
        (vec!["--cell", "127.0.0.1:9"], "a cell has a region; set --region"),
        (vec!["--peer", "us=http://127.0.0.1:9"], "set --cell to the address"),
        (vec!["--region", "eu", "--cell", "192.0.2.1:9"], "set --cell-cert, --cell-key and --cell-ca"),
        (vec!["--region", "eu", "--cell", "0.0.0.0:9"], "set --cell-cert, --cell-key and --cell-ca"),
        (vec!["--region", "eu", "--cell", "127.0.0.1:0"], "set --cell-url"),
        (vec!["--region", "e u", "--cell", "127.0.0.1:9"], "the region of a cell has 1 to 64"),
        (vec!["--region", "eu", "--cell", "127.0.0.1:9", "--cell-cert", "x"], "must be set together"),
        (vec!["--region", "eu", "--cell", "127.0.0.1:9", "--peer", "us"], "is not a region and a URL"),
        (
            vec!["--region", "eu", "--cell", "127.0.0.1:9", "--peer", "us=http://192.0.2.1:9"],
            "http:// is for loopback",
        ),
        (vec!["--region", "eu", "--cell", "127.0.0.1:9", "--peer", "us=https://h:9"], "for https://"),
        (
            vec![
                "--region",
                "eu",
                "--cell",
                "127.0.0.1:9",
                "--peer",
                "us=https://h:9",
                "--cell-cert",
                "c",
                "--cell-key",
                "k",
                "--cell-ca",
                "a",
            ],
            "h:9 is not on loopback; set `identity.api_key.secret_file`",
        ),
        (
            vec!["--region", "eu", "--cell", "127.0.0.1:9", "--peer", "eu=http://127.0.0.1:9"],
            "this is the cell itself",
        ),
        (vec!["--cell-url", "http://127.0.0.1:9"], "--cell-url: has no effect without --cell"),
        (vec!["--region", "eu", "--cell-tick-ms", "100"], "--cell-tick-ms: has no effect without --cell"),
        (vec!["--cell-cert", "c", "--cell-key", "k", "--cell-ca", "a"], "--cell-cert: has no effect"),
    ] {
        let ended = run(&[&["serve"], &flags[..]].concat());
        assert!(ended.code == Some(1) && ended.err.contains(message), "{flags:?}: {}", ended.err);
    }
    let folder = Folder::new();
    let cells = "{listen: 127.0.0.1:9, peers: [us=http://127.0.0.1:10], weights: ";
    for (cells, message) in [
        (format!("{cells}{{eu: 2, us: 1, mars: 1}}}}"), "no cell of a region `mars`"),
        (format!("{cells}{{eu: 2}}}}"), "give the region `us` a weight"),
        ("{weights: {eu: 2}}".to_owned(), "`cells.weights`: has no effect without --cell"),
    ] {
        let config = folder.write("c.yaml", format!("{{region: eu, cells: {cells}}}"));
        let ended = run(&["serve", "--config", config.to_str().expect("a plain path")]);
        assert!(ended.code == Some(1) && ended.err.contains(message), "{cells}: {}", ended.err);
    }
    let rules = folder.write("r.yaml", "{domain: d, descriptors: [{key: a, limit: 9/day, region: split}]}");
    let ended = run(&["serve", "--rules", rules.to_str().expect("a plain path")]);
    assert!(ended.err.contains("this server has no region"), "{}", ended.err);
}

/// Without it a copy of a node, or an old process beside its replacement, admits its cell's part of every limit once more, and
/// nobody notices.
#[test]
fn a_second_process_of_a_cell_denies_and_is_not_ready_until_the_first_has_ended() {
    let rules = "
domain: d
descriptors:
  - {key: shared, limit: 90/day}
  - {key: split, limit: 90/day, region: split}
  - {key: owned, limit: 90/day, on_error: closed, region: {mode: owner, owner: eu}}
  - {key: leased, limit: 90/day, on_error: closed, region: {mode: leased, owner: eu}}
";
    let [eu, us, copy] = free_ports::<3>();
    let start = |region: &str, port: u16, peer: String, more: &[&str]| {
        let cell = format!("127.0.0.1:{port}");
        let mut flags = vec!["--region", region, "--cell", &cell, "--peer", &peer];
        flags.extend(more);
        Server::start_with_rules(rules, &flags)
    };
    let shows = |node: &Server, line: &str| {
        eventually(line, || node.get("/metrics").text().lines().any(|one| one == line).then_some(()));
    };
    let first = start("eu", eu, format!("us=http://127.0.0.1:{us}"), &[]);
    let other = start("us", us, format!("eu=http://127.0.0.1:{eu}"), &[]);
    [&first, &other].into_iter().for_each(|node| shows(node, "ratelimit_region_share 1"));

    // It learns that it is the second one when it reaches another cell.
    let (link, url) = (Cuttable::to(us), format!("http://127.0.0.1:{eu}"));
    link.cut();
    let second = start("eu", copy, format!("us=http://{}", link.address), &["--cell-url", &url]);
    link.heal();
    shows(&second, "ratelimit_region_displaced 1");
    assert_eq!([&first, &other, &second].map(|node| node.get("/readyz").status), [200, 200, 503]);
    for key in ["shared", "split", "owned", "leased"] {
        assert_ne!(second.check("d", &json!({key: "a"})).status, 200, "{key}");
        assert_eq!(first.check("d", &json!({key: "a"})).status, 200, "{key}");
    }
    assert!(
        second.log().contains("another process has the same --region and --cell-url"),
        "{}",
        second.log()
    );

    drop(first);
    shows(&second, "ratelimit_region_displaced 0");
    eventually("the second to be ready", || (second.get("/readyz").status == 200).then_some(()));
    for key in ["shared", "split", "owned"] {
        let admits = || (second.check("d", &json!({key: "b"})).status == 200).then_some(());
        eventually(&format!("the second to decide {key}"), admits);
    }
}
