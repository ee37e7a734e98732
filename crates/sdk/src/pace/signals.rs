//! Reads what a response says about its limits: `Retry-After`, `RateLimit` and `RateLimit-Policy` (IETF draft 11, and the
//! forms of drafts 3 to 7), and the `X-RateLimit-*` of many APIs. Malformed fields are ignored.

use super::http_date;
use http::{HeaderMap, StatusCode};

/// No host is avoided for longer than this, whatever it says.
const MAX_WAIT_MS: u64 = 3_600_000;
const TOO_LARGE: u64 = 999_999_999_999_999;
const GROUPS: [&str; 3] = ["ratelimit", "x-ratelimit", "x-rate-limit"];

/// What a response says about its limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// Whether the server refused the request for its rate or load.
    pub is_refused: bool,
    /// How long not to call the host.
    pub wait_ms: Option<u64>,
    /// The limit with the least remaining: its size.
    pub limit: Option<u64>,
    /// Units that remain of it.
    pub remaining: Option<u64>,
    /// Time until it is restored.
    pub reset_ms: Option<u64>,
}

/// What remains of one limit.
struct Budget {
    limit: Option<u64>,
    remaining: u64,
    reset_ms: Option<u64>,
}

impl Signals {
    /// Reads a response; `now_ms` is the time of day, in milliseconds since 1970.
    #[must_use]
    pub fn read(status: StatusCode, headers: &HeaderMap, now_ms: u64) -> Self {
        let joined = |name: &str| {
            let mut lines = headers.get_all(name).iter().map(|value| {
                // Bytes as characters, as in every other client.
                value.as_bytes().iter().copied().map(char::from).collect::<String>()
            });
            let first = lines.next()?;
            Some(lines.fold(first, |all, line| all + ", " + &line))
        };
        Self::from_fields(status.as_u16(), joined, now_ms)
    }

    /// As [`read`](Self::read), from whatever looks up a field by its lower-case name, several lines joined by `, `.
    #[must_use]
    pub fn from_fields(status: u16, field: impl Fn(&str) -> Option<String>, now_ms: u64) -> Self {
        let has_retry_after = matches!(status, 403 | 429 | 503);
        let mut wait_ms = if has_retry_after { retry_after(&field, now_ms) } else { None };
        let budgets =
            structured_budgets(&field).unwrap_or_else(|| legacy_budget(&field, now_ms).into_iter().collect());
        for budget in &budgets {
            if budget.remaining == 0 {
                wait_ms = wait_ms.max(budget.reset_ms);
            }
        }
        // The first of equal ones.
        let paces = budgets.iter().min_by_key(|one| (one.remaining, std::cmp::Reverse(one.reset_ms)));
        let bound = |ms: Option<u64>| ms.map(|ms| ms.min(MAX_WAIT_MS));
        Self {
            is_refused: matches!(status, 429 | 503) || (status == 403 && wait_ms.is_some()),
            wait_ms: bound(wait_ms),
            limit: paces.and_then(|one| one.limit),
            remaining: paces.map(|one| one.remaining),
            reset_ms: bound(paces.and_then(|one| one.reset_ms)),
        }
    }
}

fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn retry_after(field: &impl Fn(&str) -> Option<String>, now_ms: u64) -> Option<u64> {
    let text = field("retry-after")?;
    let text = trim(&text);
    seconds(text).or_else(|| until(text, now_ms))
}

/// Returns the time until a date, 0 if it has passed.
fn until(text: &str, now_ms: u64) -> Option<u64> {
    Some(u64::try_from(http_date::parse(text, now_ms)?).unwrap_or(0).saturating_sub(now_ms))
}

/// Seconds with or without a fraction, as milliseconds, rounded up; computed on digits, so that it is exact.
fn seconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    if !is_digits(whole) || fraction.is_some_and(|fraction| !is_digits(fraction)) {
        return None;
    }
    let base = if whole.len() > 15 { TOO_LARGE } else { whole.parse().ok()? } * 1_000;
    let digits = fraction.unwrap_or("").bytes().map(|byte| u64::from(byte - b'0'));
    let thousandths =
        digits.clone().chain(std::iter::repeat(0)).take(3).fold(0, |sum, digit| sum * 10 + digit);
    Some(base + thousandths + u64::from(digits.skip(3).any(|digit| digit > 0)))
}

/// A field that is absent is `Ok(None)`, one that is not 1 to 15 digits an error.
fn integer(text: Option<&str>) -> Result<Option<u64>, ()> {
    match text {
        None => Ok(None),
        Some(text) if is_digits(text) && text.len() <= 15 => text.parse().map(Some).map_err(|_| ()),
        Some(_) => Err(()),
    }
}

/// Members of `RateLimit`; `None` if there is none that is valid.
fn structured_budgets(field: &impl Fn(&str) -> Option<String>) -> Option<Vec<Budget>> {
    let text = field("ratelimit")?;
    let members = parse_list(&text)?;
    let policy_text = field("ratelimit-policy").unwrap_or_default();
    let policies = parse_list(&policy_text).unwrap_or_default();
    let mut budgets = Vec::new();
    // Draft 7: `limit=10, remaining=5, reset=30` are together one member.
    let (mut limit, mut remaining, mut reset) = (None, None, None);
    for member in &members {
        match &member.name {
            Name::Pair("limit", value) => limit = Some(*value),
            Name::Pair("remaining", value) => remaining = Some(*value),
            Name::Pair("reset", value) => reset = Some(*value),
            Name::Pair(..) => {}
            Name::Text(name) => {
                let parameter = |key| integer(member.parameter(key));
                if let (Ok(Some(remaining)), Ok(reset)) = (parameter("r"), parameter("t")) {
                    let quota = |policy: &Member<'_>| match &policy.name {
                        Name::Text(other) if other == name => integer(policy.parameter("q")).ok()?,
                        _ => None,
                    };
                    let limit = policies.iter().find_map(quota);
                    budgets.push(Budget { limit, remaining, reset_ms: reset.map(|reset| reset * 1_000) });
                }
            }
        }
    }
    if let (Ok(limit), Ok(Some(remaining)), Ok(reset)) = (integer(limit), integer(remaining), integer(reset))
    {
        budgets.push(Budget { limit, remaining, reset_ms: reset.map(|reset| reset * 1_000) });
    }
    (!budgets.is_empty()).then_some(budgets)
}

enum Name<'a> {
    /// A quoted string, unescaped, or a token.
    Text(String),
    /// `key=value`.
    Pair(&'a str, &'a str),
}

struct Member<'a> {
    name: Name<'a>,
    parameters: Vec<(&'a str, &'a str)>,
}

impl<'a> Member<'a> {
    /// Returns the last value of a parameter.
    fn parameter(&self, key: &str) -> Option<&'a str> {
        self.parameters.iter().rev().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }
}

fn pair(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').map(|(key, value)| (trim(key), trim(value)))
}

/// Parses a list of names with parameters; `None` if a quoted string is not closed.
fn parse_list(text: &str) -> Option<Vec<Member<'_>>> {
    let mut members = Vec::new();
    for element in split(text, ',')? {
        let parts = split(element, ';')?;
        let (first, rest) = parts.split_first()?;
        let first = trim(first);
        let parameters = rest.iter().map(|part| trim(part)).filter(|part| !part.starts_with('='));
        let parameters = parameters.filter_map(pair).collect();
        let name = if let Some(quoted) = first.strip_prefix('"') {
            let Some(inner) = quoted.strip_suffix('"') else { continue };
            Name::Text(unescaped(inner))
        } else if let Some((key, value)) = pair(first) {
            Name::Pair(key, value)
        } else if first.is_empty() {
            continue;
        } else {
            Name::Text(first.to_owned())
        };
        members.push(Member { name, parameters });
    }
    Some(members)
}

fn unescaped(text: &str) -> String {
    let mut chars = text.chars();
    let mut all = String::with_capacity(text.len());
    while let Some(char) = chars.next() {
        all.push(if char == '\\' { chars.next().unwrap_or(char) } else { char });
    }
    all
}

/// Splits outside of quoted strings; `None` if one is not closed.
fn split(text: &str, separator: char) -> Option<Vec<&str>> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (at, char) in text.char_indices() {
        match char {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if char == separator && !is_quoted => {
                parts.push(&text[start..at]);
                start = at + char.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    (!is_quoted).then_some(parts)
}

fn legacy_budget(field: &impl Fn(&str) -> Option<String>, now_ms: u64) -> Option<Budget> {
    GROUPS.iter().find_map(|group| {
        let of = |part: &str| field(&format!("{group}-{part}")).map(|text| trim(&text).to_owned());
        let remaining = integer(of("remaining").as_deref()).ok()??;
        let limit = of("limit").and_then(|text| integer(text.split([',', ';']).next()).ok().flatten());
        let after = of("reset-after").and_then(|text| seconds(&text));
        let reset_ms = after.or_else(|| reset_time(&of("reset")?, now_ms));
        Some(Budget { limit, remaining, reset_ms })
    })
}

/// APIs disagree: milliseconds since 1970, seconds since 1970, seconds from now, or a date. Their sizes tell them apart.
fn reset_time(text: &str, now_ms: u64) -> Option<u64> {
    match seconds(text) {
        None => until(text, now_ms),
        Some(ms) if ms >= 1_000_000_000_000_000 => Some(ms.div_ceil(1_000).saturating_sub(now_ms)),
        Some(ms) if ms >= 1_000_000_000_000 => Some(ms.saturating_sub(now_ms)),
        Some(ms) => Some(ms),
    }
}
