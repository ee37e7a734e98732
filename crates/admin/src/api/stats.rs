//! What goes on: `GET /admin/v1/stats` (the last seconds), `/events` (each as it comes, as server-sent events), `/top` (who
//! asks most, and which keys are hot) and `/nodes`.
//!
//! Whoever reads slowly skips events, and is told so; nobody waits for a reader. There are only so many readers, of one place too, so that
//! operators always find a connection; and they listen for as long as they would be let in, not for as long as they hold on.

use super::decisions::run_blocking;
use super::schemas::{Nodes, Stats, Top};
use crate::AdminState;
use crate::auth::throttle::prefix;
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

/// How often those who listen are looked up again; told to them too, so that what stands between notices that somebody is
/// still there.
const REFRESH_EVENT: Duration = Duration::from_secs(5);
/// Those who may listen at once; the others' connections are for asking.
const MAX_SUBSCRIBERS: usize = 400;
/// Those of one place: whoever listens gives way to nobody, so the rest of the place's connections are for asking.
const SUBSCRIBERS: usize = limiter::MAX_PER_NETWORK - 32;

/// How long a database may take to tell of the nodes, or of who listens.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(5);

/// What the database told last of the nodes, if it answered.
#[derive(Default)]
pub struct NodeCache(Coalesced<Option<Vec<NodeRecord>>>);

/// How many listen, by place.
static SUBSCRIBED: LazyLock<Mutex<HashMap<IpAddr, usize>>> = LazyLock::new(Mutex::default);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct StatsParameters {
    /// How many.
    #[param(value_type = Option<i64>, minimum = 1)]
    seconds: Option<Number<3_600>>,
}

/// Figures of the last seconds.
#[utoipa::path(get, path = "/admin/v1/stats", operation_id = "GET_stats", params(StatsParameters),
    responses((status = 200, description = "What was asked for.", body = Stats)),
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

/// The keys with the most traffic and denials.
#[utoipa::path(get, path = "/admin/v1/top", operation_id = "GET_top",
    responses((status = 200, description = "What was asked for.", body = Top)),
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

/// The nodes that share the database; while it is away, this one and what was last read of the others.
#[utoipa::path(get, path = "/admin/v1/nodes", operation_id = "GET_nodes",
    responses((status = 200, description = "What was asked for.", body = Nodes)),
    extensions(("x-role" = json!("viewer"))))]
async fn nodes(State(admin): State<Arc<AdminState>>, _: Viewer, _: StrictQuery<NoParameters>) -> ApiResult {
    let observe = admin.telemetry()?;
    let control = admin.control.as_ref();
    let read = async {
        // That the database is away is told by whoever follows it; nobody need wait for it to see that.
        let control = control.filter(|control| !control.is_unavailable())?;
        match tokio::time::timeout(DATABASE_TIMEOUT, control.nodes()).await {
            Ok(Ok(nodes)) => Some(nodes),
            Ok(Err(error)) => {
                tracing::debug!(%error, "the other nodes are not known");
                None
            }
            Err(_) => {
                tracing::debug!("the other nodes are not known in time");
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
    let seen = |mut node: Value, age: i64, stale: bool, own: bool| {
        node["seen_at"] = json!(ago(age));
        node["age_ms"] = json!(age);
        node["stale"] = json!(stale);
        node["is_self"] = json!(own);
        // Heartbeats of all versions say `lag_ms`.
        if let Some(lag) = node.as_object_mut().and_then(|node| node.remove("lag_ms")) {
            node["propagation_lag_ms"] = lag;
        }
        node
    };
    // What this one is at now, not when it last told.
    let mut nodes = vec![seen(admin.status.presence(), 0, false, true)];
    // Who was there when the database went away is not silent because nobody can hear it.
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

fn subscribe() -> MutexGuard<'static, HashMap<IpAddr, usize>> {
    SUBSCRIBED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One who listens, counted for as long as it does.
struct EventSubscriber {
    slot: IpAddr,
    events: tokio::sync::broadcast::Receiver<Event>,
}

impl EventSubscriber {
    fn new(peer: IpAddr, events: tokio::sync::broadcast::Receiver<Event>) -> Result<Self, Problem> {
        let (place, mut all) = (prefix(peer), subscribe());
        if all.values().sum::<usize>() >= MAX_SUBSCRIBERS {
            return Err(busy(
                "close some of the pages that show live figures, or ask /admin/v1/stats now and then",
            ));
        }
        let here = all.entry(place).or_default();
        if *here >= SUBSCRIBERS {
            return Err(busy(&format!(
                "{SUBSCRIBERS} listen from {place} already, and its other connections are for asking; close some of the \
                 pages that show live figures there, or ask /admin/v1/stats now and then"
            )));
        }
        *here += 1;
        Ok(Self { slot: place, events })
    }
}

impl Drop for EventSubscriber {
    fn drop(&mut self) {
        let mut all = subscribe();
        if let Some(here) = all.get_mut(&self.slot) {
            *here = here.saturating_sub(1);
            if *here == 0 {
                all.remove(&self.slot);
            }
        }
    }
}

fn busy(detail: &str) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Too many event streams", detail)
}

/// What is told of an event, if it is not the end. Whoever was too slow has missed some: figures come again, but that something
/// has changed is said once, so it is told that anything may have.
fn event_text(heard: Result<Event, RecvError>) -> Option<Bytes> {
    match heard {
        Ok(event) => Some(format!("event: {}\ndata: {}\n\n", event.kind, event.data).into()),
        Err(RecvError::Lagged(missed)) => {
            let told = |kind| format!("event: {kind}\ndata: {{\"missed\":{missed}}}\n\n");
            Some(["rules", "emergency", "quota"].map(told).concat().into())
        }
        Err(RecvError::Closed) => None,
    }
}

/// Figures as they come, as server-sent events.
#[utoipa::path(get, path = "/admin/v1/events", operation_id = "GET_events",
    responses((status = 200, description = "Events.", body = String, content_type = "text/event-stream")),
    extensions(("x-role" = json!("viewer"))))]
async fn events(State(admin): State<Arc<AdminState>>, _: Viewer, head: Parts) -> ApiResult {
    let events = admin.telemetry()?.subscribe().ok_or_else(|| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Shutting down", "this process is about to end")
    })?;
    let listener = EventSubscriber::new(auth::peer(&head), events)?;
    let head = Arc::new(head);
    let mut pulse = tokio::time::interval(REFRESH_EVENT);
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
                heard = listener.events.recv() => event_text(heard)?,
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

    /// A page that was behind would go on showing rules, emergencies and quotas that are no more.
    #[tokio::test]
    async fn a_slow_subscriber_gets_a_refresh_event() {
        let (tell, mut hear) = broadcast::channel(2);
        for at in 0..5 {
            let _ = tell.send(Event { kind: "tick", data: at.to_string().into() });
        }
        let behind = event_text(hear.recv().await).expect("not the end");
        let behind = String::from_utf8_lossy(&behind).into_owned();
        for kind in ["rules", "emergency", "quota"] {
            assert!(behind.contains(&format!("event: {kind}\ndata: {{\"missed\":3}}\n\n")), "{behind}");
        }
        assert_eq!(event_text(hear.recv().await).as_deref(), Some(&b"event: tick\ndata: 3\n\n"[..]));
        drop((hear.recv().await, tell));
        assert_eq!(event_text(hear.recv().await), None, "the end");
    }
}
