//! `/check`, as proxies ask it: with any method, path and body, and with nothing in the query that decides.

mod harness;

use harness::{Server, WebResponse, exchange_from};

/// A caller that is no proxy.
const ONE: &str = "127.0.0.2";

const RULES: &str = "
domain: web
descriptors:
  - key: remote_address
    descriptors:
      - {key: endpoint, value: 'POST /login', name: log-ins, limit: 3/hour}
      - {key: endpoint, value: 'GET /users/{id}', name: users, limit: 3/hour}
      - {key: endpoint, value: 'GET /heal', name: heal, limit: 1/second}
      - {key: path, value: /lesser, name: lesser, limit: 1/hour, action: degrade}
  - {key: api_key, name: per-key, limit: 2/hour}
  - {key: host, value: hidden.example, name: hidden, limit: 0/hour}
";

const WHO: &str = "identity: {routes: ['POST /login', 'GET /users/{id}', 'GET /heal']}\n";

fn serve() -> Server {
    Server::start(&[RULES], WHO)
}

fn ask(server: &Server, source: &str, line: &str, headers: &str) -> WebResponse {
    ask_with(server, source, line, headers, "")
}

fn ask_with(server: &Server, source: &str, line: &str, headers: &str, body: &str) -> WebResponse {
    let request =
        format!("{line} HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\n{headers}\r\n{body}");
    exchange_from(source, server.http, request.as_bytes()).expect("an answer")
}

/// Proxies ask with whatever method, path and body they have; none of that may be an error.
#[test]
fn any_method_any_path_and_no_body_will_do() {
    let server = serve();
    let large = "x".repeat(200_000);
    for (line, headers, body) in [
        ("GET /check", "", ""),
        ("POST /check/", "content-length: 5\r\n", "hello"),
        ("POST /check/", "content-length: 200000\r\n", &large),
        ("DELETE /check/a/b/c?x=y", "", ""),
        ("OPTIONS /check", "", ""),
        ("PURGE /check/x", "", ""),
        ("PUT /check", "transfer-encoding: chunked\r\n", "2\r\nhi\r\n0\r\n\r\n"),
        ("GET /check/%ff%00//../..", "", ""),
    ] {
        let answer = ask_with(&server, ONE, line, headers, body);
        assert_eq!((answer.status, answer.text().as_str()), (200, ""), "{line}: {:?}", answer.headers);
    }
    assert_eq!(
        ask(&server, ONE, "GET /checks", "").status,
        404,
        "a path that only begins like it is another"
    );
    // Without a proxy's headers, the path that follows is the one that is meant, as Envoy asks.
    for (id, status) in [(1, 200), (2, 200), (3, 200), (4, 429)] {
        assert_eq!(ask(&server, ONE, &format!("GET /check/users/{id}"), "").status, status, "{id}");
    }
    let hidden = ask(&server, "127.0.0.1", "GET /check", "x-forwarded-host: Hidden.example:443\r\n");
    assert_eq!(hidden.status, 429, "a limit of nothing on a host");
    assert_eq!(ask(&server, ONE, "GET /check", "x-forwarded-host: hidden.example\r\n").status, 200);
}

/// The query is the caller's to write: it may choose among denials, and nothing else.
#[test]
fn a_query_decides_nothing() {
    let server = serve();
    let told = "x-forwarded-for: 192.0.2.9\r\nx-forwarded-method: POST\r\nx-forwarded-uri: /login\r\n";
    for _ in 0..3 {
        assert_eq!(ask(&server, "127.0.0.1", "GET /check?cost=0&deny_status=403", told).status, 200);
    }
    for (query, status) in [
        ("", 429),
        ("deny_status=403", 403),
        ("a=b&deny_status=401", 401),
        ("deny_status=200", 429),
        ("deny_status=503", 429),
        ("deny_status=", 429),
        ("deny_status=4030", 429),
        ("deny_status=%34%30%33", 429),
        ("cost=0", 429),
        ("domain=other&remote_address=1.2.3.4", 429),
    ] {
        let answer = ask(&server, "127.0.0.1", &format!("GET /check?{query}"), told);
        assert_eq!(answer.status, status, "{query}");
        assert!(answer.header("retry-after").is_some() && answer.header("ratelimit").is_some(), "{query}");
    }
    let both = format!("{told}x-original-uri: /users/1\r\n");
    let refused = ask(&server, "127.0.0.1", "GET /check", &both);
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("x-original-uri"), "{}", refused.text());
}

/// Which rules decide must never be a guess.
#[test]
fn the_domain_is_the_only_one_or_the_one_that_is_set() {
    let other = "{domain: other, descriptors: [{key: remote_address, limit: 0/hour}]}";
    let start = |more: &str| Server::start(&[RULES, other], &format!("{WHO}{more}"));
    let undecided = ask(&start(""), ONE, "GET /check", "");
    assert_eq!(undecided.status, 500);
    assert!(undecided.text().contains("forward_auth"), "{}", undecided.text());
    assert_eq!(ask(&start("forward_auth: {domain: other}\n"), ONE, "GET /check", "").status, 429);
    assert_eq!(ask(&start("forward_auth: {domain: web}\n"), ONE, "GET /check", "").status, 200);
}
