//! Consumption for billing, through the real binary: what survives a kill and a shutdown, how it is read, and how a
//! webhook gets it.

use crate::databases::Place;
use crate::harness::{Folder, Node, Server, eventually, run};
use ring::hmac;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use tollgate_control::{Billing, BillingRetention, ControlPlane};
use tollgate_core::{Clock, ManualClock, SystemClock, Timestamp};
use tollgate_engine::Consumption;

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    name: calls
    billing: true
    limit: [100000/hour, {count: 1000000, period: day, cost: tokens}]
  - key: path
    limit: 1000/minute
";

const SECRET: &str = "a secret of the test, long enough";

fn send(node: &Node, key: &str, requests: usize) {
    for _ in 0..requests {
        let attributes = json!({"api_key": key, "path": "/", "tokens": 3});
        assert_eq!(node.server.check("d", &attributes).status, 200);
    }
}

fn rows(node: &Node, query: &str) -> Vec<Value> {
    let answer = node.ask("GET", &format!("/admin/v1/consumption?{query}"), &[], &Value::Null);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["rows"].as_array().expect("rows").clone()
}

/// Requests and tokens of all rows.
fn sums(node: &Node) -> (i64, i64) {
    let all = rows(node, "limit=1000");
    let sum = |meter: &str, field: &str| {
        let own = all.iter().filter(|row| row["meter"] == meter);
        own.map(|row| row[field].as_i64().expect("a number")).sum()
    };
    (sum("requests", "units"), sum("tokens", "units"))
}

#[test]
fn a_kill_loses_nothing_that_was_written_and_a_shutdown_nothing_at_all() {
    let place = Place::new();
    let db = place.sqlite("billing");
    let mut node = Node::start(RULES, &db, &[]);
    send(&node, "sk_live_4242424242424242", 20);
    send(&node, "sk_live_1111111111111111", 5);
    eventually("consumption in the database", || (sums(&node) == (25, 75)).then_some(()));
    node.server.signal("KILL");
    node.server.wait();

    let mut node = Node::start(RULES, &db, &[]);
    assert_eq!(sums(&node), (25, 75), "what was written is there");
    send(&node, "sk_live_4242424242424242", 6);
    eventually("consumption of the second process", || (sums(&node) == (31, 93)).then_some(()));
    // A shutdown writes what has just been counted.
    send(&node, "sk_live_4242424242424242", 7);
    node.server.signal("TERM");
    assert!(node.server.wait().success(), "{}", node.server.log());

    let node = Node::start(RULES, &db, &[]);
    assert_eq!(sums(&node), (38, 114));
    for row in rows(&node, "") {
        let caller = row["caller"].as_str().expect("a caller");
        assert!(caller.starts_with("sk_liv…"), "a key is masked: {row}");
        assert_eq!(
            (&row["key"], &row["rule"], &row["domain"]),
            (&json!("api_key"), &json!("calls"), &json!("d"))
        );
    }
    // By caller: its key, or the id that rows have.
    let own = rows(&node, "granularity=month&caller=sk_live_1111111111111111");
    assert_eq!(own.len(), 2, "{own:?}");
    let id = own[0]["caller_id"].as_str().expect("an id");
    assert_eq!(rows(&node, &format!("granularity=month&caller={id}&rule=calls&limit=10")), own);
    assert_eq!(rows(&node, "granularity=month&rule=other"), Vec::<Value>::new());
    let wrong = node.ask("GET", "/admin/v1/consumption?granularity=week", &[], &Value::Null);
    assert_eq!(
        (wrong.status, wrong.text().contains("must be hour or month")),
        (400, true),
        "{}",
        wrong.text()
    );

    // The same rows in pages, as NDJSON and by the command line.
    let all = rows(&node, "limit=1000");
    let first = node.ask("GET", "/admin/v1/consumption?limit=1", &[], &Value::Null).json();
    let cursor = first["next_cursor"].as_str().expect("more");
    let rest = rows(&node, &format!("limit=1000&cursor={cursor}"));
    assert_eq!((&first["rows"][0], &rest[..]), (&all[0], &all[1..]));
    let lines = |text: &str| -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let accept = [("accept", "application/x-ndjson")];
    let streamed = node.ask("GET", "/admin/v1/consumption?limit=1", &accept, &Value::Null);
    assert_eq!(lines(&streamed.text()), all);
    let admin = format!("http://{}", node.admin);
    let exported = run(&["consumption", "export", "--admin", &admin, "--from", "2020-01-01"]);
    assert_eq!((exported.code, lines(&exported.out)), (Some(0), all), "{}", exported.err);
    let metrics = node.server.get("/metrics").text();
    assert!(metrics.contains("ratelimit_billing_pending_rows 0\n"), "{metrics}");
    assert!(metrics.contains("ratelimit_billing_dropped_units_total 0\n"), "{metrics}");
}

#[test]
fn rules_that_cannot_be_billed_say_so() {
    let server = Server::with_rules(RULES);
    eventually("a warning", || server.log().contains("no consumption is recorded; set --db").then_some(()));
    let folder = Folder::new();
    let secret = folder.write("secret", "short");
    let secret = secret.to_str().expect("a plain path");
    let hook = ["serve", "--billing-webhook", "http://127.0.0.1:9/hunter2"];
    for (flags, expected) in [
        (&[][..], "--billing-webhook and --billing-webhook-secret-file must be set together"),
        (&["--billing-webhook-secret-file", secret], "--billing-webhook requires --db"),
        (&["--billing-webhook-secret-file", secret, "--db", "sqlite:x.db"], "the secret is too short"),
    ] {
        let ended = run(&[&hook[..], flags].concat());
        assert_eq!(ended.code, Some(1), "{}", ended.err);
        assert!(ended.err.contains(expected) && !ended.err.contains("hunter2"), "{}", ended.err);
    }
}

/// What a receiver was sent: the signature and the body.
type Posts = Arc<Mutex<Vec<(String, String)>>>;

/// A receiver that answers with these statuses, and then with 204.
fn receiver(statuses: &'static [u16]) -> (SocketAddr, Posts) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (address, posts) = (listener.local_addr().expect("an address"), Posts::default());
    let seen = Arc::clone(&posts);
    std::thread::spawn(move || {
        let mut statuses = statuses.iter();
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(stream);
            let (mut signature, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                    break;
                }
                let (name, value) = line.trim().split_once(": ").unwrap_or_default();
                match name {
                    "tollgate-signature" => signature = value.to_owned(),
                    "content-length" => length = value.parse().expect("a length"),
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            if reader.read_exact(&mut body).is_err() {
                continue;
            }
            let status = statuses.next().copied().unwrap_or(204);
            let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            // Recorded first: a test that has seen the response's effect finds the post.
            seen.lock().expect("posts").push((signature, String::from_utf8(body).expect("text")));
            let _ = reader.get_mut().write_all(answer.as_bytes());
        }
    });
    (address, posts)
}

/// Writes consumption of an earlier time, as a node that no longer runs.
fn consumed(db: &str, at: Timestamp, callers: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let clock = Arc::new(ManualClock::at(at));
        let control = ControlPlane::open(db, clock).await.expect("a database");
        let display = Box::new(|_: &str, value: &str| value.to_owned());
        let billing = Billing::new(Arc::clone(&control), display, BillingRetention::default());
        for n in 0..callers {
            billing.meter().record(&Consumption {
                domain: "d",
                rule: "r",
                meter: "cost",
                key: "tenant",
                caller: &format!("tenant {n}"),
                units: 5,
                requests: 1,
                at,
            });
        }
        billing.flush().await.expect("a database");
        control.close().await;
    });
}

fn ids(body: &str) -> Vec<String> {
    let body: Value = serde_json::from_str(body).expect("JSON");
    assert!(body["installation"].is_string());
    let rows = body["rows"].as_array().expect("rows").iter();
    rows.map(|row| row["id"].as_str().expect("an id").to_owned()).collect()
}

#[test]
fn a_webhook_gets_every_row_until_it_accepts_it() {
    let place = Place::new();
    let db = place.sqlite("webhook");
    let earlier = Timestamp::from_micros(SystemClock::new().now().as_micros() - 3 * 3_600_000_000);
    consumed(&db, earlier, 700);
    let folder = Folder::new();
    let secret = folder.write("secret", format!("{SECRET}\n"));
    let (address, posts) = receiver(&[500, 400]);
    let url = format!("http://{address}/hook?key=1");
    let flags =
        ["--billing-webhook", &url, "--billing-webhook-secret-file", secret.to_str().expect("a plain path")];
    let mut node = Node::start(RULES, &db, &flags);
    // The current hour is not sent.
    send(&node, "open", 1);
    let sent = eventually("all posts", || {
        let posts = posts.lock().expect("posts").clone();
        (posts.len() >= 4).then_some(posts)
    });
    assert_eq!(sent[0].1, sent[1].1, "what is refused is sent again");
    assert_eq!(sent[1].1, sent[2].1);
    let mut all = [ids(&sent[2].1), ids(&sent[3].1)].concat();
    assert_eq!((all.len(), ids(&sent[2].1).len()), (700, 500));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 700, "each row once");
    for (signature, body) in &sent {
        let (time, digits) =
            signature.strip_prefix("t=").and_then(|rest| rest.split_once(",v1=")).expect("both");
        let expected = hmac::sign(
            &hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes()),
            format!("{time}.{body}").as_bytes(),
        );
        let expected: String = expected.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits, expected);
    }
    eventually("the sender's numbers", || {
        let metrics = node.server.get("/metrics").text();
        let is_counted = metrics.contains("ratelimit_billing_webhook_rows_total 700\n");
        (is_counted && metrics.contains("ratelimit_billing_webhook_failures_total 2\n")).then_some(())
    });
    node.server.signal("TERM");
    assert!(node.server.wait().success());

    // A correction of a sent hour, and nothing else, is what a later process sends.
    consumed(&db, earlier, 1);
    let _node = Node::start(RULES, &db, &flags);
    let corrected = eventually("the correction", || posts.lock().expect("posts").get(4).cloned());
    assert_eq!(ids(&corrected.1).len(), 1);
    assert!(all.contains(&ids(&corrected.1)[0]), "under the same id");
    let body: Value = serde_json::from_str(&corrected.1).expect("JSON");
    assert_eq!((&body["rows"][0]["units"], &body["rows"][0]["caller"]), (&json!(10), &json!("tenant 0")));
}
