//! Tunnels: connections after a protocol switch. Copies bytes both ways until both sides have ended.

use crate::pool::{ConnectionPermit, InFlight};
use bytes::{Bytes, BytesMut};
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tollgate_http::server::{BufferedRead, LazyTimeout, WriteHalf};

const ROOM: usize = 16 * 1024;

/// The upstream side of a connection that has switched protocols.
pub(crate) struct Tunnel {
    pub(crate) source: BufferedRead,
    pub(crate) write: WriteHalf,
    pub(crate) in_flight: InFlight,
    pub(crate) permit: ConnectionPermit,
    /// Maximum idle time.
    pub(crate) idle: Duration,
}

/// One direction.
struct TunnelDirection {
    from: BufferedRead,
    to: WriteHalf,
    pending: BytesMut,
    ended: bool,
    shut: bool,
}

impl TunnelDirection {
    fn new(mut from: BufferedRead, to: WriteHalf) -> Self {
        let pending = from.buffer.split();
        Self { from, to, pending, ended: false, shut: false }
    }

    /// Copies available bytes; sets `moved` if there were any.
    fn poll(&mut self, cx: &mut Context<'_>, moved: &mut bool) -> Poll<io::Result<()>> {
        loop {
            if !self.pending.is_empty() {
                let mut none = Bytes::new();
                ready!(self.to.poll_write_both(cx, &mut self.pending, &mut none))?;
                *moved = true;
            }
            if self.ended {
                if !self.shut {
                    ready!(self.to.poll_shutdown(cx))?;
                    self.shut = true;
                }
                return Poll::Ready(Ok(()));
            }
            self.pending.reserve(ROOM);
            if ready!(self.from.read.poll_fill(cx, &mut self.pending))? == 0 {
                self.ended = true;
            }
        }
    }
}

/// Copies bytes both ways until both sides have ended, one has failed, or the tunnel has been idle for too long.
pub(crate) async fn run(client: BufferedRead, to_client: WriteHalf, tunnel: Tunnel) {
    let Tunnel { source, write, in_flight, permit, idle } = tunnel;
    let (mut up, mut down) = (TunnelDirection::new(client, write), TunnelDirection::new(source, to_client));
    let mut timeout = LazyTimeout::new(idle);
    let _ = poll_fn(|cx| {
        let mut moved = false;
        let upward = up.poll(cx, &mut moved)?;
        let downward = down.poll(cx, &mut moved)?;
        if moved {
            timeout.set(idle);
        }
        if upward.is_ready() && downward.is_ready() || timeout.poll(cx).is_ready() {
            return Poll::Ready(Ok::<(), io::Error>(()));
        }
        Poll::Pending
    })
    .await;
    // The connection closes first: dropping its permit lets another one open.
    drop((up, down));
    drop((in_flight, permit));
}
