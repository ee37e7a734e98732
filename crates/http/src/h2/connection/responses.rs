//! Responses: what is sent at once, and what waits for the client's windows.

use super::{Connection, MAX_QUEUED, STREAM_WINDOW};
use crate::h2::frame::{self, MAX_PAYLOAD, Reason, put_header};
use crate::h2::stream::{End, Queue};
use bytes::BytesMut;

impl<T> Connection<T> {
    /// Allows the client to send so many more bytes of a body, because these were read.
    pub fn release(&mut self, stream: u32, bytes: usize) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        state.released += bytes as u32;
        if !state.is_received && state.released >= STREAM_WINDOW / 2 {
            let returned = std::mem::take(&mut state.released);
            state.receive_window += returned;
            self.out.put_window_update(stream, returned);
        }
    }

    /// Sends the head of a response, which `block` has encoded.
    pub fn send_head(&mut self, stream: u32, block: &[u8]) {
        if self.streams.contains_key(&stream) {
            self.out.put_block(stream, block, 0);
        }
    }

    /// Sends a part of a response's body, or queues it.
    pub fn send_data(&mut self, stream: u32, bytes: &[u8]) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        state.queue.get_or_insert_default().push(bytes);
        self.queued += bytes.len();
        self.send_queue(stream, usize::MAX);
    }

    /// Ends a response, with trailers if there are any, once what is queued is sent.
    pub fn send_end(&mut self, stream: u32, trailers: Option<&[u8]>) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let end = trailers.map_or(End::Data, |block| End::Trailers(block.into()));
        let queue = state.queue.get_or_insert_default();
        let before = queue.len();
        queue.end = Some(end);
        self.queued += queue.len() - before;
        self.send_queue(stream, usize::MAX);
    }

    /// Sends a response that has no body: a head that is the end as well.
    pub fn send_only_head(&mut self, stream: u32, block: &[u8]) {
        if self.streams.contains_key(&stream) {
            self.out.put_block(stream, block, frame::END_STREAM);
            self.close(stream);
        }
    }

    /// Sends a whole response: a head, a body that `body` appends, and trailers. It is written where it is sent from, unless
    /// the client's windows have no room for it; if too much waits for these already, the stream is reset.
    pub fn respond(&mut self, stream: u32, head: &[u8], body: impl FnOnce(&mut BytesMut), trailers: &[u8]) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let window = self.send_window.min(self.initial_send_window + state.send_credit);
        self.out.put_block(stream, head, 0);
        let begin = self.out.bytes.len();
        put_header(&mut self.out.bytes, 0, frame::DATA, 0, stream);
        body(&mut self.out.bytes);
        let length = self.out.bytes.len() - begin - frame::HEADER;
        if length as i64 <= window.min(MAX_PAYLOAD as i64) {
            self.out.bytes[begin..begin + 3].copy_from_slice(&(length as u32).to_be_bytes()[1..]);
            self.send_window -= length as i64;
            self.out.put_block(stream, trailers, frame::END_STREAM);
            return self.close(stream);
        }
        if self.is_queue_full() {
            self.out.bytes.truncate(begin);
            self.reset(stream, Reason::EnhanceYourCalm);
            return;
        }
        let mut queue = Queue::default();
        queue.push(&self.out.bytes[begin + frame::HEADER..]);
        self.out.bytes.truncate(begin);
        queue.end = Some(End::Trailers(trailers.into()));
        self.queued += queue.len();
        if let Some(state) = self.streams.get_mut(&stream) {
            state.queue = Some(Box::new(queue));
        }
        self.send_queue(stream, usize::MAX);
    }

    /// Returns how many bytes of a response wait for the client's windows; `None` if the stream is not open.
    #[must_use]
    pub fn queued(&self, stream: u32) -> Option<usize> {
        let state = self.streams.get(&stream)?;
        Some(state.queue.as_ref().map_or(0, |queue| queue.body.len()))
    }

    /// Returns whether so much waits for the client's windows that no more is to be queued.
    #[must_use]
    pub const fn is_queue_full(&self) -> bool {
        self.queued > MAX_QUEUED
    }

    /// Returns whether [`Self::send_waiting`] may have something to send.
    #[must_use]
    pub const fn may_send(&self) -> bool {
        self.may_send
    }

    /// Sends what has waited for a window, if one has grown since the last call, until the output has about `max` bytes. What
    /// there is no room for is sent by the next call.
    pub fn send_waiting(&mut self, max: usize) {
        if !std::mem::take(&mut self.may_send) {
            return;
        }
        for _ in 0..self.waiting.len() {
            if self.out.bytes.len() >= max {
                self.may_send = true;
                return;
            }
            let Some(stream) = self.waiting.pop_front() else { break };
            if let Some(state) = self.streams.get_mut(&stream) {
                state.is_waiting = false;
                self.send_queue(stream, max);
            }
        }
    }

    /// Sends as much of a queue as the windows allow, until the output has about `max` bytes.
    fn send_queue(&mut self, id: u32, max: usize) {
        let Some(state) = self.streams.get_mut(&id) else { return };
        let Some(queue) = &mut state.queue else { return };
        while !queue.body.is_empty() {
            let window = self.send_window.min(self.initial_send_window + state.send_credit);
            let length = (queue.body.len() as i64).min(window).min(MAX_PAYLOAD as i64);
            let has_room = self.out.bytes.len() < max;
            if length <= 0 || !has_room {
                self.may_send |= !has_room;
                queue.shrink();
                if !std::mem::replace(&mut state.is_waiting, true) {
                    self.waiting.push_back(id);
                }
                return;
            }
            let part = queue.body.split_to(length as usize);
            let is_last = queue.body.is_empty() && matches!(queue.end, Some(End::Data));
            let flags = if is_last { frame::END_STREAM } else { 0 };
            put_header(&mut self.out.bytes, part.len(), frame::DATA, flags, id);
            self.out.bytes.extend_from_slice(&part);
            self.send_window -= length;
            state.send_credit -= length;
            self.queued -= length as usize;
            if is_last {
                return self.close(id);
            }
        }
        self.queued -= queue.len();
        let end = queue.end.take();
        state.queue = None;
        match end {
            None => {}
            Some(End::Data) => {
                put_header(&mut self.out.bytes, 0, frame::DATA, frame::END_STREAM, id);
                self.close(id);
            }
            Some(End::Trailers(block)) => {
                self.out.put_block(id, &block, frame::END_STREAM);
                self.close(id);
            }
        }
    }
}
