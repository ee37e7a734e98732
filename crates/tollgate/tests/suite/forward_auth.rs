//! `/check` behind the real nginx, Caddy, HAProxy, Traefik and Envoy, each on the configuration in `examples/`: limits
//! bite, callers get the fields, none can impersonate another, and what was denied passes again when it may.

use crate::harness::{
    Folder, Proxy, Server, Service, Stopwatch, WebResponse, eventually, exchange_from, run,
};

/// A caller's own address, and another's.
const ONE: &str = "127.0.0.2";
const OTHER: &str = "127.0.0.3";

// An hour refills one of three in twenty minutes: no test takes as long.
const RULES: &str = "
domain: web
descriptors:
  - key: remote_address
    descriptors:
      - {key: endpoint, value: 'POST /login', name: logins, limit: 3/hour}
      - {key: endpoint, value: 'GET /users/{id}', name: users, limit: 3/hour}
      - {key: endpoint, value: 'GET /heal', name: heal, limit: 1/second}
      - {key: path, value: /lesser, name: lesser, limit: 1/hour, action: degrade}
  - {key: api_key, name: per-key, limit: 2/hour}
  - {key: host, value: hidden.example, name: hidden, limit: 0/hour}
";

const SETTINGS: &str = "
rules: [rules.yaml]
http: 127.0.0.1:0
grpc: 127.0.0.1:0
identity: {routes: ['POST /login', 'GET /users/{id}', 'GET /heal']}
";

fn serve(more: &str) -> (Server, Folder) {
    let folder = Folder::new();
    folder.write("rules.yaml", RULES);
    let path = folder.write("tollgate.yml", format!("{SETTINGS}{more}"));
    (Server::start(&["--config", path.to_str().expect("a plain path")]), folder)
}

/// What a proxy hands on to callers of what may pass.
#[derive(PartialEq)]
enum OnPass {
    ToCaller,
    ToService,
}

/// What every proxy must do.
fn holds_behind(
    name: &'static str,
    main: &str,
    on_pass: &OnPass,
    settings: &str,
) -> (Proxy, Service, Server) {
    let (server, _folder) = serve(settings);
    let service = Service::start();
    let proxy = Proxy::start(name, main, &server, &service);
    let log_in = |source: &str, headers: &str| proxy.ask(source, "POST", "/login", headers);
    let context = |answer: &WebResponse| {
        format!("{name}: {} {:?}\n{}\n{}", answer.status, answer.headers, answer.text(), proxy.output())
    };

    eventually("the first answer", || (proxy.ask(OTHER, "GET", "/", "").status == 200).then_some(()));
    let before = service.served();
    for left in [2, 1, 0] {
        let answer = log_in(ONE, "");
        assert_eq!((answer.status, answer.text().as_str()), (200, "hello"), "{}", context(&answer));
        let expected = format!("\"logins\";r={left};t=");
        let header = match on_pass {
            OnPass::ToCaller => answer.header("ratelimit").map(str::to_owned),
            OnPass::ToService => service.last_header("ratelimit"),
        };
        assert!(
            header.as_ref().is_some_and(|header| header.starts_with(&expected)),
            "{header:?} {}",
            context(&answer)
        );
    }
    assert_eq!(service.served(), before + 3);

    let denied = log_in(ONE, "");
    assert_eq!(denied.status, 429, "{}", context(&denied));
    let wait: u64 = denied.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
    assert!((1..=1200).contains(&wait), "{}", context(&denied));
    assert_eq!(
        denied.header("ratelimit"),
        Some(format!("\"logins\";r=0;t={wait}").as_str()),
        "{}",
        context(&denied)
    );
    assert_eq!(denied.header("ratelimit-policy"), Some("\"logins\";q=3;w=3600"), "{}", context(&denied));
    assert_eq!(denied.header("x-ratelimit-denied-by"), Some("logins"), "{}", context(&denied));
    assert_eq!(denied.header("content-type"), Some("application/problem+json"), "{}", context(&denied));
    assert!(denied.text().contains("#quota-exceeded"), "{}", context(&denied));
    assert_eq!(service.served(), before + 3, "the service never saw it");

    // Whatever a caller says of itself, it is who it is, and asks for what it asks for.
    for spoof in [
        "x-forwarded-for: 9.9.9.9\r\n",
        "x-forwarded-for: 9.9.9.9, 127.0.0.1\r\nx-real-ip: 9.9.9.9\r\n",
        "forwarded: for=9.9.9.9\r\n",
        "x-forwarded-uri: /other\r\nx-forwarded-method: GET\r\n",
        "x-original-uri: /other\r\nx-original-method: GET\r\n",
        "x-original-host: other\r\nx-forwarded-host: other\r\n",
    ] {
        let answer = log_in(ONE, spoof);
        assert!(answer.status >= 400, "{spoof}{}", context(&answer));
        let same = proxy.ask(ONE, "POST", "/login?deny_status=200&cost=0&domain=other", spoof);
        assert!(same.status >= 400, "{spoof}{}", context(&same));
    }
    assert_eq!(service.served(), before + 3, "none of them got through");
    for path in ["//login", "/login/", "/%6Cogin", "/x/../login"] {
        let answer = proxy.ask(ONE, "POST", path, "");
        assert_ne!(answer.status, 200, "{path} is the same endpoint: {}", context(&answer));
    }
    let other = log_in(OTHER, "x-forwarded-for: 127.0.0.2\r\n");
    assert_eq!(other.status, 200, "another caller has a limit of its own: {}", context(&other));

    // One endpoint, not a million.
    for (id, status) in [(1, 200), (2, 200), (3, 200), (4, 429)] {
        let answer = proxy.ask(ONE, "GET", &format!("/users/{id}?page={id}"), "");
        assert_eq!(answer.status, status, "{id} {}", context(&answer));
    }
    // A key has limits of its own, whichever client uses it.
    for (source, status) in [(ONE, 200), (OTHER, 200), (ONE, 429)] {
        let answer = proxy.ask(source, "GET", "/", "x-api-key: secret\r\n");
        assert_eq!(answer.status, status, "{}", context(&answer));
    }
    // What passes in a lesser way is marked for the service.
    for marked in [None, Some("lesser".to_owned())] {
        let answer = proxy.ask(ONE, "GET", "/lesser", "");
        assert_eq!(
            (answer.status, service.last_header("x-ratelimit-degraded")),
            (200, marked),
            "{}",
            context(&answer)
        );
    }

    let heal = || proxy.ask(ONE, "GET", "/heal", "").status;
    eventually("a denial", || (heal() == 429).then_some(()));
    eventually("the way back", || (heal() == 200).then_some(()));
    (proxy, service, server)
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn nginx_with_auth_request() {
    let (proxy, _service, _server) = holds_behind("nginx", "nginx.conf", &OnPass::ToCaller, "");
    // Its own body, in nginx's own words.
    let denied = proxy.ask(ONE, "POST", "/login", "");
    let wait: u64 = denied.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
    assert_eq!(denied.json()["retry_after"], wait);
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn caddy() {
    holds_behind("caddy", "Caddyfile", &OnPass::ToCaller, "");
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn haproxy_with_lua() {
    holds_behind("haproxy", "haproxy.cfg", &OnPass::ToCaller, "");
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn traefik() {
    holds_behind("traefik", "traefik.yml", &OnPass::ToService, "");
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn envoy_with_ext_authz() {
    holds_behind("envoy", "ext_authz.yaml", &OnPass::ToCaller, "");
}

/// The other way with nginx: a denial reaches the caller as Tollgate wrote it.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn nginx_with_accel_redirect() {
    let settings = "forward_auth: {accel_redirect: '@app'}\n";
    let (proxy, _service, _server) = holds_behind("nginx", "nginx-accel.conf", &OnPass::ToCaller, settings);
    let denied = proxy.ask(ONE, "POST", "/login", "");
    assert!(denied.text().contains("decision_id"), "{}", denied.text());
}

fn ask(server: &Server, source: &str, line: &str, headers: &str) -> WebResponse {
    ask_with(server, source, line, headers, "")
}

fn ask_with(server: &Server, source: &str, line: &str, headers: &str, body: &str) -> WebResponse {
    let request =
        format!("{line} HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\n{headers}\r\n{body}");
    exchange_from(source, server.http, request.as_bytes()).expect("an answer")
}

/// A rule that names an endpoint bites without the endpoint being set as a route too, and so does one that comes later.
#[test]
fn endpoints_of_the_rules_are_known_and_follow_them() {
    let rule = |endpoint: &str| {
        format!(
            "{{domain: web, descriptors: [{{key: endpoint, value: '{endpoint}', name: only, limit: 1/hour}}]}}"
        )
    };
    let server = Server::with_rules(&rule("POST /login"));
    let statuses = |line: &str| [ask(&server, ONE, line, "").status, ask(&server, ONE, line, "").status];
    assert_eq!(statuses("POST /check/login/"), [200, 429]);
    assert_eq!(statuses("GET /check/items/1"), [200, 200]);
    std::fs::write(server.rules_path(), rule("GET /items/{id}")).expect("the rules");
    eventually("the new rules", || {
        (ask(&server, ONE, "GET /check/items/1", "").header("ratelimit").is_some()).then_some(())
    });
    assert_eq!(ask(&server, ONE, "GET /check/items/2", "").status, 429, "one endpoint");
    assert_eq!(statuses("POST /check/login"), [200, 200]);
}

/// A setting that cannot be meant must not be served by.
#[test]
fn wrong_settings_are_refused() {
    let folder = Folder::new();
    folder.write("rules.yaml", RULES);
    for (more, says) in [
        ("forward_auth: {domian: web}\n", "domian"),
        ("forward_auth: {accel_redirect: app}\n", "@app"),
        ("responses: {status: 200}\n", "429"),
    ] {
        let path = folder.write("tollgate.yml", format!("{SETTINGS}{more}"));
        let run = run(&["serve", "--config", path.to_str().expect("a plain path")]);
        assert_eq!(run.code, Some(1), "{more}: {}", run.err);
        assert!(run.err.contains(says), "{more}: {}", run.err);
    }
    let path = folder.write("tollgate.yml", SETTINGS.replace("/heal'", "/heal', nowhere"));
    let run = run(&["serve", "--config", path.to_str().expect("a plain path")]);
    assert!(run.err.contains("nowhere") && run.err.contains("GET /path"), "{}", run.err);
}

/// A third-party proxy waits for its answer, and its callers are spread out.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn nginx_waits_for_a_turn() {
    let folder = Folder::new();
    let rule = "{key: path, name: paced, limit: 4/second, burst: 9, action: delay}";
    folder.write("rules.yaml", format!("{{domain: d, descriptors: [{rule}]}}"));
    let settings = "rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n";
    let path = folder.write("tollgate.yml", settings);
    let server = Server::start(&["--config", path.to_str().expect("a plain path")]);
    let service = Service::start();
    let nginx = Proxy::start("nginx", "nginx.conf", &server, &service);
    eventually("the first answer", || (nginx.ask("127.0.0.3", "GET", "/", "").status == 200).then_some(()));
    let watch = Stopwatch::start();
    for _ in 0..4 {
        assert_eq!(nginx.ask("127.0.0.2", "GET", "/paced", "").status, 200, "{}", nginx.output());
    }
    assert!(watch.elapsed() >= std::time::Duration::from_millis(750), "{:?}", watch.elapsed());
}

/// A caller that gets a 500 takes the service for broken; a shed request is to be sent again later.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs proxies: make test")]
fn nginx_passes_on_that_load_is_shed() {
    let folder = Folder::new();
    folder.write("rules.yaml", "{domain: d, overload: {fleet: {capacity: 2/day}}}");
    let settings = "rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n";
    let path = folder.write("tollgate.yml", settings);
    let server = Server::start(&["--config", path.to_str().expect("a plain path")]);
    let service = Service::start();
    let nginx = Proxy::start("nginx", "nginx.conf", &server, &service);
    let shed = eventually("the capacity to be used up", || {
        let answer = nginx.ask(ONE, "GET", "/", "");
        (answer.status == 503).then_some(answer)
    });
    assert_eq!(shed.header("x-ratelimit-denied-by"), Some("overload/fleet"), "{}", nginx.output());
    assert_eq!(shed.header("x-ratelimit-reason"), None, "what the load is, callers are not told");
    let wait: u64 = shed.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
    assert_eq!(
        (shed.json()["status"].as_u64(), shed.json()["retry_after"].as_u64()),
        (Some(503), Some(wait))
    );
    drop(server);
    assert_eq!(nginx.ask(ONE, "GET", "/", "").status, 500, "no decision is no such answer");
}
