//! `traceparent` parsing, compared with the text of the standard. A wrong result attaches spans to the wrong trace, or
//! creates spans for traces that are not sampled.

use http::HeaderMap;
use proptest::prelude::*;
use std::sync::Arc;
use tollgate_core::{Clock, ManualClock, Timestamp};
use tollgate_engine::{Check, Decision, Limiter, Observer, TraceContext};
use tollgate_http::traceparent::{self, TRACEPARENT, format, sampled};
use tollgate_rules::{Options, Ruleset};
use tollgate_store::{MemoryConfig, MemoryStore};

const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn read(text: &str) -> Option<TraceContext> {
    sampled(text.as_bytes(), || Timestamp::from_secs(7))
}

/// A slow parser that follows the text of the standard.
fn oracle(text: &str) -> Option<(u128, u64)> {
    let parts: Vec<&str> = text.split('-').collect();
    let is_hex = |part: &&str, length: usize| {
        part.len() == length && part.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
    };
    let [version, trace, span, flags, ..] = &parts[..] else { return None };
    if !is_hex(version, 2) || !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
        return None;
    }
    if *version == "ff" || (*version == "00" && parts.len() != 4) {
        return None;
    }
    let number = |part: &str| u128::from_str_radix(part, 16).expect("hexadecimal");
    let sampled = number(flags) % 2 == 1;
    (sampled && number(trace) != 0 && number(span) != 0).then(|| (number(trace), number(span) as u64))
}

/// Valid values, nearly valid ones, and those of later versions.
fn written() -> impl Strategy<Value = String> {
    let version = prop_oneof![5 => Just("00"), 1 => Just("01"), 1 => Just("fe"), 1 => Just("ff"), 1 => Just("0"), 1 => Just("0G")];
    let digits = |length: usize| {
        prop_oneof![
            8 => proptest::string::string_regex(&format!("[0-9a-f]{{{length}}}")).expect("a pattern"),
            1 => Just("0".repeat(length)),
            1 => proptest::string::string_regex(&format!("[0-9A-F]{{{length}}}")).expect("a pattern"),
            1 => proptest::string::string_regex(&format!("[0-9a-f]{{{},{}}}", length - 1, length + 1)).expect("a pattern"),
        ]
    };
    let rest = prop_oneof![6 => Just(""), 1 => Just("-"), 1 => Just("-more"), 1 => Just("x"), 1 => Just(" ")];
    (version, digits(32), digits(16), digits(2), rest)
        .prop_map(|(version, trace, span, flags, rest)| format!("{version}-{trace}-{span}-{flags}{rest}"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn the_parser_follows_the_standard(text in written()) {
        let read = read(&text).map(|trace| (u128::from_be_bytes(trace.id), u64::from_be_bytes(trace.parent)));
        prop_assert_eq!(read, oracle(&text));
    }

    #[test]
    fn arbitrary_bytes_are_parsed_like_the_oracle(bytes in proptest::collection::vec(any::<u8>(), 0..80), at in 0_usize..55, byte: u8) {
        let _ = sampled(&bytes, || Timestamp::ZERO);
        let mut near = GOOD.as_bytes().to_vec();
        near[at] = byte;
        let expected = std::str::from_utf8(&near).ok().and_then(oracle);
        prop_assert_eq!(sampled(&near, || Timestamp::ZERO).is_some(), expected.is_some());
    }
}

#[test]
fn only_a_sampled_trace_is_followed() {
    let trace = read(GOOD).expect("the standard's own example");
    assert_eq!((trace.id[0], trace.id[15], trace.parent[7]), (0x4b, 0x36, 0xb7));
    assert_eq!(trace.started_at, Timestamp::from_secs(7));
    assert!(read("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-comes-later").is_some());
    for other in [
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        "",
    ] {
        assert_eq!(read(other), None, "{other}");
    }
}

#[test]
fn the_next_hop_receives_our_span_as_its_parent() {
    let trace = read(GOOD).expect("a trace");
    let next = read(format(&trace).to_str().expect("text")).expect("a trace");
    assert_eq!((next.id, next.parent), (trace.id, trace.span));
    let spans: std::collections::HashSet<_> =
        (0..10_000).map(|_| trace.child(trace.started_at).span).collect();
    assert_eq!((spans.len(), spans.contains(&[0; 8])), (10_000, false));
}

struct Follows(bool);

impl Observer for Follows {
    fn on_decision(&self, _: &Check<'_>, _: &Decision) {}
    fn follows_traces(&self) -> bool {
        self.0
    }
}

/// If no observer follows traces, the field is not parsed.
#[test]
fn a_trace_is_read_only_if_an_observer_follows_traces() {
    let mut fields = HeaderMap::new();
    let is_traced = |follows: &[bool], fields: &HeaderMap| {
        let clock = Arc::new(ManualClock::default());
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let rules = Ruleset::load(&[], &Options::default()).expect("no rules");
        let mut limiter = Limiter::new(Arc::new(rules), store, clock as Arc<dyn Clock>);
        for follows in follows {
            limiter = limiter.with_observer(Arc::new(Follows(*follows)));
        }
        traceparent::from_headers(&limiter, fields, || Timestamp::ZERO).is_some()
    };
    assert!(!is_traced(&[true], &fields));
    fields.append(&TRACEPARENT, GOOD.parse().expect("a value"));
    assert!(is_traced(&[false, true, false], &fields));
    assert!(!is_traced(&[], &fields) && !is_traced(&[false], &fields));
    // Two values are ambiguous.
    fields.append(&TRACEPARENT, GOOD.parse().expect("a value"));
    assert!(!is_traced(&[true], &fields));
}
