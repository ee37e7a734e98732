//! `GET /admin/v1/audit`: what was changed, the latest first.

use super::{Admin, problem, query};
use crate::http::problem::Problem;
use crate::http::{Answer, json_answer};
use hyper::{StatusCode, Uri};
use serde_json::json;

const MOST: i64 = 1_000;

pub(super) async fn list(admin: &Admin, uri: &Uri) -> Result<Answer, Problem> {
    let [before, limit] = query::words(uri, ["before", "limit"])?;
    let number = |name: &str, text: Option<String>, most: i64| match text.map(|text| text.parse()) {
        None => Ok(None),
        Some(Ok(number)) if (1..=most).contains(&number) => Ok(Some(number)),
        Some(_) => Err(Problem::bad(format!("write a number from 1 to {most}")).at(name)),
    };
    let before = number("before", before, i64::MAX)?;
    let limit = number("limit", limit, MOST)?.unwrap_or(100);
    let entries = admin.control.audit(before, limit).await.map_err(problem)?;
    let next = entries.last().map(|entry| entry.seq).filter(|seq| *seq > 1);
    let body = json!({"entries": entries, "next_before": next});
    Ok(json_answer(StatusCode::OK, format!("{body:#}\n").into_bytes()))
}
