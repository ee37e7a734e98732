//! `/admin/v1/session`: a browser logs in with a token, asks who it is, and logs out.

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

/// Who sends the request.
#[derive(Serialize, ToSchema)]
struct Session {
    /// The name of the token or certificate; null, if a login is needed.
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

/// Who asks.
#[utoipa::path(get, path = "/admin/v1/session", operation_id = "GET_session",
    responses((status = 200, description = "What was asked for.", body = Session)),
    extensions(("x-role" = json!("anybody"))))]
async fn current(State(admin): State<Arc<AdminState>>, head: Parts) -> ApiResult {
    let database = admin.control.as_ref().map(|control| control.kind());
    let session = match authorize_viewer(&admin, &head).await {
        Ok(who) => Session { name: Some(who.name), role: Some(who.role), needs_login: false, database },
        Err(refused) if refused.status == StatusCode::UNAUTHORIZED => {
            Session { name: None, role: None, needs_login: true, database: None }
        }
        Err(other) => return Err(other.into()),
    };
    Ok(json_response(StatusCode::OK, &session))
}

/// A browser logs in with a token.
#[utoipa::path(post, path = "/admin/v1/session", operation_id = "POST_session", request_body = LogIn,
    responses((status = 204, description = "Done.")),
    extensions(("x-role" = json!("anybody"))))]
async fn log_in(
    State(admin): State<Arc<AdminState>>,
    head: Parts,
    Json(LogIn { token }): Json<LogIn>,
) -> ApiResult {
    let token = token.trim();
    authenticate_token(&admin, &head, token).await.map_err(|refused| refused.in_field("token"))?;
    // `tg_ID_SECRET`: it has just been proven, so it has this form.
    let id = token.split('_').nth(1).unwrap_or_default();
    let broken = || Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "No randomness", "try again");
    admin.sessions.end(&head);
    let cookie = admin.sessions.begin(id).ok_or_else(broken)?;
    Ok(done(&format!("{COOKIE_NAME}={cookie}; Max-Age={}{}", TTL.as_micros() / 1_000_000, delay(&head))))
}

/// A browser logs out.
#[utoipa::path(delete, path = "/admin/v1/session", operation_id = "DELETE_session",
    responses((status = 204, description = "Done.")),
    extensions(("x-role" = json!("anybody"))))]
async fn log_out(State(admin): State<Arc<AdminState>>, head: Parts) -> Response {
    admin.sessions.end(&head);
    done(&format!("{COOKIE_NAME}=; Max-Age=0{}", delay(&head)))
}

/// No script reads it, no other site sends it; and nobody sends it in the clear if the page came by TLS: ours, or that of a
/// proxy in front, of which the browser says so in `Origin`.
fn delay(head: &Parts) -> &'static str {
    let origin = head.headers.get(ORIGIN).map(HeaderValue::as_bytes);
    let encrypted = head.extensions.get::<ClientPeer>().is_some_and(|peer| peer.encrypted);
    match encrypted || origin.is_some_and(|origin| origin.starts_with(b"https://")) {
        true => "; Path=/; HttpOnly; SameSite=Strict; Secure",
        false => "; Path=/; HttpOnly; SameSite=Strict",
    }
}

fn done(cookie: &str) -> Response {
    let mut answer = no_content();
    if let Ok(cookie) = HeaderValue::from_str(cookie) {
        answer.headers_mut().insert(SET_COOKIE, cookie);
    }
    answer
}
