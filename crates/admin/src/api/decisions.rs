//! Decision log endpoints: `GET /admin/v1/decisions` searches the log; `/decisions/{id}/why` explains one decision.
//! `decision_export` exports what a search matches.

use super::schemas::{DecisionPage, ExplainedDecision, IdParameter};
use crate::AdminState;
use crate::auth::Viewer;
use crate::error::ApiResult;
use crate::path::Id;
use crate::query::{Number, StrictQuery, parsed};
use crate::response::compact_json;
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_core::Timestamp;
use tollgate_engine::DecisionId;
use tollgate_http::problem::Problem;
use tollgate_observe::{DecisionQuery, LoggedVerdict, Telemetry};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(search)).routes(routes!(explain))
}

const MAX_FOUND: u64 = 1_000;
/// Bytes of a value that the decision log keeps.
const MAX_KEY: usize = 256;

/// Runs a query on the telemetry, after draining its buffers, on a blocking thread: request threads never wait for a
/// reader.
pub(crate) async fn run_blocking<T: Send + 'static>(
    admin: &AdminState,
    query: impl FnOnce(&Telemetry) -> T + Send + 'static,
) -> Result<T, Problem> {
    let observe = Arc::clone(admin.telemetry()?);
    let task = tokio::task::spawn_blocking(move || {
        observe.drain_buffers();
        query(&observe)
    });
    task.await.map_err(|_| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal error", "try again"))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct SearchParameters {
    #[param(value_type = Option<String>)]
    limit: Option<Number<MAX_FOUND>>,
    #[serde(default, deserialize_with = "decision")]
    #[param(value_type = Option<String>)]
    id: Option<DecisionId>,
    /// Value of any attribute: the raw value, its masked form or its id.
    key: Option<String>,
    /// First characters of any attribute's value, as the log shows it.
    prefix: Option<String>,
    /// Domain of the request.
    domain: Option<String>,
    rule: Option<String>,
    #[serde(default, deserialize_with = "verdict")]
    #[param(value_type = Option<String>)]
    verdict: Option<LoggedVerdict>,
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    from: Option<Timestamp>,
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    to: Option<Timestamp>,
    #[param(value_type = Option<String>)]
    cursor: Option<Number<{ u64::MAX }>>,
}

/// Searches the decision log.
#[utoipa::path(get, path = "/admin/v1/decisions", operation_id = "GET_decisions", params(SearchParameters),
    responses((status = 200, description = "The matching decisions, newest first.", body = DecisionPage)),
    extensions(("x-role" = json!("viewer"))))]
async fn search(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(of): StrictQuery<SearchParameters>,
) -> ApiResult {
    let search = DecisionQuery {
        id: of.id,
        key: of.key.map(truncate_key),
        prefix: of.prefix,
        domain: of.domain,
        rule: of.rule,
        ruled: of.verdict,
        from: of.from,
        to: of.to,
        before: of.cursor.map(|cursor| cursor.0),
        limit: of.limit.map_or(100, |limit| usize::try_from(limit.0).unwrap_or(usize::MAX)),
    };
    let found = run_blocking(&admin, move |observe| {
        let (found, next) = observe.search(&search);
        let found: Vec<Value> = found.iter().map(|entry| entry.json(observe.node_info())).collect();
        compact_json(&json!({"decisions": found, "next_cursor": next.map(|next| next.to_string())}))
    });
    Ok(found.await?)
}

/// Explains one decision.
#[utoipa::path(get, path = "/admin/v1/decisions/{id}/why", operation_id = "GET_decisions_id_why",
    params(IdParameter),
    responses((status = 200, description = "The decision with its explanation.", body = ExplainedDecision)),
    extensions(("x-role" = json!("viewer"))))]
async fn explain(State(admin): State<Arc<AdminState>>, _: Viewer, Id(id): Id) -> ApiResult {
    let id = decision_id(&id).ok_or_else(|| Problem::bad(DECISION_ID).in_field("id"))?;
    let observe = admin.telemetry()?;
    let found = run_blocking(&admin, move |observe| observe.find(id)).await?.ok_or_else(|| {
        let detail = "no such decision in this node's log; the log keeps recent denials and a sample of allowed \
                      requests, so it may have expired or belong to another node";
        Problem::new(StatusCode::NOT_FOUND, "Not found", detail)
    })?;
    let mut body = found.json(observe.node_info());
    let (lines, passes) = found.explanation(observe.node_info());
    body["explanation"] = json!(lines);
    body["headline"] = json!(found.headline());
    body["notes"] = json!(found.notes());
    if let Some(passes) = passes {
        body["would_pass_at"] = json!(passes);
    }
    Ok(compact_json(&body))
}

/// Truncates `key` to the prefix that the log keeps, so that longer values are still found.
pub(crate) fn truncate_key(mut key: String) -> String {
    let mut end = key.len().min(MAX_KEY);
    while !key.is_char_boundary(end) {
        end -= 1;
    }
    key.truncate(end);
    key
}

const DECISION_ID: &str = "must be a decision id from a response: 32 hexadecimal digits";

fn decision_id(text: &str) -> Option<DecisionId> {
    Some(text).filter(|text| text.len() == 32).and_then(|text| text.parse().ok())
}

pub(crate) fn decision<'de, D: Deserializer<'de>>(text: D) -> Result<Option<DecisionId>, D::Error> {
    parsed(text, DECISION_ID, decision_id).map(Some)
}

pub(crate) fn verdict<'de, D: Deserializer<'de>>(text: D) -> Result<Option<LoggedVerdict>, D::Error> {
    parsed(text, "must be allow, deny, shadow_deny, delay, degrade or warn", LoggedVerdict::from_name)
        .map(Some)
}

pub(crate) fn time<'de, D: Deserializer<'de>>(text: D) -> Result<Option<Timestamp>, D::Error> {
    let micros = |text: &str| {
        let at: jiff::Timestamp = text.parse().ok()?;
        u64::try_from(at.as_microsecond()).ok().map(Timestamp::from_micros)
    };
    parsed(text, "must be a time such as 2027-01-31T14:32:17Z", micros).map(Some)
}
