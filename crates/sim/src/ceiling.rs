//! Ceiling check: verifies that no time span admitted more than the limit allows.

use tollgate_core::{Algorithm, Cost, Limit, State, Timestamp};

/// Admitted units, and units that a disaster may have added.
#[derive(Clone, Debug, Default)]
pub(crate) struct CeilingCheck {
    /// Time and number of admitted units.
    admitted: Vec<(u64, u64)>,
    /// Time from which additional units are excused, and their number.
    excused: Vec<(u64, u64)>,
}

impl CeilingCheck {
    /// Records admitted units. Returns their place, for [`CeilingCheck::settle`].
    pub(crate) fn admit(&mut self, when: u64, units: u64) -> usize {
        self.admitted.push((when, units));
        self.admitted.len() - 1
    }

    /// Records that only this many of the units at a place were used.
    pub(crate) fn settle(&mut self, place: usize, used: u64) {
        self.admitted[place].1 = used;
    }

    pub(crate) fn excuse(&mut self, when: u64, units: u64) {
        self.excused.push((when, units));
    }

    pub(crate) fn total(&self) -> u64 {
        self.admitted.iter().map(|(_, units)| units).sum()
    }

    /// Returns a description of the first violation.
    pub(crate) fn violation(&self, limit: &Limit, phase: u64) -> Option<String> {
        let mut admitted = self.admitted.clone();
        admitted.sort_unstable();
        match limit.algorithm() {
            Algorithm::FixedWindow => self.windows(&admitted, limit, phase),
            Algorithm::StrictWindow => self.spans(&admitted, limit),
            _ => self.bucket(&admitted, limit),
        }
    }

    /// A bucket admits a sequence exactly if no span of it has more than burst + rate * t.
    fn bucket(&self, admitted: &[(u64, u64)], limit: &Limit) -> Option<String> {
        let (mut state, mut spare) = (State::default(), 0_u64);
        let mut excused = self.excused.clone();
        excused.sort_unstable();
        let mut excused = excused.into_iter().peekable();
        for (when, units) in admitted {
            while let Some((_, more)) = excused.next_if(|(from, _)| from <= when) {
                spare += more;
            }
            let outcome = limit.step(&mut state, Timestamp::from_micros(*when), Cost::new(*units));
            if !outcome.verdict.is_allowed() {
                let over = units - outcome.remaining;
                if over > spare {
                    return Some(format!("{over} units over {limit} at {:.6}", *when as f64 / 1e6));
                }
                spare -= over;
                let _ = limit.step(&mut state, Timestamp::from_micros(*when), Cost::new(outcome.remaining));
            }
        }
        None
    }

    fn windows(&self, admitted: &[(u64, u64)], limit: &Limit, phase: u64) -> Option<String> {
        let period = limit.rate().period.length().as_micros();
        let (mut window, mut used) = (0, 0);
        let spare: u64 = self.excused.iter().map(|(_, units)| units).sum();
        for (when, units) in admitted {
            let present = (when + phase) / period;
            if present != window {
                (window, used) = (present, 0);
            }
            used += units;
            if used > limit.capacity() + spare {
                return Some(format!("{used} units in a window of {limit} at {:.6}", *when as f64 / 1e6));
            }
        }
        None
    }

    /// Checks every span of one period, wherever it begins.
    fn spans(&self, admitted: &[(u64, u64)], limit: &Limit) -> Option<String> {
        let period = limit.rate().period.length().as_micros();
        let (mut from, mut used) = (0, 0);
        let spare: u64 = self.excused.iter().map(|(_, units)| units).sum();
        for (when, units) in admitted {
            used += units;
            while admitted[from].0 + period <= *when {
                used -= admitted[from].1;
                from += 1;
            }
            if used > limit.capacity() + spare {
                return Some(format!("{used} units in a span of {limit} at {:.6}", *when as f64 / 1e6));
            }
        }
        None
    }
}
