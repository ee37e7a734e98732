//! Limits of the admin listener, and what its connections report to the accept loop
//! ([`tollgate_http::server::connections`]), which decides who ends when there is no room. Operators are few, so the cap
//! is low; still, no client can take all connections:
//!
//! - A network (an address, or the /64 of an IPv6 address) has a share of them, so that others can always connect.
//! - A client without authority waits for nothing but itself: its connection counts as idle even with a request in
//!   progress. An authorized connection ends after all others, and never with a request in progress, of which all has
//!   arrived: half a request keeps no operator out.
//!
//! Rejected: a table of connections of its own. Two mechanisms decided about the same files, and disagreed.

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use tollgate_http::server::connections::{Activity, PortLimits, WhenFull};

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of connections per network.
pub(crate) const MAX_PER_NETWORK: usize = 256;
/// Time limit for the first request of a connection, including the TLS handshake.
const FIRST_REQUEST: Duration = Duration::from_secs(5);

/// Returns the limits of the admin listener within the budget of the process; `guaranteed` connections are held back
/// for it.
#[must_use]
pub const fn port_limits(guaranteed: usize) -> PortLimits {
    PortLimits {
        guaranteed,
        per_network: MAX_PER_NETWORK,
        first_request: FIRST_REQUEST,
        ..PortLimits::new(MAX_CONNECTIONS, WhenFull::Wait)
    }
}

/// One connection to the admin listener.
#[derive(Debug)]
pub(crate) struct AdminConnection {
    requests: Mutex<Requests>,
    /// What the accept loop knows of the connection.
    activity: Arc<Activity>,
    /// Signals that the connection ends, because its client does not read.
    stalled: Notify,
}

#[derive(Debug, Default)]
struct Requests {
    /// Number of requests in progress.
    active: u32,
    /// Whether the rest of a request's body is missing; requests of one connection follow each other.
    is_awaited: bool,
}

impl AdminConnection {
    pub(crate) fn new(activity: Arc<Activity>) -> Arc<Self> {
        Arc::new(Self { requests: Mutex::default(), activity, stalled: Notify::new() })
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what the connection does, and reports it.
    fn change(&self, change: impl FnOnce(&mut Requests)) {
        let mut requests = self.requests();
        change(&mut requests);
        if requests.active > 0 && !requests.is_awaited && self.activity.is_trusted() {
            self.activity.busy();
        } else {
            self.activity.idle(Instant::now());
        }
    }

    /// Starts a request, which is in progress until the returned guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        self.change(|requests| requests.active += 1);
        ActiveRequest(Arc::clone(self))
    }

    /// Ends the connection, whose client does not read its response.
    pub(crate) fn end(&self) {
        self.stalled.notify_one();
    }

    /// Waits for [`Self::end`].
    pub(crate) async fn ended(&self) {
        self.stalled.notified().await;
    }

    /// The client is authorized by a token, a session or a certificate.
    pub(crate) fn authorized(&self) {
        self.change(|_| self.activity.trust());
    }
}

/// A request in progress.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<AdminConnection>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.change(|requests| requests.active = requests.active.saturating_sub(1));
    }
}

/// The body of a request, which reports when it waits for its client.
#[derive(Debug)]
pub(crate) struct TrackedBody {
    body: Incoming,
    connection: Arc<AdminConnection>,
    is_awaited: bool,
}

impl TrackedBody {
    pub(crate) fn new(body: Incoming, connection: &Arc<AdminConnection>) -> Self {
        Self { body, connection: Arc::clone(connection), is_awaited: false }
    }

    fn set_awaited(&mut self, is_awaited: bool) {
        if std::mem::replace(&mut self.is_awaited, is_awaited) != is_awaited {
            self.connection.change(|requests| requests.is_awaited = is_awaited);
        }
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        this.set_awaited(polled.is_pending());
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.set_awaited(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use tollgate_http::server::connections::{ConnectionBudget, ConnectionSlot, ConnectionSlots, MIN_IDLE};

    fn address(number: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number).expect("an address")))
    }

    struct Client {
        slot: ConnectionSlot,
        connection: Arc<AdminConnection>,
    }

    fn client(slots: &ConnectionSlots, from: IpAddr) -> Client {
        let slot = slots.admit(from).expect("a slot");
        let connection = AdminConnection::new(slot.activity());
        Client { slot, connection }
    }

    fn stays(client: &Client) -> bool {
        !client.slot.activity().has_ended()
    }

    /// Takes all free slots, from addresses other than `address(0)`.
    fn full(slots: &ConnectionSlots) -> Vec<Client> {
        (slots.open()..MAX_CONNECTIONS).map(|i| client(slots, address(1 + i / MAX_PER_NETWORK))).collect()
    }

    fn port() -> ConnectionSlots {
        ConnectionBudget::default().port(port_limits(0))
    }

    #[tokio::test(start_paused = true)]
    async fn one_network_never_takes_all_slots() {
        let slots = port();
        let six = |last: u16| -> IpAddr { format!("2001:db8::{last:x}").parse().expect("an address") };
        let held: Vec<_> = (0..600).map(|i| client(&slots, six(i))).collect();
        assert_eq!(held.iter().filter(|held| stays(held)).count(), MAX_PER_NETWORK, "of one /64");
        assert!(held[600 - MAX_PER_NETWORK..].iter().all(stays), "the oldest were ended");
        let other = client(&slots, address(0));
        assert!(stays(&other) && stays(&held[600 - MAX_PER_NETWORK]), "other networks closed no connection");
        drop(held);
        assert_eq!(slots.open(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn anonymous_connections_end_before_operators() {
        let slots = port();
        let served = client(&slots, address(0));
        let served_request = served.connection.begin_request();
        served.connection.authorized();
        let idle = client(&slots, address(0));
        drop(idle.connection.begin_request());
        idle.connection.authorized();
        tokio::time::advance(MIN_IDLE).await;
        let unauthorized = client(&slots, address(0));
        let public_request = unauthorized.connection.begin_request();
        let silent = full(&slots);
        let mut admitted = Vec::new();
        let mut admit = async |many: usize| {
            for _ in 0..many {
                tokio::time::advance(MIN_IDLE).await;
                let new = client(&slots, address(1_000 + admitted.len()));
                drop(new.connection.begin_request());
                new.connection.authorized();
                admitted.push(new);
            }
        };
        admit(1).await;
        assert!(!stays(&silent[0]) && silent[1..].iter().all(stays), "the oldest silent connection");
        admit(silent.len() - 1).await;
        assert!(!silent.iter().any(stays) && stays(&unauthorized));
        // All of one address now, so that only who they are decides.
        admit(1).await;
        assert!(!stays(&unauthorized) && stays(&idle), "a public request does not protect its connection");
        admit(1).await;
        assert!(!stays(&idle) && stays(&served));
        admit(2 * MAX_CONNECTIONS).await;
        assert!(stays(&served), "authorized with a request in progress");
        drop((served_request, public_request));
        admit(MAX_CONNECTIONS).await;
        assert!(!stays(&served));
    }

    /// Half a request of an operator blocks no other connection either, and the rest of it protects its connection again.
    #[tokio::test(start_paused = true)]
    async fn an_operator_with_half_a_request_waits_for_itself() {
        let slots = ConnectionBudget::default().port(PortLimits { max: 1, ..port_limits(0) });
        let half = client(&slots, address(0));
        let _request = half.connection.begin_request();
        half.connection.authorized();
        tokio::time::advance(MIN_IDLE).await;
        assert!(slots.admit(address(0)).is_none(), "a request in progress");
        half.connection.change(|requests| requests.is_awaited = true);
        tokio::time::advance(MIN_IDLE).await;
        half.connection.change(|requests| requests.is_awaited = false);
        assert!(slots.admit(address(0)).is_none(), "the rest has arrived");
        half.connection.change(|requests| requests.is_awaited = true);
        tokio::time::advance(MIN_IDLE).await;
        assert!(slots.admit(address(0)).is_some() && !stays(&half));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_rejected_when_none_can_end() {
        let slots = port();
        let mut held: Vec<_> = (0..MAX_PER_NETWORK)
            .map(|_| {
                let client = client(&slots, address(0));
                let request = client.connection.begin_request();
                client.connection.authorized();
                (client, request)
            })
            .collect();
        assert!(slots.admit(address(0)).is_none());
        assert!(slots.admit(address(1)).is_some());
        drop(held.pop());
        assert!(slots.admit(address(0)).is_some());
    }
}
