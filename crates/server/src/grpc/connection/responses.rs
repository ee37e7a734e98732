//! The calls of a connection that go on: those that were woken are polled, and what they answer is sent.

use super::{Call, GrpcConnection, TaskProjection, failed};
use crate::grpc::exchange::{self, Progress};
use crate::grpc::{Unary, message};
use bytes::BytesMut;
use std::future::Future;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite};
use tollgate_http::h2::Reason;
use tonic::Status;

impl<I, U, S, F> GrpcConnection<'_, I, U, S, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    U: Unary,
    S: Fn(U::Request) -> F,
    F: Future<Output = Result<U::Response, Status>>,
{
    /// Polls the calls that were woken.
    pub(super) fn poll_woken(&mut self) {
        for word in 0..self.calls.words() {
            let mut woken = self.calls.take_woken(word);
            while woken != 0 {
                let bit = woken.trailing_zeros();
                woken &= woken - 1;
                self.poll_place(word as u32 * 64 + bit);
            }
        }
    }

    /// Polls the call at a place, and sends its response. Returns whether it goes on.
    pub(super) fn poll_place(&mut self, place: u32) -> bool {
        let Some((task, waker, stream)) = self.calls.get(place) else { return false };
        let cx = &mut Context::from_waker(waker);
        match task.project() {
            TaskProjection::Unary { response } => {
                let polled = exchange::catch_panic(|| response.poll(cx));
                let failed = || Poll::Ready(Err(failed()));
                let Poll::Ready(result) = polled.unwrap_or_else(failed) else { return true };
                match result {
                    Ok(response) => {
                        let body = |out: &mut BytesMut| message::put(&response, out);
                        self.http2.respond(stream, message::RESPONSE_HEAD, body, message::OK_TRAILERS);
                    }
                    Err(status) => self.http2.send_only_head(stream, &message::status_head(status)),
                }
            }
            TaskProjection::Exchange { exchange } => match exchange.poll(cx, &mut self.http2, stream) {
                Progress::Done => {}
                Progress::Service => return true,
                Progress::Client => {
                    if !std::mem::replace(&mut exchange.is_blocked, true) {
                        self.blocked.push(place);
                    }
                    return true;
                }
            },
        }
        self.calls.remove(place);
        // The response may wait for the client, and the place is free for another call.
        self.set_call(stream, Call::New);
        false
    }

    pub(super) fn set_call(&mut self, stream: u32, call: Call<U::Opening>) {
        if let Some(data) = self.http2.data(stream) {
            *data = call;
        }
    }

    /// Ends a call with a status.
    pub(super) fn send_status(&mut self, stream: u32, status: Status) {
        if let Some(call @ Call::Receiving { .. }) = self.http2.data(stream)
            && let Call::Receiving { opening, .. } = std::mem::replace(call, Call::New)
        {
            self.forget(stream, &opening);
        }
        self.http2.send_only_head(stream, &message::status_head(status));
    }

    /// Ends a call of another service whose client does not go on.
    pub(super) fn end_exchange(&mut self, stream: u32, place: u32, status: Status) {
        let is_calling = self.calls.get(place).is_some_and(|(task, ..)| match task.project() {
            TaskProjection::Unary { .. } => false,
            TaskProjection::Exchange { exchange } => exchange.is_calling(),
        });
        self.calls.remove(place);
        if is_calling {
            self.send_status(stream, status);
        } else {
            drop(self.http2.reset(stream, Reason::Cancel));
        }
    }
}
