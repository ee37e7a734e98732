//! What ends when an answer's body does: its line in the access log, its span, and what its request held.

use crate::access_log::AccessLogGuard;

/// Something that is given back by being dropped.
pub(crate) trait DropAction: Send {}
impl<T: Send> DropAction for T {}

/// Dropped when the answer has been written, has failed, or the caller has left.
pub(crate) struct Completion {
    pub(crate) line: Option<AccessLogGuard>,
    pub(crate) _permits: Option<Box<dyn DropAction>>,
    pub(crate) _span: Option<Box<dyn DropAction>>,
}

impl Completion {
    /// So many bytes of the answer have been handed on.
    pub(crate) fn count(&mut self, bytes: usize) {
        if let Some(line) = &mut self.line {
            line.entry.bytes += bytes as u64;
        }
    }

    /// The answer could not be read to its end.
    pub(crate) fn failed(&mut self, error: &impl ToString) {
        if let Some(line) = &mut self.line {
            line.entry.error = Some(error.to_string());
        }
    }

    /// The answer has come to its end.
    pub(crate) fn completed(&mut self) {
        if let Some(line) = &mut self.line {
            line.is_complete = true;
        }
    }
}
