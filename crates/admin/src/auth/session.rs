//! Session endpoints at `/admin/v1/session`: log a browser in with a token, show the current principal, log out.

use super::sessions::{COOKIE_NAME, TTL};
use super::tls::ClientPeer;
use super::{authenticate_token, authorize_viewer};
use crate::AdminState;
use crate::body::Json;
use crate::error::ApiResult;
use crate::response::{json_response, no_content};
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use http::header::{HeaderValue, ORIGIN, SET_COOKIE};
use http::request::Parts;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::Role;
use tollgate_http::problem::Problem;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(current, log_in, log_out))
}

/// The principal of a request.
#[derive(Serialize, ToSchema)]
struct Session {
    /// Name of the token or certificate; null if a login is needed.
    #[schema(required = true)]
    name: Option<String>,
    #[schema(required = true)]
    role: Option<Role>,
    needs_login: bool,
    /// The kind of control-plane database; null without one, where the API is read-only, and before login.
    #[schema(required = true)]
    database: Option<&'static str>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct LogIn {
    token: String,
}

/// Returns the current principal.
#[utoipa::path(get, path = "/admin/v1/session", operation_id = "GET_session",
    responses((status = 200, description = "The principal.", body = Session)),
    extensions(("x-role" = json!("anybody"))))]
async fn current(State(admin): State<Arc<AdminState>>, head: Parts) -> ApiResult {
    let database = admin.control.as_ref().map(|control| control.kind());
    let session = match authorize_viewer(&admin, &head).await {
        Ok(found) => Session { name: Some(found.name), role: Some(found.role), needs_login: false, database },
        Err(problem) if problem.status == StatusCode::UNAUTHORIZED => {
            Session { name: None, role: None, needs_login: true, database: None }
        }
        Err(other) => return Err(other.into()),
    };
    Ok(json_response(StatusCode::OK, &session))
}

/// Logs a browser in with a token.
#[utoipa::path(post, path = "/admin/v1/session", operation_id = "POST_session", request_body = LogIn,
    responses((status = 204, description = "Logged in.")),
    extensions(("x-role" = json!("anybody"))))]
async fn log_in(
    State(admin): State<Arc<AdminState>>,
    head: Parts,
    Json(LogIn { token }): Json<LogIn>,
) -> ApiResult {
    let token = token.trim();
    authenticate_token(&admin, &head, token).await.map_err(|problem| problem.in_field("token"))?;
    // `tg_ID_SECRET`: the token has just been verified, so it has this form.
    let id = token.split('_').nth(1).unwrap_or_default();
    let no_randomness = || {
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "No randomness",
            "the system's random generator failed; retry",
        )
    };
    admin.sessions.end(&head);
    let cookie = admin.sessions.begin(id).ok_or_else(no_randomness)?;
    Ok(done(&format!(
        "{COOKIE_NAME}={cookie}; Max-Age={}{}",
        TTL.as_micros() / 1_000_000,
        cookie_attributes(&head)
    )))
}

/// Logs a browser out.
#[utoipa::path(delete, path = "/admin/v1/session", operation_id = "DELETE_session",
    responses((status = 204, description = "Logged out.")),
    extensions(("x-role" = json!("anybody"))))]
async fn log_out(State(admin): State<Arc<AdminState>>, head: Parts) -> Response {
    admin.sessions.end(&head);
    done(&format!("{COOKIE_NAME}=; Max-Age=0{}", cookie_attributes(&head)))
}

/// Returns the cookie's attributes: hidden from scripts, never sent by other sites, and never sent unencrypted if the
/// page was loaded over TLS, either ours or that of a proxy in front, which the browser's `Origin` reveals.
fn cookie_attributes(head: &Parts) -> &'static str {
    let origin = head.headers.get(ORIGIN).map(HeaderValue::as_bytes);
    let encrypted = head.extensions.get::<ClientPeer>().is_some_and(|peer| peer.encrypted);
    match encrypted || origin.is_some_and(|origin| origin.starts_with(b"https://")) {
        true => "; Path=/; HttpOnly; SameSite=Strict; Secure",
        false => "; Path=/; HttpOnly; SameSite=Strict",
    }
}

fn done(cookie: &str) -> Response {
    let mut response = no_content();
    if let Ok(cookie) = HeaderValue::from_str(cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}
