//! A connection that has stopped speaking HTTP: bytes are passed both ways until both sides have ended.

use crate::pool::{ConnectionPermit, InFlight};
use bytes::{Bytes, BytesMut};
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tollgate_http::server::{BufferedRead, LazyTimeout, WriteHalf};

const ROOM: usize = 16 * 1024;

/// The upstream's side of a connection that has switched.
pub(crate) struct Tunnel {
    pub(crate) source: BufferedRead,
    pub(crate) write: WriteHalf,
    pub(crate) in_flight: InFlight,
    pub(crate) permit: ConnectionPermit,
    /// The longest silence.
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

    /// Passes on what there is; whether anything moved is told by `moved`.
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

/// Passes bytes both ways until both sides have ended, one has failed, or nothing has moved for too long.
pub(crate) async fn run(caller: BufferedRead, to_caller: WriteHalf, tunnel: Tunnel) {
    let Tunnel { source, write, in_flight, permit: place, idle } = tunnel;
    let (mut up, mut down) = (TunnelDirection::new(caller, write), TunnelDirection::new(source, to_caller));
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
    // The connection first: its place is another's from here on.
    drop((up, down));
    drop((in_flight, place));
}
