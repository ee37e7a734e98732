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
//! `listen` accepts connections, `connection` reads requests and writes answers (`unread` reads unusual bodies),
//! `turn` holds answers back, `decision` is the answer's form. Few paths need no router, and this is where every request
//! passes.

mod check;
mod connection;
mod decision;
mod forward;
mod health;
mod json;
mod listen;
pub(crate) mod request;
mod reserve;
mod turn;
mod unread;

pub use forward::{Forward, ForwardError, ForwardSettings};
pub use listen::{HttpConfig, serve};

use http::Method;
use listen::Service;
use problem::Problem;
use request::Request;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_edge::answer::AnswerSettings;
use tollgate_edge::{body, h1, problem, trace};
use tollgate_engine::{Limiter, Trace};
use tollgate_observe::Status;

/// What every handler needs.
pub(crate) struct App<S> {
    pub(crate) limiter: Arc<Limiter<S>>,
    pub(crate) status: Arc<dyn Status>,
    pub(crate) answers: AnswerSettings,
    pub(crate) forward: Forward,
}

/// Where programs ask, by POST.
fn is_asked_of(path: &str) -> bool {
    matches!(path, "/v1/check" | "/v1/reserve" | "/v1/settle" | "/v1/cancel" | "/json")
}

/// Where an answer is a decision.
fn decides(path: &str) -> bool {
    matches!(path, "/v1/check" | "/v1/reserve" | "/json") || forward::is_at(path)
}

impl<S: CounterStore + 'static> Service for App<S> {
    fn wants_body(&self, request: &Request<'_>) -> bool {
        request.method == "POST" && is_asked_of(request.path)
    }

    type Rest = Option<Box<forward::Held>>;

    fn answer_now(&self, request: &Request<'_>) -> Result<h1::Answer, Self::Rest> {
        let limiter = &self.limiter;
        if !limiter.decides_at_once() {
            return Err(None);
        }
        let began = limiter.clock().now();
        let trace = trace::of(limiter, &request.fields, || began);
        let answer = if request.path == "/v1/check" && request.method == "POST" {
            check::answer_now(self, request.body, trace.as_ref()).transpose().ok_or(None)
        } else if forward::is_at(request.path) {
            forward::answer_now(self, request, began, trace.as_ref())
                .map_or_else(|problem| Ok(Err(problem)), |told| told.map(Ok))
        } else {
            Err(None)
        }?;
        if answer.is_ok() {
            limiter.took("http", 1, limiter.clock().now().since(began));
        }
        Ok(answer.unwrap_or_else(Problem::told))
    }

    async fn answer(&self, request: &Request<'_>, rest: Self::Rest) -> h1::Answer {
        if !decides(request.path) {
            return route(self, request, None, None).await.unwrap_or_else(Problem::told);
        }
        let began = self.limiter.clock().now();
        let trace = trace::of(&self.limiter, &request.fields, || began);
        let answer = route(self, request, rest, trace.as_ref()).await;
        if answer.is_ok() {
            self.limiter.took("http", 1, self.limiter.clock().now().since(began));
        }
        answer.unwrap_or_else(Problem::told)
    }
}

async fn route<S: CounterStore + 'static>(
    app: &App<S>,
    request: &Request<'_>,
    held: Option<Box<forward::Held>>,
    trace: Option<&Trace>,
) -> Result<h1::Answer, Problem> {
    let body = request.body;
    match (request.path, request.method) {
        ("/v1/check", "POST") => check::answer(app, body, trace).await,
        (path, _) if forward::is_at(path) => forward::answer(app, request, held, trace).await,
        ("/v1/reserve", "POST") => Box::pin(reserve::reserve(app, body, trace)).await,
        ("/v1/settle", "POST") => Box::pin(reserve::settle(&app.limiter, body)).await,
        ("/v1/cancel", "POST") => Box::pin(reserve::cancel(&app.limiter, body)).await,
        ("/json", "POST") => Box::pin(json::answer(app, body, trace)).await,
        (path, _) if is_asked_of(path) => Err(Problem::wrong_method(&Method::POST)),
        ("/healthz" | "/readyz" | "/metrics" | "/v1/hot", "GET" | "HEAD") => {
            Ok(Box::pin(health::told(&app.status, request)).await)
        }
        ("/healthz" | "/readyz" | "/metrics" | "/v1/hot", _) => Err(Problem::wrong_method(&Method::GET)),
        (path, _) => Err(Problem::not_found(path, "POST /v1/check")),
    }
}
