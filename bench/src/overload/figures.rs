//! What is read from a run: goodput, latency, who was served, and how soon all were again.

use super::clients::{Fate, PATIENCE, Sent};

/// Requests that were due within a span of a run.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    sent: &'a [Sent],
    from: f64,
    to: f64,
}

impl Sent {
    /// Returns whether it was answered while its client waited.
    fn is_good(&self) -> bool {
        matches!(self.fate, Fate::Served(latency) if latency <= PATIENCE)
    }
}

impl<'a> Span<'a> {
    pub(crate) fn new(sent: &'a [Sent], from: f64, to: f64) -> Self {
        let first = sent.partition_point(|one| one.at < from);
        let end = sent.partition_point(|one| one.at < to);
        Self { sent: &sent[first..end], from, to }
    }

    /// Returns good answers per second.
    pub(crate) fn goodput(self) -> f64 {
        self.sent.iter().filter(|one| one.is_good()).count() as f64 / (self.to - self.from)
    }

    fn good_part(self, which: impl Fn(&Sent) -> bool) -> f64 {
        let all = self.sent.iter().filter(|one| which(one));
        let good = all.clone().filter(|one| one.is_good()).count();
        good as f64 / all.count().max(1) as f64
    }

    /// Returns the part of the requests that was not served.
    pub(crate) fn unserved(self) -> f64 {
        1.0 - self.good_part(|_| true)
    }

    /// Returns the part of the requests that was answered with an error. One that took longer than its client waited is none.
    pub(crate) fn refused(self) -> f64 {
        let refused = self.sent.iter().filter(|one| one.fate == Fate::Refused).count();
        refused as f64 / self.sent.len().max(1) as f64
    }

    /// Returns the part of the requests of a priority that was served.
    pub(crate) fn served(self, priority: usize) -> f64 {
        self.good_part(|one| one.priority == priority)
    }

    /// Returns the part of the requests of tenants within their guarantees that was served.
    pub(crate) fn guaranteed_served(self) -> f64 {
        self.good_part(|one| one.is_guaranteed)
    }

    /// Returns a quantile of the latency of what was served, in milliseconds, if anything was.
    pub(crate) fn latency(self, part: f64) -> Option<f64> {
        let served = self.sent.iter().filter_map(|one| match one.fate {
            Fate::Served(latency) => Some(latency * 1e3),
            Fate::Refused | Fate::Lost => None,
        });
        quantile(served.collect(), part)
    }

    /// Returns the standard deviation of the part that was refused, second by second.
    pub(crate) fn shed_deviation(self) -> f64 {
        let parts: Vec<f64> = (self.from as usize..self.to as usize)
            .map(|second| {
                let one = Self::new(self.sent, second as f64, second as f64 + 1.0);
                one.refused()
            })
            .collect();
        let mean = parts.iter().sum::<f64>() / parts.len().max(1) as f64;
        (parts.iter().map(|part| (part - mean).powi(2)).sum::<f64>() / parts.len().max(1) as f64).sqrt()
    }

    /// Returns how long after its begin the last request was not served, in seconds; `None` if that went on to the end.
    pub(crate) fn back_to_normal(self) -> Option<f64> {
        let last = self.sent.iter().rev().find(|one| !one.is_good()).map_or(0.0, |one| one.at - self.from);
        (last < self.to - self.from - 1.0).then_some(last)
    }

    /// Returns the p99 of how late requests were sent, in milliseconds.
    pub(crate) fn lateness(self) -> f64 {
        quantile(self.sent.iter().map(|one| one.late * 1e3).collect(), 0.99).unwrap_or(0.0)
    }
}

fn quantile(mut values: Vec<f64>, part: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * part) as usize).copied()
}
