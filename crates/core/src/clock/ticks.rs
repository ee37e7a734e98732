//! Tick counter of the processor, used to measure time between two readings of the system clock.
//!
//! Reading the operating system's monotonic clock costs as much as the rest of an in-memory decision. So each thread
//! reads it every [`TRUSTED_NANOS`] and counts ticks in between, at the rate measured by the last two readings. The
//! length of a tick is thus measured continuously; an error of 100 parts per million is one microsecond per interval
//! and never accumulates.
//!
//! State is per thread, so nothing is shared; time never moves backward on a thread. If the processor does not report
//! an invariant counter, or the counter disagrees with the clock, the clock is read every time. Rejected: a counter
//! calibrated once at start, because it drifts from the clock by seconds per day.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::Instant;

/// How long ticks are trusted after a reading, in nanoseconds.
const TRUSTED_NANOS: u64 = 10_000_000;
/// The minimum time between two readings for measuring the tick length, in nanoseconds.
const BASELINE: u64 = 1_000_000;

/// A reading of the clock and the counter value at that moment.
#[derive(Clone, Copy, Default)]
struct Anchor {
    ticks: u64,
    nanos: u64,
    /// Nanoseconds per tick, times 2^32; zero while unknown.
    scale: u64,
    /// Number of ticks after the reading that are trusted; zero while none are.
    trusted_ticks: u64,
}

thread_local! {
    static ANCHOR: Cell<Anchor> = const { Cell::new(Anchor { ticks: 0, nanos: 0, scale: 0, trusted_ticks: 0 }) };
}

/// Returns the microseconds since the first reading in this process.
#[inline(always)]
pub(super) fn micros() -> u64 {
    let trusted = ANCHOR.with(|anchor| {
        let known = anchor.get();
        let passed = counter().wrapping_sub(known.ticks);
        (passed < known.trusted_ticks).then(|| known.nanos_after(passed))
    });
    trusted.unwrap_or_else(nanos_by_clock) / 1_000
}

/// Reads the clock again.
#[cold]
#[inline(never)]
fn nanos_by_clock() -> u64 {
    ANCHOR.with(|anchor| {
        let (ticks, nanos) = reading();
        let (next, nanos) = anchor.get().renewed(ticks, nanos, is_invariant());
        anchor.set(next);
        nanos
    })
}

impl Anchor {
    /// Returns the nanoseconds at `ticks` after the reading. Cannot overflow within the trusted interval: both factors
    /// are small.
    #[inline]
    const fn nanos_after(&self, ticks: u64) -> u64 {
        self.nanos + ((ticks * self.scale) >> 32)
    }

    /// Applies a new reading. Returns the new anchor and the time.
    #[cold]
    fn renewed(self, ticks: u64, nanos: u64, even: bool) -> (Self, u64) {
        // The returned time may be slightly ahead: it stands still until the clock has caught up.
        let nanos = nanos.max(self.nanos_after(self.trusted_ticks));
        let (ticks_passed, nanos_passed) = (ticks.wrapping_sub(self.ticks), nanos.saturating_sub(self.nanos));
        if !even || ticks_passed > 1 << 62 || self.nanos == 0 {
            return (Self { ticks, nanos: nanos.max(1), ..Self::default() }, nanos);
        }
        if nanos_passed < BASELINE {
            return (self, nanos);
        }
        let scale = (u128::from(nanos_passed) << 32) / u128::from(ticks_passed.max(1));
        let scale = u64::try_from(scale).unwrap_or(0);
        // Agreement with the previous measurement shows that neither reading was disturbed.
        let agrees = self.scale != 0 && scale.abs_diff(self.scale) < self.scale / 256;
        let span =
            if agrees { ((u128::from(TRUSTED_NANOS) << 32) / u128::from(scale.max(1))) as u64 } else { 0 };
        (Self { ticks, nanos, scale, trusted_ticks: span }, nanos)
    }
}

/// Reads the counter and the clock together: of three attempts, the one with the least time between the two.
#[allow(clippy::disallowed_methods, reason = "the clocks are read here")]
fn reading() -> (u64, u64) {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..3 {
        let before = counter();
        let now = Instant::now();
        let took = counter().wrapping_sub(before);
        if took < best.0 {
            let nanos = u64::try_from(now.duration_since(start).as_nanos()).unwrap_or(u64::MAX);
            best = (took, before.wrapping_add(took / 2), nanos);
        }
    }
    (best.1, best.2)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
#[allow(unsafe_code, reason = "the counter has no other name")]
fn counter() -> u64 {
    // SAFETY: reading the time stamp counter touches no memory, and every x86-64 processor has one.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Returns whether the counter runs at one rate in all states of the processor.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn is_invariant() -> bool {
    static EVEN: OnceLock<bool> = OnceLock::new();
    *EVEN.get_or_init(|| {
        let has = |leaf| core::arch::x86_64::__cpuid(0x8000_0000).eax >= leaf;
        has(0x8000_0007) && core::arch::x86_64::__cpuid(0x8000_0007).edx & (1 << 8) != 0
    })
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn counter() -> u64 {
    0
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn is_invariant() -> bool {
    false
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "held against the clock itself")]
mod tests {
    use super::*;

    /// A clock that drifted from the system clock would shift every window, and two nodes' windows against each other.
    #[test]
    fn ticks_follow_the_system_clock_and_never_go_back() {
        let (mut last, mut worst, mut trusted) = (micros(), 0_u64, false);
        // Both are read at the same moment, regardless of other load on the machine.
        let (start, offset) = loop {
            let (start, offset) = (Instant::now(), micros());
            if start.elapsed().as_micros() < 100 {
                break (start, offset);
            }
        };
        while start.elapsed().as_millis() < 200 {
            let before = start.elapsed();
            let time = micros();
            let after = start.elapsed();
            assert!(time >= last, "{time} after {last}");
            last = time;
            let time = time - offset;
            let (least, most) = (before.as_micros() as u64, after.as_micros() as u64);
            worst = worst.max(least.saturating_sub(time)).max(time.saturating_sub(most));
            trusted |= ANCHOR.with(Cell::get).trusted_ticks > 0;
        }
        assert!(worst < 1_000, "{worst} us off");
        assert_eq!(trusted, is_invariant(), "where the counter is even it is used");
    }

    /// Two ticks per nanosecond, measured by two readings 2 ms apart; trusted once a third agrees.
    fn settled() -> Anchor {
        let (first, _) = Anchor::default().renewed(1_000, 500, true);
        let (second, _) = first.renewed(1_000 + 4_000_000, 500 + 2_000_000, true);
        assert_eq!(second.trusted_ticks, 0, "one measure is not enough");
        let (third, _) = second.renewed(1_000 + 8_000_000, 500 + 4_000_000, true);
        assert_eq!(third.trusted_ticks, 2 * TRUSTED_NANOS, "ten milliseconds of ticks");
        third
    }

    /// After a migration or suspend the counter value makes no sense; the clock is then used instead.
    #[test]
    fn an_inconsistent_cycle_counter_is_not_used() {
        let settled = settled();
        let (faster, nanos) = settled.renewed(settled.ticks + 40_000_000, settled.nanos + 10_000_000, true);
        assert_eq!((faster.trusted_ticks, nanos), (0, settled.nanos + 10_000_000));
        let (backwards, _) = settled.renewed(settled.ticks - 5, settled.nanos + 50_000_000, true);
        assert_eq!(backwards.trusted_ticks, 0);
        let (uneven, _) = settled.renewed(settled.ticks + 20_000_000, settled.nanos + 10_000_000, false);
        assert_eq!(uneven.trusted_ticks, 0);
    }

    /// Time computed from ticks may run ahead of the clock; it must then stand still, not move backward.
    #[test]
    fn time_never_goes_back() {
        let settled = settled();
        let time = settled.nanos_after(settled.trusted_ticks);
        let (_, nanos) = settled.renewed(settled.ticks + settled.trusted_ticks, time - 1_000, true);
        assert_eq!(nanos, time);
    }
}
