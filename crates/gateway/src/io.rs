//! Streams as this crate has them: TCP or TLS, in halves, so that a request can be read while its answer is written.

use bytes::{Buf, Bytes, BytesMut};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio_rustls::TlsStream;

/// A connection before it is split.
pub(crate) enum Io {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// What is read from.
pub(crate) enum ReadHalf {
    Tcp(OwnedReadHalf),
    Tls(tokio::io::ReadHalf<Box<TlsStream<TcpStream>>>),
}

/// What is written to.
pub(crate) enum WriteHalf {
    Tcp(OwnedWriteHalf),
    Tls(tokio::io::WriteHalf<Box<TlsStream<TcpStream>>>),
    /// One that has been moved elsewhere.
    Closed,
}

impl Io {
    pub(crate) fn split(self) -> (ReadHalf, WriteHalf) {
        match self {
            Self::Tcp(stream) => {
                let (read, write) = stream.into_split();
                (ReadHalf::Tcp(read), WriteHalf::Tcp(write))
            }
            Self::Tls(stream) => {
                let (read, write) = tokio::io::split(stream);
                (ReadHalf::Tls(read), WriteHalf::Tls(write))
            }
        }
    }
}

impl ReadHalf {
    /// Reads what is there into the room that `buffer` has.
    pub(crate) fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(read) => tokio_util::io::poll_read_buf(Pin::new(read), cx, buffer),
            Self::Tls(read) => tokio_util::io::poll_read_buf(Pin::new(read), cx, buffer),
        }
    }

    /// Whether the other side has closed or spoken out of turn, as far as it is known without asking the kernel.
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::Tcp(read) => {
                matches!(read.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Self::Tls(_) => true,
        }
    }
}

impl WriteHalf {
    fn poll_some(&mut self, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match (self, parts) {
            // The kernel takes one part more quickly than a list of one.
            (Self::Tcp(write), [one]) => Pin::new(write).poll_write(cx, one),
            (Self::Tcp(write), _) => Pin::new(write).poll_write_vectored(cx, parts),
            (Self::Tls(write), _) => Pin::new(write).poll_write_vectored(cx, parts),
            (Self::Closed, _) => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Writes both, one after the other, in as few calls as can be.
    pub(crate) fn poll_write_both(
        &mut self,
        cx: &mut Context<'_>,
        first: &mut BytesMut,
        second: &mut Bytes,
    ) -> Poll<io::Result<()>> {
        while !first.is_empty() || !second.is_empty() {
            let written = if second.is_empty() {
                ready!(self.poll_some(cx, &[IoSlice::new(first)]))?
            } else if first.is_empty() {
                ready!(self.poll_some(cx, &[IoSlice::new(second)]))?
            } else {
                ready!(self.poll_some(cx, &[IoSlice::new(first), IoSlice::new(second)]))?
            };
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_first = written.min(first.len());
            first.advance(of_first);
            second.advance(written - of_first);
        }
        first.clear();
        match self {
            Self::Tcp(_) | Self::Closed => Poll::Ready(Ok(())),
            Self::Tls(write) => Pin::new(write).poll_flush(cx),
        }
    }

    pub(crate) fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(write) => Pin::new(write).poll_shutdown(cx),
            Self::Tls(write) => Pin::new(write).poll_shutdown(cx),
            Self::Closed => Poll::Ready(Ok(())),
        }
    }

    /// Ends what is said without ending what is heard.
    pub(crate) async fn shutdown(&mut self) -> io::Result<()> {
        std::future::poll_fn(|cx| self.poll_shutdown(cx)).await
    }
}

/// A connection whose first bytes have been read already: what HTTP/2 is served on.
pub(crate) struct Rewound {
    pub(crate) first: BytesMut,
    pub(crate) io: Io,
}

impl AsyncRead for Rewound {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let take = self.first.len().min(out.remaining());
            out.put_slice(&self.first.split_to(take));
            return Poll::Ready(Ok(()));
        }
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_read(cx, out),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, out),
        }
    }
}

impl AsyncWrite for Rewound {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Io::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Io::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
