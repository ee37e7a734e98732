//! Acceptor of client connections: bounds their number, and detects PROXY headers, TLS and HTTP/2 within a deadline.

use crate::h1::Session;
use crate::h2;
use crate::headers::Peer;
use crate::proxy::Proxy;
use arc_swap::ArcSwap;
use bytes::BytesMut;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsStream;
use tollgate_core::CounterStore;
use tollgate_http::proxy_protocol;
use tollgate_http::server::accept;
use tollgate_http::server::connections::{Activity, ConnectionSlots};
use tollgate_http::server::{self, Drain, GRACE_PERIOD, Io, Settings};
use tollgate_http::tls::ServerTls;

/// State shared by the connections of one listener.
pub(crate) struct Acceptor<S: CounterStore + 'static> {
    pub(crate) proxy: Arc<Proxy<S>>,
    pub(crate) drain: Arc<Drain>,
    pub(crate) tls: Option<Arc<ServerTls>>,
    pub(crate) proxy_protocol: bool,
    pub(crate) h1: Settings,
    pub(crate) h2: h2::H2Settings,
    pub(crate) slots: ConnectionSlots,
}

impl<S: CounterStore + 'static> Acceptor<S> {
    /// Accepts connections for as long as it is polled; each uses the settings that are active when it is accepted.
    pub(crate) async fn accept_all(current: Arc<ArcSwap<Self>>, listener: TcpListener) {
        loop {
            let slots = current.load().slots.clone();
            let (stream, address, slot) = accept::accept(&listener, &slots).await;
            let this = current.load_full();
            let drain = Arc::clone(&this.drain);
            let activity = slot.activity();
            accept::spawn(&drain, slot, async move { this.serve(stream, address, &activity).await });
        }
    }

    async fn serve(&self, stream: TcpStream, address: SocketAddr, activity: &Arc<Activity>) {
        let deadline = Instant::now() + self.h1.header_timeout;
        let mut from = address.ip();
        if self.proxy_protocol {
            match tokio::time::timeout_at(deadline, self.proxied_for(&stream, from)).await {
                Ok(Some(named)) => from = named,
                _ => return,
            }
        }
        let peer = Peer::new(from, self.tls.is_some());
        match &self.tls {
            None => self.serve_plain(stream, peer, activity).await,
            Some(tls) => Box::pin(self.serve_tls(tls, stream, peer, deadline, activity)).await,
        }
    }

    /// Returns the client address from the PROXY header of a load balancer. Only trusted peers may send one.
    async fn proxied_for(&self, stream: &TcpStream, from: IpAddr) -> Option<IpAddr> {
        if !self.proxy.state().routes.fallback_site().trusts(from) {
            tracing::debug!(%from, "connection closed; PROXY header from an untrusted peer");
            return None;
        }
        let mut seen = vec![0; proxy_protocol::MAX_HEADER];
        loop {
            // Bytes after the header belong to the client's protocol: peek first, then read exactly the header.
            let length = stream.peek(&mut seen).await.ok()?;
            match proxy_protocol::read(&seen[..length]) {
                Err(error) => {
                    tracing::debug!(%from, %error, "connection closed; invalid PROXY header");
                    return None;
                }
                Ok(None) if length == 0 || length == seen.len() => return None,
                // The socket is already readable, so there is no wake-up for further bytes.
                Ok(None) => tokio::time::sleep(Duration::from_millis(5)).await,
                Ok(Some(proxied)) => {
                    let mut left = proxied.length;
                    while left > 0 {
                        stream.readable().await.ok()?;
                        match stream.try_read(&mut seen[..left]) {
                            Ok(0) => return None,
                            Ok(read) => left -= read,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                            Err(_) => return None,
                        }
                    }
                    return Some(proxied.addresses.map_or(from, |(source, _)| source.ip()));
                }
            }
        }
    }

    async fn serve_tls(
        &self,
        tls: &ServerTls,
        stream: TcpStream,
        peer: Peer,
        deadline: Instant,
        activity: &Arc<Activity>,
    ) {
        let Ok(Ok(stream)) = tokio::time::timeout_at(deadline, tls.acceptor().accept(stream)).await else {
            return;
        };
        let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        let io = Io::Tls(Box::new(TlsStream::Server(stream)));
        self.serve_io(io, BytesMut::new(), peer, is_h2, activity).await;
    }

    async fn serve_plain(&self, stream: TcpStream, peer: Peer, activity: &Arc<Activity>) {
        let mut first = BytesMut::new();
        // A client that has sent nothing is idle, not slow.
        let mut deadline = Instant::now() + self.h2.idle_timeout;
        if tokio::time::timeout_at(deadline, self.wait_for_first_byte(&stream)).await != Ok(true) {
            return;
        }
        deadline = deadline.min(Instant::now() + self.h1.header_timeout);
        // Reads until the preface tells HTTP/2 from HTTP/1, usually one read.
        let detected = async {
            loop {
                stream.readable().await?;
                first.reserve(4096);
                match stream.try_read_buf(&mut first) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(_) => {
                        let length = first.len().min(h2::PREFACE.len());
                        if first[..length] != h2::PREFACE[..length] {
                            return Ok(false);
                        }
                        if length == h2::PREFACE.len() {
                            return Ok(true);
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        };
        if let Ok(Ok(is_h2)) = tokio::time::timeout_at(deadline, detected).await {
            self.serve_io(Io::Tcp(stream), first, peer, is_h2, activity).await;
        }
    }

    /// Waits for the first byte. When draining begins, a request may be on its way: the client has a grace period.
    async fn wait_for_first_byte(&self, stream: &TcpStream) -> bool {
        let mut first = [0];
        let draining = self.drain.begun();
        if !self.drain.has_begun() {
            tokio::select! {
                // A new stream counts as readable until a read finds nothing.
                peeked = stream.peek(&mut first) => return peeked.is_ok(),
                () = draining => {}
            }
        }
        tokio::time::timeout(GRACE_PERIOD, stream.peek(&mut first)).await.is_ok_and(|peeked| peeked.is_ok())
    }

    async fn serve_io(&self, io: Io, first: BytesMut, peer: Peer, is_h2: bool, activity: &Arc<Activity>) {
        if !is_h2 {
            let session = Session { proxy: Arc::clone(&self.proxy), peer };
            server::serve(io, first, &self.h1, &self.drain, activity, &session).await;
            return;
        }
        let (refused_peer, peer, proxy) = (peer.clone(), Arc::new(peer), Arc::clone(&self.proxy));
        let handle = move |request| {
            let (peer, proxy) = (Arc::clone(&peer), Arc::clone(&proxy));
            async move { h2::respond(&proxy, &peer, request).await }
        };
        let refused = |status, detail: &str| self.proxy.rejected(&refused_peer, status, detail);
        Box::pin(h2::serve(io, first, self.h2, &self.drain, activity, handle, refused)).await;
    }
}
