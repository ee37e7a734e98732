//! Decodes the states in a bundle.
//!
//! Only scripts write bundles; here they are read, so that an outcome is computed by the same step as in the memory
//! store. State that cannot be decoded counts as unused, as it does in the scripts.

use super::compact;
use super::shard_request::BundleCounter;
use std::collections::VecDeque;
use tollgate_core::{
    AdmissionLog, PermitId, Permits, Scale, SlidingCounts, State, StrictCounts, Tat, Timestamp, WindowCount,
};

/// Returns the state of a counter in its bundle.
pub(super) fn state(bundle: Option<&[u8]>, counter: &BundleCounter) -> State {
    let BundleCounter { name, short, .. } = counter;
    let Some(text) = bundle.and_then(|bytes| std::str::from_utf8(bytes).ok()) else { return State::Unused };
    if text.starts_with('-') {
        return compact::bucket(text, name).unwrap_or_default();
    }
    if let Some(window) = compact::window(text, short) {
        return window;
    }
    if !text.starts_with(';') {
        // A whole number as former versions wrote it: sixteen digits of time, three of name, no scale.
        return match text.split_at_checked(16) {
            Some((micros, whose)) if whose.as_bytes() == name.as_slice() => bucket(micros, None),
            _ => State::Unused,
        };
    }
    let entry = |name: &[u8]| {
        let mut entries = text.split(';').filter_map(|entry| entry.split_once(':'));
        entries.find(|(whose, _)| whose.as_bytes() == name)
    };
    entry(name)
        .or_else(|| compact::window_name(short).and_then(entry))
        .and_then(|(_, body)| parse(body))
        .unwrap_or_default()
}

/// Returns when a counter was reset after a loss, if its bundle still has the mark.
pub(super) fn reset_at(bundle: Option<&[u8]>, counter: &BundleCounter) -> Option<Timestamp> {
    let text = bundle.and_then(|bytes| std::str::from_utf8(bytes).ok())?;
    let mut entries = text.split(';').filter_map(|entry| entry.split_once(':'));
    let is_mark = |whose: &str| whose.as_bytes().strip_suffix(b"~") == Some(counter.name.as_slice());
    match parse(entries.find(|(whose, _)| is_mark(whose))?.1)? {
        State::Window(mark) => Some(mark.start),
        _ => None,
    }
}

fn bucket(micros: &str, scale: Option<Scale>) -> State {
    micros.parse().map_or(State::Unused, |micros| State::Bucket(Tat { micros, fraction: 0, reach: 0, scale }))
}

fn parse(body: &str) -> Option<State> {
    let (kind, fields) = body.split_at_checked(1)?;
    if kind == "b" {
        let (micros, unit) = fields.split_once(',').unwrap_or((fields, ""));
        return Some(bucket(micros, unit.parse().ok().and_then(|unit| Scale::new(1, unit))));
    }
    // The first field is the expiry, readable without the limit; for a fractional bucket it is the microsecond after
    // it.
    let (expiry, fields) = fields.split_once(',')?;
    let mut fields = fields.split(',');
    let mut number = || fields.next()?.parse::<u64>().ok();
    Some(match kind {
        "f" => {
            let micros = expiry.parse::<u64>().ok()?.checked_sub(1)?;
            let fraction = number()?;
            let reach = number().map_or(0, |log2| u8::try_from(log2).unwrap_or(0).min(52));
            let scale = number().zip(number()).and_then(|(k, unit)| Scale::new(k, unit));
            State::Bucket(Tat { micros, fraction, reach, scale })
        }
        "w" => State::Window(WindowCount { start: Timestamp::from_micros(number()?), count: number()? }),
        "s" => State::Sliding(SlidingCounts {
            start: Timestamp::from_micros(number()?),
            previous: number()?,
            current: number()?,
        }),
        "k" => State::Strict(StrictCounts { slot: number()?, counts: std::iter::from_fn(number).collect() }),
        "l" => {
            let pair = || Some((Timestamp::from_micros(number()?), number()?));
            State::Log(AdmissionLog::from_entries(std::iter::from_fn(pair).collect::<VecDeque<_>>()))
        }
        "p" => {
            let held = || {
                let id = u128::from_str_radix(fields.next()?, 16).ok()?;
                let units = fields.next()?.parse().ok()?;
                Some((PermitId(id), units, Timestamp::from_micros(fields.next()?.parse().ok()?)))
            };
            State::Permits(Permits { held: std::iter::from_fn(held).collect() })
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_gives_each_counter_its_own_state() {
        let name = |text: &str| BundleCounter {
            bundle: 0,
            name: text.bytes().collect(),
            short: compact::Short::from_slice(if text.len() == 11 { b"15%08d" } else { b"" }),
        };
        let tat = |micros, fraction| State::Bucket(Tat { micros, fraction, reach: 0, scale: None });
        let alone = Some(b"1700000017123457601".as_slice());
        assert_eq!(state(alone, &name("601")), tat(1_700_000_017_123_457, 0));
        assert_eq!(state(alone, &name("602")), State::Unused);
        let several = Some(b";601:f1701,5;AAAAAAAAAAA:w9,7,3;BBBBBBBBBBB:l9,1,2,3,4".as_slice());
        assert_eq!(state(several, &name("601")), tat(1_700, 5));
        let scaled = Some(b";601:b1700000017123457,600000;602:f1701,5,0,7,60000000".as_slice());
        let with = |micros, fraction, k, unit| {
            State::Bucket(Tat { micros, fraction, reach: 0, scale: Scale::new(k, unit) })
        };
        assert_eq!(state(scaled, &name("601")), with(1_700_000_017_123_457, 0, 1, 600_000));
        assert_eq!(state(scaled, &name("602")), with(1_700, 5, 7, 60_000_000));
        let window = WindowCount { start: Timestamp::from_micros(7), count: 3 };
        assert_eq!(state(several, &name("AAAAAAAAAAA")), State::Window(window));
        let minute = WindowCount { start: Timestamp::from_secs(1_794_719_040), count: 7 };
        for form in ["152991198400000007", ";601:b1700000017123457,1;15:w1,1794719040000000,7"] {
            assert_eq!(state(Some(form.as_bytes()), &name("AAAAAAAAAAA")), State::Window(minute), "{form}");
            assert_eq!(state(Some(form.as_bytes()), &name("602")), State::Unused);
        }
        let State::Log(log) = state(several, &name("BBBBBBBBBBB")) else { panic!("a log") };
        assert_eq!(log.entries, [(Timestamp::from_micros(1), 2), (Timestamp::from_micros(3), 4)]);
        assert_eq!(state(None, &name("601")), State::Unused);
    }
}
