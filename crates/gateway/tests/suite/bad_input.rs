//! Malformed and hostile input: every case gets a clear error or a closed connection, nothing of it reaches the upstream as
//! something else, and the next request works.

use crate::harness::{Gateway, Origin, WebConnection, eventually, note, plain};

const RULES: &str = "domain: d\ndescriptors:\n  - {key: api_key, limit: 1000/second}\n";

/// Input bytes and the acceptable statuses; closing the connection without a response is acceptable too.
struct Case {
    bytes: Vec<u8>,
    statuses: &'static [u16],
}

fn case(bytes: impl Into<Vec<u8>>, statuses: &'static [u16]) -> Case {
    Case { bytes: bytes.into(), statuses }
}

/// A request with these header lines, and a second request hidden behind it.
fn smuggle(lines: &str, body: &str) -> Case {
    let text =
        format!("POST /a HTTP/1.1\r\nhost: t\r\n{lines}\r\n{body}GET /smuggled HTTP/1.1\r\nhost: t\r\n\r\n");
    case(text, &[400, 501])
}

fn line(first: &str, statuses: &'static [u16]) -> Case {
    case(format!("{first}\r\nhost: t\r\n\r\n"), statuses)
}

fn field(field: &str, statuses: &'static [u16]) -> Case {
    case(format!("GET /a HTTP/1.1\r\nhost: t\r\n{field}\r\n\r\n"), statuses)
}

fn chunks(body: &str) -> Case {
    let head = "POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
    case(format!("{head}{body}GET /smuggled HTTP/1.1\r\nhost: t\r\n\r\n"), &[400, 502])
}

fn cases() -> Vec<Case> {
    let mut cases = vec![
        // Two lengths.
        smuggle("content-length: 5\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\ncontent-length: 5\r\n", "0\r\n\r\n"),
        smuggle("content-length: 5\r\ncontent-length: 6\r\n", "hello"),
        smuggle("content-length: 5\r\ncontent-length: 5\r\n", "hello"),
        smuggle("content-length: 5, 5\r\n", "hello"),
        smuggle("content-length: 5,6\r\n", "hello"),
        // Invalid lengths.
        smuggle("content-length: +5\r\n", "hello"),
        smuggle("content-length: -5\r\n", "hello"),
        smuggle("content-length: 0x5\r\n", "hello"),
        smuggle("content-length: 5 5\r\n", "hello"),
        smuggle("content-length: 5;x\r\n", "hello"),
        smuggle("content-length: five\r\n", "hello"),
        smuggle("content-length:\r\n", "hello"),
        smuggle("content-length: 99999999999999999999999999\r\n", "hello"),
        smuggle("content-length: 18446744073709551616\r\n", "hello"),
        smuggle("content-length: \u{665}\r\n", "hello"),
        // Encodings that another reader might or might not take for chunked.
        smuggle("transfer-encoding: xchunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked, chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked, identity\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: identity\r\ncontent-length: 5\r\n", "hello"),
        smuggle("transfer-encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: \"chunked\"\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked;q=1\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding:\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: \u{b}chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding : chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding\t: chunked\r\n", "0\r\n\r\n"),
        smuggle(" transfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("x: y\r\n transfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("x: y\r\n\ttransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("x: y\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("x: y\rtransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked\n", "0\r\n\r\n"),
        smuggle("connection: content-length\r\ncontent-length: 5\r\n", "hello"),
        smuggle("connection: transfer-encoding\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        // Chunks.
        chunks("5\r\nhelloXX0\r\n\r\n"),
        chunks("5\nhello\r\n0\r\n\r\n"),
        chunks("5 \r\nhello\r\n0\r\n\r\n"),
        chunks(" 5\r\nhello\r\n0\r\n\r\n"),
        chunks("0x5\r\nhello\r\n0\r\n\r\n"),
        chunks("+5\r\nhello\r\n0\r\n\r\n"),
        chunks("-1\r\nhello\r\n0\r\n\r\n"),
        chunks("zz\r\nhello\r\n0\r\n\r\n"),
        chunks("\r\nhello\r\n0\r\n\r\n"),
        chunks("5;a\nb\r\nhello\r\n0\r\n\r\n"),
        chunks("5;a\rb\r\nhello\r\n0\r\n\r\n"),
        chunks("ffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
        chunks("10000000000000000\r\nhello\r\n0\r\n\r\n"),
        chunks("5\r\nhello\r0\r\n\r\n"),
        chunks("0\r\nx: y\n\r\n"),
        chunks("0\r\nbad trailer\r\n\r\n"),
        chunks(&format!("5;{}\r\nhello\r\n0\r\n\r\n", "x".repeat(1000))),
        chunks(&format!("0\r\nx: {}\r\n\r\n", "y".repeat(20_000))),
        // First lines.
        line("GET  /a HTTP/1.1", &[400]),
        line("GET /a  HTTP/1.1", &[400]),
        line(" GET /a HTTP/1.1", &[400]),
        line("GET\t/a\tHTTP/1.1", &[400]),
        line("GET /a HTTP/1.1 ", &[400, 505]),
        line("GET /a", &[400]),
        line("GET /a b HTTP/1.1", &[400]),
        line("GET /a HTTP/2.0", &[505]),
        line("GET /a HTTP/1.2", &[505]),
        line("GET /a http/1.1", &[400]),
        line("G\u{0}T /a HTTP/1.1", &[400]),
        line("GET(x) /a HTTP/1.1", &[400]),
        line("GET a HTTP/1.1", &[400]),
        line("GET * HTTP/1.1", &[400]),
        line("GET ftp://t/a HTTP/1.1", &[400]),
        line("GET http://user@t/a HTTP/1.1", &[400]),
        line("GET http://other/a HTTP/1.1", &[400]),
        line("CONNECT t:443 HTTP/1.1", &[400, 501]),
        line("GET /a#fragment HTTP/1.1", &[400]),
        line("GET /a\u{0} HTTP/1.1", &[400]),
        line("GET /caf\u{e9} HTTP/1.1", &[400]),
        // Paths in disguise.
        line("GET /public/../admin HTTP/1.1", &[400]),
        line("GET /public/%2e%2e/admin HTTP/1.1", &[400]),
        line("GET /public/.%2E/admin HTTP/1.1", &[400]),
        line("GET /public/..%2fadmin HTTP/1.1", &[400]),
        line("GET /public/..;/admin HTTP/1.1", &[400]),
        line("GET /public/..\\admin HTTP/1.1", &[400]),
        line("GET /public/%5c../admin HTTP/1.1", &[400]),
        line("GET /./a HTTP/1.1", &[400]),
        line("GET /a%00b HTTP/1.1", &[400]),
        // Fields.
        field("no colon", &[400]),
        field(": no name", &[400]),
        field("x y: z", &[400]),
        field("x: a\u{0}b", &[400]),
        field("x: a\u{7f}b", &[400]),
        field("x: a\u{1}b", &[400]),
        field("host: other", &[400]),
        field("expect: 200-maybe", &[417]),
        case("GET /a HTTP/1.1\r\n\r\n", &[400]),
        case("GET /a HTTP/1.1\r\nhost:\r\n\r\n", &[400]),
        case("GET /a HTTP/1.1\r\nhost: a b\r\n\r\n", &[400]),
        case("GET /a HTTP/1.1\r\nhost: t/x\r\n\r\n", &[400]),
        case("GET /a HTTP/1.1\nhost: t\n\n", &[400]),
        case("GET /a HTTP/1.1\r\nhost: t\r\n\n", &[400]),
        case("POST /a HTTP/1.0\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", &[501]),
        // Other protocols.
        case(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), &[400]),
        case(b"\0\0\0\0\r\n\r\n".to_vec(), &[400]),
        case("*1\r\n$4\r\nPING\r\n\r\n", &[400]),
        case("PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", &[400, 505]),
        case("\r\n\r\n\r\n", &[400]),
        // Oversized input.
        case(format!("GET /{} HTTP/1.1\r\nhost: t\r\n\r\n", "a".repeat(9000)), &[414]),
        case(format!("GET /a HTTP/1.1\r\nhost: t\r\nx: {}\r\n\r\n", "y".repeat(40_000)), &[431]),
        case(format!("GET /a HTTP/1.1\r\nhost: t\r\n{}\r\n", "x: y\r\n".repeat(101)), &[431]),
        case("GET /a HTTP/1.1\r\nhost: t\r\n".to_owned() + &"x".repeat(1 << 20), &[431]),
        case("POST /a HTTP/1.1\r\nhost: t\r\ncontent-length: 2000000\r\n\r\n", &[413]),
    ];
    let mut large = b"POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..300 {
        large.extend_from_slice(b"1000\r\n");
        large.extend_from_slice(&[b' '; 4096]);
        large.extend_from_slice(b"\r\n");
    }
    cases.push(case(large, &[413]));
    cases
}

/// A gateway that any of these could fool would let the sender act in another caller's name.
#[test]
fn nothing_ambiguous_is_passed_on() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ", max_body: 1MiB"));
    let cases = cases();
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut wrong = Vec::new();
    let mut silent = 0;
    for Case { bytes, statuses } in &cases {
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(140)]).into_owned();
        let mut open = gateway.open();
        // The server may respond and close before reading everything; a failed write is not an error of the test.
        let _ = open.send(bytes);
        let _ = open.finish_sending();
        match open.response() {
            Ok(answer) if !statuses.contains(&answer.status) => {
                wrong.push(format!("{shown:?}: {} {}", answer.status, answer.text()));
            }
            Ok(answer) => {
                if answer.header("content-type") != Some("application/problem+json")
                    || answer.json()["detail"].as_str().unwrap_or_default().is_empty()
                {
                    wrong.push(format!("{shown:?}: has no detail: {}", answer.text()));
                }
                if !open.is_at_end() {
                    wrong.push(format!("{shown:?}: the connection stays open"));
                }
            }
            Err(_) => silent += 1,
        }
        let next = gateway.get("/next");
        assert_eq!(next.status, 200, "after {shown:?}");
    }
    for head in origin.heads() {
        assert!(!head.contains("/smuggled"), "a hidden request arrived:\n{head}");
        assert!(!head.contains("admin"), "a hidden path arrived:\n{head}");
    }
    note(&format!("{} bad inputs, {silent} closed without a response", cases.len()));
    assert!(silent < cases.len() / 4, "{silent} got no response");
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Heads and bodies that take forever cost their senders a connection, and affect no one else.
#[test]
fn slowness_is_bounded() {
    let origin = Origin::start();
    let section =
        plain(origin.address, "") + "  clients: {header_timeout: 2s, body_timeout: 2s, idle_timeout: 2s}\n";
    let gateway = Gateway::start(RULES, &section);
    let slow = |bytes: &[u8]| {
        let mut open = gateway.open();
        open.send(bytes).expect("sent");
        open
    };
    let mut head = slow(b"GET /a HTTP/1.1\r\nhost: t\r\n");
    let mut body = slow(b"POST /a HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\nhello");
    let mut chunk = slow(b"POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel");
    let mut silent = slow(b"");
    let mut idle = slow(b"GET /a HTTP/1.1\r\nhost: t\r\n\r\n");
    assert_eq!(idle.response().expect("an answer").status, 200);
    assert_eq!(head.response().expect("an answer").status, 408);
    assert_eq!(body.response().expect("an answer").status, 408);
    assert_eq!(chunk.response().expect("an answer").status, 408);
    assert!(head.is_at_end() && body.is_at_end() && chunk.is_at_end());
    assert!(silent.is_at_end() && idle.is_at_end());
    assert_eq!(gateway.get("/a").status, 200);
}

/// Input one byte at a time is unusual but valid.
#[test]
fn a_request_may_come_in_the_smallest_pieces() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let mut open = gateway.open();
    for byte in b"POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\none\r\n2\r\nab\r\n0\r\n\r\n" {
        open.send(&[*byte]).expect("sent");
    }
    assert_eq!(open.response().expect("an answer").text(), "oneab");
}

/// Ambiguous upstream responses are not forwarded either.
#[test]
fn ambiguous_answers_are_stopped() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    let answers: [&[u8]; 8] = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nx: y\r\n z\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nx: y\n\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx : y\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"nonsense\r\n\r\n",
    ];
    std::thread::spawn(move || {
        for (answer, stream) in answers.iter().zip(listener.incoming()) {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
        }
    });
    let gateway = Gateway::start(RULES, &plain(address, ", retries: 0"));
    for answer in answers {
        assert_eq!(gateway.get("/a").status, 502, "{}", String::from_utf8_lossy(answer));
    }
}

/// Many idle or slow connections leave room for others.
#[test]
fn idle_and_slow_crowds_do_not_stop_others() {
    tollgate_testing::open_files::raise();
    let (idle, slow) = (2_000, 200);
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let crowd: Vec<WebConnection> = (0..idle + slow)
        .map(|at| {
            let mut open = WebConnection::to(gateway.address()).expect("a connection");
            if at >= idle {
                open.send(b"POST /a HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\nx").expect("sent");
            }
            open
        })
        .collect();
    eventually("the crowd to be there", || {
        (gateway.metric("gateway_connections") >= (idle + slow) as u64).then_some(())
    });
    for _ in 0..50 {
        assert_eq!(gateway.get("/a").status, 200);
    }
    drop(crowd);
    eventually("the crowd to be gone", || (gateway.metric("gateway_connections") < 10).then_some(()));
}
