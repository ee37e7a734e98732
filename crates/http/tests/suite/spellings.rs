//! Spellings of one path: whatever two of them a server routes alike are one canonical path, or refused. Models of
//! servers stand in for the servers themselves, which `gateway/tests/suite/upstream_spellings.rs` asks.

use proptest::prelude::*;
use std::borrow::Cow;
use tollgate_http::identity::{IdentityConfig, PathCase, PathError, PathEscapes, PathRules};

fn rules(escapes: PathEscapes, path_case: PathCase) -> PathRules {
    PathRules::new(&IdentityConfig { escapes, path_case, ..IdentityConfig::default() })
}

fn all_rules() -> Vec<PathRules> {
    let escapes = [PathEscapes::Refuse, PathEscapes::Decode, PathEscapes::Keep];
    let both = |escapes| [PathCase::Exact, PathCase::Ignore].map(|case| rules(escapes, case));
    escapes.into_iter().flat_map(both).collect()
}

/// Decodes each escape once, and leaves what is not one, as Python's `unquote` does.
fn decoded(path: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < path.len() {
        let digits = path.get(at + 1..at + 3).and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) if path[at] == b'%' => {
                out.push(byte);
                at += 3;
            }
            _ => {
                out.push(path[at]);
                at += 1;
            }
        }
    }
    out
}

/// Removes empty and dot segments.
fn cleaned(path: &[u8]) -> Vec<u8> {
    let mut segments: Vec<&[u8]> = Vec::new();
    for segment in path.split(|byte| *byte == b'/') {
        match segment {
            b"" | b"." => {}
            b".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    segments.join(&b'/')
}

fn without_parameters(path: &[u8]) -> Vec<u8> {
    let segments = path.split(|byte| *byte == b'/');
    let names: Vec<&[u8]> =
        segments.map(|segment| segment.split(|byte| *byte == b';').next().unwrap_or_default()).collect();
    names.join(&b'/')
}

/// How a server reads a path before it routes it.
type Model = (&'static str, fn(&[u8]) -> Vec<u8>);

/// Servers that decode the path before they route it.
const DECODING: [Model; 4] = [
    ("WSGI", |path| decoded(path)),
    ("nginx, and Go's URL.Path after cleaning", |path| cleaned(&decoded(path))),
    ("servlet container", |path| cleaned(&decoded(&without_parameters(path)))),
    ("Flask with merged slashes", |path| {
        decoded(path).split(|b| *b == b'/').filter(|s| !s.is_empty()).collect::<Vec<_>>().join(&b'/')
    }),
];

/// Servers that route the path by its segments as they are.
const KEEPING: [Model; 3] = [
    ("Node", |path| path.to_vec()),
    ("router that decodes segments", |path| {
        path.split(|byte| *byte == b'/')
            .map(|segment| decoded(segment).escape_ascii().to_string().replace('/', "\\/").into_bytes())
            .collect::<Vec<_>>()
            .join(&b'/')
    }),
    ("router that ignores the last slash", |path| path.strip_suffix(b"/").unwrap_or(path).to_vec()),
];

/// A reverse proxy that decodes, in front of a server that decodes again.
const TWICE: Model = ("two decoding servers", |path| cleaned(&decoded(&decoded(path))));

fn lowered(path: &str) -> String {
    String::from_utf8_lossy(&decoded(path.as_bytes())).to_lowercase()
}

fn path() -> impl Strategy<Value = String> {
    let parts = [
        "a",
        "b",
        "A",
        "%61",
        "%62",
        "%41",
        "/",
        "/",
        "/",
        "//",
        "%2F",
        "%2f",
        "%5C",
        "\\",
        ".",
        "..",
        "%2e",
        ";",
        ";a",
        "%3B",
        "%25",
        "%2561",
        "%25%36%31",
        "%252F",
        "%00",
        "%0a",
        "%",
        "%zz",
        "%c3%a9",
        "%C3%89",
        "%c0%af",
        "%20",
        " ",
        "+",
        "|",
        "%7c",
        "\u{e9}",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..7)
        .prop_map(|parts| format!("/{}", parts.concat()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// What is canonical once must be so again: another node, or another process, reads it too.
    #[test]
    fn the_canonical_form_is_a_fixed_point(path in path()) {
        for rules in all_rules() {
            if let Ok(canonical) = rules.canonical(&path) {
                prop_assert!(canonical.is_ascii() && canonical.starts_with('/'), "{} {}", path, canonical);
                prop_assert_eq!(rules.canonical(&canonical), Ok(Cow::Borrowed(&*canonical)), "{}", path);
            }
        }
    }

    /// Otherwise one of the two would be a fresh limit.
    #[test]
    fn what_a_server_routes_alike_is_counted_alike_or_refused(one in path(), other in path()) {
        let alike = |rules: PathRules, (name, model): &Model| -> Result<(), TestCaseError> {
            if model(one.as_bytes()) != model(other.as_bytes()) {
                return Ok(());
            }
            if let (Ok(first), Ok(second)) = (rules.canonical(&one), rules.canonical(&other)) {
                prop_assert_eq!(first, second, "{} and {} for {} by {:?}", one, other, name, rules);
            }
            Ok(())
        };
        for case in [PathCase::Exact, PathCase::Ignore] {
            let refusing = rules(PathEscapes::Refuse, case);
            for model in DECODING.iter().chain(&KEEPING).chain([&TWICE]) {
                alike(refusing, model)?;
            }
            DECODING.iter().try_for_each(|model| alike(rules(PathEscapes::Decode, case), model))?;
            KEEPING.iter().try_for_each(|model| alike(rules(PathEscapes::Keep, case), model))?;
        }
        let ignoring = rules(PathEscapes::Refuse, PathCase::Ignore);
        if lowered(&one) == lowered(&other)
            && let (Ok(first), Ok(second)) = (ignoring.canonical(&one), ignoring.canonical(&other))
        {
            prop_assert_eq!(first, second, "{} and {}", one, other);
        }
    }

    /// A plain path that was refused would be an outage; one that was merged with another, a shared limit.
    #[test]
    fn plain_paths_are_accepted_in_every_spelling(
        segments in proptest::collection::vec("[a-zA-Z0-9_~!$&'()*+,=:@-]{1,6}", 0..4),
        escape in any::<u64>(),
        slashes in any::<u8>(),
    ) {
        let plain = format!("/{}", segments.join("/"));
        let mut spelled = String::new();
        for (at, byte) in plain.bytes().enumerate() {
            let is_escaped = byte != b'/' && escape >> (at % 64) & 1 == 1;
            match (byte, is_escaped) {
                // Two at the start could be the beginning of a host.
                (b'/', _) => spelled.push_str(if at > 0 && slashes >> (at % 8) & 1 == 1 { "//" } else { "/" }),
                (byte, true) if at % 2 == 0 => spelled.push_str(&format!("%{byte:02x}")),
                (byte, true) => spelled.push_str(&format!("%{byte:02X}")),
                (byte, false) => spelled.push(byte as char),
            }
        }
        for escapes in [PathEscapes::Refuse, PathEscapes::Decode, PathEscapes::Keep] {
            let rules = rules(escapes, PathCase::Exact);
            prop_assert_eq!(rules.canonical(&plain), Ok::<_, PathError>(Cow::Borrowed(plain.as_str())));
            prop_assert_eq!(rules.canonical(&spelled), Ok(Cow::Borrowed(plain.as_str())), "{}", spelled);
            if !segments.is_empty() {
                let below = format!("{spelled}/");
                prop_assert_eq!(rules.canonical(&below), Ok(Cow::Borrowed(plain.as_str())));
            }
        }
    }
}
