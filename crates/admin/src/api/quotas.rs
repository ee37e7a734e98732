//! Quotas of single callers: list, read, agree, end. A change says which version it is of by `If-Match`, if it says any.

use super::schemas::{ApiKeyParameter, CallerIdParameter, Preconditions};
use crate::AdminState;
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::caller_path::CallerPath;
use crate::error::ApiResult;
use crate::query::{ReasonParameter, StrictQuery};
use crate::response::{json_response, no_content};
use axum::extract::State;
use axum::response::Response;
use http::header::{ETAG, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{Actor, Cursor, Precondition, Quota, QuotaFilter, QuotaPage, QuotaSpec};
use tollgate_http::problem::Problem;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get, put, delete)).routes(routes!(
        get_by_id,
        put_by_id,
        delete_by_id
    ))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ListParameters {
    /// Those of this tier.
    tier: Option<String>,
    /// Those of keys that begin so.
    prefix: Option<String>,
    /// The next_cursor of the page before.
    cursor: Option<String>,
}

/// What is agreed with callers, in pages.
#[utoipa::path(get, path = "/admin/v1/quotas", operation_id = "GET_quotas", params(ListParameters),
    responses((status = 200, description = "What was asked for.", body = QuotaPage)),
    extensions(("x-role" = json!("viewer"))))]
async fn list(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(ListParameters { tier, prefix, cursor }): StrictQuery<ListParameters>,
) -> ApiResult {
    let wrong = || Problem::bad("write a `next_cursor` of a page before, or leave it out").in_field("cursor");
    let after = cursor.map(|cursor| Cursor::parse(&cursor).ok_or_else(wrong)).transpose()?;
    let page = admin.control()?.quotas(&QuotaFilter { tier, prefix, after }).await?;
    Ok(json_response(StatusCode::OK, &page))
}

/// What is agreed with one caller.
#[utoipa::path(get, path = "/admin/v1/quotas/{api_key}", operation_id = "GET_quotas_api_key", params(ApiKeyParameter),
    responses((status = 200, description = "What was asked for.", body = KeyedQuota)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer, caller: CallerPath) -> ApiResult {
    read(&admin, &caller).await
}

/// What is agreed with one caller, by the id that a list tells.
#[utoipa::path(get, path = "/admin/v1/quotas/by-id/{id}", operation_id = "GET_quotas_by-id_id",
    params(CallerIdParameter),
    responses((status = 200, description = "What was asked for.", body = KeyedQuota)),
    extensions(("x-role" = json!("viewer"))))]
async fn get_by_id(State(admin): State<Arc<AdminState>>, _: Viewer, caller: CallerPath) -> ApiResult {
    read(&admin, &caller).await
}

async fn read(admin: &AdminState, caller: &CallerPath) -> ApiResult {
    let found = admin.control()?.quota(caller.caller()).await?;
    let detail = "nothing is agreed with this caller; the rules act alone";
    let found = found.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not found", detail))?;
    Ok(quota_response(caller, &found))
}

/// Agree on something: replaces all that was agreed.
#[utoipa::path(put, path = "/admin/v1/quotas/{api_key}", operation_id = "PUT_quotas_api_key",
    params(ApiKeyParameter, Preconditions), request_body = QuotaSpec,
    responses((status = 200, description = "What was asked for.", body = KeyedQuota)),
    extensions(("x-role" = json!("operator"))))]
async fn put(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    headers: HeaderMap,
    Json(draft): Json<QuotaSpec>,
) -> ApiResult {
    replace(&admin, &caller, draft, &headers, &actor).await
}

/// Agree on something, by that id.
#[utoipa::path(put, path = "/admin/v1/quotas/by-id/{id}", operation_id = "PUT_quotas_by-id_id",
    params(CallerIdParameter, Preconditions), request_body = QuotaSpec,
    responses((status = 200, description = "What was asked for.", body = KeyedQuota)),
    extensions(("x-role" = json!("operator"))))]
async fn put_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    headers: HeaderMap,
    Json(draft): Json<QuotaSpec>,
) -> ApiResult {
    replace(&admin, &caller, draft, &headers, &actor).await
}

async fn replace(
    admin: &AdminState,
    caller: &CallerPath,
    draft: QuotaSpec,
    headers: &HeaderMap,
    actor: &Actor,
) -> ApiResult {
    let (rules, expected) = ((admin.rules)(), expected(headers)?);
    let put = admin.control()?.put_quota(caller.caller(), draft, &rules, expected, actor).await??;
    Ok(quota_response(caller, &put))
}

/// The rules act alone again.
#[utoipa::path(delete, path = "/admin/v1/quotas/{api_key}", operation_id = "DELETE_quotas_api_key",
    params(ApiKeyParameter, Preconditions, ReasonParameter),
    responses((status = 204, description = "Done.")),
    extensions(("x-role" = json!("operator"))))]
async fn delete(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(why): StrictQuery<ReasonParameter>,
    headers: HeaderMap,
) -> ApiResult {
    remove(&admin, &caller, &headers, &why, &actor).await
}

/// The rules act alone again, by that id.
#[utoipa::path(delete, path = "/admin/v1/quotas/by-id/{id}", operation_id = "DELETE_quotas_by-id_id",
    params(CallerIdParameter, Preconditions, ReasonParameter),
    responses((status = 204, description = "Done.")),
    extensions(("x-role" = json!("operator"))))]
async fn delete_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(why): StrictQuery<ReasonParameter>,
    headers: HeaderMap,
) -> ApiResult {
    remove(&admin, &caller, &headers, &why, &actor).await
}

async fn remove(
    admin: &AdminState,
    caller: &CallerPath,
    headers: &HeaderMap,
    why: &ReasonParameter,
    actor: &Actor,
) -> ApiResult {
    let (expected, reason) = (expected(headers)?, why.get()?);
    admin.control()?.delete_quota_with_reason(caller.caller(), expected, reason, actor).await?;
    Ok(no_content())
}

/// What is agreed with the caller of the path.
#[derive(Serialize, ToSchema)]
struct KeyedQuota<'q> {
    /// Told to those alone who have sent it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    api_key: Option<&'q str>,
    #[serde(flatten)]
    quota: &'q Quota,
}

fn quota_response(caller: &CallerPath, quota: &Quota) -> Response {
    let mut answer = json_response(StatusCode::OK, &KeyedQuota { api_key: caller.sent(), quota });
    if let Ok(tag) = HeaderValue::from_str(&format!("\"r{}\"", quota.revision)) {
        answer.headers_mut().insert(ETAG, tag);
    }
    answer
}

/// What the caller believes is there.
fn expected(headers: &HeaderMap) -> Result<Precondition, Problem> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("").trim());
    match (text(IF_MATCH), text(IF_NONE_MATCH)) {
        (None, None) => Ok(Precondition::Any),
        (Some("*"), None) => Ok(Precondition::Present),
        (None, Some("*")) => Ok(Precondition::Absent),
        (Some(tag), None) => {
            let revision = tag.strip_prefix("\"r").and_then(|tag| tag.strip_suffix('"'));
            revision.and_then(|revision| revision.parse().ok()).map(Precondition::Revision).ok_or_else(|| {
                Problem::bad("write one ETag as GET has told it, such as If-Match: \"r12\", or *")
                    .in_field("If-Match")
            })
        }
        _ => {
            Err(Problem::bad("write `If-Match: ETAG` or `If-None-Match: *`, not both")
                .in_field("If-None-Match"))
        }
    }
}
