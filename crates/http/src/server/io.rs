//! Connections over TCP or TLS, split into halves so that a request can be read while its response is written.

use bytes::{Buf, Bytes, BytesMut};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
#[cfg(feature = "tls")]
use tokio_rustls::TlsStream;

/// A connection before it is split.
#[derive(Debug)]
pub enum Io {
    /// Plain.
    Tcp(TcpStream),
    /// Encrypted.
    #[cfg(feature = "tls")]
    Tls(Box<TlsStream<TcpStream>>),
}

/// The half that is read from.
#[derive(Debug)]
pub enum ReadHalf {
    /// Plain.
    Tcp(OwnedReadHalf),
    /// Encrypted.
    #[cfg(feature = "tls")]
    Tls(tokio::io::ReadHalf<Box<TlsStream<TcpStream>>>),
}

/// The half that is written to.
#[derive(Debug)]
pub enum WriteHalf {
    /// Plain.
    Tcp(OwnedWriteHalf),
    /// Encrypted.
    #[cfg(feature = "tls")]
    Tls(tokio::io::WriteHalf<Box<TlsStream<TcpStream>>>),
    /// Moved elsewhere.
    Closed,
}

impl Io {
    /// Splits the connection for concurrent use.
    #[must_use]
    pub fn split(self) -> (ReadHalf, WriteHalf) {
        match self {
            Self::Tcp(stream) => {
                let (read, write) = stream.into_split();
                (ReadHalf::Tcp(read), WriteHalf::Tcp(write))
            }
            #[cfg(feature = "tls")]
            Self::Tls(stream) => {
                let (read, write) = tokio::io::split(stream);
                (ReadHalf::Tls(read), WriteHalf::Tls(write))
            }
        }
    }
}

impl ReadHalf {
    /// Reads into the spare capacity of `buffer`. Returns 0 at the end of the stream.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(read) => tokio_util::io::poll_read_buf(Pin::new(read), cx, buffer),
            #[cfg(feature = "tls")]
            Self::Tls(read) => tokio_util::io::poll_read_buf(Pin::new(read), cx, buffer),
        }
    }

    /// Returns whether the peer has neither closed the connection nor sent anything. Otherwise the connection must not
    /// be reused: unsolicited bytes would be read as the next response.
    #[must_use]
    pub fn is_quiet(&mut self) -> bool {
        match self {
            Self::Tcp(read) => {
                matches!(read.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            #[cfg(feature = "tls")]
            Self::Tls(read) => {
                let mut cx = Context::from_waker(Waker::noop());
                Pin::new(read).poll_read(&mut cx, &mut ReadBuf::new(&mut [0])).is_pending()
            }
        }
    }
}

impl WriteHalf {
    fn poll_some(&mut self, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match (self, parts) {
            // A plain write is faster than a vectored write of one part.
            (Self::Tcp(write), [one]) => Pin::new(write).poll_write(cx, one),
            (Self::Tcp(write), _) => Pin::new(write).poll_write_vectored(cx, parts),
            #[cfg(feature = "tls")]
            (Self::Tls(write), _) => Pin::new(write).poll_write_vectored(cx, parts),
            (Self::Closed, _) => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Writes both buffers, one after the other, in as few system calls as possible.
    ///
    /// # Errors
    /// I/O errors of the connection.
    pub fn poll_write_both(
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
            #[cfg(feature = "tls")]
            Self::Tls(write) => Pin::new(write).poll_flush(cx),
        }
    }

    /// Shuts down the write direction.
    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(write) => Pin::new(write).poll_shutdown(cx),
            #[cfg(feature = "tls")]
            Self::Tls(write) => Pin::new(write).poll_shutdown(cx),
            Self::Closed => Poll::Ready(Ok(())),
        }
    }

    /// Shuts down the write direction; the read direction stays open.
    ///
    /// # Errors
    /// I/O errors of the connection.
    pub async fn shutdown(&mut self) -> io::Result<()> {
        std::future::poll_fn(|cx| self.poll_shutdown(cx)).await
    }
}

/// A connection whose first bytes were already read, for libraries that expect to read it from the start.
#[derive(Debug)]
pub struct PrefixedStream {
    /// The bytes that were already read.
    pub first: BytesMut,
    /// The rest of the connection.
    pub io: Io,
}

impl AsyncRead for PrefixedStream {
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
            #[cfg(feature = "tls")]
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, out),
        }
    }
}

impl AsyncWrite for PrefixedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            #[cfg(feature = "tls")]
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
            #[cfg(feature = "tls")]
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            #[cfg(feature = "tls")]
            Io::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            #[cfg(feature = "tls")]
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
