//! Invalid HTTP input: the client receives an error that names the field, and no other client is affected.

use crate::harness::{Server, WebConnection, exchange, request};
use serde_json::json;

const RULES: &str = "
domain: d
descriptors:
  - key: k
    limit: 1000000/hour
";

const DESCRIPTOR: &str = r#"{"domain":"d","descriptors":[{"entries":[["k","v"]],"#;

/// Path, body, status, and the text that the response must contain: the field, or the error if it concerns the whole
/// body.
type Case = (&'static str, Vec<u8>, u16, &'static str);

fn cases() -> Vec<Case> {
    let check = |body: &str, status, named| ("/v1/check", body.as_bytes().to_vec(), status, named);
    let described = |rest: &str, named| check(&format!("{DESCRIPTOR}{rest}}}]}}"), 400, named);
    let many = |n: usize, one: &dyn Fn(usize) -> String| (0..n).map(one).collect::<Vec<_>>().join(",");
    let mut cases = vec![
        // Not JSON at all.
        check("", 400, "ends too early"),
        check("{", 400, "ends too early"),
        check("hello", 400, "at column 1"),
        check("{\"domain\":\"d\",\"attributes\":{}} tail", 400, "at column 32"),
        check("{'domain':'d'}", 400, "at column 2"),
        check("\u{feff}{}", 400, "at column 1"),
        (
            "/v1/check",
            b"{\"domain\":\"d\",\"attributes\":{\"k\":\"\xff\xfe\"}}".to_vec(),
            400,
            "attributes.k",
        ),
        ("/v1/check", b"{\"domain\":\"d\",\"attributes\":{\"k\":\"\0\"}}".to_vec(), 400, "attributes.k"),
        check(r#"{"domain":"d","attributes":{"k":"\ud800"}}"#, 400, "attributes.k"),
        ("/v1/check", vec![0; 100], 400, "at column 1"),
        // JSON of another shape.
        check("null", 400, "object"),
        check("[]", 400, "object"),
        check(r#"["d",{"k":"v"},null,null,null,null]"#, 400, "object"),
        check("\"text\"", 400, "object"),
        check("{}", 400, "domain"),
        check(r#"{"attributes":{}}"#, 400, "domain"),
        check(r#"{"domain":"","attributes":{}}"#, 400, "domain"),
        check(r#"{"domain":7,"attributes":{}}"#, 400, "domain"),
        check(r#"{"domain":null,"attributes":{}}"#, 400, "domain"),
        check(r#"{"domain":"d","domain":"e","attributes":{}}"#, 400, "domain"),
        check(r#"{"domain":"d"}"#, 400, "attributes"),
        check(
            r#"{"domain":"d","attributes":{},"descriptors":[{"entries":[["k","v"]]}]}"#,
            400,
            "descriptors",
        ),
        // Unknown names.
        check(r#"{"domain":"d","attributes":{},"kost":1}"#, 400, "kost"),
        check(r#"{"domain":"d","attributes":{},"hits":1}"#, 400, "hits"),
        described(r#""weight":1"#, "descriptors[0].weight"),
        described(r#""limit":{"requests_per_unit":1,"unit":"day","name":"n"}"#, "descriptors[0].limit.name"),
        check(
            r#"{"domain":"d","descriptors":[{"entries":[{"key":"k","value":"v","x":1}]}]}"#,
            400,
            "descriptors[0].entries[0].x",
        ),
        // Attributes.
        check(r#"{"domain":"d","attributes":{"k":true}}"#, 400, "attributes.k"),
        check(r#"{"domain":"d","attributes":{"k":9007199254740993}}"#, 400, "attributes.k"),
        check(r#"{"domain":"d","attributes":{"k":null}}"#, 400, "attributes.k"),
        check(r#"{"domain":"d","attributes":{"k":{"a":"b"}}}"#, 400, "attributes.k"),
        check(r#"{"domain":"d","attributes":{"k":"v","k":"w"}}"#, 400, "attributes"),
        check(r#"{"domain":"d","attributes":[["k","v"]]}"#, 400, "attributes"),
        // Costs.
        check(r#"{"domain":"d","attributes":{},"cost":-1}"#, 400, "cost"),
        check(r#"{"domain":"d","attributes":{},"cost":1.5}"#, 400, "cost"),
        check(r#"{"domain":"d","attributes":{},"cost":null}"#, 400, "leave it out"),
        check(r#"{"domain":"d","descriptors":[{"entries":[["k","v"]],"hits":null}]}"#, 400, "leave it out"),
        check(r#"{"domain":"d","attributes":{},"cost":"1"}"#, 400, "cost"),
        check(r#"{"domain":"d","attributes":{},"cost":1e999}"#, 400, "cost"),
        check(r#"{"domain":"d","attributes":{},"cost":18446744073709551616}"#, 400, "cost"),
        // Descriptors.
        check(r#"{"domain":"d","descriptors":[]}"#, 400, "descriptors"),
        check(r#"{"domain":"d","descriptors":{}}"#, 400, "descriptors"),
        check(r#"{"domain":"d","descriptors":[{"entries":[]}]}"#, 400, "descriptors[0].entries"),
        check(r#"{"domain":"d","descriptors":[[[["k","v"]],null,null]]}"#, 400, "descriptors[0]"),
        check(r#"{"domain":"d","descriptors":[{"entries":[["k"]]}]}"#, 400, "descriptors[0].entries[0]"),
        check(
            r#"{"domain":"d","descriptors":[{"entries":[["k","v","w"]]}]}"#,
            400,
            "descriptors[0].entries[0]",
        ),
        check(
            r#"{"domain":"d","descriptors":[{"entries":[["k",[5]]]}]}"#,
            400,
            "descriptors[0].entries[0][1]",
        ),
        described(r#""hits":-1"#, "descriptors[0].hits"),
        described(r#""limit":{"requests_per_unit":1,"unit":"fortnight"}"#, "descriptors[0].limit.unit"),
        described(
            r#""limit":{"requests_per_unit":4294967296,"unit":"day"}"#,
            "descriptors[0].limit.requests_per_unit",
        ),
        described(r#""limit":{"unit":"day"}"#, "descriptors[0].limit"),
        // Fields of other endpoints.
        check(r#"{"domain":"d","attributes":{},"idempotency_key":"k"}"#, 400, "idempotency_key"),
        check(r#"{"domain":"d","attributes":{},"deadline_ms":5}"#, 400, "deadline_ms"),
        ("/v1/reserve", br#"{"domain":"d","attributes":{},"deadline_ms":0}"#.to_vec(), 400, "deadline_ms"),
        (
            "/v1/reserve",
            br#"{"domain":"d","attributes":{},"deadline_ms":86400001}"#.to_vec(),
            400,
            "deadline_ms",
        ),
        (
            "/v1/reserve",
            br#"{"domain":"d","attributes":{},"idempotency_key":""}"#.to_vec(),
            400,
            "idempotency_key",
        ),
        ("/v1/settle", br#"{"reservation":"zz","cost":1}"#.to_vec(), 400, "reservation"),
        ("/v1/settle", br#"{"reservation":"00000000000000000000000000000001"}"#.to_vec(), 400, "cost"),
        (
            "/v1/cancel",
            br#"{"reservation":"00000000000000000000000000000001","cost":1}"#.to_vec(),
            400,
            "cost",
        ),
        ("/v1/cancel", b"{}".to_vec(), 400, "reservation"),
        // Envoy's JSON.
        ("/json", b"{}".to_vec(), 400, "rate limit domain must not be empty"),
        ("/json", br#"{"domain":"d"}"#.to_vec(), 400, "rate limit descriptor list must not be empty"),
        ("/json", br#"{"domain":"d","descriptors":[{}],"hitsAddend":-1}"#.to_vec(), 400, "hitsAddend"),
        (
            "/json",
            br#"{"domain":"d","descriptors":[{"entries":[{"key":"k","value":"v","x":1}]}]}"#.to_vec(),
            400,
            "descriptors[0].entries[0].x",
        ),
        (
            "/json",
            br#"{"domain":"d","descriptors":[{"limit":{"requestsPerUnit":1,"unit":"WEEK"}}]}"#.to_vec(),
            400,
            "descriptors[0].limit.unit",
        ),
        (
            "/json",
            br#"{"domain":"d","descriptors":[{"limit":{"requestsPerUnit":1}}]}"#.to_vec(),
            400,
            "descriptors[0].limit.unit",
        ),
        // Unknown paths.
        ("/v1/checks", b"{}".to_vec(), 404, "/v1/checks"),
        ("/", b"{}".to_vec(), 404, "/v1/check"),
        ("/v1/check/", b"{}".to_vec(), 404, "/v1/check/"),
    ];
    // Exceeded size limits.
    let attributes = many(65, &|n| format!("\"k{n}\":\"v\""));
    cases.push((
        "/v1/check",
        format!("{{\"domain\":\"d\",\"attributes\":{{{attributes}}}}}").into(),
        400,
        "attributes",
    ));
    let descriptors = many(65, &|_| "{\"entries\":[[\"k\",\"v\"]]}".to_owned());
    cases.push((
        "/v1/check",
        format!("{{\"domain\":\"d\",\"descriptors\":[{descriptors}]}}").into(),
        400,
        "descriptors",
    ));
    let long = "x".repeat(9000);
    cases.push(("/v1/check", format!("{{\"domain\":\"{long}\",\"attributes\":{{}}}}").into(), 400, "domain"));
    cases.push(("/v1/check", format!("{{\"domain\":{}", "[".repeat(60_000)).into(), 400, "domain"));
    cases.push(("/v1/check", format!("{{\"x\":{}", "[".repeat(60_000)).into(), 400, "x"));
    cases.push((
        "/json",
        format!("{{\"domain\":\"d\",\"hits_addend\":{}", "[".repeat(60_000)).into(),
        400,
        "recursion limit",
    ));
    for size in [64 * 1024 + 1, 512 * 1024] {
        cases.push(("/v1/check", vec![b' '; size], 413, "65536"));
    }
    cases
}

/// Every response is a 4xx with problem details that name the field, so that a client's developer can find the bug.
#[test]
fn every_invalid_body_is_rejected_with_its_field() {
    let server = Server::with_rules(RULES);
    let cases = cases();
    assert!(cases.len() >= 30);
    let mut wrong = Vec::new();
    for (path, body, status, named) in &cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(120)]).into_owned();
        let response = match exchange(server.http, &request("POST", path, body)) {
            Ok(response) => response,
            Err(error) => {
                wrong.push(format!("{path} {shown}: no response: {error}"));
                continue;
            }
        };
        let kind = response.header("content-type").unwrap_or_default();
        if response.status != *status || kind != "application/problem+json" {
            wrong.push(format!("{path} {shown}: {} {kind} {}", response.status, response.text()));
            continue;
        }
        let problem = response.json();
        assert_eq!(problem["status"], *status);
        let text = |key: &str| problem[key].as_str().unwrap_or_default().to_owned();
        if text("field") != *named && !text("detail").contains(named) {
            wrong.push(format!("{path} {shown}: `{named}` is not named in {problem}"));
        }
        if text("field").contains('?') || text("detail").contains("struct ") {
            wrong.push(format!("{path} {shown}: exposes internal terms: {problem}"));
        }
        let after = server.check("d", &json!({"k": "v"}));
        assert_eq!(after.status, 200, "after {path} {shown}");
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// The response to a wrong method names the right one.
#[test]
fn a_wrong_method_is_rejected_with_the_allowed_one() {
    let server = Server::with_rules(RULES);
    let cases = [
        ("GET", "/v1/check", "POST"),
        ("PUT", "/v1/settle", "POST"),
        ("DELETE", "/json", "POST"),
        ("POST", "/healthz", "GET"),
        ("POST", "/readyz", "GET"),
        ("PATCH", "/metrics", "GET"),
    ];
    for (method, path, right) in cases {
        let response = server.exchange(&request(method, path, b""));
        assert_eq!((response.status, response.header("allow")), (405, Some(right)), "{method} {path}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"));
    }
}

/// Scanners and broken proxies send bytes that are not HTTP: they are rejected, and other clients are not affected.
#[test]
fn bytes_that_are_not_a_request_close_only_their_own_connection() {
    let server = Server::with_rules(RULES);
    let long_header = format!("GET /healthz HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    let cases: [&[u8]; 7] = [
        b"\0\0\0\0\0\0\0\0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        long_header.as_bytes(),
    ];
    for bytes in cases {
        // Either a 4xx response or a closed connection is acceptable.
        if let Ok(response) = exchange(server.http, bytes) {
            assert!(
                (400..500).contains(&response.status),
                "{:?}: {}",
                &bytes[..bytes.len().min(40)],
                response.status
            );
        }
        assert_eq!(server.check("d", &json!({"k": "v"})).status, 200);
    }
    // A client that disconnects in the middle of its body.
    let mut gone = WebConnection::to(server.http).expect("a connection");
    gone.send(b"POST /v1/check HTTP/1.1\r\ncontent-length: 500\r\n\r\n{\"domain\"").expect("sent");
    drop(gone);
    // A chunked body that is too large, without a length to reject it by.
    let mut chunked =
        b"POST /v1/check HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..20 {
        chunked.extend_from_slice(b"1000\r\n");
        chunked.extend_from_slice(&[b' '; 4096]);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    assert_eq!(server.exchange(&chunked).status, 413);
    // A body so large that the server does not read it to its end: either a response or a closed connection.
    if let Ok(response) = exchange(server.http, &request("POST", "/v1/check", &vec![b' '; 8 << 20])) {
        assert_eq!(response.status, 413);
    }
    assert_eq!(server.check("d", &json!({"k": "v"})).status, 200);
}
