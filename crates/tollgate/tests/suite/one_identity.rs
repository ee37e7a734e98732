//! A caller is the same one at every entry point: the quota of an API key, or an emergency measure on it, applies
//! at the gateway and at `/check` as it does at `/v1/check`; and the key itself is written down nowhere.

use crate::databases::Place;
use crate::harness::{
    Folder, Gateway, Node, Origin, Redis, Server, WebResponse, eventually, exchange, plain,
};
use serde_json::{Value, json};
use std::net::SocketAddr;

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    name: per-key
    limit: 100/hour
    descriptors:
      - {key: endpoint, value: POST /login, name: logins, limit: 3/hour}
  - {key: api_key, value: named-key, name: named, limit: 7/hour}
  - {key: remote_address, name: per-address, limit: 1000/hour}
";

/// Somewhere that requests go in: `GET /a` and the like.
struct EntryPoint {
    name: &'static str,
    address: SocketAddr,
    prefix: &'static str,
}

impl EntryPoint {
    fn ask(&self, line: &str, fields: &str) -> WebResponse {
        let (method, path) = line.split_once(' ').expect("a method and a path");
        let text = format!(
            "{method} {}{path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: 0\r\n{fields}\r\n",
            self.prefix
        );
        exchange(self.address, text.as_bytes()).expect("an answer")
    }

    fn by_key(&self, key: &str) -> WebResponse {
        self.ask("GET /a", &format!("x-api-key: {key}\r\n"))
    }

    /// The limit of a rule, as its responses report it.
    fn policy(&self, key: &str, rule: &str) -> String {
        let answer = self.by_key(key);
        let policies = answer.header("ratelimit-policy").unwrap_or_default().to_owned();
        let found = policies.split(", ").find(|policy| policy.starts_with(&format!("\"{rule}\"")));
        found.unwrap_or_else(|| panic!("{}: {rule} is not in {policies}", self.name)).to_owned()
    }
}

/// A gateway and a server that answers `/check`, with what keeps them alive.
struct EntryPoints {
    all: [EntryPoint; 2],
    gateway: Gateway,
    server: Node,
    _origin: Origin,
    _place: Place,
}

/// Each with a database of its own, and these settings.
fn entry_points(more: &str) -> EntryPoints {
    let (origin, place, folder) = (Origin::start(), Place::new(), Folder::new());
    let db = |name: &str| format!("db: \"{}\"\n{more}", place.sqlite(name));
    let gateway = Gateway::start_in(Folder::new(), RULES, &db("gateway"), &plain(origin.address, ""));
    folder.write("rules.yaml", RULES);
    let settings = format!("rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n{}", db("server"));
    let path = folder.write("tollgate.yml", settings);
    let flags =
        ["--config", path.to_str().expect("a plain path"), "--admin", "127.0.0.1:0", "--log", "debug"];
    let server = Node::from(Server::start(&flags), folder);
    let all = [
        EntryPoint { name: "gateway", address: gateway.address(), prefix: "" },
        EntryPoint { name: "/check", address: server.server.http, prefix: "/check" },
    ];
    EntryPoints { all, gateway, server, _origin: origin, _place: place }
}

impl EntryPoints {
    /// Each entry with its admin address.
    fn each(&self) -> impl Iterator<Item = (&EntryPoint, SocketAddr)> {
        self.all.iter().zip([self.gateway.admin, self.server.admin])
    }
}

fn operate(admin: SocketAddr, method: &str, path: &str, body: &Value) -> WebResponse {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let text = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    exchange(admin, text.as_bytes()).expect("an answer")
}

fn declare(admin: SocketAddr, action: &str, kind: &str, value: &str) -> String {
    let sent = json!({"action": action, "target": {"kind": kind, "value": value}, "reason": "test"});
    let answer = operate(admin, "POST", "/admin/v1/emergency", &sent);
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["id"].as_str().expect("an id").to_owned()
}

/// An operator who raises a customer's limit, or blocks an attacker, must not get a success while nothing has changed.
#[test]
fn a_quota_change_reaches_the_keys_owner() {
    let points = entry_points("");
    for (entry, admin) in points.each() {
        assert_eq!(entry.policy("abc", "per-key"), "\"per-key\";q=100;w=3600", "{}", entry.name);
        let quota = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 50, "unit": "hour"}], "reason": "test"});
        let agreed = operate(admin, "PUT", "/admin/v1/quotas/abc", &quota);
        assert!(matches!(agreed.status, 200 | 201), "{}", agreed.text());
        assert_eq!(entry.policy("abc", "per-key"), "\"per-key\";q=50;w=3600", "{}", entry.name);
        assert_eq!(entry.policy("other", "per-key"), "\"per-key\";q=100;w=3600", "{}", entry.name);
        let bearer = entry.ask("GET /a", "authorization: Bearer abc\r\n");
        assert!(
            bearer
                .header("ratelimit-policy")
                .is_some_and(|policy| policy.contains("\"per-key\";q=50;w=3600")),
            "{}",
            entry.name
        );
        // Its usage is found by its key, too.
        let usage = operate(admin, "GET", "/admin/v1/usage/abc", &Value::Null).json();
        assert!(usage.to_string().contains("\"used\":3"), "{}: {usage}", entry.name);
        // And a rule that names a key is about that key.
        assert_eq!(entry.policy("named-key", "named"), "\"named\";q=7;w=3600", "{}", entry.name);

        let id = declare(admin, "block", "api_key", "bad");
        let denied = entry.by_key("bad");
        assert_eq!(denied.status, 429, "{}", entry.name);
        assert_eq!(denied.header("x-ratelimit-denied-by"), Some(format!("emergency:{id}").as_str()));
        assert_eq!(entry.by_key("good").status, 200, "{}", entry.name);
    }
}

/// What an operator blocks by one IPv6 address is that address, although rules know its owner by its network.
#[test]
fn an_emergency_about_one_address_is_felt_there() {
    let points = entry_points("");
    for (entry, admin) in points.each() {
        // This machine is trusted to say whom it speaks for.
        let from = |address: &str| entry.ask("GET /a", &format!("x-forwarded-for: {address}\r\n")).status;
        assert_eq!(from("2001:db8:1:2::5"), 200, "{}", entry.name);
        let one = declare(admin, "block", "address", "2001:db8:1:2::5");
        assert_eq!([from("2001:db8:1:2::5"), from("2001:db8:1:2::6")], [429, 200], "{}", entry.name);
        let end =
            |id: &str| operate(admin, "DELETE", &format!("/admin/v1/emergency/{id}"), &Value::Null).status;
        assert_eq!(end(&one), 204);
        declare(admin, "block", "address", "2001:db8:1:2:8000::/65");
        assert_eq!([from("2001:db8:1:2:8000::1"), from("2001:db8:1:2:7::1")], [429, 200], "{}", entry.name);
        declare(admin, "block", "address", "2001:db8:1:2::/64");
        assert_eq!([from("2001:db8:1:2:7::1"), from("2001:db8:1:3::1")], [429, 200], "{}", entry.name);
        declare(admin, "block", "address", "192.0.2.7");
        assert_eq!([from("192.0.2.7"), from("192.0.2.8")], [429, 200], "{}", entry.name);
    }
}

/// A made-up key beside the real one must not be a fresh limit.
#[test]
fn a_request_with_two_keys_is_refused() {
    let points = entry_points("");
    for entry in &points.all {
        let (real, made_up) = ("authorization: Bearer real\r\n", "x-api-key: x1\r\n");
        let twice = "x-api-key: real\r\nx-api-key: x1\r\n";
        for fields in [format!("{real}{made_up}"), twice.to_owned()] {
            for line in ["GET /a", "POST /login"] {
                let refused = entry.ask(line, &fields);
                let problem = refused.json();
                assert_eq!(
                    (refused.status, &problem["status"]),
                    (400, &json!(400)),
                    "{}: {problem}",
                    entry.name
                );
                let detail = problem["detail"].as_str().expect("a detail");
                assert!(detail.contains("x-api-key") && !detail.contains("x1"), "{}: {detail}", entry.name);
            }
        }
        let both = entry.ask("GET /a", &format!("{real}{made_up}")).json();
        assert!(
            both["detail"].as_str().is_some_and(|detail| detail.contains("identity.api_key.bearer: false"))
        );
        assert_eq!(entry.ask("GET /a", &format!("{real}x-api-key: real\r\n")).status, 200, "{}", entry.name);
    }
}

/// Servlet containers take `/login;a=b` for `/login`.
#[test]
fn parameters_of_a_path_are_no_other_endpoint() {
    let points = entry_points("identity: {routes: ['POST /login']}");
    let check = &points.all[1];
    for n in 0..3 {
        let passed = check.ask(&format!("POST /login;n={n}"), "x-api-key: k\r\n");
        assert_eq!(passed.status, 200, "{n}");
    }
    let denied = check.ask("POST /login;n=4/", "x-api-key: k\r\n");
    assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("logins")));
}

/// A reader of Redis, its backups or its logs must not be able to impersonate a caller.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs redis-server: make test")]
fn no_key_is_written_to_redis() {
    const KEY: &str = "sk_live_PLANTED0123456789abcdef";
    let (redis, folder) = (Redis::start(), Folder::new());
    let secret = folder.write("secret", "a secret of this installation\n");
    let store = format!("store: {}\nstore_deadline_ms: 10000\nleases: {{hot_per_second: 1}}\n", redis.url());
    let keyed = format!("identity: {{api_key: {{secret_file: \"{}\"}}}}\n", secret.display());
    let monitor = redis.monitor();
    let mut names = Vec::new();
    for more in [store.clone(), format!("{store}{keyed}")] {
        let points = entry_points(&more);
        let server = &points.server.server;
        let known = redis.cli(&["--scan"]);
        eventually("the gateway on Redis", || {
            assert_eq!(points.all[0].by_key(KEY).status, 200);
            redis.cli(&["--scan"]).lines().any(|name| !known.contains(name)).then_some(())
        });
        eventually("the server on Redis", || {
            assert_eq!(points.all[1].by_key(KEY).status, 200);
            (server.check("d", &json!({"api_key": KEY})).json()["origin"] == "store").then_some(())
        });
        // The same caller by attributes and descriptors, and by a limit that a request brings.
        let entries = json!([["api_key", KEY], ["session_id", KEY]]);
        assert_eq!(server.check("d", &json!({"api_key": KEY, "endpoint": "POST /login"})).status, 200);
        let own = json!({"domain": "d", "descriptors": [{"entries": entries, "limit": {"requests_per_unit": 5, "unit": "HOUR"}}]});
        assert_eq!(server.post("/v1/check", &own).status, 200, "{}", server.post("/v1/check", &own).text());
        names.push(redis.cli(&["--scan"]));
        let mut outputs = vec![points.gateway.log(), points.gateway.output(), server.log()];
        for admin in [points.gateway.admin, points.server.admin] {
            for path in
                ["/metrics", "/admin/v1/decisions", "/admin/v1/top", "/admin/v1/stats", "/admin/v1/audit"]
            {
                outputs.push(operate(admin, "GET", path, &Value::Null).text());
            }
        }
        outputs.extend(["/v1/hot", "/readyz?verbose", "/metrics"].map(|path| server.get(path).text()));
        for text in outputs {
            assert!(!text.contains("PLANTED"), "{text}");
        }
    }
    // printf %s KEY | sha256sum, 128 bits of it, eight bytes at a time with the lowest bits first.
    assert!(names[0].contains("tg1:{@YVLBSZQqQED-cUD63dPk5M}"), "{}", names[0]);
    let new = names[1].lines().filter(|name| !names[0].contains(name)).count();
    assert!(new >= 2, "hashed with a secret they are others:\n{}\n{}", names[0], names[1]);
    let seen = monitor.text();
    assert!(seen.contains("tg1:{@"), "nothing was seen:\n{seen}");
    for text in [&names[0], &names[1], &seen] {
        assert!(!text.contains("PLANTED"), "{text}");
    }
}
