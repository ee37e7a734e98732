//! Token endpoints: list, create, revoke. A token is shown once, in the response that creates it.

use super::schemas::IdParameter;
use crate::AdminState;
use crate::auth::Administrator;
use crate::body::Json;
use crate::error::ApiResult;
use crate::path::Id;
use crate::query::{NoParameters, StrictQuery};
use crate::response::{json_response, no_content};
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{Role, Token};
use tollgate_core::TimeDelta;
use tollgate_http::problem::Problem;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(revoke))
}

/// Maximum length of a name, in bytes.
const MAX_NAME: usize = 128;
/// Days that a token is valid, unless the request says otherwise, and at most.
const DEFAULT_DAYS: u32 = 365;
const MAX_DAYS: u32 = 36_500;

#[derive(Serialize, ToSchema)]
struct Tokens {
    tokens: Vec<Token>,
}

/// Lists all tokens, including expired and revoked ones; never their secrets.
#[utoipa::path(get, path = "/admin/v1/tokens", operation_id = "GET_tokens",
    responses((status = 200, description = "The tokens.", body = Tokens)),
    extensions(("x-role" = json!("admin"))))]
async fn list(
    State(admin): State<Arc<AdminState>>,
    _: Administrator,
    _: StrictQuery<NoParameters>,
) -> ApiResult {
    let tokens = admin.control()?.tokens().await?;
    Ok(json_response(StatusCode::OK, &Tokens { tokens }))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct TokenSpec {
    /// Name of the owner, recorded in the audit log.
    name: String,
    /// `viewer`, `operator`, `admin` or `replica`.
    role: String,
    /// Days that the token is valid; 0 if it does not expire. Default: 365.
    days: Option<u32>,
}

#[derive(Serialize, ToSchema)]
struct CreatedToken {
    id: String,
    /// The token; it cannot be shown again.
    token: String,
    name: String,
    role: String,
}

/// Creates a token. The response is the only place that shows it.
#[utoipa::path(post, path = "/admin/v1/tokens", operation_id = "POST_tokens", request_body = TokenSpec,
    responses((status = 201, description = "The token.", body = CreatedToken)),
    extensions(("x-role" = json!("admin"))))]
async fn create(
    State(admin): State<Arc<AdminState>>,
    Administrator(actor): Administrator,
    Json(spec): Json<TokenSpec>,
) -> ApiResult {
    if spec.name.is_empty() || spec.name.len() > MAX_NAME || spec.name.chars().any(char::is_control) {
        let detail = format!("must have 1 to {MAX_NAME} bytes and no control characters");
        return Err(Problem::bad(detail).in_field("name").into());
    }
    let role: Role = spec
        .role
        .parse()
        .map_err(|_| Problem::bad("must be viewer, operator, admin or replica").in_field("role"))?;
    let days = spec.days.unwrap_or(DEFAULT_DAYS);
    if days > MAX_DAYS {
        return Err(Problem::bad(format!("must be between 0 and {MAX_DAYS}")).in_field("days").into());
    }
    let lasts = (days > 0).then(|| TimeDelta::from_secs(u64::from(days) * 86_400));
    let made = admin.control()?.create_token(&spec.name, role, lasts, &actor).await?;
    let created =
        CreatedToken { id: made.id, token: made.secret, name: spec.name, role: role.name().to_owned() };
    Ok(json_response(StatusCode::CREATED, &created))
}

/// Revokes a token, immediately.
#[utoipa::path(delete, path = "/admin/v1/tokens/{id}", operation_id = "DELETE_tokens_id",
    params(IdParameter),
    responses((status = 204, description = "The token is revoked.")),
    extensions(("x-role" = json!("admin"))))]
async fn revoke(
    State(admin): State<Arc<AdminState>>,
    Administrator(actor): Administrator,
    Id(id): Id,
    _: StrictQuery<NoParameters>,
) -> ApiResult {
    admin.control()?.revoke_token(&id, &actor).await?;
    Ok(no_content())
}
