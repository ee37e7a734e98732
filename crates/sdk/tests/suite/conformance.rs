//! The cases that Tollgate's clients in every language run; `clients/conformance/README.md` has the rules.

use serde_json::Value;
use tollgate_sdk::pace::{AdaptiveThrottle, Pacer, RetryBudget, Signals, backoff, pace_delay};

/// Reads a file of cases. Fractions become strings: `serde_json` rounds some of them wrongly, and they are compared
/// exactly.
fn load(name: &str) -> Value {
    let path = format!("{}/../../clients/conformance/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("a file of cases");
    let (mut quoted, mut rest) = (String::with_capacity(text.len()), text.as_str());
    while let Some(char) = rest.chars().next() {
        let length = match char {
            '"' => string_length(rest),
            '-' | '0'..='9' => rest.find([',', '}', ']', ' ', '\n']).unwrap_or(rest.len()),
            _ => char.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        if char.is_ascii_digit() && token.contains(['.', 'e']) {
            quoted.push_str(&format!("\"{token}\""));
        } else {
            quoted.push_str(token);
        }
        rest = after;
    }
    serde_json::from_str(&quoted).expect("JSON")
}

/// Returns the length of the string literal that the text starts with.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, char)| {
        let ends = !is_escaped && *char == '"';
        is_escaped = !is_escaped && *char == '\\';
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

fn list<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
    let all = value[name].as_array().unwrap_or_else(|| panic!("`{name}` is a list"));
    assert!(!all.is_empty(), "`{name}` has cases");
    all
}

fn fraction(value: &Value) -> f64 {
    value.as_str().map_or_else(|| value.as_f64().expect("a number"), |text| text.parse().expect("a number"))
}

fn signals(value: &Value) -> Signals {
    Signals {
        is_refused: value["refused"].as_bool().unwrap_or(false),
        wait_ms: value["wait_ms"].as_u64(),
        limit: value["limit"].as_u64(),
        remaining: value["remaining"].as_u64(),
        reset_ms: value["reset_ms"].as_u64(),
    }
}

/// A wait that is read too long is an outage; one too short is a refusal.
#[test]
fn headers() {
    for case in list(&load("headers"), "cases") {
        let lines = case["headers"].as_array().expect("lines");
        let field = |name: &str| {
            let named = |line: &&Value| line[0].as_str().is_some_and(|key| key.eq_ignore_ascii_case(name));
            let values: Vec<_> = lines.iter().filter(named).filter_map(|line| line[1].as_str()).collect();
            (!values.is_empty()).then(|| values.join(", "))
        };
        let status = u16::try_from(case["status"].as_u64().expect("a status")).expect("a status");
        let read = Signals::from_fields(status, field, case["now_ms"].as_u64().expect("a time"));
        assert_eq!(read, signals(&case["expect"]), "{}", case["name"]);
    }
}

/// A client that paces otherwise than the others takes their share, or leaves its own.
#[test]
fn pacing() {
    let data = load("pacing");
    for case in list(&data, "cases") {
        let number = |name: &str| case[name].as_u64().expect("a number");
        let delay = pace_delay(
            case["limit"].as_u64(),
            number("remaining"),
            number("reset_ms"),
            number("since_last_ms"),
        );
        assert_eq!(Some(delay), case["expect"]["delay_ms"].as_u64(), "{case}");
    }
    for sequence in list(&data, "sequences") {
        let mut pacer = Pacer::default();
        for step in list(sequence, "steps") {
            let now = step["at_ms"].as_u64().unwrap_or(0);
            match step["event"].as_str() {
                Some("send") => {
                    assert_eq!(
                        Some(pacer.send(now)),
                        step["expect"]["delay_ms"].as_u64(),
                        "{}: {step}",
                        sequence["name"]
                    );
                }
                Some("failed") => pacer.failed(),
                Some("response") => {
                    let random = step.get("random").map_or(0.0, fraction);
                    pacer.response(now, &signals(&step["signals"]), random);
                    let expected = step["expect"]["blocked_until_ms"].as_u64();
                    assert_eq!(Some(pacer.blocked_until()), expected, "{}: {step}", sequence["name"]);
                }
                other => panic!("unknown event {other:?}"),
            }
        }
    }
}

#[test]
fn backoffs() {
    for case in list(&load("backoff"), "cases") {
        let attempt = u32::try_from(case["attempt"].as_u64().expect("a number")).expect("a number");
        let delay = backoff(attempt, fraction(&case["random"]), case["wait_ms"].as_u64());
        assert_eq!(Some(delay), case["expect"]["delay_ms"].as_u64(), "{case}");
        assert_eq!(Some(backoff(attempt, 1.0, None)), case["expect"]["bound_ms"].as_u64(), "{case}");
    }
}

/// A file that no test reads would say that the clients are alike where nobody has looked.
#[test]
fn every_file_of_cases_is_known() {
    let folder = format!("{}/../../clients/conformance", env!("CARGO_MANIFEST_DIR"));
    let names = std::fs::read_dir(folder).expect("a folder").filter_map(|file| {
        let path = file.expect("a file").path();
        let is_cases = path.extension().is_some_and(|end| end == "json");
        is_cases.then(|| path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned())
    });
    let names: std::collections::BTreeSet<String> = names.collect();
    // Those below, and in `src`: `servers.rs`, `hedge.rs`, `hedge_after.rs`, `checks` with `answer.rs` and `deny_cache.rs`, `http_remote` with
    // `head.rs` and `tests.rs`, and `remote/tests.rs`.
    let here = ["headers", "pacing", "backoff", "retry-budget", "adaptive-throttling"];
    let inside = ["failover", "hedging", "hedge-after", "answers", "heads", "deny-cache", "faults"];
    let known = here.into_iter().chain(inside).map(str::to_owned).collect();
    assert_eq!(names, known, "run them in the tests");
}

/// Retries beyond the budget multiply the load on a server that fails already.
#[test]
fn retry_budgets() {
    for sequence in list(&load("retry-budget"), "sequences") {
        let mut budget = RetryBudget::default();
        for step in list(sequence, "steps") {
            match step["event"].as_str() {
                Some("request") => budget.deposit(),
                Some("retry") => assert_eq!(Some(budget.withdraw()), step["granted"].as_bool(), "{step}"),
                other => panic!("unknown event {other:?}"),
            }
            assert_eq!(Some(u64::from(budget.balance())), step["balance"].as_u64(), "{step}");
        }
    }
}

#[test]
fn adaptive_throttling() {
    for sequence in list(&load("adaptive-throttling"), "sequences") {
        let mut throttle = AdaptiveThrottle::default();
        for step in list(sequence, "steps") {
            let now = step["at_ms"].as_u64().expect("a time");
            let times = step["times"].as_u64().unwrap_or(1);
            match step["event"].as_str() {
                Some("request") => (0..times).for_each(|_| throttle.request(now)),
                Some("accept") => (0..times).for_each(|_| throttle.accept(now)),
                Some("probability") => {
                    let probability = throttle.probability(now);
                    let expected = fraction(&step["expect"]);
                    assert_eq!(probability.to_bits(), expected.to_bits(), "{}: {step}", sequence["name"]);
                    if let Some(random) = step.get("random") {
                        assert_eq!(
                            Some(fraction(random) < probability),
                            step["rejected"].as_bool(),
                            "{step}"
                        );
                    }
                }
                other => panic!("unknown event {other:?}"),
            }
        }
    }
}
