//! Incoming connections of the gRPC server: accepted by the shared accept loop, served by tonic.
//!
//! tonic owns the connection, so what the accept loop must know of it is read from its bytes: it is silent until the
//! header of the first HTTP/2 frame that opens a request, and a connection that must end reads the end of its stream.

use futures_util::Stream;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tollgate_http::server::accept::{accept, prepare};
use tollgate_http::server::connections::{Activity, ConnectionSlot, ConnectionSlots};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Length of the preface that every HTTP/2 client sends first; whether it is right is tonic's to say.
const PREFACE: usize = 24;
/// Length of a frame's header: the length of its payload in three bytes, then its type.
const FRAME_HEADER: usize = 9;
const HEADERS_FRAME: u8 = 1;

/// A connection that occupies a slot until tonic drops it.
pub(super) struct Admitted {
    stream: TcpStream,
    activity: Arc<Activity>,
    first_request: FirstRequest,
    _slot: ConnectionSlot,
}

/// Finds the first request in the bytes of an HTTP/2 client, however they are cut.
#[derive(Debug)]
enum FirstRequest {
    /// So many bytes to skip, then a frame header, of which some has been read.
    Awaited {
        skip: usize,
        header: [u8; FRAME_HEADER],
        read: usize,
    },
    Seen,
}

impl FirstRequest {
    const fn awaited() -> Self {
        Self::Awaited { skip: PREFACE, header: [0; FRAME_HEADER], read: 0 }
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        while let Self::Awaited { skip, header, read } = self {
            let skipped = bytes.len().min(*skip);
            *skip -= skipped;
            bytes = &bytes[skipped..];
            let copied = bytes.len().min(FRAME_HEADER - *read);
            header[*read..*read + copied].copy_from_slice(&bytes[..copied]);
            *read += copied;
            bytes = &bytes[copied..];
            if *read < FRAME_HEADER {
                return;
            }
            let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
            (*skip, *read) = (length as usize, 0);
            if header[3] == HEADERS_FRAME {
                *self = Self::Seen;
            }
        }
    }
}

/// Returns a stream that accepts connections.
pub(super) fn incoming(
    listener: TcpListener,
    slots: ConnectionSlots,
) -> impl Stream<Item = io::Result<Admitted>> {
    prepare(&listener);
    futures_util::stream::unfold((listener, slots), async |(listener, slots)| {
        let (stream, _, slot) = accept(&listener, &slots).await;
        let (activity, first_request) = (slot.activity(), FirstRequest::awaited());
        Some((Ok(Admitted { stream, activity, first_request, _slot: slot }), (listener, slots)))
    })
}

impl Connected for Admitted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Admitted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.activity.has_ended() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buffer) {
            Poll::Pending => self.activity.poll_ended(cx).map(|()| Err(io::ErrorKind::TimedOut.into())),
            Poll::Ready(Ok(())) => {
                if let FirstRequest::Awaited { .. } = self.first_request {
                    self.first_request.feed(&buffer.filled()[before..]);
                }
                if let FirstRequest::Seen = self.first_request {
                    self.activity.idle(Instant::now());
                }
                Poll::Ready(Ok(()))
            }
            failed => failed,
        }
    }
}

impl AsyncWrite for Admitted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, length: usize) -> Vec<u8> {
        let size = u32::try_from(length).expect("a length").to_be_bytes();
        [&size[1..], &[kind, 0, 0, 0, 0, 0], &vec![1; length]].concat()
    }

    /// However its bytes are cut, a client is silent until it opens a request; the payloads of other frames are skipped.
    #[test]
    fn the_first_request_is_found_however_bytes_are_cut() {
        let silent = [&[b'P'; PREFACE][..], &frame(4, 12), &frame(8, 4), &frame(6, 8)].concat();
        let spoken = [&silent[..], &frame(HEADERS_FRAME, 1)[..FRAME_HEADER]].concat();
        for size in 1..=spoken.len() {
            let mut first = FirstRequest::awaited();
            silent.chunks(size).for_each(|part| first.feed(part));
            assert!(matches!(first, FirstRequest::Awaited { .. }), "in pieces of {size}");
            let mut first = FirstRequest::awaited();
            spoken.chunks(size).for_each(|part| first.feed(part));
            assert!(matches!(first, FirstRequest::Seen), "in pieces of {size}");
        }
    }
}
