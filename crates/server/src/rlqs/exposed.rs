//! The most that a stream may have admitted since its last report, and may still admit. Pure.

use super::sent::Sent;
use smallvec::SmallVec;
use tollgate_core::Timestamp;

/// Assignments before the current one, as far as they may have been used since the last report.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    /// Most that may have been admitted by the older ones, and until when.
    older: (u64, Timestamp),
    /// The latest ones, and until when.
    latest: SmallVec<[(Sent, Timestamp); 1]>,
}

impl Past {
    /// Most of the latest ones. Of older ones only the sum is known, which counts from any instant while they lasted.
    const MAX_LATEST: usize = 16;

    /// Returns the past after a report that was written at `read`: by what came before `sent`.
    pub(super) fn after_report(sent: Option<&Sent>, read: Timestamp) -> Self {
        let residue = sent.filter(|sent| read < sent.replaced).map(|sent| (sent.residue, sent.replaced));
        Self { older: residue.unwrap_or_default(), latest: SmallVec::new() }
    }

    /// Adds an assignment that may have been used until then.
    pub(super) fn push(&mut self, sent: Sent, until: Timestamp, settled: Timestamp) {
        self.latest.push((sent, until));
        if self.latest.len() > Self::MAX_LATEST {
            let (sent, until) = self.latest.remove(0);
            let units = self.older.0.saturating_add(sent.own(settled, until));
            self.older = (units, self.older.1.max(until));
        }
    }

    /// Returns the most that may have been admitted by them from `start` until `until`.
    fn between(&self, start: Timestamp, until: Timestamp) -> u64 {
        let older = if start < self.older.1.min(until) { self.older.0 } else { 0 };
        let latest = self.latest.iter().map(|(sent, end)| sent.own(start, until.min(*end)));
        let all = latest.fold(older, u64::saturating_add);
        let twice = self.latest.windows(2).map(|pair| twice(&pair[0].0, &pair[1].0, start, until));
        twice.fold(all, u64::saturating_sub)
    }

    fn last(&self) -> Option<&Sent> {
        self.latest.last().map(|(sent, _)| sent)
    }
}

/// Returns what two assignments that follow each other both count: the time in which the second takes effect is that of one of
/// them. One less, because the parts of tokens that each of them has left may be a whole one together.
fn twice(first: &Sent, second: &Sent, start: Timestamp, until: Timestamp) -> u64 {
    let (start, until) = (start.max(second.started), until.min(second.replaced));
    first.whole_gain(start, until).min(second.whole_gain(start, until)).saturating_sub(1)
}

/// What a stream may have admitted since its last report, and may still admit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exposed<'a> {
    pub(super) sent: Sent,
    pub(super) past: &'a Past,
    /// The assignment that `sent` replaces, if it does.
    pub(super) replaces: Option<Sent>,
    /// Time of the last report.
    pub(super) settled: Timestamp,
    /// Until when it must be covered.
    pub(super) until: Timestamp,
}

impl Exposed<'_> {
    /// Returns an instant from which nothing can be admitted anymore.
    pub(super) fn end(&self) -> Timestamp {
        let past = self.past.latest.iter().map(|(_, end)| *end);
        past.fold(self.sent.expires.max(self.sent.replaced), Timestamp::max).max(self.past.older.1)
    }

    /// Returns by how many units what is admitted in a time may exceed the sum of what is admitted in its two parts: each
    /// assignment counts whole tokens, and what it has in common with the next one is counted in whole ones too.
    pub(super) fn parts(&self) -> u64 {
        2 * (self.past.latest.len() as u64 + 2)
    }

    /// Returns the most that may be admitted from `start`, or the last report, until `until`.
    pub(super) fn between(&self, start: Timestamp, until: Timestamp) -> u64 {
        let start = start.max(self.settled);
        let replaced = self.replaces.map_or(0, |sent| sent.own(start, until.min(self.sent.replaced)));
        let past = self.past.between(start, until);
        let all = past.saturating_add(replaced).saturating_add(self.sent.own(start, until));
        let twice = |first: &Sent, second: &Sent| twice(first, second, start, until);
        let again = match (self.past.last(), self.replaces.as_ref()) {
            (Some(past), Some(replaced)) => twice(past, replaced) + twice(replaced, &self.sent),
            (Some(before), None) | (None, Some(before)) => twice(before, &self.sent),
            (None, None) => 0,
        };
        all.saturating_sub(again)
    }
}
