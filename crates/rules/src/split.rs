//! Which of the counters that a counter is split into a request is counted in: each in turn, on every thread.
//!
//! A hash of the request was rejected: one caller would always meet the same one, and be denied a part of the limit.

use std::cell::Cell;

/// The most counters that one may be split into.
pub(crate) const MOST: u64 = 256;

static NAMES: [&str; 256] = names();

const fn names() -> [&'static str; 256] {
    const DIGITS: &str = include_str!("split.txt");
    let mut names = [""; 256];
    let mut at = 0;
    while at < 256 {
        names[at] = DIGITS.split_at(at * 2).1.split_at(2).0;
        at += 1;
    }
    names
}

thread_local! {
    static NEXT: Cell<u16> = const { Cell::new(0) };
}

/// One of the first `split` names.
pub(crate) fn some(split: u16) -> &'static str {
    let turn = NEXT.with(|next| {
        let turn = next.get();
        next.set(turn.wrapping_add(1));
        turn
    });
    NAMES[usize::from(turn % split.max(1)) % NAMES.len()]
}

/// All names of a counter that is split so.
pub(crate) fn all(split: u16) -> &'static [&'static str] {
    &NAMES[..usize::from(split).min(NAMES.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_turn_and_a_name_of_its_own() {
        let mut met: Vec<&str> = (0..256).map(|_| some(256)).collect();
        met.sort_unstable();
        met.dedup();
        assert_eq!(met.len(), 256);
        assert!((0..100).map(|_| some(3)).all(|name| ["00", "01", "02"].contains(&name)));
    }
}
