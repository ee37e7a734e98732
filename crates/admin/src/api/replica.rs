//! What programs that embed the limiter follow (`tollgate-sdk`, feature `control`): the state, a dump of all quotas, what
//! has changed among those, and which counters are hot. A follower asks for the state every few seconds, with the `ETag`
//! of the last one; only when the state's revision is newer than its own does it read quotas. A follower that leases
//! counters also reports which of them it finds hot, and receives those of the fleet: apart from the state, which may be
//! large and changes less often.
//!
//! Rejected: holding requests until something changes. Each follower would hold a connection of a listener that has few of
//! them, and operators need those.

use crate::AdminState;
use crate::auth::Replica;
use crate::body::Json;
use crate::conn::limiter::AdminConnection;
use crate::error::ApiResult;
use crate::query::{NoParameters, StrictQuery};
use crate::response::{compact_json, typed};
use axum::body::Body;
use axum::extract::{Extension, State};
use bytes::Bytes;
use futures_util::stream;
use http::header::{ETAG, HeaderValue, IF_NONE_MATCH};
use http::{HeaderMap, Response, StatusCode};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tollgate_control::ControlPlane;
use tollgate_http::problem::Problem;
use tollgate_replica::{MAX_HOT, ReplicatedRules};
use utoipa::openapi::schema::{Array, ArrayBuilder, ObjectBuilder, Type};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Maximum number of dumps at a time.
const MAX_DUMPS: usize = 8;
/// Time within which a client must have read a piece of a dump.
const MAX_STALL: Duration = Duration::from_secs(10);

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new()
        .routes(routes!(state))
        .routes(routes!(quotas))
        .routes(routes!(changes))
        .routes(routes!(hot))
}

/// Returns the control plane, once it has read everything, and the generation of its quota table.
fn loaded(admin: &AdminState) -> Result<(&Arc<ControlPlane>, u64), Problem> {
    let control = admin.control()?;
    if let Some(generation) = control.table_generation() {
        return Ok((control, generation));
    }
    let detail = "this server has not read its quotas yet, or reads all of them again; retry";
    Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Not loaded", detail))
}

/// Fails if the quota table was read again since, so that what was taken from it may be incomplete.
fn still_complete(control: &ControlPlane, generation: u64) -> Result<(), Problem> {
    if control.table_generation() == Some(generation) {
        return Ok(());
    }
    let detail = "this server reads all of its quotas again; retry";
    Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Not loaded", detail))
}

/// Returns the rules, emergency measures and grants of this server, and the secret that API keys are hashed with.
#[utoipa::path(get, path = "/admin/v1/replica", operation_id = "GET_replica",
    params(("if-none-match" = Option<String>, Header, description = "The `ETag` of the last state.")),
    responses((status = 200, description = "The state.", body = serde_json::Value),
        (status = 304, description = "The state is still the same.")),
    extensions(("x-role" = json!("replica"))))]
async fn state(
    State(admin): State<Arc<AdminState>>,
    _: Replica,
    _: StrictQuery<NoParameters>,
    headers: HeaderMap,
) -> ApiResult {
    let (control, generation) = loaded(&admin)?;
    let rules = (admin.rules)();
    let rev = admin.rule_manager.as_ref().and_then(|manager| manager.active().rev());
    // Read before the state, which may be newer: then it is sent once more.
    let version = control.replica_version();
    let tag = format!("\"{version}.{}.{}\"", rules.revision(), rev.unwrap_or(0));
    let whole = || {
        let options = admin.explainer.options();
        let rules = ReplicatedRules::new(rules.revision(), rev, &options, rules.sources());
        let state = control.replica_state(rules);
        still_complete(control, generation)?;
        Ok(compact_json(&state))
    };
    Ok(with_tag(&headers, &tag, whole)?)
}

/// Returns what `whole` does, or that the client has it already.
fn with_tag(
    headers: &HeaderMap,
    tag: &str,
    whole: impl FnOnce() -> Result<Response<Body>, Problem>,
) -> Result<Response<Body>, Problem> {
    let known = headers.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = if known {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        whole()?
    };
    if let Ok(tag) = HeaderValue::from_str(tag) {
        response.headers_mut().insert(ETAG, tag);
    }
    Ok(response)
}

/// The dumps of quotas that are being sent: so few that operators always find a connection.
#[derive(Debug)]
pub struct DumpSlots(Arc<Semaphore>);

impl Default for DumpSlots {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_DUMPS)))
    }
}

impl DumpSlots {
    fn begin(&self) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.0).try_acquire_owned().map_err(|_| {
            let detail = format!("{MAX_DUMPS} programs are reading all quotas; retry");
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Too many dumps", detail)
        })
    }
}

/// Returns a body of these pieces, which is broken off when one fails, or when the client does not read: then `stalled`
/// ends its connection. The permit is held until the body is dropped.
fn dump_body(
    pieces: impl Iterator<Item = std::io::Result<Bytes>> + Send + 'static,
    permit: OwnedSemaphorePermit,
    stalled: impl FnOnce() + Send + 'static,
) -> Body {
    let (sender, receiver) = mpsc::channel(1);
    // The body itself is not asked while its client does not read, so it cannot tell that time passes.
    tokio::spawn(async move {
        let _permit = permit;
        let sending = async {
            for piece in pieces.map(Some).chain([None]) {
                let is_last = !matches!(piece, Some(Ok(_)));
                match tokio::time::timeout(MAX_STALL, sender.send(piece)).await {
                    Ok(Ok(())) if !is_last => {}
                    Ok(Ok(())) => break,
                    Ok(Err(_)) => return true,
                    Err(_) => return false,
                }
            }
            tokio::time::timeout(MAX_STALL, sender.closed()).await.is_ok()
        };
        if !sending.await {
            stalled();
        }
    });
    let next = |mut receiver: mpsc::Receiver<Option<std::io::Result<Bytes>>>| async {
        let piece =
            receiver.recv().await.unwrap_or_else(|| Some(Err(std::io::Error::other("broken off"))))?;
        Some((piece, receiver))
    };
    Body::from_stream(stream::unfold(receiver, next))
}

/// Returns all quotas, by the keyed hashes of their callers.
#[utoipa::path(get, path = "/admin/v1/replica/quotas", operation_id = "GET_replica_quotas",
    responses((status = 200, description = "A dump of the quotas.", body = Vec<u8>,
        content_type = "application/octet-stream")),
    extensions(("x-role" = json!("replica"))))]
async fn quotas(
    State(admin): State<Arc<AdminState>>,
    _: Replica,
    _: StrictQuery<NoParameters>,
    connection: Option<Extension<Arc<AdminConnection>>>,
) -> ApiResult {
    let (control, generation) = loaded(&admin)?;
    let permit = admin.dumps.begin()?;
    let (dump, control) = (control.dump_quotas(), Arc::clone(control));
    // A response that has begun can only be broken off.
    let pieces = dump.map(move |piece| match still_complete(&control, generation) {
        Ok(()) => Ok(Bytes::from(piece)),
        Err(problem) => Err(std::io::Error::other(problem.detail)),
    });
    let stalled = move || {
        if let Some(Extension(connection)) = connection {
            connection.end();
        }
    };
    Ok(typed(StatusCode::OK, "application/octet-stream", dump_body(pieces, permit, stalled)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ChangesParameters {
    /// The control revision up to which quotas are known.
    #[serde(default)]
    #[param(value_type = Option<i64>)]
    after: After,
}

#[derive(Clone, Copy, Default)]
struct After(i64);

impl<'de> Deserialize<'de> for After {
    fn deserialize<D: serde::Deserializer<'de>>(text: D) -> Result<Self, D::Error> {
        let revision = |text: &str| text.parse().ok().filter(|after| *after >= 0).map(Self);
        crate::query::parsed(text, "must be a control revision", revision)
    }
}

/// Returns the quotas that have changed after a control revision.
#[utoipa::path(get, path = "/admin/v1/replica/changes", operation_id = "GET_replica_changes", params(ChangesParameters),
    responses((status = 200, description = "The changes, in their order.", body = serde_json::Value)),
    extensions(("x-role" = json!("replica"))))]
async fn changes(
    State(admin): State<Arc<AdminState>>,
    _: Replica,
    StrictQuery(of): StrictQuery<ChangesParameters>,
) -> ApiResult {
    let (control, generation) = loaded(&admin)?;
    let changes = control.quota_changes(of.after.0).await?;
    still_complete(control, generation)?;
    Ok(compact_json(&changes))
}

/// What a follower finds hot by its own traffic.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct HotBody {
    /// Names of counters, each with its units per second; at most 1,000.
    #[schema(schema_with = hot_schema)]
    hot: Vec<(u64, u64)>,
}

/// Pairs of numbers of 64 bits: in the format `int64`, half of the names would be invalid.
fn hot_schema() -> Array {
    let number =
        ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0_u64)).maximum(Some(u64::MAX)).build();
    let pair = ArrayBuilder::new().items(number).min_items(Some(2)).max_items(Some(2));
    ArrayBuilder::new().items(pair).max_items(Some(MAX_HOT)).build()
}

/// Receives what a follower finds hot, by keyed hashes of counters, and returns what the fleet does.
#[utoipa::path(post, path = "/admin/v1/replica/hot", operation_id = "POST_replica_hot", request_body = HotBody,
    params(("if-none-match" = Option<String>, Header, description = "The `ETag` of the last list.")),
    responses((status = 200, description = "Names of the hot counters.", body = serde_json::Value),
        (status = 304, description = "The list is still the same.")),
    extensions(("x-role" = json!("replica"))))]
async fn hot(
    State(admin): State<Arc<AdminState>>,
    _: Replica,
    _: StrictQuery<NoParameters>,
    headers: HeaderMap,
    Json(report): Json<HotBody>,
) -> ApiResult {
    let control = admin.control()?;
    if report.hot.len() > MAX_HOT {
        let detail = format!("more than {MAX_HOT} counters; send the busiest");
        return Err(Problem::bad(detail).in_field("hot").into());
    }
    let names = control.exchange_hot(report.hot);
    let tag = format!("\"{:016x}\"", names.version());
    Ok(with_tag(&headers, &tag, || Ok(compact_json(&names)))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn pieces(count: usize) -> impl Iterator<Item = std::io::Result<Bytes>> + Send + 'static {
        (0..count).map(|_| Ok(Bytes::from_static(b"piece")))
    }

    /// Followers that do not read would otherwise keep operators out.
    #[tokio::test(start_paused = true)]
    async fn dumps_are_few_and_end_when_nobody_reads() {
        let (slots, ended) = (DumpSlots::default(), Arc::new(AtomicU32::new(0)));
        let begin = |count: usize| {
            let ended = Arc::clone(&ended);
            let stalled = move || {
                ended.fetch_add(1, Ordering::Relaxed);
            };
            slots.begin().map(|permit| dump_body(pieces(count), permit, stalled))
        };
        // One that is short, one that is long, and others.
        let unread: Vec<Body> =
            [1, 1_000, 5, 5, 5, 5, 5, 5].map(|count| begin(count).expect("a slot")).into();
        assert_eq!(begin(1).expect_err("no slot").status, StatusCode::SERVICE_UNAVAILABLE);
        tokio::time::sleep(MAX_STALL * 3).await;
        assert_eq!((ended.load(Ordering::Relaxed), slots.0.available_permits()), (8, MAX_DUMPS));
        let broken = unread.into_iter().nth(1).expect("a body").collect().await;
        assert!(broken.is_err(), "what is incomplete must not look complete");

        let read = begin(1_000).expect("a slot").collect().await.expect("a body");
        assert_eq!(read.to_bytes().len(), 5_000);
        let failing = pieces(3).chain([Err(std::io::Error::other("no"))]).chain(pieces(1));
        let failing = dump_body(failing, slots.begin().expect("a slot"), || ());
        assert!(failing.collect().await.is_err());
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!((ended.load(Ordering::Relaxed), slots.0.available_permits()), (8, MAX_DUMPS));
    }
}
