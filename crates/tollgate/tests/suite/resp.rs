//! The Redis protocol, spoken by third-party clients: redis-py, the `redis` crate, redis-cli, redis-benchmark.

use crate::harness::{self, Folder, Redis, Server, Stopwatch, eventually, foreign_client, note, run};
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: per-user, limit: 10/hour}
  - {key: login, name: login, class: security, limit: 10/hour}
";

fn resp(server: &Server) -> SocketAddr {
    server.resp.expect("the Redis protocol is on")
}

fn connect(server: &Server) -> redis::Connection {
    let client = redis::Client::open(format!("redis://{}", resp(server))).expect("an address");
    client.get_connection().expect("a connection")
}

/// What redis-cli prints.
fn cli(server: &Server, arguments: &[&str]) -> String {
    let address = resp(server);
    let output = Command::new("redis-cli")
        .args(["-h", &address.ip().to_string(), "-p", &address.port().to_string()])
        .args(arguments)
        .output()
        .expect("redis-cli is installed: make setup");
    let text = String::from_utf8_lossy(&output.stdout).trim().replace('\n', " ");
    format!("{text}{}", String::from_utf8_lossy(&output.stderr).trim())
}

/// Makes calls whose replies count whole seconds, with a key of their own: again, with another key, where they did not end
/// within one.
fn within_a_second<T>(mut calls: impl FnMut(&str) -> T) -> T {
    let mut attempt = 0;
    eventually("calls within a second", || {
        attempt += 1;
        let watch = Stopwatch::start();
        let replies = calls(&format!("k{attempt}"));
        (watch.elapsed() < Duration::from_millis(900)).then_some(replies)
    })
}

type Five = (i64, i64, i64, i64, i64);

fn throttle(connection: &mut redis::Connection, words: &str) -> redis::RedisResult<Five> {
    let mut command = redis::cmd("CL.THROTTLE");
    words.split(' ').for_each(|word| {
        command.arg(word);
    });
    command.query(connection)
}

/// Programs that use redis-cell move over without a change.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn redis_py_reads_responses_as_from_redis_cell() {
    let server = Server::with_rules(RULES);
    let report = foreign_client("resp.py", &server);
    note(&report);
    assert!(report.ends_with(" passed, 0 failed\n"), "{report}");
}

/// Nodes over one Redis must give the same answers, and share what they count.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server and Python: make test")]
fn the_answers_are_the_same_over_redis() {
    let redis = Redis::start();
    let url = redis.url();
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let flags =
        ["--rules", rules.to_str().expect("a plain path"), "--store", &url, "--store-deadline-ms", "5000"];
    let nodes = [Server::start(&flags), Server::start(&flags)];
    for node in &nodes {
        eventually("the node on Redis", || {
            cli(node, &["TG.PEEK", "d", "user", "x"]).ends_with("store").then_some(())
        });
    }
    let report = foreign_client("resp.py", &nodes[0]);
    note(&report);
    assert!(report.ends_with(" passed, 0 failed\n"), "{report}");
    let [mut one, mut other] = [connect(&nodes[0]), connect(&nodes[1])];
    assert_eq!(throttle(&mut one, "shared 1 1 3600").expect("a reply").2, 1);
    assert_eq!(throttle(&mut other, "shared 1 1 3600").expect("a reply").2, 0);

    // Without a store an inline limit is an error; a rule is decided by its fail policy.
    drop(redis.stop());
    let lost = eventually("the loss of Redis", || throttle(&mut one, "shared 1 1 3600 0").err());
    assert_eq!(lost.code(), Some("TGUNAVAIL"), "{lost}");
    eventually("a rule's own policy", || {
        cli(&nodes[0], &["TG.CHECK", "d", "login", "x"]).contains("fail_closed").then_some(())
    });
}

/// The same calls in memory and in Redis end in the same numbers, also where a key's limit changes between calls.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn numbers_may_change_from_call_to_call() {
    let redis = Redis::start();
    let servers =
        [Server::start(&[]), Server::start(&["--store", &redis.url(), "--store-deadline-ms", "5000"])];
    for server in &servers {
        let mut connection = connect(server);
        eventually("a reply", || throttle(&mut connection, "warm 1 1 1").ok());
        let mut calls = |name: &str, each: &[&str]| -> Vec<Five> {
            within_a_second(|key| {
                let mut call = |numbers: &&str| {
                    throttle(&mut connection, &format!("{name}-{key} {numbers}")).expect(numbers)
                };
                each.iter().map(&mut call).collect()
            })
        };
        let replies = calls("burst", &["9 1 3600 6", "19 1 3600 1", "2 1 3600 1", "2 1 60 1"]);
        assert_eq!(replies[0], (0, 10, 4, -1, 21_600));
        assert_eq!(replies[1], (0, 20, 13, -1, 25_200), "a larger burst has more left");
        assert_eq!(replies[2], (1, 3, 0, 18_000, 25_200), "a smaller one owes what was used");
        assert_eq!(replies[3].0, 1, "and so by another period");
        // Three a minute and seven a minute have no common whole unit of time.
        let replies = calls("common", &["6 7 60 3", "2 3 60 0"]);
        assert_eq!(replies[0].2, 4);
        assert_eq!(replies[1].2, 0, "the same units used");
        let replies = calls("back", &["6 7 3600 3", "99 100 3600 0", "99 100 3600 1", "6 7 3600 0"]);
        assert_eq!(replies[0].2, 4);
        assert_eq!(replies[1], (0, 100, 97, -1, 1_543), "which come back as they were taken");
        assert_eq!(replies[2], (0, 100, 96, -1, 144), "until a call is allowed");
        assert_eq!(replies[3].2, 3);
    }
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-cli: make test")]
fn redis_cli_and_redis_benchmark_are_content() {
    let server = Server::with_rules(RULES);
    let replies = within_a_second(|key| {
        let call = |more: &[&str], cost: &str| {
            cli(&server, &[more, &["CL.THROTTLE", key, "15", "30", "60", cost]].concat())
        };
        [call(&[], "1"), call(&["-3"], "0")]
    });
    assert_eq!(replies, ["0 16 15 -1 2", "0 16 15 -1 2"]);
    assert!(cli(&server, &["-3", "TG.CHECK", "d", "user", "u"]).contains("rule per-user"));
    assert!(cli(&server, &["GET", "x"]).contains("unknown command 'GET'"));
    let address = resp(&server);
    let output = Command::new("redis-benchmark")
        .args(["-h", &address.ip().to_string(), "-p", &address.port().to_string()])
        .args(["-q", "-n", "20000", "-c", "20", "-P", "16", "-r", "100"])
        .args(["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"])
        .output()
        .expect("redis-benchmark is installed: make setup");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("requests per second"), "{text}");
}

/// A password rejects clients without it, and is never shown.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-cli: make test")]
fn a_password_is_asked_for() {
    let folder = Folder::new();
    let file = folder.write("password", "hunter2\n");
    let server = Server::start(&["--resp-password-file", file.to_str().expect("a plain path")]);
    assert_eq!(cli(&server, &["CL.THROTTLE", "u", "15", "30", "60"]), "NOAUTH Authentication required.");
    assert_eq!(cli(&server, &["PING"]), "NOAUTH Authentication required.");
    assert!(cli(&server, &["AUTH", "hunter3"]).starts_with("WRONGPASS"));
    assert!(cli(&server, &["AUTH", "somebody", "hunter2"]).starts_with("WRONGPASS"));
    assert!(cli(&server, &["HELLO", "3"]).starts_with("NOAUTH"));
    let asked = ["--no-auth-warning", "-a", "hunter2", "CL.THROTTLE", "u", "15", "30", "3600"];
    assert_eq!(cli(&server, &asked), "0 16 15 -1 120");
    let open = |url: String| redis::Client::open(url).and_then(|client| client.get_connection());
    let mut connection = open(format!("redis://:hunter2@{}/?protocol=resp3", resp(&server))).expect("let in");
    assert_eq!(throttle(&mut connection, "u 15 30 3600 0").expect("a reply").2, 15);
    let Err(error) = open(format!("redis://:hunter3@{}", resp(&server))) else { panic!("let in") };
    assert_eq!(error.kind(), redis::ErrorKind::AuthenticationFailed, "{error}");
    assert!(!server.log().contains("hunter") && !server.greeting.contains("hunter"));
    let empty = folder.write("empty", "\n");
    let refused = run(&["serve", "--resp-password-file", empty.to_str().expect("a plain path")]);
    assert!(refused.code == Some(1) && refused.err.contains("empty"), "{}", refused.err);
}

#[test]
fn it_can_be_switched_off() {
    let server = Server::start(&["--resp", "off"]);
    assert_eq!(server.resp, None);
    let refused = run(&["serve", "--resp", "nowhere"]);
    assert!(refused.code == Some(2) && refused.err.contains("127.0.0.1:8080, or off"), "{}", refused.err);
}

/// Inline limits are in metrics and in the decision log, over either store; the key is masked.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn inline_limits_are_recorded() {
    let redis = Redis::start();
    let url = redis.url();
    for flags in [&[][..], &["--store", &url, "--store-deadline-ms", "5000"]] {
        let server = Server::start_with_rules(RULES, flags);
        let mut connection = connect(&server);
        eventually("the node's store", || throttle(&mut connection, "warm 9 1 3600").ok());
        let key = "sk_live_PLANTED0123456789abcdef";
        let mut pipe = redis::pipe();
        for _ in 0..8 {
            pipe.cmd("CL.THROTTLE").arg(key).arg("2 1 3600".split(' ').collect::<Vec<_>>());
        }
        let answers: Vec<Five> = pipe.query(&mut connection).expect("replies");
        assert_eq!(answers.iter().filter(|answer| answer.0 == 1).count(), 5);
        let admin = server.admin.expect("an admin address");
        let get = |path: &str| {
            let asked = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
            harness::exchange(admin, asked.as_bytes()).expect("an answer")
        };
        let metrics = get("/metrics").text();
        let denied = "ratelimit_decisions_total{domain=\"cl.throttle\",rule=\"cl.throttle\",verdict=\"deny\",origin=\"store\",shadow=\"false\"} 5\n";
        assert!(metrics.contains(denied), "{metrics}");
        let found = get(&format!("/admin/v1/decisions?key={key}&verdict=deny"));
        let log = found.json()["decisions"].as_array().cloned().unwrap_or_default();
        assert_eq!(log.len(), 5, "{}", found.text());
        assert_eq!((&log[0]["rule"], &log[0]["protocol"]), (&"cl.throttle".into(), &"resp".into()));
        // Inline limits have no quota; their decisions are counted under no tier.
        let listed = get("/admin/v1/top").json()["by_denials"][0].clone();
        assert_eq!(
            (&listed["rule"], &listed["actionable"]),
            (&"cl.throttle".into(), &false.into()),
            "{listed}"
        );
        assert!(metrics.contains("ratelimit_remaining_count{tier=\"none\"} 9\n"), "{metrics}");
        let admin_url = format!("http://{admin}");
        let why = run(&["why", "--admin", &admin_url, "--key", key]);
        assert!(
            why.out.contains("3 of 3 units were in use (1 per 1h, burst 3, gcra)"),
            "{}{}",
            why.out,
            why.err
        );
        assert!(why.out.contains("Inline limit from the request"), "{}", why.out);
        assert!(![metrics, found.text(), why.out].iter().any(|text| text.contains("PLANTED")));
    }
}
