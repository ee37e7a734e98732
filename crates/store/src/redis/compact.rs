//! The short form of a bundle: one bucket of a common period and count, or one fixed window of a common length, as a whole
//! number, which Redis keeps without extra memory. `lua/scale.lua` reads and writes the same.
//!
//! A window is two digits for its length, its number since 1970, and its count in the rest of 18 digits: Redis adds a charge
//! to it without another expiry. A bucket is a minus and 19 digits. A number has 63 bits, and a TAT alone takes 51, so there is room for a name and a scale only if both are common ones:
//! fourteen periods, and counts of two digits and up to five zeros. Other buckets are written as text. Rejected: text for
//! all of them, because it costs a quarter more memory for each key.

use super::key_encoding::Name;
use smallvec::SmallVec;
use tollgate_core::{
    Limit, LimitParams, Period, Scale, Scope, State, Tat, TimeDelta, Timestamp, WindowCount,
};

/// The names that have a short form. Their order is part of the format.
const NAMES: [&[u8; 3]; 14] = [
    b"001", b"010", b"030", b"601", b"605", b"610", b"615", b"630", b"701", b"712", b"801", b"807", b"830",
    b"890",
];
/// Counts that have a short form, and the number of the first of them.
const COUNTS: u64 = 549;
const FIRST: u64 = 1_000;
/// The instant from which a short form counts, in microseconds.
pub(super) const EPOCH: u64 = 1_600_000_000_000_000;

/// Lengths of windows that have a short form, in seconds. Their order is part of the format: the first has the code 10.
const LENGTHS: [u64; 23] = [
    1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 14_400, 21_600, 28_800, 43_200,
    86_400, 604_800, 2_592_000, 7_776_000, 31_536_000,
];
const FIRST_LENGTH: usize = 10;
/// Digits of a window's short form.
const WINDOW_DIGITS: usize = 18;
/// The second until which windows are numbered.
const LAST_SECOND: u64 = 4_000_000_000;

/// What never changes in the short form of a counter: of a window its code and the format of its number, as Lua has it
/// (`21%05d`), of a bucket its first five characters. Empty if it has none.
pub(super) type Short = SmallVec<[u8; 8]>;

/// Returns the short form of a limit's counter.
pub(super) fn short(scope: &Scope, name: &Name, limit: &Limit) -> Short {
    match limit.params() {
        // By its name alone: all limits of a window must find the same counter.
        LimitParams::Fixed { .. } | LimitParams::Attempts { .. } => {
            let length = scope.member().and_then(|member| member.strip_prefix("|fixed_window|"));
            let place = length.and_then(|text| LENGTHS.iter().position(|seconds| is_length(text, *seconds)));
            place.map_or_else(Short::new, |place| {
                let mut short = digits((place + FIRST_LENGTH) as u64);
                short.extend_from_slice(b"%0");
                short.extend(digits(number_digits(LENGTHS[place]) as u64));
                short.push(b'd');
                short
            })
        }
        LimitParams::Bucket { k: 1, reach: 0, unit, .. } if limit.refill_interval().is_none() => {
            prefix(name, unit).unwrap_or_default()
        }
        _ => Short::new(),
    }
}

/// Returns whether `lua/short.lua` can step this limit: a window that is named by its length, or a bucket.
pub(super) fn is_stepped_short(limit: &Limit, short: &Short, phase: TimeDelta) -> bool {
    match (short.first(), &limit.rate().period) {
        (Some(b'-'), _) => true,
        (Some(_), Period::Rolling(length)) => {
            phase == TimeDelta::ZERO
                && window_code(short).is_some_and(|place| TimeDelta::from_secs(LENGTHS[place]) == *length)
        }
        _ => false,
    }
}

/// Returns a number in decimal, without an allocation.
fn digits(number: u64) -> Short {
    let mut text = Short::new();
    let mut rest = number;
    loop {
        text.insert(0, b'0' + (rest % 10) as u8);
        rest /= 10;
        if rest == 0 {
            return text;
        }
    }
}

/// Returns whether a text is this length as labels have it.
fn is_length(text: &str, seconds: u64) -> bool {
    let (unit, size) = match seconds {
        _ if seconds.is_multiple_of(86_400) => ("d", 86_400),
        _ if seconds.is_multiple_of(3_600) => ("h", 3_600),
        _ if seconds.is_multiple_of(60) => ("m", 60),
        _ => ("s", 1),
    };
    text.strip_suffix(unit).and_then(|count| count.parse::<u64>().ok()) == Some(seconds / size)
        && !text.starts_with(['0', '+'])
}

/// Returns the digits for the number of a window since 1970.
fn number_digits(seconds: u64) -> usize {
    (LAST_SECOND / seconds).ilog10() as usize + 1
}

/// Returns the place of a window's length, by its code at the beginning of a text.
fn window_code(text: &[u8]) -> Option<usize> {
    let code = std::str::from_utf8(text.get(..2)?).ok()?.parse::<usize>().ok()?;
    code.checked_sub(FIRST_LENGTH).filter(|place| *place < LENGTHS.len())
}

/// Returns the name of a window's entry in a bundle, if the one who wrote it did not know its name.
pub(super) fn window_name(short: &Short) -> Option<&[u8]> {
    short.get(..2).filter(|code| code[0] != b'-')
}

/// Returns the state of the window with this short form in 18 digits; `None` if it is none, or another's.
pub(super) fn window(text: &str, short: &Short) -> Option<State> {
    let is_window = text.len() == WINDOW_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    let place = window_code(text.as_bytes())
        .filter(|_| is_window && window_name(short) == text.as_bytes().get(..2))?;
    let (number, count) = text[2..].split_at(number_digits(LENGTHS[place]));
    let start = Timestamp::from_secs(number.parse::<u64>().ok()? * LENGTHS[place]);
    Some(State::Window(WindowCount { start, count: count.parse().ok()? }))
}

/// Returns the first characters of the short form of a bucket that restores a unit in `unit` whole microseconds.
fn prefix(name: &Name, unit: u64) -> Option<Short> {
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
    let mut short = Short::from_slice(b"-");
    short.extend(digits(FIRST + index as u64 * COUNTS + place));
    Some(short)
}

/// Returns the state of the bucket with this name in a short form; `None` if it is none, or another's.
pub(super) fn bucket(text: &str, name: &Name) -> Option<State> {
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
    use tollgate_core::{Algorithm, LimitSpec, Rate};

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
                let prefix = String::from_utf8_lossy(&prefix).into_owned();
                assert!(seen.insert(prefix.clone()), "{prefix} twice");
                let text = format!("{prefix}{:015}", 194_719_042_799_955_u64);
                assert_eq!(text.parse::<i64>().map(|number| number.to_string()), Ok(text.clone()));
                let scale = Scale::new(1, period / count);
                let tat = Tat { micros: 1_794_719_042_799_955, fraction: 0, reach: 0, scale };
                assert_eq!(bucket(&text, &name), Some(State::Bucket(tat)));
                assert_eq!(bucket(&text, &Name::from_slice(b"000")), None);
            }
        }
        for (name, unit) in
            [(b"000", 1), (b"601", 60_000_000 / 125), (b"601", 7), (b"601", 0), (b"602", 1_000_000)]
        {
            assert_eq!(prefix(&Name::from_slice(name), unit), None, "{unit}");
        }
    }

    /// Without it two windows share a number, or a window takes half as much memory again.
    #[test]
    fn common_windows_have_a_short_form_of_their_own() {
        let mut seen = std::collections::HashSet::new();
        for seconds in LENGTHS {
            let length = TimeDelta::from_secs(seconds);
            let limit =
                LimitSpec::new(Algorithm::FixedWindow, Rate::per(10, length)).build().expect("a limit");
            let scope = |member: &str| Scope::in_group(format!("api|user{member}"), "api|user");
            let form = |member: &str| short(&scope(member), &Name::new(), &limit);
            let own = form(&format!("|fixed_window|{length}"));
            assert!(seen.insert(own.clone()), "{length} twice");
            assert!(is_stepped_short(&limit, &own, TimeDelta::ZERO));
            assert!(!is_stepped_short(&limit, &own, TimeDelta::from_secs(1)), "its windows are shifted");
            assert_eq!(form(&format!("|shadow:fixed_window|{length}")), Short::new());
            assert_eq!(form(&format!("|fixed_window|0{length}")), Short::new());
            let digits = number_digits(seconds);
            let number = 1_794_719_042 / seconds;
            let text = format!("{}{number:0digits$}{:0rest$}", seen.len() + 9, 42, rest = 16 - digits);
            let counted = WindowCount { start: Timestamp::from_secs(number * seconds), count: 42 };
            assert_eq!(window(&text, &own), Some(State::Window(counted)), "{text}");
            assert_eq!(text.parse::<i64>().map(|number| number.to_string()), Ok(text.clone()));
            assert_eq!(window(&text, &Short::from_slice(b"99%05d")), None);
        }
        let hour = LimitSpec::new(Algorithm::FixedWindow, Rate::per(10, TimeDelta::from_secs(3_600)));
        let hour = hour.build().expect("a limit");
        assert!(!is_stepped_short(&hour, &Short::from_slice(b"15%08d"), TimeDelta::ZERO), "named a minute");
    }
}
