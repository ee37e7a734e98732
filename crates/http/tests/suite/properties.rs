//! The parser properties of the fuzz targets, tested with heads and bodies composed of typical request-smuggling
//! fragments. The fuzzers test the same properties for longer: `cargo +nightly fuzz run request_head`.

use proptest::prelude::*;
use tollgate_http::h1::head::{self, HeadLimits};
use tollgate_http::h1::properties;

/// Valid and invalid fragments of heads, combined in any order.
const PIECES: [&str; 48] = [
    "GET / HTTP/1.1",
    "POST /a HTTP/1.1",
    "GET /a/../b HTTP/1.1",
    "GET /%2e%2E/x HTTP/1.1",
    "GET http://t/ HTTP/1.1",
    "GET / HTTP/1.0",
    "OPTIONS * HTTP/1.1",
    "\r\n",
    "\r\n",
    "\r\n",
    "\r\n",
    "\r\n\r\n",
    "\n",
    "\r",
    " ",
    "\t",
    ":",
    "\0",
    "host: t",
    "Host: t",
    "host : t",
    "host:",
    "content-length: 5",
    "Content-Length: 5",
    "content-length: 0",
    "content-length: +5",
    "content-length:5",
    "content-length: 5, 5",
    "transfer-encoding: chunked",
    "Transfer-Encoding:chunked",
    "transfer-encoding: identity",
    "transfer-encoding: chunked, chunked",
    "transfer-encoding\u{b}: chunked",
    "x: y",
    "x:\ty\t",
    "connection: close",
    "connection: content-length",
    "expect: 100-continue",
    "5",
    "0",
    "hello",
    "5\r\nhello\r\n",
    "0\r\n\r\n",
    "5;x=y\r\n",
    "ffffffffffffffff\r\n",
    "x: \u{e9}",
    "%00",
    "..",
];

fn texts() -> impl Strategy<Value = Vec<u8>> {
    let pieces = proptest::sample::select(&PIECES[..]);
    proptest::collection::vec(pieces, 0..24).prop_map(|pieces| pieces.concat().into_bytes())
}

/// Heads that are mostly valid, so that most of them pass the first checks.
fn heads() -> impl Strategy<Value = Vec<u8>> {
    let field = proptest::sample::select(&PIECES[18..38]);
    (0..7_usize, proptest::collection::vec(field, 0..6)).prop_map(|(first, fields)| {
        let mut text = format!("{}\r\n", PIECES[first]);
        for field in fields {
            text.push_str(field);
            text.push_str("\r\n");
        }
        (text + "\r\n").into_bytes()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// Every accepted head has only one reading.
    #[test]
    fn accepted_heads_are_unambiguous(text in heads(), noise in texts()) {
        properties::request_head(&text);
        properties::request_head(&noise);
        properties::request_head(&[&text[..text.len() - 2], &noise].concat());
    }

    #[test]
    fn chunks_parse_the_same_however_they_are_split(text in texts(), size in 0_u32..40) {
        properties::chunks(&text);
        let good = format!("{size:x}\r\n{}\r\n0\r\n\r\n", "d".repeat(size as usize));
        properties::chunks(good.as_bytes());
        properties::chunks(&[good.as_bytes(), &text].concat());
    }

    #[test]
    fn the_properties_hold_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        properties::request_head(&bytes);
        properties::chunks(&bytes);
    }
}

/// The parser is strict; it must still accept common requests.
#[test]
fn common_heads_are_accepted() {
    let common = [
        "GET / HTTP/1.1\r\nhost: example.com\r\n\r\n",
        "GET /a/b.c/d..e/.well-known/x?y=../z HTTP/1.1\r\nHost: [::1]:8080\r\nAccept: */*\r\n\r\n",
        "POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nConnection: keep-alive, TE\r\nTE: trailers\r\n\r\n",
        "POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: Chunked\r\nExpect: 100-Continue\r\n\r\n",
        "GET http://t/x HTTP/1.1\r\nHost: T\r\nX-Empty:\r\nX-Latin: caf\u{e9}\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
    ];
    for text in common {
        let bytes = text.as_bytes();
        assert!(head::request(bytes, &HeadLimits::default()).is_ok(), "{text}");
        properties::request_head(text.as_bytes());
    }
}
