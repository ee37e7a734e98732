//! The state of one stream: what the client may still send, and what of the response waits for the client's window.

use bytes::BytesMut;

/// A stream that is open in at least one direction, with the data that its user keeps with it.
#[derive(Debug)]
pub(super) struct Stream<T> {
    pub(super) data: T,
    /// Bytes that may be sent beyond the client's initial window; negative after some were sent. Kept apart from the initial
    /// window, so that changing that one is one assignment, however many streams there are.
    pub(super) send_credit: i64,
    /// Bytes that the client may still send.
    pub(super) receive_window: u32,
    /// Bytes that were received and released, and not yet returned to the client.
    pub(super) released: u32,
    /// Bytes of the body that `content-length` announces and that have not arrived.
    pub(super) content_left: Option<u64>,
    /// The client has ended its request.
    pub(super) is_received: bool,
    /// It is among the streams that wait for a window.
    pub(super) is_waiting: bool,
    pub(super) queue: Option<Box<Queue>>,
}

/// The part of a response that waits for a window.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) body: BytesMut,
    pub(super) end: Option<End>,
    /// Bytes that the body takes: some are those that were sent already.
    taken: usize,
}

impl Queue {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.body.extend_from_slice(bytes);
        self.taken += bytes.len();
    }

    /// Returns the bytes that wait.
    pub(super) fn len(&self) -> usize {
        let trailers = if let Some(End::Trailers(block)) = &self.end { block.len() } else { 0 };
        self.body.len() + trailers
    }

    #[cfg(test)]
    pub(super) const fn taken(&self) -> usize {
        self.taken
    }

    /// Frees what was sent, once it is more than what waits: clients could let all but the last byte of each response go.
    pub(super) fn shrink(&mut self) {
        if 2 * self.body.len() < self.taken {
            self.body = BytesMut::from(&self.body[..]);
            self.taken = self.body.len();
        }
    }
}

/// How a response ends.
#[derive(Debug)]
pub(super) enum End {
    /// With its last data.
    Data,
    /// With this header block.
    Trailers(Box<[u8]>),
}

impl<T> Stream<T> {
    pub(super) const fn new(data: T, receive_window: u32, content_left: Option<u64>) -> Self {
        Self {
            data,
            send_credit: 0,
            receive_window,
            released: 0,
            content_left,
            is_received: false,
            is_waiting: false,
            queue: None,
        }
    }
}
