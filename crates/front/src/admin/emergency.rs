//! What operators decide in an emergency: what is on, decide, renew, end.

use super::routes::{Asked, Reply, Route, done, whole};
use super::usage::unfit;
use super::{problem, query};
use crate::http::problem::Problem;
use crate::http::{body, json_answer};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tollgate_control::{EmergencyDraft, Role};

const ALL: &str = "/admin/v1/emergency";

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, ALL, Role::Viewer, |asked| Box::pin(list(asked))),
    Route::new(Method::POST, ALL, Role::Operator, |asked| Box::pin(declare(asked))),
    Route::new(Method::POST, "/admin/v1/emergency/{id}/renew", Role::Operator, |asked| {
        Box::pin(renew(asked))
    }),
    Route::new(Method::DELETE, "/admin/v1/emergency/{id}", Role::Operator, |asked| Box::pin(end(asked))),
];

fn told(status: StatusCode, body: &Value) -> Reply {
    whole(json_answer(status, format!("{body:#}\n").into_bytes()))
}

async fn list(asked: Asked) -> Result<Reply, Problem> {
    let [] = query::words(&asked.head.uri, [])?;
    let active = asked.admin.control()?.emergencies().await.map_err(problem)?;
    Ok(told(StatusCode::OK, &json!({"active": active})))
}

async fn declare(asked: Asked) -> Result<Reply, Problem> {
    let Asked { admin, body, actor, .. } = asked;
    let draft: EmergencyDraft = body::decode(&body::read(body).await?)?;
    let declared = admin.control()?.declare_emergency(draft, &(admin.rules)(), &actor).await;
    let declared = declared.map_err(problem)?.map_err(unfit)?;
    Ok(told(StatusCode::CREATED, &json!(declared)))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Renewal {
    ttl_seconds: Option<u64>,
}

async fn renew(asked: Asked) -> Result<Reply, Problem> {
    let Asked { admin, named, body, actor, .. } = asked;
    let body = body::read(body).await?;
    let sent: Renewal = if body.is_empty() { Renewal::default() } else { body::decode(&body)? };
    let renewed = admin.control()?.renew_emergency(&named[0], sent.ttl_seconds, &actor).await;
    let renewed = renewed.map_err(problem)?.map_err(unfit)?;
    Ok(told(StatusCode::OK, &json!(renewed)))
}

async fn end(asked: Asked) -> Result<Reply, Problem> {
    asked.admin.control()?.end_emergency(&asked.named[0], &asked.actor).await.map_err(problem)?;
    Ok(done())
}
