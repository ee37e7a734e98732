//! The short form of a bundle: one bucket of a common period and count as a whole number, which Redis keeps without extra
//! memory. `lua/scale.lua` reads and writes the same.
//!
//! A number has 63 bits, and a TAT alone takes 51, so there is room for a name and a scale only if both are common ones:
//! fourteen periods, and counts of two digits and up to five zeros. Other buckets are written as text. Rejected: text for
//! all of them, because it costs a quarter more memory for each key.

use super::key_encoding::Name;
use tollgate_core::{Scale, State, Tat};

/// The names that have a short form. Their order is part of the format.
const NAMES: [&[u8; 3]; 14] = [
    b"001", b"010", b"030", b"601", b"605", b"610", b"615", b"630", b"701", b"712", b"801", b"807", b"830",
    b"890",
];
/// Counts that have a short form, and the number of the first of them.
const COUNTS: u64 = 549;
const FIRST: u64 = 1_000;
/// The instant from which a short form counts, in microseconds.
const EPOCH: u64 = 1_600_000_000_000_000;

/// Returns the first characters of the short form of a bucket that restores a unit in `unit` whole microseconds.
pub(super) fn prefix(name: &Name, unit: u64) -> Option<String> {
    let index = NAMES.iter().position(|known| known.as_slice() == name.as_slice())?;
    let period = period_of(NAMES[index]);
    let (mut count, mut zeros) = (period.checked_div(unit)?, 0);
    if count == 0 || count * unit != period {
        return None;
    }
    while count > 99 && count.is_multiple_of(10) {
        (count, zeros) = (count / 10, zeros + 1);
    }
    let place = match zeros {
        _ if count > 99 || zeros > 5 => return None,
        0 => count - 1,
        zeros => 99 + (zeros - 1) * 90 + count - 10,
    };
    Some(format!("-{}", FIRST + index as u64 * COUNTS + place))
}

/// Returns the state of the counter with this name in a short form; `None` if it is none, or another's.
pub(super) fn state(text: &str, name: &Name) -> Option<State> {
    let digits = text.strip_prefix('-').filter(|digits| digits.len() == 19)?;
    let (code, micros) = digits.split_at_checked(4)?;
    let (code, micros) = (code.parse::<u64>().ok()?.checked_sub(FIRST)?, micros.parse::<u64>().ok()?);
    let whose = NAMES.get(usize::try_from(code / COUNTS).ok()?)?;
    let count = match code % COUNTS {
        place @ 0..99 => place + 1,
        place => ((place - 99) % 90 + 10) * 10_u64.pow(u32::try_from((place - 99) / 90).ok()? + 1),
    };
    let period = period_of(whose);
    let scale = Scale::new(1, period / count).filter(|_| period.is_multiple_of(count));
    (whose.as_slice() == name.as_slice())
        .then(|| State::Bucket(Tat { micros: micros + EPOCH, fraction: 0, reach: 0, scale }))
}

/// Returns the length of the period that a name of three digits stands for, in microseconds.
fn period_of(name: &[u8; 3]) -> u64 {
    let number = name.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    match number {
        0..600 => number * 1_000_000,
        600..700 => (number - 600) * 60_000_000,
        700..800 => (number - 700) * 3_600_000_000,
        _ => (number - 800) * 86_400_000_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it a counter is read with another limit's scale, or takes a third more memory than it must.
    #[test]
    fn common_buckets_have_a_short_form_of_their_own() {
        let mut seen = std::collections::HashSet::new();
        for name in NAMES {
            let (name, period) = (Name::from_slice(name), period_of(name));
            for count in
                (1..100).chain((1..6).flat_map(|zeros| (10..100).map(move |n| n * 10_u64.pow(zeros))))
            {
                let Some(prefix) = prefix(&name, period / count).filter(|_| period.is_multiple_of(count))
                else {
                    assert!(!period.is_multiple_of(count), "{count} in {name:?}");
                    continue;
                };
                assert!(seen.insert(prefix.clone()), "{prefix} twice");
                let text = format!("{prefix}{:015}", 194_719_042_799_955_u64);
                assert_eq!(text.parse::<i64>().map(|number| number.to_string()), Ok(text.clone()));
                let scale = Scale::new(1, period / count);
                let tat = Tat { micros: 1_794_719_042_799_955, fraction: 0, reach: 0, scale };
                assert_eq!(state(&text, &name), Some(State::Bucket(tat)));
                assert_eq!(state(&text, &Name::from_slice(b"000")), None);
            }
        }
        for (name, unit) in
            [(b"000", 1), (b"601", 60_000_000 / 125), (b"601", 7), (b"601", 0), (b"602", 1_000_000)]
        {
            assert_eq!(prefix(&Name::from_slice(name), unit), None, "{unit}");
        }
    }
}
