//! Completion of a response: its access log line, its span, its permits and its place in flight, which end with its body.

use crate::access_log::AccessLogGuard;
use tollgate_engine::WorkerPermit;

/// Something that is released on drop.
pub(crate) trait DropAction: Send {}
impl<T: Send> DropAction for T {}

/// Dropped when the response has been written or has failed, or the client has disconnected.
pub(crate) struct Completion {
    pub(crate) line: Option<AccessLogGuard>,
    pub(crate) _permits: Option<Box<dyn DropAction>>,
    pub(crate) _place: Option<WorkerPermit>,
    pub(crate) _span: Option<Box<dyn DropAction>>,
}

impl Completion {
    /// Counts bytes of the response body.
    pub(crate) fn count(&mut self, bytes: usize) {
        if let Some(line) = &mut self.line {
            line.entry.bytes += bytes as u64;
        }
    }

    /// Records that the response could not be read completely.
    pub(crate) fn failed(&mut self, error: &impl ToString) {
        if let Some(line) = &mut self.line {
            line.entry.error = Some(error.to_string());
        }
    }

    /// Records that the response is complete.
    pub(crate) fn completed(&mut self) {
        if let Some(line) = &mut self.line {
            line.is_complete = true;
        }
    }
}
