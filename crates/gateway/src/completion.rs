//! Completion of a response: its access log line, its span and its permits end when its body has been sent, its place in
//! flight when the body has been received.

use crate::access_log::AccessLogGuard;
use crate::place::UpstreamPlace;

/// Something that is released on drop.
pub(crate) trait DropAction: Send {}
impl<T: Send> DropAction for T {}

/// Dropped when the response has been written or has failed, or the client has disconnected.
pub(crate) struct Completion {
    pub(crate) line: Option<AccessLogGuard>,
    pub(crate) _permits: Option<Box<dyn DropAction>>,
    pub(crate) place: Option<UpstreamPlace>,
    pub(crate) _span: Option<Box<dyn DropAction>>,
}

impl Completion {
    /// More of the response body is awaited from the upstream.
    pub(crate) fn awaits_upstream(&mut self) {
        if let Some(place) = &mut self.place {
            place.resume();
        }
    }

    /// Counts bytes of the response body that the client is to take.
    pub(crate) fn received(&mut self, bytes: usize) {
        if let Some(place) = &mut self.place {
            place.pause();
        }
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

    /// Records that the response has been read to its end: the upstream has no more work with it.
    pub(crate) fn completed(&mut self) {
        self.place = None;
        if let Some(line) = &mut self.line {
            line.is_complete = true;
        }
    }
}
