//! Incoming connections of the gRPC server: accepted by the shared accept loop, served by tonic.

use futures_util::Stream;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tollgate_http::server::accept::{ConnectionSlot, ConnectionSlots, accept};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// A connection that occupies a slot until tonic drops it.
pub(super) struct Admitted {
    stream: TcpStream,
    _slot: ConnectionSlot,
}

/// Returns a stream that accepts connections.
pub(super) fn incoming(
    listener: TcpListener,
    slots: ConnectionSlots,
) -> impl Stream<Item = io::Result<Admitted>> {
    futures_util::stream::unfold((listener, slots), async |(listener, slots)| {
        let (stream, _, slot) = accept(&listener, &slots).await;
        Some((Ok(Admitted { stream, _slot: slot }), (listener, slots)))
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
        Pin::new(&mut self.stream).poll_read(cx, buffer)
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
