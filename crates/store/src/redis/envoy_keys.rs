//! Counters as envoyproxy/ratelimit keeps them, so that both can run side by side and share counts: one key for each
//! descriptor and window, `<prefix><domain>_<key>_<value>_…_<start of the window>`, that holds a plain number.
//!
//! Only windows that count attempts are kept so, and only if all limits of a request are such; others have the store's
//! own form. The start of a window is by this node's clock, as it is by that service's. Parts are joined by `_` and not
//! escaped, as there: `[a=b_c]` and `[a_b=c]` share a counter.

use std::fmt::Write;
use tollgate_core::{Charge, KeyPart, Limit, LimitParams, Period, State, TimeDelta, Timestamp, WindowCount};

/// Settings of such keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EnvoyKeys {
    /// Seconds, chosen at random below this number, that a key outlives its window.
    pub(super) jitter: u64,
}

/// Returns the key of a charge's counter at this time; `None` if it has none.
pub(super) fn key(charge: &Charge<'_>, prefix: &str, now: Timestamp) -> Option<String> {
    let seconds = window(charge.limit)?;
    let label = charge.key.scope.label();
    let label = charge.key.scope.store().map_or(label, |store| {
        let named = tollgate_core::Scope::store_prefix(store);
        label.strip_prefix(named.as_str()).unwrap_or(label)
    });
    // The last two parts are the kind of limit and the period.
    let mut elements: Vec<&str> = label.split('|').collect();
    let kind = elements.len().checked_sub(2).map(|at| elements.split_off(at))?;
    if kind.first()?.starts_with("candidate:") {
        return None;
    }
    let mut key = prefix.to_owned();
    let mut values = charge.key.parts.iter();
    for (at, element) in elements.into_iter().enumerate() {
        let (name, value) = match element.find(['=', '~']) {
            Some(mark) if at > 0 => (&element[..mark], Some(&element[mark + 1..])),
            _ => (element, None),
        };
        unescape(&mut key, name);
        key.push('_');
        match value {
            _ if at == 0 => continue,
            Some(value) => unescape(&mut key, value),
            None => match values.next()? {
                KeyPart::Text(text) | KeyPart::Secret(text) => key.push_str(text),
                KeyPart::Network { .. } => return None,
            },
        }
        key.push('_');
    }
    let start = now.as_secs() / seconds * seconds;
    let _ = write!(key, "{start}");
    Some(key)
}

/// Returns the seconds of a window that counts attempts.
fn window(limit: &Limit) -> Option<u64> {
    match (limit.params(), &limit.rate().period) {
        (LimitParams::Attempts { .. }, Period::Rolling(length)) if !limit.is_jittered() => {
            let seconds = length.as_micros() / 1_000_000;
            (seconds > 0 && TimeDelta::from_secs(seconds) == *length).then_some(seconds)
        }
        _ => None,
    }
}

/// Returns the seconds after which a key expires.
pub(super) fn expiry(limit: &Limit, keys: EnvoyKeys, now: Timestamp) -> u64 {
    // The microseconds of the clock are as good as random, and nothing depends on them.
    let jitter = if keys.jitter > 0 { now.as_micros() % keys.jitter } else { 0 };
    window(limit).unwrap_or(1) + jitter
}

/// Returns the state that the number under a key stands for.
pub(super) fn state(key: &str, held: Option<&[u8]>) -> State {
    let start = key.rsplit_once('_').and_then(|(_, start)| start.parse().ok());
    let count = held.and_then(|bytes| std::str::from_utf8(bytes).ok()).and_then(|text| text.parse().ok());
    match (start, count) {
        (Some(start), Some(count)) => {
            State::Window(WindowCount { start: Timestamp::from_secs(start), count })
        }
        _ => State::Unused,
    }
}

/// Appends a part of a label with its escapes decoded.
fn unescape(key: &mut String, part: &str) {
    let mut rest = part;
    while let Some((before, after)) = rest.split_once('%') {
        key.push_str(before);
        let code = after.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code {
            Some(code) => {
                key.push(char::from(code));
                rest = &after[2..];
            }
            None => {
                key.push('%');
                rest = after;
            }
        }
    }
    key.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{Algorithm, Cost, CounterKey, LimitSpec, Rate, Scope};

    #[test]
    fn keys_are_those_of_the_service() {
        let hour = LimitSpec::new(Algorithm::FixedWindow, Rate::per(2, TimeDelta::from_secs(3_600)));
        let hour = hour.count_denied().build().expect("a limit");
        let at = Timestamp::from_secs(7_300);
        let of = |label: &str, parts: &[KeyPart<'_>]| {
            let scope = Scope::new(label);
            key(&Charge::new(CounterKey { scope: &scope, parts }, &hour, Cost::ONE), "p:", at)
        };
        let text = [KeyPart::Text("x_y"), KeyPart::Secret("s")];
        assert_eq!(of("one|k=v|fixed_window|1h", &[]).as_deref(), Some("p:one_k_v_7200"));
        assert_eq!(of("%@eu|one|a|b|own:fixed_window|1h", &text).as_deref(), Some("p:one_a_x_y_b_s_7200"));
        assert_eq!(
            of("a%7cb|ns%2fp%2f0=ns/p/0|m~GET *|shadow:fixed_window|1h", &[]).as_deref(),
            Some("p:a|b_ns/p/0_ns/p/0_m_GET *_7200")
        );
        assert_eq!(of("one|k=v|candidate:fixed_window|1h", &[]), None);
        let counted = State::Window(WindowCount { start: Timestamp::from_secs(7_200), count: 3 });
        assert_eq!(state("p:one_k_v_7200", Some(b"3")), counted);
        assert_eq!(state("p:one_k_v_7200", None), State::Unused);
    }
}
