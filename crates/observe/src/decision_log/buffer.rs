//! Decision log: a searchable ring buffer of recent decisions, and an optional [`crate::sink`] that writes every logged
//! decision as a line to a file or standard output.

use crate::decision_log::record::DecisionRecord;
use crate::recorder::capture::LoggedVerdict;
use crate::sink::Sink;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::Timestamp;
use tollgate_engine::DecisionId;

/// Search filter for the decision log; a field that is `None` matches everything.
#[derive(Clone, Debug, Default)]
pub struct DecisionQuery {
    /// Decision ID.
    pub id: Option<DecisionId>,
    /// Value of any attribute: the raw value, its masked form or its id.
    pub key: Option<String>,
    /// First characters of any attribute's value as it is shown: never of the raw value, or a reader could find out a
    /// masked one character by character.
    pub prefix: Option<String>,
    /// Domain of the request.
    pub domain: Option<String>,
    /// Name of the rule.
    pub rule: Option<String>,
    /// Verdict.
    pub ruled: Option<LoggedVerdict>,
    /// Earliest time, inclusive.
    pub from: Option<Timestamp>,
    /// Latest time, inclusive.
    pub to: Option<Timestamp>,
    /// Sequence number to stay below, for paging.
    pub before: Option<u64>,
    /// Maximum number of results.
    pub limit: usize,
}

/// Average memory budget per record in bytes: records with long attributes reduce how many fit.
const ENTRY_BYTES: usize = 1_024;

/// Ring of recent records, and the number of records ever logged.
#[derive(Debug, Default)]
struct LogRing {
    entries: VecDeque<Arc<DecisionRecord>>,
    /// Memory used by the entries, in bytes.
    bytes: usize,
    logged: u64,
}

impl LogRing {
    fn push(&mut self, mut entry: DecisionRecord) -> &Arc<DecisionRecord> {
        self.logged += 1;
        entry.seq = self.logged;
        self.bytes += entry.bytes();
        // The log's lock is held, so the count changes only here.
        if entry.caller().references.fetch_add(1, Ordering::Relaxed) == 0 {
            self.bytes += entry.caller().bytes();
        }
        self.entries.push_back(Arc::new(entry));
        &self.entries[self.entries.len() - 1]
    }

    fn pop(&mut self) {
        let Some(entry) = self.entries.pop_front() else { return };
        self.bytes -= entry.bytes();
        if entry.caller().references.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.bytes -= entry.caller().bytes();
        }
    }
}

/// The decision log: ring buffer and optional sink.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    ring: Mutex<LogRing>,
    capacity: usize,
    pub(crate) sink: Option<Sink>,
}

impl DecisionLog {
    pub(crate) fn new(capacity: usize, sink: Option<Sink>) -> Self {
        Self { ring: Mutex::default(), capacity: capacity.max(1), sink }
    }

    fn ring(&self) -> MutexGuard<'_, LogRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.ring().entries.len()
    }

    /// Memory used by the entries, in bytes, as accounted.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.ring().bytes
    }

    /// Number of records ever logged.
    pub(crate) fn logged(&self) -> u64 {
        self.ring().logged
    }

    /// Stores `entries` and returns those to write to the sink; none without a sink.
    pub(crate) fn push(&self, entries: Vec<DecisionRecord>) -> Vec<Arc<DecisionRecord>> {
        let mut ring = self.ring();
        let mut written = Vec::new();
        for entry in entries {
            let entry = ring.push(entry);
            if self.sink.is_some() {
                written.push(Arc::clone(entry));
            }
        }
        while ring.entries.len() > self.capacity || ring.bytes > self.capacity * ENTRY_BYTES {
            ring.pop();
        }
        written
    }

    /// Returns the API key of the caller with this id, if a stored record has it.
    pub(crate) fn key(&self, id: u64) -> Option<String> {
        self.ring().entries.iter().rev().find_map(|entry| entry.key_of(id).map(str::to_owned))
    }

    /// Returns the latest matching records, newest first, and the sequence number to continue from.
    pub(crate) fn search(
        &self,
        search: &DecisionQuery,
        id_of: impl Fn(&str) -> u64,
    ) -> (Vec<Arc<DecisionRecord>>, Option<u64>) {
        let key = search.key.as_deref().map(|key| (key, [Some(id_of(key)), parse_id(key)]));
        let ring = self.ring();
        let matches = |entry: &&Arc<DecisionRecord>| {
            search.before.is_none_or(|before| entry.seq < before)
                && search.id.is_none_or(|id| entry.id == id)
                && search.domain.as_deref().is_none_or(|domain| entry.domain() == domain)
                && search.rule.as_deref().is_none_or(|rule| entry.rule() == Some(rule))
                && search.ruled.is_none_or(|ruled| entry.verdict == ruled)
                && search.from.is_none_or(|from| entry.at >= from)
                && search.to.is_none_or(|to| entry.at <= to)
                && search.prefix.as_deref().is_none_or(|prefix| entry.shows(prefix))
                && key.as_ref().is_none_or(|(key, ids)| entry.concerns(key, ids))
        };
        let mut found: Vec<Arc<DecisionRecord>> =
            ring.entries.iter().rev().filter(matches).take(search.limit + 1).map(Arc::clone).collect();
        let more = found.len() > search.limit;
        found.truncate(search.limit);
        let next = found.last().map(|last| last.seq).filter(|_| more);
        (found, next)
    }
}

/// Parses an id in its printed form: sixteen lower-case hexadecimal digits.
fn parse_id(text: &str) -> Option<u64> {
    let digit = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f');
    let is_printed_form = text.len() == 16 && text.bytes().all(digit);
    is_printed_form.then(|| u64::from_str_radix(text, 16).ok()).flatten()
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
