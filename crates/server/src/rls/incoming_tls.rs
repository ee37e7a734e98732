//! The stream under a gRPC connection: plain, or TLS whose handshake is part of the first read.
//!
//! The accept loop must not wait for a client's handshake, and tonic takes connections that are ready; so the handshake
//! is driven by the first read or write, in the connection's own task.

use super::listener::Socket;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::Accept;
use tokio_rustls::server::TlsStream;
use tollgate_http::tls::ServerTls;

/// A connection before and after its handshake.
pub(super) enum Stream {
    Plain(Socket),
    Handshake(Box<Accept<Socket>>, Arc<ServerTls>),
    Tls(Box<TlsStream<Socket>>),
}

impl Stream {
    pub(super) fn new(stream: Socket, tls: Option<&Arc<ServerTls>>) -> Self {
        match tls {
            None => Self::Plain(stream),
            Some(tls) => Self::Handshake(Box::new(tls.acceptor().accept(stream)), Arc::clone(tls)),
        }
    }

    /// Drives the handshake to its end, if there is one.
    fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Self::Handshake(accept, tls) = self {
            let stream = ready!(Pin::new(accept.as_mut()).poll(cx))?;
            tls.check_client(stream.get_ref().1.peer_certificates())?;
            *self = Self::Tls(Box::new(stream));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_handshake(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buffer),
            Self::Handshake(..) => Poll::Pending,
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_handshake(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            Self::Handshake(..) => Poll::Pending,
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_handshake(cx))?;
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, parts),
            Self::Handshake(..) => Poll::Pending,
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            // Nothing has been written.
            Self::Handshake(..) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            // Dropping it closes the connection.
            Self::Handshake(..) => Poll::Ready(Ok(())),
        }
    }
}
