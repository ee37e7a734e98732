//! Scale: how much time one unit of cost is in a bucket, and the same debt under another scale.
//!
//! A bucket's state is an instant, and an instant alone is not a number of units: a minute ahead is 100 units at 100 a
//! minute and 5,000 at 5,000 a minute. So a state names the scale of the limit that wrote it, and a limit with another one
//! converts: the units that were used stay used, no fewer and, but for rounding up, no more. An upgrade gives its new room
//! at once, and going down and up again gives nothing: a conversion never rounds down what is owed, and only a charge that
//! is admitted, or a debit, writes the new scale. Until then the debt drains as its writer's limit drains it.
//!
//! Rejected: keeping the time instead of the units (an upgraded caller would have used up the new limit too), keeping a
//! count and its instant (two numbers that every request writes), and fixed point (it rounds, and scripts have 53 bits).
//!
//! A word in a table has no room for two numbers, so scales have [codes](ScaleCode): an index into a table of this
//! process that only grows, found without a lock when a limit is built. When it is full, or someone who states limits with
//! every request has taken three quarters of it, further limits have no code: states that they write are read as
//! written by every reader.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The scale of a bucket: `unit / k` microseconds for one unit of cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Units of time per microsecond.
    pub k: u64,
    /// Units of time per unit of cost.
    pub unit: u64,
}

/// Direction in which a conversion rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Up,
    Down,
}

impl Scale {
    /// The largest parts of a scale: [`Rate::MAX_COUNT`](crate::Rate), and beyond the longest period.
    const MAX: Self = Self { k: 1 << 40, unit: 1 << 50 };
    /// More units than any bucket holds or owes.
    const MAX_UNITS: u128 = 1 << 42;

    /// Returns the scale with these parts; `None` if no limit has it.
    #[must_use]
    pub const fn new(k: u64, unit: u64) -> Option<Self> {
        let is_valid = k > 0 && k <= Self::MAX.k && unit > 0 && unit <= Self::MAX.unit;
        if is_valid { Some(Self { k, unit }) } else { None }
    }

    /// Returns the time, in parts of `to`, that the same units of cost are there.
    pub(crate) fn convert(self, time: u128, to: Self, rounding: Rounding) -> u128 {
        let (from, to) = (u128::from(self.unit), u128::from(to.unit));
        // At most 2^92 and 2^100.
        let (whole, part) = ((time / from).min(Self::MAX_UNITS) * to, time % from * to);
        whole
            + match rounding {
                Rounding::Up => part.div_ceil(from),
                Rounding::Down => part / from,
            }
    }
}

/// What a packed bucket's code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Coded {
    pub(crate) scale: Scale,
    /// See [`Tat::reach`](crate::Tat).
    pub(crate) reach: u8,
    /// Log2 of the fill time.
    pub(crate) log2: u8,
}

/// A bucket's scale, reach and fill time in 14 bits. Codes below 64 are the log2 of a fill time alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaleCode(u16);

const BITS: u32 = 14;
const FIRST: usize = 64;
const CODES: usize = (1 << BITS) - FIRST;
/// Places that are searched for a code.
const PROBES: usize = 32;

static TABLE: [OnceLock<Coded>; CODES] = [const { OnceLock::new() }; CODES];
/// Codes given to limits that a caller states with each request.
static STATED: AtomicUsize = AtomicUsize::new(0);
const MAX_STATED: usize = CODES / 4 * 3;

impl ScaleCode {
    pub(crate) const fn from_bits(bits: u16) -> Self {
        Self(bits & ((1 << BITS) - 1))
    }

    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    /// Returns the code of a bucket; one with only its fill time if the table has no room. `is_stated` if the
    /// limit comes with a request.
    pub(crate) fn of(coded: Coded, is_stated: bool) -> Self {
        let Scale { k, unit } = coded.scale;
        let mixed = (k ^ unit.rotate_left(32) ^ u64::from(coded.log2) << 56 ^ u64::from(coded.reach) << 48)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = (mixed >> 32) as usize;
        for probe in 0..PROBES {
            let at = (first + probe) % CODES;
            let found = match TABLE[at].get() {
                Some(found) => *found,
                None if is_stated && STATED.load(Ordering::Relaxed) >= MAX_STATED => break,
                None => {
                    if is_stated && TABLE[at].set(coded).is_ok() {
                        STATED.fetch_add(1, Ordering::Relaxed);
                    }
                    *TABLE[at].get_or_init(|| coded)
                }
            };
            if found == coded {
                return Self((FIRST + at) as u16);
            }
        }
        Self(u16::from(coded.log2.min(FIRST as u8 - 1)))
    }

    /// Returns the scale and reach of the writer; `None` if the code has only a fill time.
    pub(crate) fn coded(self) -> Option<Coded> {
        TABLE.get(usize::from(self.0).checked_sub(FIRST)?)?.get().copied()
    }

    /// Returns log2 of the fill time.
    pub(crate) fn log2(self) -> u32 {
        self.coded().map_or(u32::from(self.0).min(FIRST as u32 - 1), |coded| u32::from(coded.log2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it a downgraded caller that is upgraded again has used less than before.
    #[test]
    fn there_and_back_loses_no_debt() {
        let scales = [(1, 600_000), (1, 12_000), (7, 60_000_000), (4_999, 3_600_000_000), (1 << 40, 1_000)];
        let scales = scales.map(|(k, unit)| Scale { k, unit });
        for from in scales {
            for to in scales {
                for units in [0_u128, 1, 3, 100, 4_999, 1 << 40] {
                    for part in [0, 1, u128::from(from.unit) - 1] {
                        let time = units * u128::from(from.unit) + part;
                        let there = from.convert(time, to, Rounding::Up);
                        assert!(there >= units * u128::from(to.unit), "{time} of {from:?} in {to:?}");
                        assert!(to.convert(there, from, Rounding::Up) >= time);
                        // Rounding up is less than one part of the other scale.
                        assert!(there <= from.convert(time, to, Rounding::Down) + 1);
                    }
                    let exact = from.convert(units * u128::from(from.unit), to, Rounding::Up);
                    assert_eq!(exact, units * u128::from(to.unit), "whole units stay whole");
                }
            }
        }
    }

    /// Without it two limits share a code, and one reads the other's time as its own.
    #[test]
    fn codes_distinguish_scales() {
        let coded = |k, unit, log2| Coded { scale: Scale { k, unit }, reach: 0, log2 };
        let all: Vec<Coded> = (1..40).flat_map(|k| (1..20).map(move |n| coded(k, n * 1_009, 30))).collect();
        let codes: Vec<ScaleCode> = all.iter().map(|one| ScaleCode::of(*one, false)).collect();
        for (one, code) in all.iter().zip(&codes) {
            assert_eq!(code.coded(), Some(*one));
            assert_eq!(ScaleCode::of(*one, true), *code, "a scale keeps its code");
            assert_eq!(ScaleCode::from_bits(code.bits()), *code);
            assert_eq!(code.log2(), 30);
        }
        assert_eq!(ScaleCode::from_bits(17).coded(), None);
        assert_eq!(ScaleCode::from_bits(17).log2(), 17);
    }
}
