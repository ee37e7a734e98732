//! The frames of a connection: the calls that begin, the parts of their messages, and those that clients give up.

use super::{Call, GrpcConnection, MAX_EVENTS, MAX_UNSENT, Task, failed, overdue};
use crate::grpc::exchange::{self, Ending, Exchange, Inbox};
use crate::grpc::{Unary, message};
use bytes::{Buf, BytesMut};
use std::future::Future;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tollgate_http::h2::{Event, Reason};
use tonic::Status;
use tonic::codegen::Service as _;

impl<I, U, S, F> GrpcConnection<'_, I, U, S, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    U: Unary,
    S: Fn(U::Request) -> F,
    F: Future<Output = Result<U::Response, Status>>,
{
    /// Begins what has arrived. Returns false if the client broke the protocol.
    pub(super) fn on_bytes(&mut self, bytes: &[u8]) -> bool {
        if self.unread.is_empty() {
            let Some(read) = self.on_frames(bytes) else { return false };
            self.unread.extend_from_slice(&bytes[read..]);
            return true;
        }
        let mut unread = std::mem::take(&mut self.unread);
        unread.extend_from_slice(bytes);
        let Some(read) = self.on_frames(&unread) else { return false };
        unread.advance(read);
        // An idle connection keeps no buffer.
        self.unread = if unread.is_empty() { BytesMut::new() } else { BytesMut::from(&unread[..]) };
        true
    }

    /// Handles complete frames, as many as one step may. Returns how many bytes they are; `None` if the client broke the
    /// protocol.
    pub(super) fn on_frames(&mut self, bytes: &[u8]) -> Option<usize> {
        let (mut read, mut events) = (0, 0);
        loop {
            self.has_unread_frames = events >= MAX_EVENTS || self.http2.unsent().len() > MAX_UNSENT;
            if self.has_unread_frames {
                return Some(read);
            }
            let step = self.http2.receive(&bytes[read..], || Call::New).ok()?;
            match step.event {
                None => {}
                Some(Event::Request { stream, is_end }) => {
                    events += 1;
                    self.on_request(stream, is_end);
                }
                Some(Event::Data { stream, bytes, is_end }) => {
                    events += usize::from(is_end);
                    self.on_data(stream, bytes, is_end);
                }
                Some(Event::End { stream }) => {
                    events += 1;
                    self.on_data(stream, &[], true);
                }
                Some(Event::Reset { stream, data }) => self.drop_call(stream, data),
            }
            if step.consumed == 0 {
                return Some(read);
            }
            read += step.consumed;
        }
    }

    pub(super) fn on_request(&mut self, stream: u32, is_end: bool) {
        let head = self.http2.head();
        let timeout = head.get(b"grpc-timeout").and_then(message::timeout);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if let Some(deadline) = deadline {
            self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
        }
        let generation = self.generation;
        if head.path() == U::PATH.as_bytes() && head.method() == b"POST" {
            let Some(opening) = exchange::catch_panic(|| self.unary.open(head)) else {
                return self.send_status(stream, failed());
            };
            self.incomplete.add_head(U::kept(&opening));
            self.set_call(stream, Call::Receiving { opening, deadline, body: Vec::new(), generation });
            if is_end {
                self.on_data(stream, &[], true);
            }
            return;
        }
        let inbox = Inbox::new();
        if is_end {
            inbox.end(Ending::Complete);
        }
        let Some(request) = exchange::request(head, inbox.body()) else {
            drop(self.http2.reset(stream, Reason::Protocol));
            return;
        };
        let Some(response) = exchange::catch_panic(|| self.others.call(request)) else {
            return self.send_status(stream, failed());
        };
        let task = Task::Exchange { exchange: Exchange::new(Box::pin(response), inbox.clone()) };
        let Some(place) = self.calls.insert(stream, task) else { return self.refuse(stream) };
        if let Some((_, waker, _)) = self.calls.get(place) {
            inbox.set_exchange(waker);
        }
        self.set_call(stream, Call::Exchange { place, inbox, generation });
        self.set_deadline(place, deadline);
        self.poll_place(place);
    }

    pub(super) fn on_data(&mut self, stream: u32, bytes: &[u8], is_end: bool) {
        let max = self.settings.message_bytes;
        let Some(call) = self.http2.data(stream) else { return };
        match call {
            Call::Exchange { inbox, .. } => {
                self.has_begun |= inbox.push(bytes);
                if is_end {
                    inbox.end(Ending::Complete);
                }
            }
            Call::Receiving { body, .. } => {
                // What is known not to be a message is not collected.
                let refused = if body.is_empty() { message::begun(bytes, max).err() } else { None };
                if let Some(status) = refused {
                    return self.send_status(stream, status);
                }
                if is_end {
                    return self.start(stream, bytes);
                }
                body.extend_from_slice(bytes);
                let refused = message::begun(body, max).err();
                let returned = self.incomplete.add(stream, bytes.len());
                if let Some(status) = refused {
                    return self.send_status(stream, status);
                }
                self.http2.release(stream, returned);
                while let Some(stream) = self.incomplete.excess() {
                    let text = "too many messages are not complete";
                    self.send_status(stream, Status::resource_exhausted(text));
                    self.incomplete.remove(stream, 0);
                }
            }
            Call::New | Call::Running(_) => {}
        }
    }

    /// Counts a message off that is complete or given up, and lets others go on.
    pub(super) fn forget(&mut self, stream: u32, opening: &U::Opening) {
        self.incomplete.remove(stream, U::kept(opening));
        self.release_next();
    }

    /// Lets the streams go on that may.
    pub(super) fn release_next(&mut self) {
        while let Some((stream, bytes)) = self.incomplete.next() {
            self.http2.release(stream, bytes);
        }
    }

    /// Begins a call of the method, with the last part of its body.
    pub(super) fn start(&mut self, stream: u32, last: &[u8]) {
        let Some(call) = self.http2.data(stream) else { return };
        let receiving = std::mem::replace(call, Call::New);
        let Call::Receiving { opening, deadline, mut body, .. } = receiving else { return };
        self.forget(stream, &opening);
        let whole = if body.is_empty() {
            last
        } else {
            body.extend_from_slice(last);
            &body
        };
        let decoded = message::only(whole, self.settings.message_bytes);
        self.has_begun |= decoded.is_ok();
        let request = decoded.and_then(|message| {
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(overdue());
            }
            exchange::catch_panic(|| self.unary.decode(opening, message)).unwrap_or_else(|| Err(failed()))
        });
        match request {
            Err(status) => self.send_status(stream, status),
            Ok(request) => {
                let task = Task::Unary { response: (self.start)(request) };
                let Some(place) = self.calls.insert(stream, task) else { return self.refuse(stream) };
                if self.poll_place(place) {
                    self.set_call(stream, Call::Running(place));
                    self.set_deadline(place, deadline);
                }
            }
        }
    }

    /// Refuses a call for which there is no place, which its client may repeat.
    pub(super) fn refuse(&mut self, stream: u32) {
        drop(self.http2.reset(stream, Reason::RefusedStream));
    }

    /// Drops a call that its client has given up.
    pub(super) fn drop_call(&mut self, stream: u32, call: Call<U::Opening>) {
        match call {
            Call::New => {}
            Call::Receiving { opening, .. } => self.forget(stream, &opening),
            Call::Running(place) | Call::Exchange { place, .. } => self.calls.remove(place),
        }
    }
}
