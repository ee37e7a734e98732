//! What was changed: `GET /admin/v1/audit`, the latest first; `/export`, all of it in order.

use super::routes::{Asked, Reply, Route, whole};
use super::{lines, problem, query};
use crate::http::json_answer;
use crate::http::problem::Problem;
use hyper::{Method, StatusCode};
use serde_json::json;
use std::sync::Arc;
use tollgate_control::Role;

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, "/admin/v1/audit", Role::Admin, |asked| Box::pin(list(asked))),
    Route::new(Method::GET, "/admin/v1/audit/export", Role::Admin, |asked| Box::pin(export(asked))),
];

const MOST: i64 = 1_000;

async fn list(asked: Asked) -> Result<Reply, Problem> {
    let [before, limit] = query::words(&asked.head.uri, ["before", "limit"])?;
    let before = number("before", before, i64::MAX)?;
    let limit = number("limit", limit, MOST)?.unwrap_or(100);
    let entries = asked.admin.control()?.audit(before, limit).await.map_err(problem)?;
    let next = entries.last().map(|entry| entry.seq).filter(|seq| *seq > 1);
    let body = json!({"entries": entries, "next_before": next});
    Ok(whole(json_answer(StatusCode::OK, format!("{body:#}\n").into_bytes())))
}

/// All of it, or what came after an entry: whoever ships it elsewhere asks for what is new.
async fn export(asked: Asked) -> Result<Reply, Problem> {
    let [after] = query::words(&asked.head.uri, ["after"])?;
    let after = number("after", after, i64::MAX)?.unwrap_or(0);
    let control = Arc::clone(asked.admin.control()?);
    let next = move |after: i64| {
        let control = Arc::clone(&control);
        async move {
            let entries = control.audit_after(after).await?;
            let mut text = Vec::new();
            entries.iter().for_each(|entry| lines::write(&mut text, entry));
            Ok(entries.last().map(|last| (text, last.seq)))
        }
    };
    lines::reply("audit.ndjson", after, next).await.map_err(problem)
}

fn number(name: &str, text: Option<String>, most: i64) -> Result<Option<i64>, Problem> {
    match text.map(|text| text.parse()) {
        None => Ok(None),
        Some(Ok(number)) if (1..=most).contains(&number) => Ok(Some(number)),
        Some(_) => Err(Problem::bad(format!("write a number from 1 to {most}")).at(name)),
    }
}
