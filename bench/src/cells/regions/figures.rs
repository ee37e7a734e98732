//! What was admitted as a part of the bound, and what honest callers were denied.

use super::RATE;
use super::callers::{Caller, Record};
use super::faults::Found;
use super::subjects::{Ceiling, Verdict};

pub(super) struct Figures {
    /// In the order in which they were answered.
    records: Vec<Record>,
}

impl Figures {
    pub(super) fn new(mut records: Vec<Record>) -> Self {
        records.sort_by_key(|record| record.received);
        Self { records }
    }

    fn of(&self, mode: usize, caller: Caller) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(move |record| record.mode == mode && record.caller == caller)
    }

    /// Returns the units of a burst that were admitted, and the seconds that it took.
    pub(super) fn admitted_at_once(&self, mode: usize, number: usize) -> (usize, f64) {
        let burst: Vec<&Record> = self.of(mode, Caller::Burst(number)).collect();
        let admitted = burst.iter().filter(|record| record.verdict == Verdict::Allowed).count();
        let sent = burst.iter().map(|record| record.sent).min().unwrap_or_default();
        let received = burst.iter().map(|record| record.received).max().unwrap_or_default();
        (admitted, received.saturating_sub(sent).as_secs_f64())
    }

    /// Returns what the attacker was admitted in a fault, as a part of what the rate gives in that time.
    pub(super) fn admitted_of_rate(&self, mode: usize, found: &Found) -> f64 {
        let is_in = |record: &&Record| record.received >= found.begin && record.received < found.end;
        let records = self.of(mode, Caller::Attacker).filter(is_in);
        let admitted = records.filter(|record| record.verdict == Verdict::Allowed).count();
        admitted as f64 / (RATE as f64 * (found.end - found.begin).as_secs_f64())
    }

    /// Returns the largest part of its ceiling that the attacker was admitted in any span of a fault.
    pub(super) fn worst_span(&self, mode: usize, found: &Found, ceiling: Ceiling) -> f64 {
        let is_in = |record: &&Record| record.sent >= found.begin && record.received < found.end;
        let is_admitted = |record: &&Record| record.verdict == Verdict::Allowed;
        let admitted: Vec<&Record> =
            self.of(mode, Caller::Attacker).filter(is_in).filter(is_admitted).collect();
        let mut worst = 0.0_f64;
        for first in 0..admitted.len() {
            // A unit is admitted between its request and its answer: the span may be as long as that.
            let mut begin = admitted[first].sent;
            for (count, last) in admitted[first..].iter().enumerate() {
                begin = begin.min(last.sent);
                worst = worst.max(ceiling.part(count + 1, (last.received - begin).as_secs_f64()));
            }
        }
        worst
    }

    /// Returns how many requests of an honest caller were not admitted, and how many were answered, in a fault.
    pub(super) fn denied(&self, mode: usize, caller: Caller, found: &Found) -> (usize, usize) {
        let is_in = |record: &&Record| record.sent >= found.begin && record.received < found.end;
        let answered: Vec<&Record> = self.of(mode, caller).filter(is_in).collect();
        let denied = answered.iter().filter(|record| record.verdict != Verdict::Allowed).count();
        (denied, answered.len())
    }
}
