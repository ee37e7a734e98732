//! Live stats endpoints: `GET /admin/v1/stats` (the last seconds), `/events` (server-sent events), `/top` (top
//! callers and hot keys) and `/nodes`.
//!
//! A slow subscriber skips events and receives a notice of it; nothing waits for a subscriber. The number of
//! subscribers is capped, in total and per network, so that operators always find a free connection. A stream ends
//! when its subscriber's authorization does, not only when the client disconnects.

use super::decisions::run_blocking;
use super::schemas::{Nodes, Stats, Top};
use crate::AdminState;
use crate::auth::{self, Viewer};
use crate::coalesce::Coalesced;
use crate::conn::limiter;
use crate::error::ApiResult;
use crate::query::{NoParameters, Number, StrictQuery};
use crate::response::{compact_json, typed};
use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use futures_util::stream::unfold;
use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::MissedTickBehavior;
use tollgate_control::NodeRecord;
use tollgate_core::TimeDelta;
use tollgate_http::problem::Problem;
use tollgate_observe::{Event, Telemetry, rfc3339};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new()
        .routes(routes!(stats))
        .routes(routes!(events))
        .routes(routes!(top))
        .routes(routes!(nodes))
}

/// Interval at which subscribers are authorized again. Each time a comment is sent too, so that proxies in between
/// see that the connection is alive.
const REAUTHORIZE_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of subscribers; the remaining connections are for requests.
const MAX_SUBSCRIBERS: usize = 400;
/// Maximum number of subscribers per network: their connections are never evicted, so the rest of the network's
/// connections are for requests.
const MAX_SUBSCRIBERS_PER_NETWORK: usize = limiter::MAX_PER_NETWORK - 32;

/// Timeout for reading the nodes, or a subscriber's principal, from the database.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The nodes as last read from the database; `None` if it was unavailable.
#[derive(Default)]
pub struct NodeCache(Coalesced<Option<Vec<NodeRecord>>>);

/// Number of subscribers per network.
static SUBSCRIBERS: LazyLock<Mutex<HashMap<IpAddr, usize>>> = LazyLock::new(Mutex::default);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct StatsParameters {
    /// Number of seconds to return.
    #[param(value_type = Option<i64>, minimum = 1)]
    seconds: Option<Number<3_600>>,
}

/// Returns the stats of the last seconds.
#[utoipa::path(get, path = "/admin/v1/stats", operation_id = "GET_stats", params(StatsParameters),
    responses((status = 200, description = "The stats.", body = Stats)),
    extensions(("x-role" = json!("viewer"))))]
async fn stats(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(StatsParameters { seconds }): StrictQuery<StatsParameters>,
) -> ApiResult {
    let seconds = seconds.map_or(300, |seconds| usize::try_from(seconds.0).unwrap_or(usize::MAX));
    let status = Arc::clone(&admin.status);
    let all = move |observe: &Telemetry| {
        let mut stats = observe.stats(seconds);
        if let (Some(node), Value::Object(more)) = (stats["node"].as_object_mut(), status.node()) {
            node.extend(more);
        }
        compact_json(&stats)
    };
    Ok(run_blocking(&admin, all).await?)
}

/// Returns the callers with the most requests and denials, and the hot keys.
#[utoipa::path(get, path = "/admin/v1/top", operation_id = "GET_top",
    responses((status = 200, description = "The top callers.", body = Top)),
    extensions(("x-role" = json!("viewer"))))]
async fn top(State(admin): State<Arc<AdminState>>, _: Viewer) -> ApiResult {
    let (rules, status) = ((admin.rules)(), Arc::clone(&admin.status));
    let all = move |observe: &Telemetry| {
        let (mut top, mut hot) = (observe.top_talkers(&rules), status.hot());
        top["hot"] = hot["hot"].take();
        top["hot_from_per_second"] = hot["threshold_per_second"].take();
        compact_json(&top)
    };
    Ok(run_blocking(&admin, all).await?)
}

/// Lists the nodes that share the database; while it is unavailable, this node and the last known state of the
/// others.
#[utoipa::path(get, path = "/admin/v1/nodes", operation_id = "GET_nodes",
    responses((status = 200, description = "The nodes.", body = Nodes)),
    extensions(("x-role" = json!("viewer"))))]
async fn nodes(State(admin): State<Arc<AdminState>>, _: Viewer, _: StrictQuery<NoParameters>) -> ApiResult {
    let observe = admin.telemetry()?;
    let control = admin.control.as_ref();
    let read = async {
        // Replication detects an unavailable database; no request needs to wait for a timeout to find out.
        let control = control.filter(|control| !control.is_unavailable())?;
        match tokio::time::timeout(DATABASE_TIMEOUT, control.nodes()).await {
            Ok(Ok(nodes)) => Some(nodes),
            Ok(Err(error)) => {
                tracing::debug!(%error, "reading nodes failed");
                None
            }
            Err(_) => {
                tracing::debug!("reading nodes timed out");
                None
            }
        }
    };
    let (at, read) = admin.nodes.0.get(|| observe.now(), read).await;
    let now = observe.now();
    let last = control.filter(|_| read.is_none()).and_then(|control| control.cached_nodes());
    let (since, rows) = match (&*read, &last) {
        (Some(rows), _) => (i64::try_from(now.since(at).ceil_millis()).unwrap_or(i64::MAX), &rows[..]),
        (None, Some((age, rows))) => (*age, &rows[..]),
        (None, None) => (0, &[][..]),
    };
    let ago = |millis: i64| rfc3339(now - TimeDelta::from_millis(millis.unsigned_abs()));
    let seen = |mut node: Value, age: i64, stale: bool, is_self: bool| {
        node["seen_at"] = json!(ago(age));
        node["age_ms"] = json!(age);
        node["stale"] = json!(stale);
        node["is_self"] = json!(is_self);
        // Heartbeats of all versions use `lag_ms`.
        if let Some(lag) = node.as_object_mut().and_then(|node| node.remove("lag_ms")) {
            node["propagation_lag_ms"] = lag;
        }
        node
    };
    // The current state of this node, not its last heartbeat.
    let mut nodes = vec![seen(admin.status.presence(), 0, false, true)];
    // A node that was alive when the database became unavailable is not stale just because its heartbeats cannot be
    // read.
    nodes.extend(rows.iter().filter(|node| !node.is_self).map(|node| {
        seen(Value::Object(node.report.clone()), node.age_millis.saturating_add(since), node.stale, false)
    }));
    nodes.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
    let database = control.map(|control| control.kind());
    let read_at = (read.is_some() || last.is_some()).then(|| ago(since));
    Ok(compact_json(&json!({
        "database": database,
        "database_unavailable": control.is_some() && read.is_none(),
        "complete": read.is_some(),
        "read_at": read_at,
        "nodes": nodes,
    })))
}

fn lock_subscribers() -> MutexGuard<'static, HashMap<IpAddr, usize>> {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A subscriber to the event stream, counted until it is dropped.
struct EventSubscriber {
    network: IpAddr,
    events: tokio::sync::broadcast::Receiver<Event>,
}

impl EventSubscriber {
    fn new(peer: IpAddr, events: tokio::sync::broadcast::Receiver<Event>) -> Result<Self, Problem> {
        let (network, mut all) = (tollgate_http::server::connections::network(peer), lock_subscribers());
        if all.values().sum::<usize>() >= MAX_SUBSCRIBERS {
            return Err(busy("too many live pages are open; close some, or poll /admin/v1/stats"));
        }
        let here = all.entry(network).or_default();
        if *here >= MAX_SUBSCRIBERS_PER_NETWORK {
            return Err(busy(&format!(
                "{network} already has {MAX_SUBSCRIBERS_PER_NETWORK} event streams, and its other connections are reserved for requests; \
                 close some live pages there, or poll /admin/v1/stats"
            )));
        }
        *here += 1;
        Ok(Self { network, events })
    }
}

impl Drop for EventSubscriber {
    fn drop(&mut self) {
        let mut all = lock_subscribers();
        if let Some(here) = all.get_mut(&self.network) {
            *here = here.saturating_sub(1);
            if *here == 0 {
                all.remove(&self.network);
            }
        }
    }
}

fn busy(detail: &str) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Too many event streams", detail)
}

/// Renders an event as server-sent event text; `None` at the end of the stream. A subscriber that was too slow has
/// missed events. Stats repeat, but change notices do not, so it receives one notice of every kind.
fn event_text(received: Result<Event, RecvError>) -> Option<Bytes> {
    match received {
        Ok(event) => Some(format!("event: {}\ndata: {}\n\n", event.kind, event.data).into()),
        Err(RecvError::Lagged(missed)) => {
            let notice = |kind| format!("event: {kind}\ndata: {{\"missed\":{missed}}}\n\n");
            Some(["rules", "emergency", "quota"].map(notice).concat().into())
        }
        Err(RecvError::Closed) => None,
    }
}

/// Streams stats and change notices as server-sent events.
#[utoipa::path(get, path = "/admin/v1/events", operation_id = "GET_events",
    responses((status = 200, description = "The event stream.", body = String, content_type = "text/event-stream")),
    extensions(("x-role" = json!("viewer"))))]
async fn events(State(admin): State<Arc<AdminState>>, _: Viewer, head: Parts) -> ApiResult {
    let events = admin.telemetry()?.subscribe().ok_or_else(|| {
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "Shutting down",
            "this node is shutting down; connect to another node",
        )
    })?;
    let listener = EventSubscriber::new(auth::peer(&head), events)?;
    let head = Arc::new(head);
    let mut pulse = tokio::time::interval(REAUTHORIZE_INTERVAL);
    pulse.reset();
    pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let greeting = Some(Bytes::from_static(b"retry: 2000\n\n"));
    let stream = unfold((listener, pulse, greeting), move |(mut listener, mut pulse, greeting)| {
        let (admin, head) = (Arc::clone(&admin), Arc::clone(&head));
        async move {
            if let Some(greeting) = greeting {
                return Some((Ok::<_, Infallible>(greeting), (listener, pulse, None)));
            }
            let text = tokio::select! {
                biased;
                _ = pulse.tick() => {
                    if !auth::may_still_view(&admin, &head, DATABASE_TIMEOUT).await {
                        return None;
                    }
                    Bytes::from_static(b": still here\n\n")
                }
                received = listener.events.recv() => event_text(received)?,
            };
            Some((Ok(text), (listener, pulse, None)))
        }
    });
    Ok(typed(StatusCode::OK, "text/event-stream", Body::from_stream(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::broadcast;

    /// A slow page would otherwise keep showing rules, emergency measures and quotas that are no longer active.
    #[tokio::test]
    async fn a_slow_subscriber_gets_a_refresh_event() {
        let (sender, mut receiver) = broadcast::channel(2);
        for at in 0..5 {
            let _ = sender.send(Event { kind: "tick", data: at.to_string().into() });
        }
        let behind = event_text(receiver.recv().await).expect("not the end of the stream");
        let behind = String::from_utf8_lossy(&behind).into_owned();
        for kind in ["rules", "emergency", "quota"] {
            assert!(behind.contains(&format!("event: {kind}\ndata: {{\"missed\":3}}\n\n")), "{behind}");
        }
        assert_eq!(event_text(receiver.recv().await).as_deref(), Some(&b"event: tick\ndata: 3\n\n"[..]));
        drop((receiver.recv().await, sender));
        assert_eq!(event_text(receiver.recv().await), None, "end of stream");
    }
}
