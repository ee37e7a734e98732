//! Incoming connections of the gRPC server: accepted by the shared accept loop, served by tonic.
//!
//! tonic owns the connection, so what the accept loop must know of it is read from its bytes: it is silent until the
//! header of the first HTTP/2 frame that opens a request, busy from the end of a request until something is written, and
//! otherwise waits for its client. A connection that must end reads the end of its stream, and so does one that has
//! reached its greatest age.

use super::incoming_tls::Stream as Connection;
use super::listener::GrpcListener;
use futures_util::Stream;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tollgate_http::server::accept::accept;
use tollgate_http::server::connections::{Activity, ConnectionSlot, ConnectionSlots};
use tollgate_http::tls::ServerTls;
use tonic::transport::server::Connected;

/// Length of the preface that every HTTP/2 client sends first; whether it is right is tonic's to say.
const PREFACE: usize = 24;
/// Length of a frame's header: the length of its payload in three bytes, then its type.
const FRAME_HEADER: usize = 9;
const DATA_FRAME: u8 = 0;
const HEADERS_FRAME: u8 = 1;
/// Flag of the last frame of a request.
const END_STREAM: u8 = 1;

/// A connection that occupies a slot until tonic drops it.
pub(super) struct Admitted {
    stream: Connection,
    activity: Arc<Activity>,
    requests: Requests,
    /// Resolves when the connection must not last longer.
    end: Option<Pin<Box<Sleep>>>,
    _slot: ConnectionSlot,
}

/// Finds the requests in the bytes of an HTTP/2 client, however they are cut: so many bytes to skip, then a frame
/// header, of which some has been read.
#[derive(Debug)]
struct Requests {
    skip: usize,
    header: [u8; FRAME_HEADER],
    read: usize,
    /// A request was opened.
    is_opened: bool,
}

impl Requests {
    const fn new() -> Self {
        Self { skip: PREFACE, header: [0; FRAME_HEADER], read: 0, is_opened: false }
    }

    /// Returns whether a request ends in `bytes`.
    fn feed(&mut self, mut bytes: &[u8]) -> bool {
        let mut has_ended = false;
        loop {
            let skipped = bytes.len().min(self.skip);
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let copied = bytes.len().min(FRAME_HEADER - self.read);
            self.header[self.read..self.read + copied].copy_from_slice(&bytes[..copied]);
            self.read += copied;
            bytes = &bytes[copied..];
            if self.read < FRAME_HEADER {
                return has_ended;
            }
            let [a, b, c, kind, flags, ..] = self.header;
            (self.skip, self.read) = (u32::from_be_bytes([0, a, b, c]) as usize, 0);
            self.is_opened |= kind == HEADERS_FRAME;
            has_ended |= matches!(kind, HEADERS_FRAME | DATA_FRAME) && flags & END_STREAM != 0;
        }
    }
}

/// Returns a stream that accepts connections, which last no longer than `lifetime`.
pub(super) fn incoming(
    listener: GrpcListener,
    slots: ConnectionSlots,
    tls: Option<Arc<ServerTls>>,
    lifetime: Option<Duration>,
) -> impl Stream<Item = io::Result<Admitted>> {
    listener.prepare();
    futures_util::stream::unfold(
        (listener, slots, tls, lifetime),
        async |(listener, slots, tls, lifetime)| {
            let (stream, _, slot) = accept(&listener, &slots).await;
            let (activity, requests) = (slot.activity(), Requests::new());
            let stream = Connection::new(stream, tls.as_ref());
            let end = lifetime.map(|lifetime| Box::pin(tokio::time::sleep(lifetime)));
            let admitted = Admitted { stream, activity, requests, end, _slot: slot };
            Some((Ok(admitted), (listener, slots, tls, lifetime)))
        },
    )
}

impl Connected for Admitted {
    // Descriptors say who asks, not addresses.
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl Admitted {
    /// Returns whether the connection must not last longer.
    fn has_ended(&self) -> bool {
        self.activity.has_ended() || self.end.as_ref().is_some_and(|end| end.is_elapsed())
    }

    /// Waits for the end of the connection while its client is waited for, whether that is to send or to read: one that never
    /// reads keeps tonic from reading.
    fn or_ended<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            return polled;
        }
        let is_old = self.end.as_mut().is_some_and(|end| end.as_mut().poll(cx).is_ready());
        if is_old || self.activity.poll_ended(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Pending
    }

    /// Something is written: from now on the client is to read it, and to send the next request.
    fn answering(&self) {
        if self.requests.is_opened {
            self.activity.waiting();
        }
    }
}

impl AsyncRead for Admitted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.has_ended() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        match self.or_ended(polled, cx) {
            Poll::Ready(Ok(())) => {
                if self.requests.feed(&buffer.filled()[before..]) {
                    self.activity.busy();
                } else if self.requests.is_opened {
                    self.activity.waiting();
                }
                Poll::Ready(Ok(()))
            }
            other => other,
        }
    }
}

impl AsyncWrite for Admitted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.answering();
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.or_ended(polled, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.answering();
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.or_ended(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.or_ended(polled, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.or_ended(polled, cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, length: usize) -> Vec<u8> {
        let size = u32::try_from(length).expect("a length").to_be_bytes();
        [&size[1..], &[kind, 0, 0, 0, 0, 0], &vec![1; length]].concat()
    }

    /// However its bytes are cut, a client is silent until it opens a request, and busy with the last frame of one; the
    /// payloads of frames are skipped.
    #[test]
    fn requests_are_found_however_bytes_are_cut() {
        let silent = [&[b'P'; PREFACE][..], &frame(4, 12), &frame(8, 4), &frame(6, 8)].concat();
        let opened = [&silent[..], &frame(HEADERS_FRAME, 1), &frame(DATA_FRAME, 3)].concat();
        let mut last = frame(DATA_FRAME, 5);
        last[4] |= END_STREAM;
        for size in 1..=opened.len() {
            let mut requests = Requests::new();
            assert!(!silent.chunks(size).any(|part| requests.feed(part)));
            assert!(!requests.is_opened, "in pieces of {size}");
            let mut requests = Requests::new();
            assert!(!opened.chunks(size).any(|part| requests.feed(part)), "half a request");
            assert!(requests.is_opened, "in pieces of {size}");
            assert_eq!(
                last.chunks(size).filter(|part| requests.feed(part)).count(),
                1,
                "in pieces of {size}"
            );
        }
    }
}
