//! Emergency measure endpoints: list, create, renew, end.

use super::schemas::{IdParameter, SeenCallerIdParameter};
use crate::AdminState;
use crate::auth::{Operator, Viewer};
use crate::body::{Json, JsonOrDefault};
use crate::caller_path::CallerPath;
use crate::error::ApiResult;
use crate::path::Id;
use crate::query::{KeyParameter, NoParameters, ReasonParameter, StrictQuery};
use crate::response::{json_response, no_content};
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{EmergencyRecord, EmergencySpec, EmergencyTarget, TargetKind};
use tollgate_http::problem::Problem;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(declare_by_id))
        .routes(routes!(renew))
        .routes(routes!(end))
}

#[derive(Serialize, ToSchema)]
struct Emergencies {
    active: Vec<EmergencyRecord>,
}

/// Lists the active emergency measures.
#[utoipa::path(get, path = "/admin/v1/emergency", operation_id = "GET_emergency",
    responses((status = 200, description = "The active measures.", body = Emergencies)),
    extensions(("x-role" = json!("viewer"))))]
async fn list(State(admin): State<Arc<AdminState>>, _: Viewer, _: StrictQuery<NoParameters>) -> ApiResult {
    let active = admin.control()?.emergencies().await?;
    Ok(json_response(StatusCode::OK, &Emergencies { active }))
}

/// Creates an emergency measure: block, tighten, exempt, disable a rule, allow all or shadow all.
#[utoipa::path(post, path = "/admin/v1/emergency", operation_id = "POST_emergency",
    params(KeyParameter), request_body = EmergencySpec,
    responses((status = 201, description = "The measure is active.", body = EmergencyRecord)),
    extensions(("x-role" = json!("operator"))))]
async fn create(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    StrictQuery(key): StrictQuery<KeyParameter>,
    Json(mut draft): Json<EmergencySpec>,
) -> ApiResult {
    draft.target = draft.target.map(EmergencyTarget::resolved);
    if let Some(target) = draft.target.as_mut().filter(|target| target.kind == TargetKind::ApiKey) {
        let caller = CallerPath::by_key(&admin, std::mem::take(&mut target.value), key.spelled()).await?;
        if matches!(caller, CallerPath::Value { .. }) {
            let detail = "must be api_key: the target is an API key; for other callers use the kinds tenant, address and attribute";
            return Err(Problem::bad(detail).in_field("key").into());
        }
        caller.attribute()?.1.clone_into(&mut target.value);
    }
    let declared = admin.control()?.create_emergency(draft, &(admin.rules)(), &actor).await??;
    Ok(json_response(StatusCode::CREATED, &declared))
}

/// Creates an emergency measure for a caller id from a list; `target` must be absent.
#[utoipa::path(post, path = "/admin/v1/emergency/by-id/{id}", operation_id = "POST_emergency_by-id_id",
    params(SeenCallerIdParameter), request_body = EmergencySpec,
    responses((status = 201, description = "The measure is active.", body = EmergencyRecord)),
    extensions(("x-role" = json!("operator"))))]
async fn declare_by_id(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    caller: CallerPath,
    Json(mut draft): Json<EmergencySpec>,
) -> ApiResult {
    if draft.target.is_some() {
        return Err(Problem::bad("must be absent; the path already names the target")
            .in_field("target")
            .into());
    }
    draft.target = Some(EmergencyTarget {
        kind: TargetKind::ApiKey,
        key: None,
        value: caller.attribute()?.1.to_owned(),
    });
    let declared = admin.control()?.create_emergency(draft, &(admin.rules)(), &actor).await??;
    Ok(json_response(StatusCode::CREATED, &declared))
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Renewal {
    ttl_seconds: Option<u64>,
}

/// Extends an emergency measure.
#[utoipa::path(post, path = "/admin/v1/emergency/{id}/renew", operation_id = "POST_emergency_id_renew",
    params(IdParameter), request_body = Option<Renewal>,
    responses((status = 200, description = "The extended measure.", body = EmergencyRecord)),
    extensions(("x-role" = json!("operator"))))]
async fn renew(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Id(id): Id,
    JsonOrDefault(sent): JsonOrDefault<Renewal>,
) -> ApiResult {
    let renewed = admin.control()?.renew_emergency(&id, sent.ttl_seconds, &actor).await??;
    Ok(json_response(StatusCode::OK, &renewed))
}

/// Ends an emergency measure.
#[utoipa::path(delete, path = "/admin/v1/emergency/{id}", operation_id = "DELETE_emergency_id",
    params(IdParameter, ReasonParameter),
    responses((status = 204, description = "The measure has ended.")),
    extensions(("x-role" = json!("operator"))))]
async fn end(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Id(id): Id,
    StrictQuery(why): StrictQuery<ReasonParameter>,
) -> ApiResult {
    admin.control()?.end_emergency_with_reason(&id, why.get()?, &actor).await?;
    Ok(no_content())
}
