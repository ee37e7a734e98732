//! In the place of envoyproxy/ratelimit: the real binary with that service's environment, a real Redis, and gRPC's own
//! client. What users would lose is a move that needs nothing but another image.

use crate::harness::{
    self, Folder, NODE, Ratelimit, Redis, XdsServer, calls_at, certificate, eventually, run_with,
};
use serde_json::{Value, json};
use std::path::Path;

mod gateway;
mod policies;

const RULES: &str = "
domain: one
descriptors:
  - key: k
    value: v
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: free
    rate_limit: {unlimited: true}
  - key: shaded
    shadow_mode: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: ns/policy/rule/0
    value: ns/policy/rule/0
    descriptors:
      - key: rule-0-match-0
        rate_limit: {unit: minute, requests_per_unit: 5}
        metadata: {team: {name: shop}}
";

/// A folder with rules as a deployment has them.
fn rules(text: &str) -> Folder {
    let folder = Folder::new();
    std::fs::create_dir_all(folder.join("ratelimit/config")).expect("a folder");
    folder.write("ratelimit/config/one.yaml", text);
    folder
}

fn variables<'a>(folder: &'a Folder, url: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("RUNTIME_ROOT", folder.path().to_str().expect("a plain path")),
        ("RUNTIME_SUBDIRECTORY", "ratelimit"),
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", url),
    ]
}

fn call(entries: &[(&str, &str)]) -> Value {
    json!({"domain": "one", "descriptors": [{"entries": entries}]})
}

fn codes(answers: &[Value]) -> Vec<&str> {
    answers.iter().map(|answer| answer["overallCode"].as_str().unwrap_or("?")).collect()
}

/// Everything that a deployment of that service meets, by its own name.
#[test]
fn it_takes_the_place_of_the_service() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let mut service = Ratelimit::start_by_name(&folder, &variables(&folder, &url)).healthy();
    let calls = json!([
        call(&[("k", "v")]),
        call(&[("k", "v")]),
        call(&[("k", "v")]),
        call(&[("free", "x")]),
        call(&[("nobody", "x")]),
        call(&[("shaded", "x")]),
        call(&[("shaded", "x")]),
        {"domain": "", "descriptors": [{"entries": [["k", "v"]]}]},
        {"domain": "one", "descriptors": []},
        {"health": ""},
        {"health": "ratelimit"},
        {"health": "envoy.service.ratelimit.v3.RateLimitService"},
    ]);
    let answers = service.calls(&calls);
    assert_eq!(codes(&answers[..7]), ["OK", "OK", "OVER_LIMIT", "OK", "OK", "OK", "OK"], "{answers:?}");
    for answer in &answers[..7] {
        let unasked = ["responseHeadersToAdd", "requestHeadersToAdd", "dynamicMetadata", "rawBody"];
        assert!(unasked.iter().all(|field| answer.get(field).is_none()), "{answer}");
    }
    assert_eq!(answers[3]["statuses"][0], json!({"code": "OK", "limitRemaining": 4_294_967_295_u32}));
    assert_eq!(answers[7]["details"], "rate limit domain must not be empty");
    assert_eq!(answers[8]["details"], "rate limit descriptor list must not be empty");
    assert_eq!((&answers[9]["health"], &answers[10]["health"]), (&json!("SERVING"), &json!("SERVING")));
    assert_eq!(answers[11]["error"], "NOT_FOUND");

    let healthy = service.get(service.http, "/healthcheck");
    assert_eq!((healthy.status, healthy.text()), (200, "OK".to_owned()));
    assert_eq!(service.get(service.http, "/v1/check").status, 404);
    let body = call(&[("k", "v")]).to_string();
    let body = body.replace("[[\"k\",\"v\"]]", "[{\"key\":\"k\",\"value\":\"v\"}]");
    let over = service.post("/json", &body);
    assert_eq!(over.status, 429, "{}", over.text());
    assert_eq!(over.json()["overallCode"], "OVER_LIMIT");
    assert!(over.header("ratelimit").is_none() && over.header("retry-after").is_none(), "{over:?}");
    let bad = service.post("/json", "{");
    assert_eq!((bad.status, bad.text()), (400, "Bad Request\n".to_owned()));
    let shown = service.get(service.debug, "/rlconfig").text();
    assert!(
        shown.contains("one.k_v: unit=HOUR requests_per_unit=2, shadow_mode: false, quota_mode: false\n"),
        "{shown}"
    );
    assert!(shown.contains("one.free: unit=UNKNOWN requests_per_unit=0"), "{shown}");
    assert!(shown.contains("one.ns/policy/rule/0_ns/policy/rule/0.rule-0-match-0: unit=MINUTE"), "{shown}");
    let stats = service.get(service.debug, "/stats").text();
    assert!(stats.contains("ratelimit.service.rate_limit.one.k_v.over_limit: 2\n"), "{stats}");
    assert!(service.get(service.debug, "/").text().contains("/rlconfig: "));
    service.wait_for_log("Successfully loaded new configuration");
    service.signal("TERM");
    assert_eq!(service.wait().code(), Some(0), "{}", service.log());
}

/// An outage of Redis must neither keep the ports closed nor stop checks.
#[test]
fn ports_open_without_redis() {
    let folder = rules(RULES);
    let dead = Redis::start().stop();
    let url = dead.url();
    let mut all = variables(&folder, &url);
    all.push(("TOLLGATE_STORE_DEADLINE_MS", "100"));
    let service = Ratelimit::start(&all);
    assert_eq!(service.get(service.http, "/healthcheck").status, 500, "before Redis has answered");
    let answers = service.calls(&json!([call(&[("k", "v")]), {"health": "ratelimit"}]));
    assert_eq!(codes(&answers[..1]), ["OK"], "by a local counter");
    assert_eq!(answers[1]["health"], "NOT_SERVING");
    let _redis = dead.start_again();
    eventually("health", || (service.get(service.http, "/healthcheck").status == 200).then_some(()));
    eventually("gRPC health", || {
        (service.calls(&json!([{"health": "ratelimit"}]))[0]["health"] == "SERVING").then_some(())
    });
}

/// A variable that means nothing here must be named, and one that is wrong must end the start.
#[test]
fn no_variable_is_ignored_in_silence() {
    let folder = rules(RULES);
    let mut all = variables(&folder, "127.0.0.1:1");
    all.extend([
        ("REDIS_POOL_SIZE", "20"),
        ("GRPC_SERVER_TLS_CA_CERT", "/certs/ca.crt"),
        ("TRACING_ENABLED", "true"),
    ]);
    let service = Ratelimit::start(&all);
    service.wait_for_log("TRACING_ENABLED has no effect");
    service.wait_for_log("REDIS_POOL_SIZE has no effect");
    service.wait_for_log("GRPC_SERVER_TLS_CA_CERT is not needed");
    for (name, value, code) in [
        ("PORT", "http", 2),
        ("REDIS_TIMEOUT", "10", 2),
        ("EXTRA_TAGS", "a", 2),
        ("REDIS_TYPE", "MANY", 2),
        ("BACKEND_TYPE", "memcache", 1),
        ("CONFIG_TYPE", "GIT", 1),
        ("LOG_LEVEL", "loud", 1),
        ("PORT", "70000", 1),
        ("GRPC_PORT", "-1", 1),
        ("GRPC_UDS", "/nowhere/socket", 1),
    ] {
        let ended = run_with(&["ratelimit"], &[("USE_STATSD", "false"), (name, value)]);
        assert_eq!(ended.code, Some(code), "{name}: {}", ended.err);
        assert!(ended.err.contains(name), "{name}: {}", ended.err);
    }
    // What is taken is named by its variable: there are no flags.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    for (host, name) in [("HOST", "PORT"), ("GRPC_HOST", "GRPC_PORT")] {
        let mut all = vec![("USE_STATSD", "false"), ("PORT", "0"), ("GRPC_PORT", "0"), ("DEBUG_PORT", "0")];
        all.extend(["HOST", "GRPC_HOST", "DEBUG_HOST"].map(|host| (host, "127.0.0.1")));
        all.push((name, &port));
        let ended = run_with(&["ratelimit"], &all);
        assert_eq!(ended.code, Some(1), "{name}: {}", ended.err);
        assert!(ended.err.contains(&format!("set {host} or {name} to another")), "{name}: {}", ended.err);
    }
    let both = run_with(&["ratelimit"], &[("USE_PROMETHEUS", "true")]);
    assert!(both.code == Some(1) && both.err.contains("more than one stats sink"), "{}", both.err);
}

/// Envoy beside the service in one pod reaches it by a socket, in place of the port.
#[test]
fn grpc_is_served_at_a_unix_socket() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let (url, path) = (format!("127.0.0.1:{}", redis.port()), folder.join("grpc.sock"));
    let mut all = variables(&folder, &url);
    all.push(("GRPC_UDS", path.to_str().expect("a plain path")));
    let mut service = Ratelimit::start(&all).healthy();
    assert_eq!(service.grpc, format!("unix:{}", path.display()));
    let hit = call(&[("k", "v")]);
    let answers = service.calls(&json!([hit, hit, hit, {"health": "ratelimit"}]));
    assert_eq!(codes(&answers[..3]), ["OK", "OK", "OVER_LIMIT"]);
    assert_eq!(answers[3]["health"], "SERVING");
    service.signal("TERM");
    assert_eq!(service.wait().code(), Some(0), "{}", service.log());
    assert!(!path.exists(), "the file is removed");
}

/// A caller that one limit denies keeps what is left of its others, if the operator says so.
#[test]
fn a_denied_request_charges_nothing_if_asked_for() {
    let text = "
domain: one
descriptors:
  - {key: k, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: m, rate_limit: {unit: day, requests_per_unit: 5}}
";
    let (redis, folder) = (Redis::start(), rules(text));
    let url = format!("127.0.0.1:{}", redis.port());
    let both =
        json!({"domain": "one", "descriptors": [{"entries": [["k", "v"]]}, {"entries": [["m", "v"]]}]});
    let look = json!({"domain": "one", "descriptors": [{"entries": [["m", "v"]], "hits": 0}]});
    for (stop, left) in [("false", 1), ("true", 3)] {
        let mut all = variables(&folder, &url);
        all.extend([("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", stop), ("CACHE_KEY_PREFIX", stop)]);
        let service = Ratelimit::start(&all).healthy();
        let tokens =
            |hits: u32| json!({"domain": "one", "descriptors": [{"entries": [["m", "w"]], "hits": hits}]});
        let answers = service.calls(&json!([tokens(4), tokens(3), tokens(1), tokens(0)]));
        assert_eq!(codes(&answers), ["OK", "OVER_LIMIT", "OVER_LIMIT", "OVER_LIMIT"], "attempts count");
        let answers = service.calls(&json!([both, both, both, both, look]));
        assert_eq!(codes(&answers), ["OK", "OK", "OVER_LIMIT", "OVER_LIMIT", "OK"]);
        assert_eq!(answers[4]["statuses"][0]["limitRemaining"], left, "{}", answers[4]);
        for denied in &answers[2..4] {
            assert!(denied["statuses"][1]["limitRemaining"].is_u64(), "the other limit is shown: {denied}");
        }
    }
}

/// One variable makes limits exact. What that takes from gateways that look first and charge afterwards must not go unsaid.
#[test]
fn native_limits_charge_no_denied_request_and_looks_are_named() {
    let text = "domain: one\ndescriptors:\n  - {key: k, rate_limit: {unit: day, requests_per_unit: 2}}\n  \
                - {key: m, rate_limit: {unit: day, requests_per_unit: 5}}\n";
    let (redis, folder) = (Redis::start(), rules(text));
    let url = format!("127.0.0.1:{}", redis.port());
    let mut all = variables(&folder, &url);
    all.push(("TOLLGATE_PROFILE", "native"));
    let service = Ratelimit::start(&all).healthy();
    let both =
        json!({"domain": "one", "descriptors": [{"entries": [["k", "v"]]}, {"entries": [["m", "v"]]}]});
    let answers = service.calls(&json!([both, both, both, both]));
    assert_eq!(codes(&answers), ["OK", "OK", "OVER_LIMIT", "OVER_LIMIT"]);
    assert!(!service.log().contains("hits_addend 0"), "{}", service.log());
    let look = json!({"domain": "one", "descriptors": [{"entries": [["m", "v"]], "hits": 0}]});
    let answers = service.calls(&json!([look]));
    assert_eq!(
        answers[0]["statuses"][0]["limitRemaining"], 3,
        "denied requests charged nothing: {}",
        answers[0]
    );
    service.wait_for_log("a descriptor with hits_addend 0 passes whatever is left");
}

/// Who has Datadog's agent sees the metrics with their tags.
#[test]
fn dogstatsd_gets_datagrams_with_tags() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let agent = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = agent.local_addr().expect("bound").port().to_string();
    let mut all = variables(&folder, &url);
    all.extend([("USE_DOG_STATSD", "true"), ("STATSD_HOST", "127.0.0.1"), ("STATSD_PORT", &port)]);
    all.extend([("EXTRA_TAGS", "env:test,team:a"), ("STATS_FLUSH_INTERVAL", "50ms")]);
    let service = Ratelimit::start(&all).healthy();
    service.calls(&json!([call(&[("k", "v")])]));
    let wanted = "ratelimit.service.rate_limit.one.k_v.total_hits:1|c|#env:test,team:a";
    let mut datagram = [0; 2048];
    loop {
        let length = agent.recv(&mut datagram).expect("a datagram");
        let text = String::from_utf8_lossy(&datagram[..length]);
        if text.lines().any(|line| line == wanted) {
            break;
        }
    }
}

/// Rules arrive as a ConfigMap swaps them, and a broken set changes nothing.
#[test]
fn rules_follow_the_files() {
    let (redis, folder) = (Redis::start(), Folder::new());
    let url = format!("127.0.0.1:{}", redis.port());
    let config = folder.join("ratelimit/config");
    let write = |version: &str, text: &str| {
        let version = config.join(version);
        std::fs::create_dir_all(&version).expect("a folder");
        std::fs::write(version.join("rules"), text).expect("a file");
        let next = config.join("..next");
        std::os::unix::fs::symlink(&version, &next).expect("a link");
        std::fs::rename(&next, config.join("..data")).expect("swapped");
    };
    let file = |domain: &str, count: u32| {
        format!(
            "domain: {domain}\ndescriptors: [{{key: a, value: b, rate_limit: {{unit: hour, requests_per_unit: {count}}}}}]\n"
        )
    };
    write("..1", &file("one", 1));
    std::os::unix::fs::symlink("..data/rules", config.join("rules")).expect("a link");
    let mut all = variables(&folder, &url);
    all.extend([("RUNTIME_WATCH_ROOT", "false"), ("RUNTIME_IGNOREDOTFILES", "true")]);
    let service = Ratelimit::start(&all).healthy();
    let shown = |text: &str| {
        eventually(text, || service.get(service.debug, "/rlconfig").text().contains(text).then_some(()));
    };
    shown("one.a_b: unit=HOUR requests_per_unit=1,");
    write("..2", &file("one", 7));
    shown("one.a_b: unit=HOUR requests_per_unit=7,");
    write("..3", "domain: ''\n");
    eventually("the refusal", || {
        let text = "Error loading new configuration: rules: config file cannot have empty domain";
        service.log().contains(text).then_some(())
    });
    shown("requests_per_unit=7,");
    // A second file of the same domain, in a folder within.
    write("..4", &file("one", 8));
    shown("requests_per_unit=8,");
    std::fs::create_dir_all(config.join("more")).expect("a folder");
    std::fs::write(config.join("more/two"), file("one", 9)).expect("a file");
    eventually("the refusal", || {
        service.log().contains("duplicate domain 'one' in config file").then_some(())
    });
    std::fs::write(config.join("more/two"), file("two", 9)).expect("a file");
    shown("two.a_b: unit=HOUR requests_per_unit=9,");
    // Each set that cannot be read is an error of its own, though the message is the same.
    let errors = || {
        let stats = service.get(service.debug, "/stats").text();
        let line = stats.lines().find_map(|line| line.strip_prefix("ratelimit.service.config_load_error: "));
        line.and_then(|count| count.parse::<u64>().ok()).expect("a count")
    };
    for bytes in [&b"\xff"[..], b"\xfe\n"] {
        let (refusals, before) =
            (|| service.log().matches("more.two: error loading config file").count(), errors());
        let logged = refusals();
        std::fs::write(folder.join("next"), bytes).expect("a file");
        std::fs::rename(folder.join("next"), config.join("more/two")).expect("moved");
        eventually("the refusal", || (refusals() > logged && errors() > before).then_some(()));
    }
    std::fs::write(config.join("more/two"), file("two", 10)).expect("a file");
    shown("two.a_b: unit=HOUR requests_per_unit=10,");
    // Moving the directory away does not mean to remove every limit.
    std::fs::rename(&config, config.with_extension("away")).expect("moved");
    eventually("the refusal", || service.log().contains("config does not exist").then_some(()));
    shown("two.a_b: unit=HOUR requests_per_unit=10,");
    assert_eq!(service.get(service.http, "/healthcheck").status, 200);
}

/// A broken first set starts the service without rules; checks say so until a good one comes.
#[test]
fn a_broken_first_configuration_does_not_keep_it_from_starting() {
    let (redis, folder) = (Redis::start(), rules("domain: one\ndescriptors: [{value: x}]\n"));
    let url = format!("127.0.0.1:{}", redis.port());
    let service = Ratelimit::start(&variables(&folder, &url)).healthy();
    let text = "Error loading new configuration: config.one.yaml: descriptor has empty key";
    service.wait_for_log(text);
    let answer = service.calls(&json!([call(&[("k", "v")])])).remove(0);
    assert_eq!(answer["details"], "no rate limit configuration loaded", "{answer}");
    folder.write("ratelimit/config/one.yaml", RULES);
    eventually("rules", || {
        (service.calls(&json!([call(&[("free", "v")])]))[0]["overallCode"] == "OK").then_some(())
    });
}

/// What is asked for is sent, and only that.
#[test]
fn headers_and_metadata_are_sent_if_asked_for() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let mut all = variables(&folder, &url);
    all.extend([
        ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
        ("LIMIT_LIMIT_HEADER", "X-Limit"),
        ("RESPONSE_DYNAMIC_METADATA", "1"),
        ("SHADOW_MODE", "t"),
    ]);
    let service = Ratelimit::start(&all).healthy();
    let entries = [("ns/policy/rule/0", "ns/policy/rule/0"), ("rule-0-match-0", "x")];
    let deep = json!({"domain": "one", "hits": 2, "descriptors": [{"entries": entries, "hits": 1}]});
    let answers = service.calls(&json!([deep, call(&[("k", "v")]), {"domain": "one", "hits": 9, "descriptors": [{"entries": [["k", "v"]]}]}]));
    let headers = |answer: &Value| -> Vec<(String, String)> {
        let all = answer["responseHeadersToAdd"].as_array().expect("headers").iter();
        all.map(|header| {
            (
                header["key"].as_str().unwrap_or("").to_owned(),
                header["value"].as_str().unwrap_or("").to_owned(),
            )
        })
        .collect()
    };
    let first = headers(&answers[0]);
    assert_eq!(first[0], ("X-Limit".to_owned(), "5".to_owned()));
    assert_eq!(first[1], ("RateLimit-Remaining".to_owned(), "4".to_owned()));
    assert_eq!(first[2].0, "RateLimit-Reset");
    assert!((1..=60).contains(&first[2].1.parse::<u64>().expect("seconds")), "{first:?}");
    let metadata = &answers[0]["dynamicMetadata"];
    assert_eq!(metadata["domain"], "one");
    assert_eq!(metadata["hitsAddend"], 2.0);
    assert_eq!(metadata["descriptors"][0]["hitsAddend"], 1.0);
    assert_eq!(metadata["descriptors"][0]["entries"][1], "rule-0-match-0=x");
    assert_eq!(metadata["metadata"], json!({"team": {"name": "shop"}}));
    // In shadow mode the statuses stay, and the whole passes.
    assert_eq!(answers[2]["overallCode"], "OK");
    assert_eq!(answers[2]["statuses"][0]["code"], "OVER_LIMIT");
}

/// Metrics under the names that dashboards ask for.
#[test]
fn metrics_have_the_names_of_the_service() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let mut all = variables(&folder, &url);
    all.extend([("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "127.0.0.1:0"), ("EXTRA_TAGS", "env:test")]);
    let service = Ratelimit::start(&all).healthy();
    let entries = [("ns/policy/rule/0", "ns/policy/rule/0"), ("rule-0-match-0", "1.2.3.4")];
    let unknown =
        json!({"domain": "zero", "descriptors": [{"entries": [["a", "b"]]}, {"entries": [["c", "d"]]}]});
    let mut calls = vec![json!({"domain": "one", "descriptors": [{"entries": entries}]}); 6];
    calls.extend([
        call(&[("shaded", "x")]),
        call(&[("shaded", "x")]),
        unknown,
        json!({"domain": "", "descriptors": []}),
    ]);
    service.calls(&Value::from(calls));
    let metrics = service.metrics.expect("a port");
    assert_eq!(service.get(metrics, "/").status, 404);
    let text = service.get(metrics, "/metrics").text();
    let labels = r#"domain="one",key1="ns/policy/rule/0_ns/policy/rule/0",key2="rule-0-match-0",env="test""#;
    for (name, count) in [("total_hits", 6), ("within_limit", 5), ("near_limit", 1), ("over_limit", 1)] {
        let line = format!("ratelimit_service_rate_limit_{name}{{{labels}}} {count}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    for line in [
        r#"ratelimit_service_rate_limit_shadow_mode{domain="one",key1="shaded",env="test"} 1"#,
        r#"ratelimit_service_rate_limit_domain_not_found{domain="zero",env="test"} 2"#,
        r#"ratelimit_service_should_rate_limit_error{err_type="service_error",env="test"} 1"#,
        r#"ratelimit_service_config_load_success{env="test"} 1"#,
        r#"ratelimit_service_total_requests{grpc_method="ShouldRateLimit",env="test"} 10"#,
        r#"ratelimit_service_response_time_seconds_count{grpc_method="ShouldRateLimit",env="test"} 9"#,
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert!(text.contains("ratelimit_decisions_total"), "Tollgate's own are there too");
}

/// statsd receives metrics over TCP, with tags.
#[test]
fn statsd_receives_the_counters() {
    use std::io::{BufRead, BufReader};
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let statsd = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = statsd.local_addr().expect("an address").port().to_string();
    let mut all = variables(&folder, &url);
    all.extend([
        ("USE_STATSD", "true"),
        ("STATSD_HOST", "127.0.0.1"),
        ("STATSD_PORT", &port),
        ("STATS_FLUSH_INTERVAL", "100ms"),
        ("EXTRA_TAGS", "env:test"),
    ]);
    let service = Ratelimit::start(&all).healthy();
    service.calls(&json!([call(&[("k", "v")])]));
    let (stream, _) = statsd.accept().expect("a connection");
    let wanted = "ratelimit.service.rate_limit.one.k_v.total_hits.__env=test:1|c";
    let found = BufReader::new(stream).lines().map_while(Result::ok).take(1_000).any(|line| line == wanted);
    assert!(found, "{}", service.log());
}

/// Makes a CA, and returns the file of its certificate.
fn authority(folder: &Folder) -> String {
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let (ca, key) = (path("ca.crt"), path("ca.key"));
    harness::foreign(
        "openssl",
        &[
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", &key, "-out", &ca, "-days", "2",
            "-subj", "/CN=ca",
        ],
    );
    ca
}

fn signed(folder: &Folder, name: &str, subject: &str, dns: &str) {
    let openssl = |words: &[&str]| harness::foreign("openssl", words);
    let path = |end: &str| folder.join(format!("{name}.{end}")).to_str().expect("a path").to_owned();
    let ca = |end: &str| folder.join(format!("ca.{end}")).to_str().expect("a path").to_owned();
    let names = folder.write(format!("{name}.names"), format!("subjectAltName=DNS:{dns}\n"));
    openssl(&[
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        &path("key"),
        "-out",
        &path("csr"),
        "-subj",
        subject,
    ]);
    openssl(&[
        "x509",
        "-req",
        "-in",
        &path("csr"),
        "-CA",
        &ca("crt"),
        "-CAkey",
        &ca("key"),
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        names.to_str().expect("a path"),
        "-out",
        &path("crt"),
    ]);
}

/// Envoy Gateway encrypts the gRPC port, and rotates its certificates by writing the files.
#[test]
fn the_grpc_port_has_tls_with_rotated_certificates_and_client_names() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let ca = authority(&folder);
    signed(&folder, "server", "/CN=server", "localhost");
    signed(&folder, "client", "/CN=client", "*.envoy.test");
    signed(&folder, "stranger", "/CN=stranger", "other.test");
    let (server_crt, server_key) = (path("server.crt"), path("server.key"));
    let mut all = variables(&folder, &url);
    all.extend([
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", &server_crt),
        ("GRPC_SERVER_TLS_KEY", &server_key),
    ]);
    let service = Ratelimit::start(&all).healthy();
    let check = json!([call(&[("free", "x")])]);
    assert_eq!(codes(&calls_at(&service.grpc, &check, &[Path::new(&ca)])), ["OK"], "{}", service.log());
    assert_eq!(calls_at(&service.grpc, &check, &[])[0]["error"], "UNAVAILABLE", "plain text");
    // Another certificate, of another authority.
    certificate(&folder, "next");
    std::fs::copy(folder.join("next.key"), &server_key).expect("copied");
    std::fs::copy(folder.join("next.crt"), &server_crt).expect("copied");
    let next = path("next.crt");
    eventually("the new certificate", || {
        (codes(&calls_at(&service.grpc, &check, &[Path::new(&next)])) == ["OK"]).then_some(())
    });
    drop(service);
    signed(&folder, "server", "/CN=server", "localhost");
    all.extend([("GRPC_CLIENT_TLS_CACERT", ca.as_str()), ("GRPC_CLIENT_TLS_SAN", "a.envoy.test")]);
    let service = Ratelimit::start(&all).healthy();
    let by = |name: &str| {
        let files = [path("ca.crt"), path(&format!("{name}.crt")), path(&format!("{name}.key"))];
        let files: Vec<&Path> = files.iter().map(Path::new).collect();
        calls_at(&service.grpc, &check, &files).remove(0)
    };
    assert_eq!(by("client")["overallCode"], "OK", "{}", service.log());
    assert_eq!(by("stranger")["error"], "UNAVAILABLE", "another name");
    service.wait_for_log("the client's certificate is valid for other.test, not for a.envoy.test");
    assert_eq!(
        calls_at(&service.grpc, &check, &[Path::new(&ca)])[0]["error"],
        "UNAVAILABLE",
        "no certificate"
    );
}

/// A limit per second may be in a Redis of its own; a prefix is before every key.
#[test]
fn limits_per_second_are_in_their_own_redis() {
    let (redis, fast) = (Redis::start(), Redis::start());
    let text = "domain: one\ndescriptors:\n  - {key: s, rate_limit: {unit: second, requests_per_unit: 9}}\n  - {key: d, rate_limit: {unit: day, requests_per_unit: 9}}\n";
    let folder = rules(text);
    let (url, other) = (format!("127.0.0.1:{}", redis.port()), format!("redis://127.0.0.1:{}", fast.port()));
    let mut all = variables(&folder, &url);
    all.extend([
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_SOCKET_TYPE", "tcp"),
        ("REDIS_PERSECOND_URL", &other),
        ("CACHE_KEY_PREFIX", "mine:"),
    ]);
    let service = Ratelimit::start(&all).healthy();
    let (seen, seen_fast) = (redis.monitor(), fast.monitor());
    let answers = service.calls(&json!([call(&[("s", "per-second")]), call(&[("d", "per-day")])]));
    assert_eq!(codes(&answers), ["OK", "OK"]);
    eventually("both stores", || {
        (seen.text().contains("mine:tg1:{per-day}") && seen_fast.text().contains("mine:tg1:{per-second}"))
            .then_some(())
    });
    assert!(!seen.text().contains("per-second}"), "{}", seen.text());
}

/// Envoy Gateway delivers rules over xDS, and the service starts before it has any.
#[test]
fn rules_come_over_xds() {
    let redis = Redis::start();
    let mut manager = XdsServer::start();
    let (url, xds) = (format!("127.0.0.1:{}", redis.port()), manager.address.to_string());
    let service = Ratelimit::start(&[
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", &url),
        ("RUNTIME_ROOT", "/nowhere"),
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", &xds),
        ("CONFIG_GRPC_XDS_NODE_ID", NODE),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
    ])
    .healthy();
    let early = service.calls(&json!([call(&[("k", "v")])])).remove(0);
    assert_eq!(early["details"], "no rate limit configuration loaded", "{early}");
    let key = "ns/policy/rule/0";
    manager.set(
        "1",
        &json!([{"name": "one", "domain": "one", "descriptors": [
            {"key": key, "value": key, "rate_limit": {"unit": "HOUR", "requests_per_unit": 1}}]}]),
    );
    manager.acknowledged("1");
    let calls = json!([call(&[(key, key)]), call(&[(key, key)])]);
    assert_eq!(codes(&service.calls(&calls)), ["OK", "OVER_LIMIT"], "{}", service.log());
    assert!(service.get(service.debug, "/rlconfig").text().contains(&format!("one.{key}_{key}: unit=HOUR")));
    service.wait_for_log("Successfully loaded new configuration");
}

/// What an operator keeps in files for the time without a management server decides until that server answers.
#[test]
fn rules_of_files_decide_until_xds_answers() {
    let (redis, folder, manager) = (Redis::start(), rules(RULES), XdsServer::start());
    let (url, xds) = (format!("127.0.0.1:{}", redis.port()), manager.address.to_string());
    let mut all = variables(&folder, &url);
    all.extend([
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", &xds),
        ("CONFIG_GRPC_XDS_NODE_ID", NODE),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
        // Of the image, for `serve`: that service's variables say where it listens, and it has no Redis protocol.
        ("TOLLGATE_LISTEN_HOST", "127.0.0.2"),
    ]);
    let service = Ratelimit::start(&all).healthy();
    assert_eq!(codes(&service.calls(&json!([call(&[("k", "v")])]))), ["OK"], "{}", service.log());
    assert!(!service.log().contains("127.0.0.2"), "{}", service.log());
}

/// During a rollout both programs count on the same keys.
#[test]
fn counters_are_shared_with_the_service() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let mut all = variables(&folder, &url);
    all.extend([("TOLLGATE_SHARED_KEYS", "envoy"), ("CACHE_KEY_PREFIX", "p:")]);
    let service = Ratelimit::start(&all).healthy();
    let entries = [("ns/policy/rule/0", "ns/policy/rule/0"), ("rule-0-match-0", "a_b")];
    let both =
        json!({"domain": "one", "descriptors": [{"entries": [["k", "v"]]}, {"entries": entries, "hits": 3}]});
    let answers = service.calls(&json!([both]));
    assert_eq!(codes(&answers), ["OK"]);
    assert_eq!(answers[0]["statuses"][1]["limitRemaining"], 2);
    let keys = redis.cli(&["KEYS", "p:one_*"]);
    let hour = keys.lines().find(|key| key.starts_with("p:one_k_v_")).expect(&keys);
    let minute = "p:one_ns/policy/rule/0_ns/policy/rule/0_rule-0-match-0_a_b_";
    let minute = keys.lines().find(|key| key.starts_with(minute)).expect(&keys);
    assert_eq!(
        hour.rsplit('_').next().and_then(|start| start.parse::<u64>().ok()).map(|start| start % 3_600),
        Some(0)
    );
    assert_eq!(redis.cli(&["GET", hour]).trim(), "1");
    assert_eq!(redis.cli(&["GET", minute]).trim(), "3");
    let ttl: u64 = redis.cli(&["TTL", hour]).trim().parse().expect("seconds");
    assert!((3_000..=3_900).contains(&ttl), "{ttl}");
    // The other program counts a hit, and this one sees it.
    redis.cli(&["INCRBY", hour, "1"]);
    let look = json!({"domain": "one", "descriptors": [{"entries": [["k", "v"]], "hits": 0}]});
    let answers = service.calls(&json!([look, call(&[("k", "v")])]));
    assert_eq!(codes(&answers), ["OK", "OVER_LIMIT"], "{answers:?}");
    assert_eq!(redis.cli(&["GET", hour]).trim(), "3", "a denied hit counts too");
}

/// The service itself, built by `make .tools/bin/service_cmd`, answers the same. Without it there is nothing to compare.
#[test]
fn the_service_answers_the_same() {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin/service_cmd");
    let original = std::env::var_os("TOLLGATE_TEST_RATELIMIT").map_or(default, Into::into);
    if !original.exists() {
        harness::note("no envoyproxy/ratelimit: make .tools/bin/service_cmd");
        return;
    }
    let text = RULES.replace("        metadata: {team: {name: shop}}\n", "");
    let (redis, folder) = (Redis::start(), rules(&text));
    let url = format!("127.0.0.1:{}", redis.port());
    let all = variables(&folder, &url);
    let original = Ratelimit::start_original(&original, &all);
    let mut shared = all.clone();
    shared.push(("TOLLGATE_SHARED_KEYS", "envoy"));
    let ours = Ratelimit::start(&shared).healthy();
    let entries = [("ns/policy/rule/0", "ns/policy/rule/0"), ("rule-0-match-0", "x")];
    let deep = |hits: u64| json!({"domain": "one", "descriptors": [{"entries": entries, "hits": hits}]});
    let other = |limit: [u32; 2]| json!({"domain": "one", "descriptors": [{"entries": [["k", "v"]], "limit": limit}]});
    let calls = [
        call(&[("k", "v")]),
        call(&[("k", "w")]),
        call(&[("free", "x")]),
        call(&[("shaded", "x")]),
        json!({"domain": "none", "descriptors": [{"entries": [["k", "v"]]}]}),
        deep(2),
        deep(0),
        deep(9),
        deep(0),
        other([5, 3]),
        other([1, 4]),
        json!({"domain": "one", "hits": 2, "descriptors": [{"entries": [["k", "v"]]}, {"entries": [["k", "v"]]}]}),
    ];
    // The same traffic to each in turn, on counters of its own: that of the first run is removed before the second.
    let run = |service: &dyn Fn(&Value) -> Vec<Value>| {
        redis.cli(&["FLUSHALL"]);
        let mut answers = service(&Value::from(calls.to_vec()));
        for answer in &mut answers {
            for status in answer["statuses"].as_array_mut().into_iter().flatten() {
                // The seconds differ between two runs.
                let reset = status.as_object_mut().and_then(|status| status.remove("durationUntilReset"));
                assert_eq!(reset.is_some(), status.get("currentLimit").is_some(), "{status}");
            }
        }
        answers
    };
    let (theirs, own) = (run(&|calls| calls_at(&original.grpc, calls, &[])), run(&|calls| ours.calls(calls)));
    for ((call, theirs), own) in calls.iter().zip(&theirs).zip(&own) {
        assert_eq!(theirs, own, "{call}");
    }
    // One hit each, on one limit of two.
    redis.cli(&["FLUSHALL"]);
    let one = json!([call(&[("k", "v")])]);
    let mut each = Vec::new();
    for _ in 0..2 {
        each.push(calls_at(&original.grpc, &one, &[]).remove(0)["overallCode"].clone());
        each.push(ours.calls(&one).remove(0)["overallCode"].clone());
    }
    assert_eq!(each, ["OK", "OK", "OVER_LIMIT", "OVER_LIMIT"]);
}

/// The HTTP port can be encrypted as well, with flags that `serve` has too, and ask clients for a certificate.
#[test]
fn the_http_port_can_have_tls_with_client_certificates() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    certificate(&folder, "server");
    certificate(&folder, "client");
    certificate(&folder, "stranger");
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let (server, key, client) = (path("server.crt"), path("server.key"), path("client.crt"));
    let mut all = variables(&folder, &url);
    all.extend([
        ("TOLLGATE_HTTP_TLS_CERT", server.as_str()),
        ("TOLLGATE_HTTP_TLS_KEY", &key),
        ("TOLLGATE_HTTP_CLIENT_CA", &client),
    ]);
    let service = Ratelimit::start(&all);
    let page = format!("https://localhost:{}/healthcheck", service.http.port());
    let curl = |more: &[&str]| {
        let words = [&["-s", "--max-time", "20", "--ipv4", "--cacert", &server, &page], more].concat();
        let output = std::process::Command::new("curl").args(words).output().expect("curl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let by =
        |name: &str| curl(&["--cert", &path(&format!("{name}.crt")), "--key", &path(&format!("{name}.key"))]);
    eventually("health", || (by("client") == "OK").then_some(()));
    assert_eq!((curl(&[]), by("stranger")), (String::new(), String::new()), "no certificate, and another");
}
