//! The decision log: the last so many decisions in memory, to be searched, and all of them as lines for a file or the
//! standard output ([`crate::sink`]).

use crate::decision_log::record::DecisionRecord;
use crate::recorder::capture::LoggedVerdict;
use crate::sink::Sink;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::Timestamp;
use tollgate_engine::DecisionId;

/// What is searched for; what is not given is not asked for.
#[derive(Clone, Debug, Default)]
pub struct DecisionQuery {
    /// This one.
    pub id: Option<DecisionId>,
    /// With this value of any attribute: the value itself, what is shown of it, or its id.
    pub key: Option<String>,
    /// By this rule.
    pub rule: Option<String>,
    /// That ended so.
    pub ruled: Option<LoggedVerdict>,
    /// Not before.
    pub from: Option<Timestamp>,
    /// Not after.
    pub to: Option<Timestamp>,
    /// Only what stands before this place in the log.
    pub before: Option<u64>,
    /// At most so many.
    pub limit: usize,
}

/// Bytes in memory for each decision that is kept, on the average: who says much makes fewer be kept.
const ENTRY_BYTES: usize = 1_024;

/// The last decisions, and how many there have been.
#[derive(Debug, Default)]
struct LogRing {
    entries: VecDeque<Arc<DecisionRecord>>,
    /// What they take.
    bytes: usize,
    logged: u64,
}

impl LogRing {
    fn push(&mut self, mut entry: DecisionRecord) -> &Arc<DecisionRecord> {
        self.logged += 1;
        entry.seq = self.logged;
        self.bytes += DecisionRecord::BYTES;
        // Under the log's lock nobody else counts.
        if entry.caller().masked_key.fetch_add(1, Ordering::Relaxed) == 0 {
            self.bytes += entry.caller().bytes();
        }
        self.entries.push_back(Arc::new(entry));
        &self.entries[self.entries.len() - 1]
    }

    fn pop(&mut self) {
        let Some(entry) = self.entries.pop_front() else { return };
        self.bytes -= DecisionRecord::BYTES;
        if entry.caller().masked_key.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.bytes -= entry.caller().bytes();
        }
    }
}

/// The last decisions.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    ring: Mutex<LogRing>,
    capacity: usize,
    pub(crate) sink: Option<Sink>,
}

impl DecisionLog {
    pub(crate) fn new(most: usize, sink: Option<Sink>) -> Self {
        Self { ring: Mutex::default(), capacity: most.max(1), sink }
    }

    fn ring(&self) -> MutexGuard<'_, LogRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.ring().entries.len()
    }

    /// What those in memory take, as far as it is counted.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.ring().bytes
    }

    /// All that were ever logged.
    pub(crate) fn logged(&self) -> u64 {
        self.ring().logged
    }

    /// Keeps them, and hands them on to where else they are written, if anywhere.
    pub(crate) fn push(&self, entries: Vec<DecisionRecord>) -> Vec<Arc<DecisionRecord>> {
        let mut kept = self.ring();
        let mut written = Vec::new();
        for entry in entries {
            let entry = kept.push(entry);
            if self.sink.is_some() {
                written.push(Arc::clone(entry));
            }
        }
        while kept.entries.len() > self.capacity || kept.bytes > self.capacity * ENTRY_BYTES {
            kept.pop();
        }
        written
    }

    /// The API key of a caller of one of them.
    pub(crate) fn key(&self, id: u64) -> Option<String> {
        self.ring().entries.iter().rev().find_map(|entry| entry.key_of(id).map(str::to_owned))
    }

    /// The latest that match, the latest first, and where to go on.
    pub(crate) fn search(
        &self,
        search: &DecisionQuery,
        id_of: impl Fn(&str) -> u64,
    ) -> (Vec<Arc<DecisionRecord>>, Option<u64>) {
        let key = search.key.as_deref().map(|key| (key, [Some(id_of(key)), parse_id(key)]));
        let kept = self.ring();
        let matches = |entry: &&Arc<DecisionRecord>| {
            search.before.is_none_or(|before| entry.seq < before)
                && search.id.is_none_or(|id| entry.id == id)
                && search.rule.as_deref().is_none_or(|rule| entry.rule() == Some(rule))
                && search.ruled.is_none_or(|ruled| entry.verdict == ruled)
                && search.from.is_none_or(|from| entry.at >= from)
                && search.to.is_none_or(|to| entry.at <= to)
                && key.as_ref().is_none_or(|(key, ids)| entry.concerns(key, ids))
        };
        let mut found: Vec<Arc<DecisionRecord>> =
            kept.entries.iter().rev().filter(matches).take(search.limit + 1).map(Arc::clone).collect();
        let more = found.len() > search.limit;
        found.truncate(search.limit);
        let next = found.last().map(|last| last.seq).filter(|_| more);
        (found, next)
    }
}

/// What is written as ids are told: sixteen digits, the letters small.
fn parse_id(text: &str) -> Option<u64> {
    let digit = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f');
    let is_told_so = text.len() == 16 && text.bytes().all(digit);
    is_told_so.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::parse_id;

    #[test]
    fn an_id_is_parsed_in_its_printed_form_only() {
        for number in [0, 1, 0x5a0b_e3f1, u64::MAX] {
            assert_eq!(parse_id(&format!("{number:016x}")), Some(number));
        }
        for other in
            ["", "1", "+000000000000001", "000000000000000G", "00000000000000FF", "00000000000000000"]
        {
            assert_eq!(parse_id(other), None, "{other}");
        }
    }
}
