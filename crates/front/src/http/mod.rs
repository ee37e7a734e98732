//! JSON over HTTP/1.1.
//!
//! | path | file | answers |
//! |---|---|---|
//! | `POST /v1/check` | `check` | may this request pass? 200 or 429, the decision in the body |
//! | `POST /v1/reserve`, `/v1/settle`, `/v1/cancel` | `reserve` | charge an estimate, then the truth |
//! | `ANY /check`, `/check/*` | `forward` | may the request pass that a proxy tells about? |
//! | `POST /json` | `json` | the Envoy service's own JSON |
//! | `GET /healthz`, `/readyz[?verbose]`, `/metrics`, `/v1/hot` | `health` | is the process well? |
//!
//! `turn` holds answers back, `server` accepts connections, `body` reads and decodes, `problem` says what was wrong, `decision` is the answer's form.
//! hyper without a framework: few paths need no router, and this is where every request passes.

pub(crate) mod body;
mod check;
mod decision;
mod forward;
pub(crate) mod health;
mod json;
pub(crate) mod problem;
mod reserve;
pub(crate) mod server;
mod turn;

pub use forward::{Forward, ForwardError, ForwardSettings};
pub use server::{HttpConfig, serve};

use crate::Status;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use problem::Problem;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_edge::answer::AnswerSettings;
use tollgate_engine::Limiter;

/// What every handler needs.
pub(crate) struct App<S> {
    pub(crate) limiter: Arc<Limiter<S>>,
    pub(crate) status: Arc<dyn Status>,
    pub(crate) answers: AnswerSettings,
    pub(crate) forward: Forward,
}

pub(crate) type Answer = Response<Full<Bytes>>;

/// One request, start to end.
async fn handle<S: CounterStore + 'static>(app: &App<S>, peer: IpAddr, request: Request<Incoming>) -> Answer {
    route(app, peer, request).await.unwrap_or_else(Problem::into_answer)
}

async fn route<S: CounterStore + 'static>(
    app: &App<S>,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Answer, Problem> {
    let allowed = match request.uri().path() {
        "/v1/check" | "/v1/reserve" | "/v1/settle" | "/v1/cancel" | "/json" => Method::POST,
        "/healthz" | "/readyz" | "/metrics" | "/v1/hot" => Method::GET,
        path if forward::is_at(path) => {
            let (head, body) = request.into_parts();
            let answer = forward::answer(app, peer, &head).await;
            if !body.is_end_stream() {
                body::discard(body).await;
            }
            return answer;
        }
        path => return Err(Problem::not_found(path)),
    };
    if request.method() != allowed && !(allowed == Method::GET && request.method() == Method::HEAD) {
        return Err(Problem::wrong_method(&allowed));
    }
    if allowed == Method::GET {
        return Ok(health::answer(&*app.status, request.uri()));
    }
    let (head, body) = request.into_parts();
    let body = body::read(body).await?;
    match head.uri.path() {
        "/v1/check" => check::answer(app, &body).await,
        "/v1/reserve" => reserve::reserve(app, &body).await,
        "/v1/settle" => reserve::settle(&app.limiter, &body).await,
        "/v1/cancel" => reserve::cancel(&app.limiter, &body).await,
        _ => json::answer(app, &body).await,
    }
}

/// An answer with a JSON body.
pub(crate) fn json_answer(status: StatusCode, body: Vec<u8>) -> Answer {
    typed(status, "application/json", body)
}

pub(crate) fn typed(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().reserve(8);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
