//! `/admin/v1/session`: a browser logs in with a token, asks who it is, and logs out.

use super::access;
use super::routes::{self, Asked, Reply, Route, whole};
use super::sessions::{COOKIE_NAME, LASTS};
use super::tls::Caller;
use crate::http::problem::Problem;
use crate::http::{body, json_answer};
use hyper::header::{HeaderValue, ORIGIN, SET_COOKIE};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

const PATH: &str = "/admin/v1/session";

pub(super) const ROUTES: &[Route] = &[
    Route::open(PATH, |asked| Box::pin(who(asked))),
    Route::for_anybody(Method::POST, PATH, |asked| Box::pin(log_in(asked))),
    Route::for_anybody(Method::DELETE, PATH, |asked| Box::pin(log_out(asked))),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LogIn {
    token: String,
}

async fn who(asked: Asked) -> Result<Reply, Problem> {
    let told = match access::look(&asked.admin, &asked.head).await {
        Ok(who) => json!({"name": who.name, "role": who.role, "needs_login": false}),
        Err(refused) if refused.status == StatusCode::UNAUTHORIZED => {
            json!({"name": null, "role": null, "needs_login": true})
        }
        Err(other) => return Err(other),
    };
    Ok(whole(json_answer(StatusCode::OK, format!("{told:#}\n").into_bytes())))
}

async fn log_in(asked: Asked) -> Result<Reply, Problem> {
    let Asked { admin, head, body, .. } = asked;
    let sent = body::read(body).await?;
    let LogIn { token } = body::decode(&sent)?;
    let token = token.trim();
    access::prove(&admin, &head, token).await.map_err(|refused| refused.at("token"))?;
    // `tg_ID_SECRET`: it has just been proven, so it has this form.
    let id = token.split('_').nth(1).unwrap_or_default();
    let broken = || Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "No randomness", "try again");
    admin.sessions.end(&head);
    let cookie = admin.sessions.begin(id).ok_or_else(broken)?;
    Ok(done(&format!("{COOKIE_NAME}={cookie}; Max-Age={}{}", LASTS.as_micros() / 1_000_000, rest(&head))))
}

async fn log_out(asked: Asked) -> Result<Reply, Problem> {
    asked.admin.sessions.end(&asked.head);
    Ok(done(&format!("{COOKIE_NAME}=; Max-Age=0{}", rest(&asked.head))))
}

/// No script reads it, no other site sends it; and nobody sends it in the clear if the page came by TLS: ours, or that of a
/// proxy in front, of which the browser says so in `Origin`.
fn rest(head: &Parts) -> &'static str {
    let origin = head.headers.get(ORIGIN).map(HeaderValue::as_bytes);
    let encrypted = head.extensions.get::<Caller>().is_some_and(|caller| caller.encrypted);
    match encrypted || origin.is_some_and(|origin| origin.starts_with(b"https://")) {
        true => "; Path=/; HttpOnly; SameSite=Strict; Secure",
        false => "; Path=/; HttpOnly; SameSite=Strict",
    }
}

fn done(cookie: &str) -> Reply {
    let mut answer = routes::done();
    if let Ok(cookie) = HeaderValue::from_str(cookie) {
        answer.headers_mut().insert(SET_COOKIE, cookie);
    }
    answer
}
