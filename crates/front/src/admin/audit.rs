//! `GET /admin/v1/audit`: what was changed, the latest first.

use super::routes::{Asked, Reply, Route, whole};
use super::{problem, query};
use crate::http::json_answer;
use crate::http::problem::Problem;
use hyper::{Method, StatusCode};
use serde_json::json;
use tollgate_control::Role;

pub(super) const ROUTES: &[Route] =
    &[Route::new(Method::GET, "/admin/v1/audit", Role::Admin, |asked| Box::pin(list(asked)))];

const MOST: i64 = 1_000;

async fn list(asked: Asked) -> Result<Reply, Problem> {
    let [before, limit] = query::words(&asked.head.uri, ["before", "limit"])?;
    let number = |name: &str, text: Option<String>, most: i64| match text.map(|text| text.parse()) {
        None => Ok(None),
        Some(Ok(number)) if (1..=most).contains(&number) => Ok(Some(number)),
        Some(_) => Err(Problem::bad(format!("write a number from 1 to {most}")).at(name)),
    };
    let before = number("before", before, i64::MAX)?;
    let limit = number("limit", limit, MOST)?.unwrap_or(100);
    let entries = asked.admin.control()?.audit(before, limit).await.map_err(problem)?;
    let next = entries.last().map(|entry| entry.seq).filter(|seq| *seq > 1);
    let body = json!({"entries": entries, "next_before": next});
    Ok(whole(json_answer(StatusCode::OK, format!("{body:#}\n").into_bytes())))
}
