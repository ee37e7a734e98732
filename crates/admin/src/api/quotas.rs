//! Quota endpoints for single callers: list, get, set, delete. `If-Match` makes a change conditional on the quota's
//! revision.

use super::quota_preview::{QuotasInForce, in_force};
use super::schemas::{ApiKeyParameter, CallerIdParameter, Preconditions};
use crate::AdminState;
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::caller_path::{CallerPath, SentCaller};
use crate::error::ApiResult;
use crate::query::{ConfirmParameter, KeyParameter, QuotaDeletion, StrictQuery};
use crate::quota_guard::{self, QuotaGuard};
use crate::response::{json_response, no_content};
use axum::extract::State;
use axum::response::Response;
use http::header::{ETAG, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{Actor, Cursor, Precondition, Quota, QuotaChange, QuotaFilter, QuotaPage, QuotaSpec};
use tollgate_http::problem::Problem;
use tollgate_rules::Ruleset;
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
    /// Return only quotas of this tier.
    tier: Option<String>,
    /// Return only quotas of callers whose API key, or value of `key`, has this prefix.
    prefix: Option<String>,
    /// Return only quotas of callers that this attribute identifies: `api_key`, `user_id` and so on.
    key: Option<String>,
    /// The `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Lists quotas, in pages.
#[utoipa::path(get, path = "/admin/v1/quotas", operation_id = "GET_quotas", params(ListParameters),
    responses((status = 200, description = "A page of quotas.", body = QuotaPage)),
    extensions(("x-role" = json!("viewer"))))]
async fn list(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(ListParameters { tier, prefix, key, cursor }): StrictQuery<ListParameters>,
) -> ApiResult {
    let invalid = || {
        Problem::bad("must be the `next_cursor` of a previous page; omit it to start over").in_field("cursor")
    };
    let after = cursor.map(|cursor| Cursor::parse(&cursor).ok_or_else(invalid)).transpose()?;
    let page = admin.control()?.quotas(&QuotaFilter { tier, prefix, key, after }).await?;
    Ok(json_response(StatusCode::OK, &page))
}

/// Returns a caller's quota.
#[utoipa::path(get, path = "/admin/v1/quotas/{api_key}", operation_id = "GET_quotas_api_key", params(ApiKeyParameter, KeyParameter),
    responses((status = 200, description = "The quota.", body = KeyedQuota)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer, caller: CallerPath) -> ApiResult {
    read(&admin, &caller).await
}

/// Returns a caller's quota, by the id from a list.
#[utoipa::path(get, path = "/admin/v1/quotas/by-id/{id}", operation_id = "GET_quotas_by-id_id",
    params(CallerIdParameter),
    responses((status = 200, description = "The quota.", body = KeyedQuota)),
    extensions(("x-role" = json!("viewer"))))]
async fn get_by_id(State(admin): State<Arc<AdminState>>, _: Viewer, caller: CallerPath) -> ApiResult {
    read(&admin, &caller).await
}

async fn read(admin: &AdminState, caller: &CallerPath) -> ApiResult {
    let found = admin.control()?.quota(caller.caller()).await?;
    let detail = "this caller has no quota; the rules apply";
    let found = found.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not found", detail))?;
    let rules = (admin.rules)();
    let mut change = admin.control()?.quota_change(caller.caller(), Some(&found.spec()), &rules).ok();
    if let Some(change) = &mut change {
        QuotaGuard::new(admin)?.set_request_tier(change).await;
    }
    Ok(quota_response(caller, &found, change.map(|change| (change, rules))))
}

/// Sets a caller's quota, replacing the existing one.
#[utoipa::path(put, path = "/admin/v1/quotas/{api_key}", operation_id = "PUT_quotas_api_key",
    params(ApiKeyParameter, KeyParameter, Preconditions, ConfirmParameter), request_body = QuotaSpec,
    responses((status = 200, description = "The quota.", body = KeyedQuota)),
    extensions(("x-role" = json!("operator"))))]
async fn put(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(confirm): StrictQuery<ConfirmParameter>,
    headers: HeaderMap,
    Json(mut draft): Json<QuotaSpec>,
) -> ApiResult {
    draft.confirm |= confirm.is_confirmed();
    replace(&admin, &caller, draft, &headers, &actor).await
}

/// Sets a caller's quota, by the id from a list.
#[utoipa::path(put, path = "/admin/v1/quotas/by-id/{id}", operation_id = "PUT_quotas_by-id_id",
    params(CallerIdParameter, Preconditions, ConfirmParameter), request_body = QuotaSpec,
    responses((status = 200, description = "The quota.", body = KeyedQuota)),
    extensions(("x-role" = json!("operator"))))]
async fn put_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(confirm): StrictQuery<ConfirmParameter>,
    headers: HeaderMap,
    Json(mut draft): Json<QuotaSpec>,
) -> ApiResult {
    draft.confirm |= confirm.is_confirmed();
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
    if !draft.confirm {
        quota_guard::check(admin, caller.caller(), Some(&draft), expected).await?;
    }
    // An invalid quota is rejected below, after the precondition.
    let mut change = admin.control()?.quota_change(caller.caller(), Some(&draft), &rules).ok();
    if let Some(change) = &mut change {
        QuotaGuard::new(admin)?.set_request_tier(change).await;
    }
    let put = admin.control()?.put_quota(caller.caller(), draft, &rules, expected, actor).await??;
    Ok(quota_response(caller, &put, change.map(|change| (change, rules))))
}

/// Returns a quota that sets something; none if the caller is to have no quota.
pub(super) fn read_draft(draft: &QuotaSpec) -> Option<&QuotaSpec> {
    (draft.tier.is_some() || !draft.overrides.is_empty()).then_some(draft)
}

/// Deletes a caller's quota; the rules apply again.
#[utoipa::path(delete, path = "/admin/v1/quotas/{api_key}", operation_id = "DELETE_quotas_api_key",
    params(ApiKeyParameter, KeyParameter, Preconditions, QuotaDeletion),
    responses((status = 204, description = "The quota is deleted.")),
    extensions(("x-role" = json!("operator"))))]
async fn delete(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(why): StrictQuery<QuotaDeletion>,
    headers: HeaderMap,
) -> ApiResult {
    remove(&admin, &caller, &headers, &why, &actor).await
}

/// Deletes a caller's quota, by the id from a list.
#[utoipa::path(delete, path = "/admin/v1/quotas/by-id/{id}", operation_id = "DELETE_quotas_by-id_id",
    params(CallerIdParameter, Preconditions, QuotaDeletion),
    responses((status = 204, description = "The quota is deleted.")),
    extensions(("x-role" = json!("operator"))))]
async fn delete_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    StrictQuery(why): StrictQuery<QuotaDeletion>,
    headers: HeaderMap,
) -> ApiResult {
    remove(&admin, &caller, &headers, &why, &actor).await
}

async fn remove(
    admin: &AdminState,
    caller: &CallerPath,
    headers: &HeaderMap,
    why: &QuotaDeletion,
    actor: &Actor,
) -> ApiResult {
    let (expected, reason) = (expected(headers)?, why.reason()?);
    if !why.is_confirmed() {
        quota_guard::check(admin, caller.caller(), None, expected).await?;
    }
    admin.control()?.delete_quota_with_reason(caller.caller(), expected, reason, actor).await?;
    Ok(no_content())
}

/// The quota of the caller named in the path.
#[derive(Serialize, ToSchema)]
struct KeyedQuota<'q> {
    #[serde(flatten)]
    caller: SentCaller<'q>,
    #[serde(flatten)]
    quota: &'q Quota,
    /// The limits in force for the caller with this quota; absent if the rules changed and it is no longer valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = QuotasInForce)]
    quotas: Option<QuotasInForce>,
    /// What the quota does not do, or not alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    warnings: Vec<String>,
}

/// `compiled` is the change by which the caller gets, or got, this quota.
fn quota_response(
    caller: &CallerPath,
    quota: &Quota,
    compiled: Option<(QuotaChange, Arc<Ruleset>)>,
) -> Response {
    let quotas = compiled.as_ref().map(|(change, rules)| in_force(change, rules));
    let warnings = compiled.map_or_else(Vec::new, |(change, _)| change.warnings);
    let body = KeyedQuota { caller: caller.sent(), quota, quotas, warnings };
    let mut response = json_response(StatusCode::OK, &body);
    if let Ok(tag) = HeaderValue::from_str(&format!("\"r{}\"", quota.revision)) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}

/// Returns the precondition from `If-Match` or `If-None-Match`.
fn expected(headers: &HeaderMap) -> Result<Precondition, Problem> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("").trim());
    match (text(IF_MATCH), text(IF_NONE_MATCH)) {
        (None, None) => Ok(Precondition::Any),
        (Some("*"), None) => Ok(Precondition::Present),
        (None, Some("*")) => Ok(Precondition::Absent),
        (Some(tag), None) => {
            let revision = tag.strip_prefix("\"r").and_then(|tag| tag.strip_suffix('"'));
            revision.and_then(|revision| revision.parse().ok()).map(Precondition::Revision).ok_or_else(|| {
                Problem::bad("must be one ETag from a GET response, such as If-Match: \"r12\", or *")
                    .in_field("If-Match")
            })
        }
        _ => Err(Problem::bad("conflicts with If-Match; send `If-Match: ETAG` or `If-None-Match: *`")
            .in_field("If-None-Match")),
    }
}
