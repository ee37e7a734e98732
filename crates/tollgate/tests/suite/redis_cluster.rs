//! The binary over a real Redis Cluster: with `shard_by` all limits of a request are one slot and one call.

use crate::harness::{Folder, Monitor, Server, eventually, foreign};
use serde_json::json;
use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};
use tollgate_testing::ports;

/// A cluster of one server that has all slots; its clients speak to it as to a cluster of many.
struct Cluster {
    child: Child,
    port: String,
    _folder: Folder,
}

impl Cluster {
    fn start() -> Self {
        let (port, bus) = (ports::free().to_string(), ports::free().to_string());
        let folder = Folder::new();
        let child = Command::new("redis-server")
            .args([
                "--port",
                &port,
                "--cluster-port",
                &bus,
                "--bind",
                "127.0.0.1",
                "--cluster-enabled",
                "yes",
            ])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed: make setup");
        let cluster = Self { child, port, _folder: folder };
        eventually("an answer of Redis", || {
            std::net::TcpStream::connect(format!("127.0.0.1:{}", cluster.port)).ok()
        });
        eventually("its slots", || {
            cluster.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
            cluster.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok").then_some(())
        });
        cluster
    }

    fn cli(&self, words: &[&str]) -> String {
        foreign("redis-cli", &[&["-p", self.port.as_str()], words].concat())
    }

    /// Returns the number of script calls for requests that were seen so far.
    fn calls(&self, seen: &Monitor) -> usize {
        // What it ran before this one is seen before it.
        let marks = || seen.text().matches("\"ECHO\"").count();
        let before = marks();
        self.cli(&["ECHO", "mark"]);
        eventually("all that it ran", || (marks() > before).then_some(()));
        let key = |line: &str| {
            let words: Vec<_> = line.split('"').skip(1).step_by(2).take(4).map(str::to_owned).collect();
            matches!(words.first()?.as_str(), "EVAL" | "EVALSHA" | "FCALL").then(|| words.get(3).cloned())?
        };
        seen.text().lines().filter_map(key).filter(|key| is_of_a_request(key)).count()
    }

    /// Returns the keys of requests.
    fn keys(&self) -> Vec<String> {
        let keys = self.cli(&["KEYS", "tg1:*"]);
        keys.lines().filter(|key| is_of_a_request(key)).map(str::to_owned).collect()
    }

    fn slots(&self) -> BTreeSet<String> {
        self.keys().iter().map(|key| self.cli(&["CLUSTER", "KEYSLOT", key])).collect()
    }
}

/// Returns whether a key is of a counter with values. Those without are the node's own: its heartbeat, every two seconds, and the probes
/// of servers.
fn is_of_a_request(key: &str) -> bool {
    !key.ends_with('}')
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: user, limit: 9/hour}
  - {key: api_key, name: key, limit: [50/hour, 90/day]}
  - {key: customer, name: customer, limit: 60/hour}
  - {key: endpoint, name: endpoint, limit: 70/hour}
  - {key: endpoint, value: POST /orders, name: orders, algorithm: fixed_window, limit: 70/year}
  - {key: plan, name: shadow, shadow: true, limit: 3/hour}
  - {key: region, name: split, split: 4, limit: 80/hour}
";

/// Without it a check of four limits is as many calls to as many servers, and a denial must be undone in each.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn all_limits_of_a_customers_request_are_one_call_to_one_slot() {
    let cluster = Cluster::start();
    let url = format!("redis+cluster://127.0.0.1:{}", cluster.port);
    let seen = Monitor::at(&cluster.port);
    let flags = ["--store", url.as_str(), "--store-deadline-ms", "10000"];
    let request = |user: &str, endpoint: &str| {
        json!({"user": user, "api_key": format!("key of {user}"), "customer": "acme", "endpoint": endpoint, "plan": "pro",
               "region": "eu"})
    };
    for (head, warns) in [("shard_by: customer", false), ("", true)] {
        cluster.cli(&["FLUSHALL"]);
        let server = Server::start_with_rules(&format!("{head}{RULES}"), &flags);
        let lone = json!({"user": "anonymous"});
        eventually("the store", || (server.check("d", &lone).json()["origin"] == "store").then_some(()));
        let warning = "on Redis Cluster a request's counters need";
        if warns {
            server.wait_for_log(warning);
            continue;
        }
        assert!(!server.log().contains(warning), "{}", server.log());
        cluster.cli(&["FLUSHALL"]);
        // The first check of each kind may have to load a script.
        server.check("d", &request("warm", "GET /"));
        cluster.cli(&["FLUSHALL"]);
        let before = cluster.calls(&seen);
        for n in 0..9 {
            let endpoint = if n % 2 == 0 { "GET /" } else { "POST /orders" };
            let answer = server.check("d", &request("ada", endpoint));
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.json()["limits"].as_array().map(Vec::len), Some(7), "{}", answer.text());
        }
        assert_eq!(cluster.calls(&seen) - before, 9, "one call each");
        assert_eq!(cluster.slots().len(), 1, "{:?}", cluster.keys());
        // A denial changes nothing, in any of them, without a further call to undo it.
        let before = cluster.calls(&seen);
        let denied = server.check("d", &request("ada", "GET /"));
        assert_eq!((denied.status, &denied.json()["denied_by"]), (429, &json!("user")), "{}", denied.text());
        assert_eq!(cluster.calls(&seen) - before, 1);
        let left = |answer: &serde_json::Value, rule: &str| {
            let limits = answer["limits"].as_array().expect("limits").clone();
            limits.into_iter().find(|limit| limit["rule"] == rule).map(|limit| limit["remaining"].clone())
        };
        let other = server.check("d", &request("bob", "GET /")).json();
        assert_eq!(left(&other, "customer"), Some(json!(50)), "{other}");
        // Other customers lie elsewhere, and requests without the attribute are limited all the same.
        let mut umbrella = request("ada", "GET /");
        umbrella["customer"] = json!("umbrella");
        assert_eq!(server.check("d", &umbrella).status, 200);
        assert_eq!(cluster.slots().len(), 2, "{:?}", cluster.keys());
        let passed = (0..12).filter(|_| server.check("d", &json!({"user": "lone"})).status == 200).count();
        assert_eq!(passed, 9);
    }
}
