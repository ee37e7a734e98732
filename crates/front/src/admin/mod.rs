//! What operators decide, over HTTP/1.1 on an address of its own.
//!
//! | path | file | who | answers |
//! |---|---|---|---|
//! | `POST /admin/v1/quotas/import`, `GET /admin/v1/quotas/export` | `bulk` | operator; viewer | many of them, one a line |
//! | `GET /admin/v1/quotas[?tier=&prefix=&cursor=]` | `quotas` | viewer | what is agreed with callers, in pages |
//! | `GET`, `PUT`, `DELETE /admin/v1/quotas/{api_key}`, `/quotas/by-id/{id}` | `quotas` | viewer; operator | with one of them |
//! | `/admin/v1/rules…` | `rules` | viewer; operator | what acts, what was published; publish, approve, go back |
//! | `GET /admin/v1/usage/{api_key}`, `POST …/reset`, `…/grant`, `DELETE …/grant/{id}` | `usage` | viewer; operator | what is used of its limits; give back, grant more |
//! | the same below `/admin/v1/usage/by-id/{id}` | `usage` | viewer; operator | of a caller who is listed, by its `key_id` |
//! | `GET`, `POST /admin/v1/emergency`, `POST …/{id}/renew`, `DELETE …/{id}` | `emergency` | viewer; operator | block, tighten, exempt, switch off |
//! | `GET /admin/v1/audit[?before=&limit=]` | `audit` | admin | what was changed, the latest first |
//! | `GET /admin/v1/audit/export[?after=]` | `audit` | admin | all of it in order, one a line |
//! | `GET`, `PUT /admin/v1/log` | `log` | viewer; operator | which messages are written |
//! | `GET /admin/v1/decisions[?key=…]`, `/decisions/{id}/why` | `decisions` | viewer | what was decided, and why |
//! | `GET /admin/v1/stats`, `/events`, `/top`, `/nodes` | `live` | viewer | what goes on |
//! | `GET /admin/v1/openapi.json` | `openapi` | anybody | what all of them take and answer |
//! | `GET /metrics` | `process` | viewer | the figures of the process |
//! | `GET`, `POST`, `DELETE /admin/v1/session` | `session` | anybody | a browser logs in and out |
//! | `GET /admin/v1/rules/tree` | `tree` | viewer | the rules that act now, as a tree |
//! | `GET /`, `/assets/*` | `dashboard` | anybody | the page itself, which knows nothing |
//! | `GET /healthz`, `/readyz` | `process` | anybody | is it well? |
//!
//! `routes` matches paths, `access` says who asks and what they may do, `sessions` remembers browsers, `query` reads what
//! stands in the address, `lines` answers one JSON text a line, `shared` answers many by one reading, `listener`, `seats` and `tls` take connections, `attempts` slows down
//! who sends wrong tokens.

mod access;
mod attempts;
mod audit;
mod bulk;
mod decisions;
mod emergency;
mod lines;
mod listener;
mod live;
mod log;
mod meant;
mod openapi;
mod process;
mod query;
mod quotas;
mod routes;
mod rules;
mod seats;
mod session;
mod sessions;
mod shared;
mod tls;
mod tree;
mod usage;

pub use access::Door;
pub use attempts::Attempts;
pub use live::Nodes;
pub use log::{LogLevels, LogSettings};
pub use sessions::Sessions;
pub use tls::AdminTls;
pub use usage::{Meter, Reading, UsageOf};

use crate::Status;
use crate::dashboard;
use crate::http::problem::Problem;
use hyper::body::Incoming;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderValue, REFERRER_POLICY, STRICT_TRANSPORT_SECURITY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Request, StatusCode};
use routes::{Asked, Reply, Route};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tollgate_control::{Control, ControlError, Desk, Role};
use tollgate_rules::Ruleset;

/// What every handler needs.
pub struct Admin {
    /// Where decisions of operators are kept, if anywhere; handlers ask by [`Admin::control`].
    pub control: Option<Arc<Control>>,
    /// Which rules act, and how others come in their place; handlers ask by [`Admin::desk`].
    pub desk: Option<Arc<Desk>>,
    /// The rules that act now, for checking what is sent against.
    pub rules: Box<dyn Fn() -> Arc<Ruleset> + Send + Sync>,
    /// Who reads the counters.
    pub meter: Arc<dyn Meter>,
    /// The state of the process.
    pub status: Arc<dyn Status>,
    /// Who writes messages.
    pub log: Arc<dyn LogLevels>,
    /// Who is let in.
    pub door: Door,
    /// Browsers that have logged in.
    pub sessions: Sessions,
    /// What those may do whose certificates prove these names.
    pub roles: BTreeMap<String, Role>,
    /// Those who sent wrong tokens.
    pub attempts: Attempts,
    /// What is known of the other nodes.
    pub nodes: Nodes,
}

impl Admin {
    /// Which rules act, and how others come in their place; else what to do to have that.
    pub(crate) fn desk(&self) -> Result<&Arc<Desk>, Problem> {
        self.control()?;
        self.desk.as_ref().ok_or_else(|| Problem::bad("no rules can be published here"))
    }

    /// Where decisions of operators are kept; else what to do to have them kept.
    pub(crate) fn control(&self) -> Result<&Arc<Control>, Problem> {
        self.control.as_ref().ok_or_else(|| {
            let detail = "this server keeps nothing that operators decide; start it with --db sqlite:tollgate.db, or \
                          with --db postgres://… for several nodes";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "No database", detail)
        })
    }
}

/// Serves until `drain` is ready, and then until those who were there have been answered.
pub async fn serve(
    listener: TcpListener,
    tls: Option<AdminTls>,
    admin: Admin,
    drain: impl Future<Output = ()> + Send,
) {
    let admin = Arc::new(admin);
    let encrypted = tls.is_some();
    let serving = move |peer: IpAddr, request: Request<Incoming>| {
        let admin = Arc::clone(&admin);
        async move {
            let answered = answer(admin, peer, request).await;
            let mut answer = guarded(answered.unwrap_or_else(|problem| routes::whole(problem.into_answer())));
            if encrypted {
                let year = HeaderValue::from_static("max-age=31536000");
                answer.headers_mut().insert(STRICT_TRANSPORT_SECURITY, year);
            }
            answer
        }
    };
    listener::serve(listener, tls, drain, serving).await;
}

/// All paths, file by file; of two that match, the first answers.
const ROUTES: &[&[Route]] = &[
    session::ROUTES,
    tree::ROUTES,
    rules::ROUTES,
    bulk::ROUTES,
    quotas::ROUTES,
    usage::ROUTES,
    emergency::ROUTES,
    audit::ROUTES,
    log::ROUTES,
    openapi::ROUTES,
    process::ROUTES,
    decisions::ROUTES,
    live::ROUTES,
];

async fn answer(admin: Arc<Admin>, peer: IpAddr, request: Request<Incoming>) -> Result<Reply, Problem> {
    let (head, body) = request.into_parts();
    if let Some(page) = dashboard::page(&head) {
        return Ok(routes::whole(page));
    }
    access::refuse_other_sites(&head)?;
    let (route, named) = routes::find(ROUTES.iter().copied().flatten(), &head.method, head.uri.path())?;
    let answering = async {
        let actor = access::enter(&admin, peer, &head, route.role).await?;
        if let (Some(_), Some(seat)) = (route.role, head.extensions.get::<Arc<seats::Seat>>()) {
            seat.let_in();
        }
        (route.handler)(Asked { admin, head, template: route.path, named, body, actor }).await
    };
    tokio::time::timeout(route.patience, answering).await.unwrap_or_else(|_| Err(away()))
}

fn not_found(path: &str) -> Problem {
    let shown: String = path.chars().take(100).collect();
    let detail = format!("there is nothing at `{shown}`; try GET /admin/v1/quotas");
    Problem::new(StatusCode::NOT_FOUND, "Not found", detail)
}

/// What is said when the database did not do it. Its own words go to the log: they may name hosts.
fn problem(error: ControlError) -> Problem {
    match error {
        ControlError::Changed => {
            Problem::new(StatusCode::PRECONDITION_FAILED, "Changed meanwhile", error.to_string())
        }
        ControlError::NeverActed { .. } => {
            Problem::new(StatusCode::CONFLICT, "It has never acted", error.to_string())
        }
        ControlError::Unknown(_) => Problem::new(StatusCode::NOT_FOUND, "Not found", error.to_string()),
        error => {
            tracing::warn!(%error, "the admin API could not answer");
            away()
        }
    }
}

fn away() -> Problem {
    let detail = "the database does not answer; decisions go on by what is known. Try again";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Database away", detail)
}

/// Answers are for those who asked, and no page of a browser; a page says itself what it is.
fn guarded(mut answer: Reply) -> Reply {
    let unknown = answer.status() == StatusCode::UNAUTHORIZED;
    let headers = answer.headers_mut();
    if unknown {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(CONTENT_SECURITY_POLICY).or_insert(nothing);
    answer
}
