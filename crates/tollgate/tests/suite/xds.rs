//! Rules from a management server (go-control-plane) over xDS, with limits checked by calls of Envoy's rate limit service.

use crate::harness::{Folder, NODE, Run, Server, XdsServer, eventually, foreign, run, run_with};
use serde_json::{Value, json};
use std::path::Path;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

/// A call of the rate limit service: OK or OVER_LIMIT.
async fn call(server: &Server, domain: &str, entries: &[(&str, &str)]) -> &'static str {
    let channel = Endpoint::from_shared(format!("http://{}", server.grpc)).expect("a URL").connect().await;
    let mut client = Grpc::new(channel.expect("a connection"));
    client.ready().await.expect("ready");
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    let entries = entries.iter().map(entry).collect();
    let descriptors = vec![RateLimitDescriptor { entries, ..Default::default() }];
    let request = RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 };
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit".parse().expect("a path");
    let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
    let response = client.unary(tonic::Request::new(request), path, codec).await;
    match response.expect("a response").into_inner().overall_code {
        1 => "OK",
        2 => "OVER_LIMIT",
        other => panic!("code {other}"),
    }
}

/// How many calls in a row pass, up to twenty.
fn passes(server: &Server, domain: &str, entries: &[(&str, &str)]) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let calls = async {
        for passed in 0..20 {
            if call(server, domain, entries).await == "OVER_LIMIT" {
                return passed;
            }
        }
        20
    };
    runtime.block_on(calls)
}

/// A domain whose key `user` has a limit per day, so that no window ends during a test.
fn per_day(domain: &str, count: u32) -> Value {
    json!({"name": domain, "domain": domain, "descriptors": [
        {"key": "user", "rate_limit": {"unit": "DAY", "requests_per_unit": count}}]})
}

fn flags(xds: &XdsServer) -> Vec<String> {
    let address = xds.address.to_string();
    [
        "--rules-from",
        "xds",
        "--xds-server",
        &address,
        "--xds-node-id",
        NODE,
        "--xds-retry-ms",
        "50",
        "--xds-max-retry-ms",
        "200",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn start(xds: &XdsServer, more: &[&str]) -> Server {
    let flags = flags(xds);
    let mut all: Vec<&str> = flags.iter().map(String::as_str).collect();
    all.extend(more);
    Server::start(&all)
}

fn details(server: &Server) -> Value {
    server.get("/readyz?verbose").json()
}

fn tollgate(server: &Server, args: &[&str]) -> Run {
    let url = format!("http://{}", server.admin.expect("an admin address"));
    run_with(args, &[("TOLLGATE_ADMIN_URL", &url)])
}

/// This is what a user of Envoy Gateway replaces the original with.
#[test]
fn limits_come_from_a_management_server() {
    let mut xds = XdsServer::start();
    let route = "httproute/default/shop/rule/0/match/0/*";
    let gateway = json!({"name": "default/eg/http", "domain": "default/eg/http", "descriptors": [
        {"key": route, "value": route, "descriptors": [
            {"key": "rule-0-match-0", "value": "rule-0-match-0", "rate_limit": {"unit": "DAY", "requests_per_unit": 2}},
            {"key": "masked_remote_address", "value": "10.0.0.0/8", "descriptors": [
                {"key": "remote_address", "rate_limit": {"unit": "HOUR", "unlimited": false, "requests_per_unit": 100}}]},
            {"key": "default/policy/rule/0", "rate_limit": {"unlimited": true}}]}]});
    xds.set("1", &json!([gateway, per_day("other", 3)]));
    let server = start(&xds, &["--xds-node-metadata", "zone=a", "--xds-header", "X-Token=t0"]);

    assert_eq!(
        passes(&server, "default/eg/http", &[(route, route), ("rule-0-match-0", "rule-0-match-0")]),
        2
    );
    assert_eq!(passes(&server, "default/eg/http", &[(route, route), ("rule-0-match-0", "else")]), 20);
    assert_eq!(passes(&server, "default/eg/http", &[(route, route), ("default/policy/rule/0", "x")]), 20);
    assert_eq!(passes(&server, "other", &[("user", "a")]), 3);

    // The stream asks for everything without a version, and acknowledges.
    let first = xds.events("request").remove(0);
    assert_eq!((&first["version"], &first["nonce"], &first["names"]), (&json!(""), &json!(""), &json!(0)));
    assert_eq!((&first["node"], &first["metadata"]), (&json!(NODE), &json!({"zone": "a"})));
    assert_eq!(first["type"], "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig");
    assert_eq!(xds.events("open")[0]["headers"]["x-token"], json!(["t0"]));
    xds.acknowledged("1");

    // A response is the whole truth: domains that are no longer in it are gone. Counters stay.
    xds.set("2", &json!([per_day("other", 5)]));
    xds.acknowledged("2");
    assert_eq!(
        passes(&server, "other", &[("user", "a")]),
        1,
        "four of five are used: under this profile a refused call counts"
    );
    assert_eq!(
        passes(&server, "default/eg/http", &[(route, route), ("rule-0-match-0", "rule-0-match-0")]),
        20
    );

    // Operators see it as any other source.
    let readiness = details(&server);
    assert_eq!(
        (&readiness["rules"]["source"], &readiness["rules"]["domains"]),
        (&json!("xds"), &json!(["other"]))
    );
    let state = &readiness["xds"];
    assert_eq!(
        (&state["connected"], &state["version"], &state["resources"]),
        (&json!(true), &json!("2"), &json!(1))
    );
    assert_eq!((&state["error"], &state["refused"]), (&Value::Null, &Value::Null));
    let metrics = server.get("/metrics").text();
    for line in [
        "ratelimit_xds_connected 1",
        "ratelimit_xds_responses_total{result=\"accepted\"} 2",
        "ratelimit_xds_has_config 1",
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
    let shown = tollgate(&server, &["rules", "show", "current", "--json"]);
    assert!(
        shown.out.contains("xds/other") && shown.out.contains("requests_per_unit: 5"),
        "{}{}",
        shown.out,
        shown.err
    );
    for text in ["Connection to xDS Management Server is successful", "Successfully loaded new configuration"]
    {
        server.wait_for_log(text);
    }
    assert!(!server.log().contains("t0"), "headers may be secret: {}", server.log());
}

#[test]
fn a_bad_response_is_refused_with_the_reason_and_the_last_good_one_stays() {
    let mut xds = XdsServer::start();
    xds.set("1", &json!([per_day("shop", 2)]));
    let server = start(&xds, &[]);
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);

    // One bad resource refuses all of them.
    let bad = json!({"name": "broken", "domain": "broken", "descriptors": [
        {"key": "user", "rate_limit": {"unit": "UNKNOWN", "requests_per_unit": 1}}]});
    xds.set("2", &json!([per_day("shop", 9), bad]));
    let refusal = xds.request("a refusal", |request| request["error"] != "");
    assert_eq!((&refusal["version"], &refusal["nonce"]), (&json!("1"), &json!("2")), "{refusal}");
    let reason = refusal["error"].as_str().expect("text");
    assert!(reason.starts_with("xds/broken: ") && reason.contains("unknown"), "{reason}");
    assert_eq!(passes(&server, "shop", &[("user", "b")]), 2);
    let readiness = details(&server);
    assert_eq!((&readiness["xds"]["version"], &readiness["xds"]["refused"]), (&json!("1"), &json!(reason)));
    assert_eq!(readiness["rules"]["error"], json!(reason));
    assert!(server.get("/metrics").text().contains("ratelimit_xds_refused 1"));
    server.wait_for_log("Error loading new configuration: xds/broken: ");
    let log = server.log();
    assert_eq!(log.matches("Error loading new configuration: xds/broken: ").count(), 1, "{log}");

    // The next good one is taken as usual.
    xds.set("3", &json!([per_day("shop", 4)]));
    xds.acknowledged("3");
    assert_eq!(passes(&server, "shop", &[("user", "c")]), 4);
    let readiness = details(&server);
    assert_eq!((&readiness["xds"]["refused"], &readiness["rules"]["error"]), (&Value::Null, &Value::Null));

    // So is one that was in effect before the bad one.
    xds.set("4", &json!([per_day("shop", 9), bad]));
    xds.request("another refusal", |request| request["error"] != "" && request["version"] == "3");
    xds.set("5", &json!([per_day("shop", 4)]));
    xds.acknowledged("5");
    let readiness = details(&server);
    assert_eq!((&readiness["xds"]["refused"], &readiness["rules"]["error"]), (&Value::Null, &Value::Null));
    let refusals = xds.events("request").iter().filter(|request| request["error"] != "").count();
    assert!(refusals < 500, "a server that repeats itself is answered slowly: {refusals}");
}

/// Envoy Gateway counts versions from 1 at each start; the original keeps the limits of before.
#[test]
fn a_restarted_server_with_the_same_version_is_believed() {
    let mut xds = XdsServer::start();
    xds.set("1", &json!([per_day("shop", 2)]));
    let server = start(&xds, &[]);
    xds.acknowledged("1");
    let address = xds.stop();
    eventually("the loss of the stream", || (details(&server)["xds"]["connected"] == false).then_some(()));
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2, "rules stay while the server is away");
    let log = eventually("the reason", || {
        Some(server.log())
            .filter(|log| log.contains("Failed to receive configuration from xDS Management Server: "))
    });
    assert!(log.contains("keeping the current rules"), "{log}");

    // It listens before it has a snapshot, as Envoy Gateway does.
    let mut xds = XdsServer::start_at(&address.to_string(), &[]);
    let first = xds.request("a new stream", |_| true);
    assert_eq!((&first["version"], &first["nonce"]), (&json!(""), &json!("")), "{first}");
    xds.set("1", &json!([per_day("shop", 5)]));
    xds.acknowledged("1");
    assert_eq!(passes(&server, "shop", &[("user", "b")]), 5);
    assert_eq!(details(&server)["xds"]["connected"], true);
    let text = "Connection to xDS Management Server is successful";
    eventually("both messages", || (server.log().matches(text).count() >= 2).then_some(()));
    assert_eq!(server.log().matches(text).count(), 2, "{}", server.log());
}

/// Envoy Gateway sends it when the last policy goes.
#[test]
fn an_empty_list_is_a_configuration() {
    let mut xds = XdsServer::start();
    xds.set("1", &json!([per_day("shop", 2)]));
    let server = start(&xds, &[]);
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);
    xds.set("2", &json!([]));
    xds.acknowledged("2");
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 20);
    assert_eq!(details(&server)["rules"]["count"], 0);
}

#[test]
fn the_order_of_resources_makes_no_new_revision() {
    let mut xds = XdsServer::start();
    xds.set("1", &json!([per_day("a", 2), per_day("b", 2), per_day("c", 2)]));
    let server = start(&xds, &[]);
    let revision = details(&server)["rules"]["revision"].clone();
    for version in ["2", "3", "4"] {
        xds.set(version, &json!([per_day("c", 2), per_day("a", 2), per_day("b", 2)]));
        xds.acknowledged(version);
    }
    assert_eq!(details(&server)["rules"]["revision"], revision);
    server.wait_for_log("Successfully loaded new configuration");
    assert_eq!(server.log().matches("Successfully loaded new configuration").count(), 1, "{}", server.log());
}

#[test]
fn files_and_xds_give_rules_together() {
    let folder = Folder::new();
    let path = folder.write("own.yaml", "domain: own\ndescriptors: [{key: user, limit: 3/day}]\n");
    let mut xds = XdsServer::start();
    xds.set("1", &json!([per_day("shop", 2)]));
    let server = start(&xds, &["--rules", path.to_str().expect("a plain path")]);
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);
    assert_eq!(passes(&server, "own", &[("user", "a")]), 3);

    // A domain in both is an error of the update that brings it, and names both.
    xds.set("2", &json!([per_day("own", 9)]));
    let refusal = xds.request("a refusal", |request| request["error"] != "");
    let reason = refusal["error"].as_str().expect("text");
    assert!(reason.contains("xds/own") && reason.contains("own.yaml"), "{reason}");
    xds.set("3", &json!([per_day("shop", 4)]));
    xds.acknowledged("3");
    folder.write("own.yaml", "domain: shop\ndescriptors: [{key: user, limit: 3/day}]\n");
    let error =
        eventually("the failed reload", || details(&server)["rules"]["error"].as_str().map(str::to_owned));
    assert!(error.contains("xds/shop") && error.contains("own.yaml"), "{error}");

    // An update of one source neither changes the other nor hides its error.
    xds.set("4", &json!([per_day("shop", 5)]));
    xds.acknowledged("4");
    assert_eq!(passes(&server, "shop", &[("user", "b")]), 5);
    assert_eq!(passes(&server, "own", &[("user", "b")]), 3);
    assert!(details(&server)["rules"]["error"].is_string());
    folder.write("own.yaml", "domain: own\ndescriptors: [{key: user, limit: 6/day}]\n");
    eventually("the repaired file", || details(&server)["rules"]["error"].is_null().then_some(()));
    assert_eq!(passes(&server, "own", &[("user", "c")]), 6);
    assert_eq!(passes(&server, "shop", &[("user", "c")]), 5);

    // What was refused because of a file is asked for again once the file makes room.
    xds.set("5", &json!([per_day("own", 7)]));
    eventually("the refusal", || details(&server)["xds"]["refused"].as_str().map(|_| ()));
    folder.write("own.yaml", "domain: mine\ndescriptors: [{key: user, limit: 6/day}]\n");
    xds.acknowledged("5");
    assert_eq!(passes(&server, "own", &[("user", "d")]), 7);
    assert!(details(&server)["rules"]["error"].is_null());

    // And a file that was refused because of xDS is read again once xDS makes room.
    folder.write("own.yaml", "domain: own\ndescriptors: [{key: user, limit: 8/day}]\n");
    eventually("the failed reload", || details(&server)["rules"]["error"].as_str().map(|_| ()));
    xds.set("6", &json!([per_day("shop", 5)]));
    xds.acknowledged("6");
    eventually("the file", || details(&server)["rules"]["error"].is_null().then_some(()));
    assert_eq!(passes(&server, "own", &[("user", "e")]), 8);
}

/// With a database the rule manager applies rules; published ones are not used.
#[test]
fn it_works_beside_a_database() {
    let folder = Folder::new();
    let db = format!("sqlite:{}", folder.join("control.db").display());
    let mut xds = XdsServer::start();
    xds.set("1", &json!([per_day("shop", 2)]));
    let server = start(&xds, &["--db", &db]);
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);
    xds.set("2", &json!([per_day("shop", 5)]));
    xds.acknowledged("2");
    assert_eq!(passes(&server, "shop", &[("user", "b")]), 5);
    assert_eq!(details(&server)["rules"]["source"], "xds");
}

#[test]
fn a_start_may_wait_for_rules_or_not() {
    let mut xds = XdsServer::start();
    let server = start(&xds, &["--xds-wait", "false"]);
    let readiness = details(&server);
    assert_eq!((&readiness["rules"]["count"], &readiness["xds"]["version"]), (&json!(0), &Value::Null));
    assert!(server.get("/metrics").text().contains("ratelimit_xds_has_config 0"));
    xds.set("1", &json!([per_day("shop", 2)]));
    xds.acknowledged("1");
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);
}

/// The original does not end at all while it waits.
#[test]
fn a_start_that_waits_ends_at_a_signal() {
    let xds = XdsServer::start();
    let flags = flags(&xds);
    let ended = std::thread::spawn(move || {
        let mut all = vec!["serve"];
        all.extend(flags.iter().map(String::as_str));
        // The shell ends it by its own id, once its stream is open.
        run(&all)
    });
    xds.request("a stream", |_| true);
    // Its process is the one that has the other end of the stream.
    let peer = foreign("sh", &["-c", &format!("ss -Htnp state established dport = :{}", xds.address.port())]);
    let id = peer.split("pid=").nth(1).and_then(|rest| rest.split(',').next()).expect("a process").to_owned();
    foreign("sh", &["-c", &format!("kill -TERM {id}")]);
    let run = ended.join().expect("ended");
    assert_eq!(run.code, Some(0), "{}{}", run.out, run.err);
    assert!(run.out.is_empty(), "no listener was open: {}", run.out);
}

/// An authority, and a certificate of it for each of these names: `NAME.pem` and `NAME.key`.
fn certificates(folder: &Folder, names: &[(&str, &str)]) {
    let path = |name: &str| folder.join(name).to_str().expect("a plain path").to_owned();
    foreign(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=ca",
            "-keyout",
            &path("ca.key"),
            "-out",
            &path("ca.pem"),
        ],
    );
    for (name, dns) in names {
        let (key, request, extension) = (path(&format!("{name}.key")), path("request"), path("extension"));
        folder.write("extension", format!("subjectAltName=DNS:{dns}\n"));
        foreign(
            "openssl",
            &["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=*", "-keyout", &key, "-out", &request],
        );
        foreign(
            "openssl",
            &[
                "x509",
                "-req",
                "-days",
                "2",
                "-in",
                &request,
                "-CA",
                &path("ca.pem"),
                "-CAkey",
                &path("ca.key"),
                "-CAcreateserial",
                "-extfile",
                &extension,
                "-out",
                &path(&format!("{name}.pem")),
            ],
        );
    }
}

/// Envoy Gateway's server refuses a client without a certificate of its CA.
#[test]
fn mutual_tls_with_a_name_and_files_that_change() {
    let folder = Folder::new();
    certificates(&folder, &[("server", "envoy-gateway"), ("client", "*.envoy-gateway-system")]);
    let path = |name: &str| folder.join(name).to_str().expect("a plain path").to_owned();
    let (certificate, key, ca) = (path("server.pem"), path("server.key"), path("ca.pem"));
    let mut xds =
        XdsServer::start_at("127.0.0.1:0", &["-cert", &certificate, "-key", &key, "-client-ca", &ca]);
    xds.set("1", &json!([per_day("shop", 2)]));
    let own = (path("own.pem"), path("own.key"));
    let tls = ["--xds-wait", "false", "--xds-tls-ca", &ca, "--xds-tls-cert", &own.0, "--xds-tls-key", &own.1];
    let error = |server: &Server, part: &str| {
        eventually(part, || {
            let readiness = details(server);
            readiness["xds"]["error"].as_str().filter(|error| error.contains(part)).map(str::to_owned)
        })
    };

    // The name is checked.
    std::fs::copy(path("client.pem"), &own.0).expect("copied");
    std::fs::copy(path("client.key"), &own.1).expect("copied");
    let server = start(&xds, &tls);
    error(&server, "not valid for name");
    drop(server);

    // The files are read at each connect.
    std::fs::remove_file(&own.1).expect("removed");
    let server = start(&xds, &[&tls[..], &["--xds-tls-name", "envoy-gateway"]].concat());
    error(&server, "own.key");
    assert!(Path::new(&own.0).exists());
    std::fs::copy(path("client.key"), &own.1).expect("copied");
    xds.acknowledged("1");
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);
    drop(server);

    // Without a certificate the reason is reported.
    let server =
        start(&xds, &["--xds-wait", "false", "--xds-tls-ca", &ca, "--xds-tls-name", "envoy-gateway"]);
    error(&server, "ertificate");
}

#[test]
fn a_server_that_cannot_be_reached_is_reported_once_and_then_rarely() {
    let address = tollgate_testing::ports::free_address().to_string();
    let server = Server::start(&[
        "--rules-from",
        "xds",
        "--xds-server",
        &address,
        "--xds-wait",
        "false",
        "--xds-retry-ms",
        "1",
        "--xds-max-retry-ms",
        "5",
    ]);
    let failures = || {
        let text = server.get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix("ratelimit_xds_stream_failures_total "));
        line.and_then(|count| count.parse::<u64>().ok()).expect("a count")
    };
    eventually("many attempts", || (failures() > 20).then_some(()));
    let line =
        format!("Failed to receive configuration from xDS Management Server: cannot connect to {address}: ");
    server.wait_for_log(&line);
    let log = server.log();
    assert_eq!(log.matches(&line).count(), 1, "{log}");
    let readiness = details(&server);
    assert!(readiness["xds"]["error"].as_str().is_some_and(|error| error.contains("refused")), "{readiness}");
    assert_eq!(readiness["xds"]["connected"], false);
}

/// A response beyond the bound is not read; the log names the setting.
#[test]
fn a_response_has_a_bound() {
    let mut xds = XdsServer::start();
    let many: Vec<Value> = (0..200).map(|number| per_day(&format!("domain-{number}"), 1)).collect();
    xds.set("1", &json!(many));
    let server = start(&xds, &["--xds-wait", "false", "--xds-max-message", "4KiB"]);
    let error = eventually("the reason", || details(&server)["xds"]["error"].as_str().map(str::to_owned));
    assert!(error.contains("too large") && error.contains("4096"), "{error}");
    xds.set("2", &json!([per_day("shop", 2)]));
    xds.acknowledged("2");
    assert_eq!(passes(&server, "shop", &[("user", "a")]), 2);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    for (flags, part) in [
        (&["--rules-from", "xds"][..], "--xds-server"),
        (&["--xds-server", "localhost:1"], "--rules-from xds"),
        (&["--rules-from", "xds", "--xds-server", "http://localhost:1"], "is not an address"),
        (&["--rules-from", "xds", "--xds-server", "localhost:1", "--xds-tls-cert", "x"], "--xds-tls-key"),
        (&["--rules-from", "xds", "--xds-server", "localhost:1", "--xds-header", "secret"], "NAME=VALUE"),
        (
            &[
                "--rules-from",
                "xds",
                "--xds-server",
                "localhost:1",
                "--xds-retry-ms",
                "9",
                "--xds-max-retry-ms",
                "8",
            ],
            "--xds-retry-ms",
        ),
    ] {
        let run = run(&[&["serve"], flags].concat());
        assert_eq!(run.code, Some(1), "{flags:?}: {}", run.err);
        assert!(run.err.contains(part) && !run.err.contains("secret"), "{flags:?}: {}", run.err);
    }
}
