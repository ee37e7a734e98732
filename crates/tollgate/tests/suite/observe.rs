//! Seeing what the real binary decides: metrics that Prometheus' own tool finds clean, the decision log and `why`, live
//! figures for many readers, and none of it with a caller's key in it or in a decision's way.

use crate::harness::{
    self, Collector, Folder, Redis, Server, WebConnection, WebResponse, eventually, promtool, run,
};
use serde_json::{Value, json};
use std::net::SocketAddr;

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    name: per-key
    limit: 3/hour
    tiers: {pro: 1000/hour}
    descriptors:
      - {key: endpoint, value: POST /orders, limit: 2/hour, shadow_mode: true, name: orders}
  - {key: slow, limit: {count: 1, period: 1h, burst: 100}, action: delay, name: slow}
";
const KEY: &str = "sk_live_PLANTED0123456789abcdef";

fn admin(server: &Server) -> SocketAddr {
    server.admin.expect("an admin address")
}

fn ask(server: &Server, path: &str, accept: &str) -> WebResponse {
    let head =
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\nconnection: close\r\n\r\n");
    harness::exchange(admin(server), head.as_bytes()).expect("an answer")
}

fn get(server: &Server, path: &str) -> Value {
    let answer = ask(server, path, "*/*");
    assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    answer.json()
}

fn metrics(server: &Server) -> String {
    ask(server, "/metrics", "text/plain").text()
}

fn figure(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

/// Every figure has its line in the documentation, by its name or by how a family begins.
fn documented(text: &str) {
    let page = include_str!("../../../../docs/operations/monitoring.md");
    let names: Vec<&str> = page.split(['`', '{']).filter(|word| word.contains('_')).collect();
    let known = |name: &str| {
        names.iter().any(|known| {
            known.strip_suffix('*').map_or(*known == name, |beginning| name.starts_with(beginning))
        })
    };
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let unknown: Vec<&str> = names.filter(|name| !known(name)).collect();
    assert!(unknown.is_empty(), "docs/operations/monitoring.md does not say what these are: {unknown:?}");
}

/// A misspelled domain is a limit that does not exist: the operator must learn of it.
#[test]
fn requests_of_unknown_domains_are_counted_logged_and_shown() {
    for (flags, allowed, verdict) in
        [(&[][..], true, "allow"), (&["--unknown-domain", "deny"], false, "deny")]
    {
        let server = Server::start_with_rules(RULES, flags);
        for _ in 0..3 {
            assert_eq!(server.check("sh\u{202e}op", &json!({"api_key": "a"})).json()["allowed"], allowed);
        }
        assert_eq!(server.check("d", &json!({"nothing": "matches"})).json()["allowed"], true);
        let name = format!("ratelimit_unknown_domain_requests_total{{verdict=\"{verdict}\"}}");
        eventually("the metric", || (figure(&metrics(&server), &name) == 3.0).then_some(()));
        let shown = get(&server, "/admin/v1/stats")["unknown_domains"].clone();
        assert_eq!(
            (&shown["requests"], &shown["domains"][0]["domain"]),
            (&json!(3), &json!("sh\u{202e}op")),
            "{shown}"
        );
        let log = eventually("the message", || {
            let log = server.log();
            log.contains("requests name domains that have no rules").then_some(log)
        });
        assert_eq!(log.matches("domains that have no rules").count(), 1, "{log}");
        assert!(log.contains("sh\\u{202e}op"), "escaped: {log}");
    }
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs promtool: make test")]
fn metrics_match_the_traffic_and_pass_the_linter() {
    let server = Server::with_rules(RULES);
    for _ in 0..5 {
        server.check("d", &json!({"api_key": KEY, "endpoint": "POST /orders"}));
    }
    server.check("d", &json!({"api_key": "other", "tier": "pro"}));
    server.check("d", &json!({"nothing": "matches"}));
    server.check("elsewhere", &json!({"api_key": KEY}));
    (0..2).for_each(|_| drop(server.check("d", &json!({"slow": "x"}))));
    let text = metrics(&server);
    let count = |rule: &str, verdict: &str, origin: &str, shadow: &str| {
        let labels = format!(
            "domain=\"d\",rule=\"{rule}\",verdict=\"{verdict}\",origin=\"{origin}\",shadow=\"{shadow}\""
        );
        figure(&text, &format!("ratelimit_decisions_total{{{labels}}}"))
    };
    assert_eq!(count("per-key", "deny", "store", "false"), 2.0);
    assert_eq!(count("per-key", "allow", "store", "false"), 4.0, "{text}");
    assert_eq!(count("orders", "deny", "store", "true"), 3.0, "{text}");
    assert_eq!(count("slow", "delay", "store", "false"), 1.0);
    assert_eq!(count("", "allow", "unmatched", "false"), 1.0);
    let other = "ratelimit_decisions_total{domain=\"other\",rule=\"other\",verdict=\"allow\",origin=\"unmatched\",shadow=\"false\"}";
    assert_eq!(figure(&text, other), 1.0, "a domain that a caller made up is no label");
    assert_eq!(figure(&text, "ratelimit_check_duration_seconds_count{protocol=\"http\"}"), 10.0);
    assert_eq!(figure(&text, "ratelimit_remaining_count{tier=\"pro\"}"), 1.0);
    assert!(figure(&text, "process_resident_memory_bytes") > 1e6);
    promtool(&text);
    documented(&text);
    let open = ask(&server, "/metrics", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5");
    assert!(open.header("content-type").is_some_and(|kind| kind.starts_with("application/openmetrics-text")));
    assert!(open.text().ends_with("# EOF\n") && open.text().contains("# TYPE ratelimit_decisions counter"));
}

/// An alarm on how long checks take is about checks: nothing else is among them, and none of them twice.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn only_decisions_are_timed_and_each_once() {
    let redis = Redis::start();
    for store in ["memory", &redis.url()] {
        let flags = ["--store", store, "--store-deadline-ms", "5000", "--decision-log-allowed", "1"];
        let server = Server::start_with_rules(RULES, &flags);
        let client =
            redis::Client::open(format!("redis://{}", server.resp.expect("on"))).expect("an address");
        let mut connection = client.get_connection().expect("a connection");
        let mut pipe = redis::pipe();
        for at in 0..3 {
            pipe.cmd("CL.THROTTLE").arg(format!("k{at}")).arg(&[9, 9, 60]).ignore();
            pipe.cmd("PING").ignore().cmd("COMMAND").arg("DOCS").ignore();
        }
        // A key that is no text goes another way.
        pipe.cmd("CL.THROTTLE").arg(b"\xff").arg(&[9, 9, 60]).ignore();
        pipe.query::<()>(&mut connection).expect("answers");
        for arguments in [&["CL.THROTTLE", "k", "9"][..], &["CL.THROTTLE", "k", "9", "0", "60"], &["NOBODY"]]
        {
            let refused: redis::RedisResult<redis::Value> = arguments[1..]
                .iter()
                .fold(redis::cmd(arguments[0]), |mut all, one| all.arg(one).clone())
                .query(&mut connection);
            refused.expect_err("refused");
        }
        let entries = json!([{"entries": [{"key": "api_key", "value": "json"}]}]);
        let ask = json!({"domain": "d", "descriptors": entries});
        assert_eq!(server.post("/json", &ask).status, 200);
        assert_eq!(server.check("d", &json!({"api_key": "a"})).status, 200);
        let reserved = server.post("/v1/reserve", &json!({"domain": "d", "attributes": {"api_key": "b"}}));
        let settle =
            |name: &Value| server.post("/v1/settle", &json!({"reservation": name, "cost": 1})).status;
        assert_eq!(settle(&reserved.json()["reservation"]), 200);
        assert!(settle(&json!("nobody")) >= 400);
        for path in ["/v1/check", "/v1/reserve", "/json"] {
            assert_eq!(server.post(path, &json!({"domain": 1})).status, 400, "{path}");
        }
        let text = metrics(&server);
        let count = |protocol: &str| {
            figure(&text, &format!("ratelimit_check_duration_seconds_count{{protocol=\"{protocol}\"}}"))
        };
        assert_eq!((count("http"), count("resp")), (3.0, 4.0), "{store}");
        let log = eventually("the decision in the log", || {
            let log = get(&server, "/admin/v1/decisions?key=json");
            log["decisions"].get(0).cloned()
        });
        assert_eq!(log["protocol"], "http", "one name for one protocol");
    }
}

/// Over a store that dies: requests that passed are counted, by rule and reason.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server and promtool: make test")]
fn an_unavailable_store_is_reported() {
    let redis = Redis::start();
    let folder = Folder::new();
    let text = "{domain: d, descriptors: [{key: a, limit: 9/hour, on_error: open, name: open}]}";
    let rules = folder.write("rules.yaml", text);
    let server = Server::start(&["--rules", rules.to_str().expect("plain"), "--store", &redis.url()]);
    assert_eq!(server.check("d", &json!({"a": "1"})).status, 200);
    promtool(&metrics(&server));
    let dead = redis.stop();
    eventually("a decision without the store", || {
        (server.check("d", &json!({"a": "1"})).json()["origin"] == "fail_open").then_some(())
    });
    let text = metrics(&server);
    assert!(figure(&text, "ratelimit_failopen_total{rule=\"open\"}") >= 1.0);
    let decided = "domain=\"d\",rule=\"open\",verdict=\"allow\",origin=\"fail_open\",shadow=\"false\"";
    assert!(figure(&text, &format!("ratelimit_decisions_total{{{decided}}}")) >= 1.0);
    let shard = dead.url().trim_start_matches("redis://").to_owned();
    let errors = ["timeout", "connection", "refused"].map(|kind| {
        figure(&text, &format!("ratelimit_redis_errors_total{{shard=\"{shard}\",kind=\"{kind}\"}}"))
    });
    assert!(errors.iter().sum::<f64>() >= 1.0, "{text}");
    promtool(&text);
    documented(&text);
    let stats = get(&server, "/admin/v1/stats");
    assert_eq!(
        (&stats["node"]["store"], &stats["node"]["breakers"][0]["shard"]),
        (&json!("redis"), &json!(shard))
    );
}

#[test]
fn a_denial_can_be_explained() {
    let server = Server::start_with_rules(RULES, &["--node", "n1", "--decision-log-allowed", "0"]);
    let caller = json!({"api_key": KEY});
    (0..3).for_each(|_| assert_eq!(server.check("d", &caller).status, 200));
    let denied = server.check("d", &caller);
    assert_eq!(denied.status, 429);
    let id = denied.json()["decision_id"].as_str().expect("an id").to_owned();
    assert_eq!(denied.header("x-ratelimit-decision-id"), Some(id.as_str()));

    let why = get(&server, &format!("/admin/v1/decisions/{id}/why"));
    assert_eq!(
        (&why["verdict"], &why["rule"], &why["node"]),
        (&json!("deny"), &json!("per-key"), &json!("n1"))
    );
    assert_eq!(
        (&why["used_before"], &why["limit"]["limit"], &why["protocol"]),
        (&json!(3), &json!(3), &json!("http"))
    );
    let explanation = why["explanation"].to_string();
    assert!(
        explanation.contains("Denied by rule `per-key`") && explanation.contains("3 per 1h"),
        "{explanation}"
    );
    assert!(why["would_pass_at"].as_str() > why["at"].as_str(), "{why}");

    for (query, found) in [
        (format!("key={KEY}"), 1),
        ("key=somebody".to_owned(), 0),
        ("verdict=deny&rule=per-key".to_owned(), 1),
        ("verdict=allow".to_owned(), 0),
        (format!("id={id}"), 1),
        ("from=2020-01-01T00:00:00Z&to=2020-01-02T00:00:00Z".to_owned(), 0),
    ] {
        let decisions = get(&server, &format!("/admin/v1/decisions?{query}"))["decisions"].clone();
        assert_eq!(decisions.as_array().map(Vec::len), Some(found), "{query}: {decisions}");
    }
    for _ in 0..4 {
        server.check("d", &caller);
    }
    let page = get(&server, "/admin/v1/decisions?limit=2");
    let cursor = page["next_cursor"].as_str().expect("more");
    let rest = get(&server, &format!("/admin/v1/decisions?limit=100&cursor={cursor}"));
    assert_eq!((rest["decisions"].as_array().map(Vec::len), &rest["next_cursor"]), (Some(3), &Value::Null));
    for wrong in [
        "decisions?limit=0",
        "decisions?verdict=maybe",
        "decisions?from=now",
        "decisions/xyz/why",
        "stats?seconds=0",
    ] {
        assert_eq!(ask(&server, &format!("/admin/v1/{wrong}"), "*/*").status, 400, "{wrong}");
    }
    let unknown = ask(&server, &format!("/admin/v1/decisions/{}/why", "0".repeat(32)), "*/*");
    assert_eq!(unknown.status, 404, "{}", unknown.text());

    let place = admin(&server).to_string();
    let output = run(&["why", &id, "--admin", &place]);
    assert!(
        output.code == Some(0) && output.out.contains("Denied by rule `per-key`"),
        "{}{}",
        output.out,
        output.err
    );
    let output = run(&["why", "--key", KEY, "--admin", &place, "--json"]);
    let explanation: Value =
        serde_json::from_str(&output.out).unwrap_or_else(|_| panic!("{}{}", output.out, output.err));
    assert_eq!(explanation["rule"], "per-key");
    let made = why["at"].as_str().expect("when").trim_end_matches('Z').to_owned();
    let why_at = |at: &str| run(&["why", "--key", KEY, "--at", at, "--admin", &place]);
    let output = why_at(&made);
    assert!(output.code == Some(0) && output.out.contains("Denied by rule"), "{}{}", output.out, output.err);
    let (_, of_day) = made.split_once('T').expect("a date and a time");
    let output = why_at(&format!("2020-01-01T{of_day}"));
    assert!(output.code == Some(1) && output.err.contains("no decision on this key"), "{}", output.err);
    let output = why_at(&format!("{of_day}[Asia/Tokyo]"));
    assert!(output.code == Some(1) && output.err.contains("zone names are not supported"), "{}", output.err);
    assert_eq!(run(&["why", "--key", "", "--admin", &place]).code, Some(2), "no caller has an empty key");
    let output = run(&["why", &"0".repeat(32), "--admin", &place]);
    assert!(output.code == Some(1) && output.err.contains("no such decision"), "{}", output.err);
}

/// A query for one moment returns that moment, however much came after it.
#[test]
fn a_decision_is_found_in_a_flood() {
    let rules =
        "{domain: d, descriptors: [{key: bad, name: bad, limit: 0/hour}, {key: user, limit: 1000000/hour}]}";
    let server = Server::start_with_rules(rules, &["--decision-log-allowed", "1"]);
    let (bad, good) = (json!({"user": "u1", "bad": "x"}), json!({"user": "u1"}));
    let place = admin(&server).to_string();
    let why = |more: &[&str]| -> Value {
        let output = run(&[&["why", "--key", "u1", "--admin", &place, "--json"], more].concat());
        serde_json::from_str(&output.out).unwrap_or_else(|_| panic!("{}{}", output.out, output.err))
    };
    let flood = |caller: &Value| (0..1_100).for_each(|_| drop(server.check("d", caller)));
    let first = server.check("d", &bad).json()["decision_id"].clone();
    flood(&good);
    let decision = why(&[]);
    assert_eq!(decision["id"], first, "the last denial, and not what was allowed since");
    flood(&bad);
    let at = decision["at"].as_str().expect("a time");
    // Two decisions may be of one millisecond.
    assert_eq!(why(&["--at", at])["at"], at);
    let early = at.parse::<jiff::Timestamp>().expect("a time") - jiff::SignedDuration::from_secs(40);
    assert_eq!(why(&["--at", &early.to_string()])["at"], at, "nothing was before, much is after");
    let late = early - jiff::SignedDuration::from_secs(60);
    let output = run(&["why", "--key", "u1", "--admin", &place, "--at", &late.to_string()]);
    assert!(output.code == Some(1) && output.err.contains("within a minute"), "{}{}", output.out, output.err);
    let output = run(&["why", "--admin", &place]);
    assert!(output.code == Some(2) && output.err.contains("--key"), "{}", output.err);
}

/// The log keeps the beginning of a long value, and a search for the whole value finds it.
#[test]
fn a_long_value_is_found_whatever_its_letters() {
    let server = Server::start_with_rules(RULES, &["--decision-log-allowed", "1"]);
    let long = format!("a{}", "é".repeat(300));
    assert_eq!(server.check("d", &json!({"api_key": long})).status, 200);
    let escaped = long.replace('é', "%C3%A9");
    eventually("the decision", || {
        let found = get(&server, &format!("/admin/v1/decisions?key={escaped}"));
        (found["decisions"].as_array().map(Vec::len) == Some(1)).then_some(())
    });
}

/// A reader of the log from a pipe gets JSON and nothing else; the banner is on standard error.
#[test]
fn a_decision_log_on_standard_output_is_only_json() {
    for format in ["text", "json"] {
        let flags = ["--decision-log", "stdout", "--decision-log-allowed", "1", "--log-format", format];
        let server = Server::start_with_rules(RULES, &flags);
        assert_eq!(server.check("d", &json!({"api_key": KEY})).status, 200);
        let output =
            eventually("a decision", || Some(server.output()).filter(|output| output.ends_with('\n')));
        let records: Vec<Value> =
            output.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
        assert!(records.len() == 1 && records[0]["rule"] == "per-key", "{output}");
        let log = server.log();
        assert!(log.contains("is listening"), "{log}");
        let is_json = |line: &str| serde_json::from_str::<Value>(line).is_ok();
        assert_eq!(log.lines().all(is_json), format == "json", "{log}");
    }
}

/// Two hundred pages left open, most of which do not read: all that do are served, and decisions go on.
#[test]
fn many_can_look_on() {
    let mut server = Server::with_rules(RULES);
    let asked = b"GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut pages: Vec<WebConnection> = (0..200)
        .map(|_| {
            let mut page = WebConnection::to(admin(&server)).expect("a connection");
            page.send(asked).expect("sent");
            page
        })
        .collect();
    let caller = json!({"api_key": KEY});
    let stats = eventually("a second with all four", || {
        server.check("d", &caller);
        let stats = get(&server, "/admin/v1/stats?seconds=60");
        let sum = |name: &str| -> u64 {
            stats["series"][name].as_array().into_iter().flatten().filter_map(Value::as_u64).sum()
        };
        (sum("allow") >= 3 && sum("deny") >= 1).then_some(stats)
    });
    assert!(stats["series"]["p99_us"].as_array().is_some_and(|p99| p99.iter().any(Value::is_u64)), "{stats}");
    assert_eq!(stats["rules"][0]["rule"], "per-key");
    for page in pages.iter_mut().step_by(20) {
        let tick = page.read_until(b"event: tick\n").expect("a tick");
        assert!(String::from_utf8_lossy(&tick).contains("text/event-stream"));
        let data = page.read_until(b"\n\n").expect("its data");
        let data = String::from_utf8_lossy(&data).trim_start_matches("data: ").trim().to_owned();
        let data: Value = serde_json::from_str(data.split("\r\n").next().unwrap_or("")).expect("JSON");
        assert!(data["t"].as_u64().is_some_and(|t| t > 1_600_000_000), "{data}");
    }
    assert_eq!(get(&server, "/admin/v1/nodes")["nodes"].as_array().map(Vec::len), Some(1));
    // They are let go at the end, and do not hold it up.
    server.signal("TERM");
    assert!(server.wait().success());
    drop(pages);
}

#[test]
fn top_callers_are_listed() {
    let server = Server::with_rules(RULES);
    for n in 0..60 {
        let key = if n % 2 == 0 { KEY.to_owned() } else { format!("key-{n}") };
        server.check("d", &json!({"api_key": key, "remote_address": "10.1.2.3"}));
    }
    let top = get(&server, "/admin/v1/top");
    let first = &top["by_rate"][0];
    assert!(first["key_masked"].as_str().is_some_and(|key| key.starts_with("sk_liv…")), "{top}");
    assert!((first["share"].as_f64().unwrap_or(0.0) - 0.5).abs() < 0.01, "{top}");
    assert_eq!(
        (&top["by_denials"][0]["rule"], &top["by_denials"][0]["denied"]),
        (&json!("per-key"), &json!(27))
    );
    let id = first["key_id"].as_str().expect("an id");
    let found = get(&server, &format!("/admin/v1/decisions?key={id}&verdict=deny&limit=1000"));
    assert_eq!(found["decisions"].as_array().map(Vec::len), Some(27));
}

/// Wherever a key could have got to, it has not.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python and promtool: make test")]
fn no_key_appears_in_any_output() {
    let folder = Folder::new();
    let log = folder.join("decisions.ndjson");
    let log_path = log.to_str().expect("plain");
    let mut collector = Collector::start();
    let url = collector.url();
    let flags = ["--decision-log", log_path, "--decision-log-allowed", "1", "--log", "debug", "--otlp", &url];
    let mut server = Server::start_with_rules(RULES, &flags);
    for n in 0..8 {
        server.check("d", &json!({"api_key": KEY, "user": KEY, "endpoint": format!("GET /x?api_key={KEY}"), "n": n.to_string()}));
    }
    let descriptors = json!({"domain": "d", "descriptors": [{"entries": [["api_key", KEY], ["authorization", format!("Bearer {KEY}")]]}]});
    server.post("/v1/check", &descriptors);
    // With more around it in the place where it is expected, and bare elsewhere; spelled as addresses spell it.
    server.check("d", &json!({"authorization": format!("Bearer {KEY}"), "client": KEY, "n": &KEY[8..20]}));
    let escaped = format!("/v1/x%20{}", KEY.replace('_', "%5F"));
    server.check("d", &json!({"api_key": format!("x {KEY}"), "path": escaped}));
    // Values are cut: one in the midst of the key. And of many attributes only some are kept: not the key.
    let long = format!("{KEY}{}", "PLANTED".repeat(6));
    let cut = json!({"api_key": long, "path": format!("/{}/{long}", "x".repeat(200))});
    server.check("d", &cut);
    let mut many: Vec<[String; 2]> = (0..20).map(|n| [format!("a{n}"), KEY.to_owned()]).collect();
    many.push(["x_token".to_owned(), KEY.to_owned()]);
    server.post("/v1/check", &json!({"domain": "d", "descriptors": [{"entries": many}]}));
    let traced = format!(
        "GET /check/orders?api_key={KEY} HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx-api-key: {KEY}\r\n\
         traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\ntracestate: k={KEY}\r\n\r\n"
    );
    // The same caller, who has nothing left.
    assert_eq!(server.exchange(traced.as_bytes()).status, 429);
    let lines = eventually("fourteen lines", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        (text.lines().count() >= 14).then_some(text)
    });
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).expect("a line is JSON");
        assert!(line["id"].is_string() && line["verdict"].is_string(), "{line}");
    }
    let mut outputs = vec![lines, format!("{:?}", collector.wait_for(1))];
    promtool(&metrics(&server));
    for path in ["/metrics", "/admin/v1/decisions", "/admin/v1/stats", "/admin/v1/top", "/admin/v1/nodes"] {
        outputs.push(ask(&server, path, "*/*").text());
    }
    for path in ["/metrics", "/readyz?verbose", "/v1/hot"] {
        outputs.push(server.get(path).text());
    }
    server.signal("TERM");
    assert!(server.wait().success());
    outputs.push(server.log());
    for text in outputs {
        assert!(!text.contains("PLANTED"), "{text}");
    }
}

/// A full disk, and an output that is not read: lines are lost and counted, decisions are not held up.
#[test]
fn broken_outputs_cost_lines_and_nothing_else() {
    let flags = ["--decision-log", "/dev/full", "--decision-log-allowed", "0"];
    let server = Server::start_with_rules(RULES, &flags);
    for _ in 0..100 {
        server.check("d", &json!({"api_key": KEY}));
    }
    eventually("97 lines that were lost", || {
        let lost = figure(&metrics(&server), "ratelimit_decision_log_dropped_total{where=\"output\"}");
        (lost >= 97.0).then_some(())
    });
    assert_eq!(
        get(&server, "/admin/v1/decisions?limit=1000")["decisions"].as_array().map(Vec::len),
        Some(97)
    );
    server.wait_for_log("cannot write log; lines are dropped");
    let refused = run(&["serve", "--http", "127.0.0.1:0", "--decision-log", "/nowhere/log"]);
    assert!(
        refused.code == Some(1) && refused.err.contains("--decision-log /nowhere/log"),
        "{}",
        refused.err
    );
}

/// Makes the server say much: twice, and it is more than a pipe holds.
fn say_much(server: &Server) {
    let modules: serde_json::Map<String, Value> =
        (0..64).map(|number| (format!("m{number}_{}", "x".repeat(900)), json!("info"))).collect();
    let body = json!({"level": "info", "modules": modules}).to_string();
    let request = format!(
        "PUT /admin/v1/log HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = harness::exchange(admin(server), request.as_bytes()).expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// Log messages that are not read are lost and counted, and decisions go on; a reader that returns gets what waited, and what
/// comes, and the number of lost messages.
#[test]
fn unread_log_output_drops_only_log_lines() {
    let (mut server, read) = Server::start_unread(&["--decision-log-allowed", "0"]);
    let lost = eventually("messages that were lost", || {
        say_much(&server);
        let checked = server.check("sample", &json!({"api_key": "k"}));
        assert!([200, 429].contains(&checked.status), "{}", checked.text());
        let lost = figure(&metrics(&server), "ratelimit_log_messages_dropped_total");
        (lost > 0.0).then_some(lost)
    });
    assert!(lost >= 1.0 && server.log().is_empty());
    drop(read);
    let is_logged = |text: &str| server.log().contains(text).then_some(());
    eventually("what waited", || is_logged("open file limit is"));
    eventually("what is missing", || is_logged("log messages dropped; standard error was blocked"));
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    eventually("the last words", || server.log().contains("drained").then_some(()));
}

/// The same at shutdown: a log that is not read does not delay it.
#[test]
fn unread_log_output_does_not_delay_shutdown() {
    let (mut server, _unread) = Server::start_unread(&[]);
    (0..3).for_each(|_| say_much(&server));
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
}
