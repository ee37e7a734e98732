//! Forward auth at `/check`: any method, path and body is accepted, and the query has no influence on the decision.

use crate::harness::{Server, WebResponse, exchange_from};

/// An untrusted client.
const UNTRUSTED: &str = "127.0.0.2";

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

const IDENTITY: &str = "identity: {routes: ['POST /login', 'GET /users/{id}', 'GET /heal']}\n";

fn serve() -> Server {
    Server::start(&[RULES], IDENTITY)
}

fn check(server: &Server, source: &str, line: &str, headers: &str) -> WebResponse {
    check_with_body(server, source, line, headers, "")
}

fn check_with_body(server: &Server, source: &str, line: &str, headers: &str, body: &str) -> WebResponse {
    let request =
        format!("{line} HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\n{headers}\r\n{body}");
    exchange_from(source, server.http, request.as_bytes()).expect("a response")
}

/// Proxies send a check with the method, path and body of the original request; none of these may be an error.
#[test]
fn any_method_path_and_body_is_accepted() {
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
        ("GET /check/%ff//%20//", "", ""),
    ] {
        let response = check_with_body(&server, UNTRUSTED, line, headers, body);
        assert_eq!((response.status, response.text().as_str()), (200, ""), "{line}: {:?}", response.headers);
    }
    assert_eq!(
        check(&server, UNTRUSTED, "GET /checks", "").status,
        421,
        "a path that only has the same prefix is not the check's, and refuses foreign hosts"
    );
    // Without a proxy's headers, the rest of the path is the original path, as Envoy sends it.
    for (id, status) in [(1, 200), (2, 200), (3, 200), (4, 429)] {
        assert_eq!(check(&server, UNTRUSTED, &format!("GET /check/users/{id}"), "").status, status, "{id}");
    }
    let hidden = check(&server, "127.0.0.1", "GET /check", "x-forwarded-host: Hidden.example:443\r\n");
    assert_eq!(hidden.status, 429, "a limit of 0 on the host");
    assert_eq!(check(&server, UNTRUSTED, "GET /check", "x-forwarded-host: hidden.example\r\n").status, 200);
}

/// Whatever such a request was counted as, one server or another would give it a fresh limit.
#[test]
fn a_request_that_servers_read_differently_is_refused() {
    let server = serve();
    for (line, headers, status, detail) in [
        ("GET /check/%ff%00//../..", "", 400, "control character"),
        ("GET /check//x/login", "", 400, "two slashes"),
        ("GET /check", "x_api_key: k\r\n", 400, "read as another header"),
        ("GET /check", "X-Http_Method-Override: POST\r\n", 400, "read as another header"),
        ("GET /check", "authorization: Token k\r\n", 401, "cannot be read"),
        ("GET /check/users/..", "", 400, "segment"),
        ("GET /check", "x-forwarded-uri: /api%2Flogin\r\n", 400, "escaped slash"),
        ("GET /check", "x-original-uri: /%256Cogin\r\n", 400, "escape"),
        ("GET /check/a", "x-forwarded-uri: /b\r\n", 400, "different requests"),
        ("GET /check/a", "x-http-method-override: DELETE\r\n", 400, "x-http-method-override"),
        ("GET /check", "authorization: Bearer a b\r\n", 401, "authorization"),
        ("GET /check", "x-api-key: a,b\r\n", 401, "x-api-key"),
    ] {
        let response = check(&server, "127.0.0.1", line, headers);
        assert_eq!(response.status, status, "{line} {headers}: {}", response.text());
        assert!(response.text().contains(detail), "{line} {headers}: {}", response.text());
        assert_eq!(response.header("www-authenticate").is_some(), status == 401);
    }
    let spelled = "x-forwarded-for: 192.0.2.77\r\nx-forwarded-method: POST\r\nx-forwarded-uri: ";
    for (path, status) in [("/login", 200), ("/login//", 200), ("/%6Cogin;a=b", 200), ("/login?x", 429)] {
        let response = check(&server, "127.0.0.1", "GET /check", &format!("{spelled}{path}\r\n"));
        assert_eq!(response.status, status, "{path}");
    }
}

/// Callers control the query, so it may only change the status of a denial.
#[test]
fn the_query_does_not_influence_the_decision() {
    let server = serve();
    let original = "x-forwarded-for: 192.0.2.9\r\nx-forwarded-method: POST\r\nx-forwarded-uri: /login\r\n";
    for _ in 0..3 {
        assert_eq!(check(&server, "127.0.0.1", "GET /check?cost=0&deny_status=403", original).status, 200);
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
        let response = check(&server, "127.0.0.1", &format!("GET /check?{query}"), original);
        assert_eq!(response.status, status, "{query}");
        assert!(
            response.header("retry-after").is_some() && response.header("ratelimit").is_some(),
            "{query}"
        );
    }
    let both = format!("{original}x-original-uri: /users/1\r\n");
    let rejected = check(&server, "127.0.0.1", "GET /check", &both);
    assert_eq!(rejected.status, 400);
    assert!(rejected.text().contains("x-original-uri"), "{}", rejected.text());
}

/// The domain must never be guessed.
#[test]
fn the_domain_is_the_only_one_or_the_configured_one() {
    let other = "{domain: other, descriptors: [{key: remote_address, limit: 0/hour}]}";
    let start = |more: &str| Server::start(&[RULES, other], &format!("{IDENTITY}{more}"));
    let undecided = check(&start(""), UNTRUSTED, "GET /check", "");
    assert_eq!(undecided.status, 500);
    assert!(undecided.text().contains("forward_auth"), "{}", undecided.text());
    assert_eq!(check(&start("forward_auth: {domain: other}\n"), UNTRUSTED, "GET /check", "").status, 429);
    assert_eq!(check(&start("forward_auth: {domain: web}\n"), UNTRUSTED, "GET /check", "").status, 200);
    // A domain without rules has no limits: an error, as without a choice, instead of letting everything pass.
    let unknown = check(&start("forward_auth: {domain: nope}\n"), UNTRUSTED, "GET /check", "");
    assert!(unknown.status == 500 && unknown.text().contains("no domain `nope`"), "{}", unknown.text());
}
