//! The end of streams and of the connection: resets, shutdown, and the ping that finds out whether a client is there.

use super::{Connection, Event, KEEP_ALIVE_PING, LAST_STREAM, REMEMBERED, SHUTDOWN_PING, Shutdown};
use crate::h2::frame::Reason;
use crate::h2::stream::Stream;
use std::collections::hash_map::Entry;

impl<T> Connection<T> {
    /// Removes a stream that is reset.
    pub(super) fn remove(&mut self, id: u32) -> Option<Stream<T>> {
        let stream = self.streams.remove(&id)?;
        self.queued -= stream.queue.as_ref().map_or(0, |queue| queue.len());
        // Those that wait for a window and are reset would be remembered until one grows.
        if self.waiting.len() > 2 * self.settings.max_streams as usize {
            self.waiting.retain(|id| self.streams.contains_key(id));
        }
        Some(stream)
    }

    /// Ends a stream whose client broke a rule.
    pub(super) fn end_stream<'a>(&mut self, id: u32, reason: Reason) -> Option<Event<'a, T>> {
        self.resets += 1;
        let stream = self.remove(id);
        self.forget(id, reason);
        stream.map(|stream| Event::Reset { stream: id, data: stream.data })
    }

    /// Resets a stream that is not open, and ignores what its client has sent meanwhile.
    pub(super) fn forget(&mut self, id: u32, reason: Reason) {
        self.out.put_reset(id, reason);
        if self.reset.len() == REMEMBERED {
            self.reset.pop_front();
        }
        self.reset.push_back(id);
    }

    /// Resets a stream. Returns its data, if it was open.
    pub fn reset(&mut self, stream: u32, reason: Reason) -> Option<T> {
        let removed = self.remove(stream)?;
        self.forget(stream, reason);
        Some(removed.data)
    }

    /// Forgets a stream whose response was sent. If the client still sends its request, the stream is reset.
    pub(super) fn close(&mut self, id: u32) {
        let Entry::Occupied(stream) = self.streams.entry(id) else { return };
        let stream = stream.remove();
        self.queued -= stream.queue.as_ref().map_or(0, |queue| queue.len());
        if !stream.is_received {
            self.forget(id, Reason::None);
        }
    }

    /// Begins a graceful shutdown: GOAWAY asks the client to open no more streams. It is complete when the client has answered, or
    /// by [`Self::finish_shutdown`].
    pub fn begin_shutdown(&mut self) {
        if self.shutdown == Shutdown::No {
            self.shutdown = Shutdown::Announced;
            self.out.go_away(LAST_STREAM, Reason::None, "");
            self.out.put_ping(0, SHUTDOWN_PING);
        }
    }

    /// Returns whether a shutdown was announced, and the client has not answered yet.
    #[must_use]
    pub fn is_shutdown_announced(&self) -> bool {
        self.shutdown == Shutdown::Announced
    }

    /// Returns whether streams are refused because of a shutdown.
    #[must_use]
    pub const fn is_shutting_down(&self) -> bool {
        matches!(self.shutdown, Shutdown::After(_))
    }

    /// Refuses streams from now on, after the announcement.
    pub fn finish_shutdown(&mut self) {
        if self.shutdown == Shutdown::Announced {
            self.shutdown = Shutdown::After(self.last);
            let last = self.last;
            self.out.go_away(last, Reason::None, "");
        }
    }

    /// Asks whether the client is there. Returns false if it has not answered the last time.
    pub fn ping(&mut self) -> bool {
        if std::mem::replace(&mut self.awaits_pong, true) {
            return false;
        }
        self.out.put_ping(0, KEEP_ALIVE_PING);
        true
    }
}
