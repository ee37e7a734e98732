//! The ceiling: whether what was let through is what the limit allows, over every span.

use tollgate_core::{Algorithm, Cost, Limit, State, Timestamp};

/// What was let through, and what a disaster may have handed out beside.
#[derive(Clone, Debug, Default)]
pub(crate) struct CeilingCheck {
    /// When, how many.
    admitted: Vec<(u64, u64)>,
    /// From when on, how many more.
    excused: Vec<(u64, u64)>,
}

impl CeilingCheck {
    pub(crate) fn admit(&mut self, when: u64, units: u64) {
        self.admitted.push((when, units));
    }

    pub(crate) fn excuse(&mut self, when: u64, units: u64) {
        self.excused.push((when, units));
    }

    pub(crate) fn total(&self) -> u64 {
        self.admitted.iter().map(|(_, units)| units).sum()
    }

    /// Where the ceiling was broken, in words.
    pub(crate) fn violation(&self, limit: &Limit, phase: u64) -> Option<String> {
        let mut admitted = self.admitted.clone();
        admitted.sort_unstable();
        match limit.algorithm() {
            Algorithm::FixedWindow => self.windows(&admitted, limit, phase),
            Algorithm::StrictWindow => self.spans(&admitted, limit),
            _ => self.bucket(&admitted, limit),
        }
    }

    /// A bucket lets a sequence pass just when no span of it has more than burst + rate * t.
    fn bucket(&self, admitted: &[(u64, u64)], limit: &Limit) -> Option<String> {
        let (mut state, mut spare) = (State::default(), 0_u64);
        let mut excused = self.excused.clone();
        excused.sort_unstable();
        let mut excused = excused.into_iter().peekable();
        for (when, units) in admitted {
            while let Some((_, more)) = excused.next_if(|(from, _)| from <= when) {
                spare += more;
            }
            let told = limit.step(&mut state, Timestamp::from_micros(*when), Cost::new(*units));
            if !told.verdict.is_allowed() {
                let over = units - told.remaining;
                if over > spare {
                    return Some(format!("{over} units over {limit} at {:.6}", *when as f64 / 1e6));
                }
                spare -= over;
                let _ = limit.step(&mut state, Timestamp::from_micros(*when), Cost::new(told.remaining));
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

    /// Any span of a period, wherever it begins.
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
