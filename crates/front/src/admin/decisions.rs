//! `GET /admin/v1/decisions`: the decision log, searched; `/decisions/{id}/why`: one of them, in words.

use super::routes::{Asked, Reply, Route, whole};
use super::{Admin, query};
use crate::http::json_answer;
use crate::http::problem::Problem;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_control::Role;
use tollgate_core::Timestamp;
use tollgate_engine::DecisionId;
use tollgate_observe::{Observe, Ruled, Search};

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, "/admin/v1/decisions", Role::Viewer, |asked| Box::pin(search(asked))),
    Route::new(Method::GET, "/admin/v1/decisions/{id}/why", Role::Viewer, |asked| Box::pin(why(asked))),
];

const MOST: usize = 1_000;
/// As many bytes of a value as the log keeps.
const LONGEST_KEY: usize = 256;

/// Who watches decisions.
pub(super) fn watcher(admin: &Admin) -> Result<&Arc<Observe>, Problem> {
    admin.status.observe().ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, "Nobody watches", "this process does not watch its decisions")
    })
}

/// Asks who watches, of all up to now, beside the threads that decide: those never wait for whoever looks on.
pub(super) async fn aside<T: Send + 'static>(
    admin: &Admin,
    ask: impl FnOnce(&Observe) -> T + Send + 'static,
) -> Result<T, Problem> {
    let observe = Arc::clone(watcher(admin)?);
    let asked = tokio::task::spawn_blocking(move || {
        observe.gather();
        ask(&observe)
    });
    asked.await.map_err(|_| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Not found out", "try again"))
}

/// An answer with this in it.
pub(super) fn told(value: &Value) -> Reply {
    whole(json_answer(StatusCode::OK, format!("{value}\n").into_bytes()))
}

async fn search(asked: Asked) -> Result<Reply, Problem> {
    let names = ["id", "key", "rule", "verdict", "from", "to", "limit", "cursor"];
    let [id, key, rule, verdict, from, to, limit, cursor] = query::words(&asked.head.uri, names)?;
    let number = |name: &str, text: Option<String>, most: u64| match text.map(|text| text.parse()) {
        None => Ok(None),
        Some(Ok(number)) if (1..=most).contains(&number) => Ok(Some(number)),
        Some(_) => Err(Problem::bad(format!("write a number from 1 to {most}")).at(name)),
    };
    let wrong = || Problem::bad("write allow, deny, shadow_deny, delay or degrade").at("verdict");
    let limit = number("limit", limit, MOST as u64)?.unwrap_or(100);
    let search = Search {
        id: id.as_deref().map(decision).transpose()?,
        key: key.map(as_kept),
        rule,
        ruled: verdict.map(|verdict| Ruled::named(&verdict).ok_or_else(wrong)).transpose()?,
        from: from.map(|from| time("from", &from)).transpose()?,
        to: to.map(|to| time("to", &to)).transpose()?,
        before: number("cursor", cursor, u64::MAX)?,
        limit: usize::try_from(limit).unwrap_or(MOST),
    };
    let found = aside(&asked.admin, move |observe| {
        let (found, next) = observe.search(&search);
        let found: Vec<Value> = found.iter().map(|entry| entry.json(observe.place())).collect();
        told(&json!({"decisions": found, "next_cursor": next.map(|next| next.to_string())}))
    });
    found.await
}

async fn why(asked: Asked) -> Result<Reply, Problem> {
    let id = decision(&asked.named[0])?;
    let observe = watcher(&asked.admin)?;
    let found = aside(&asked.admin, move |observe| observe.find(id)).await?.ok_or_else(|| {
        let detail = "this node has no such decision in its log; it keeps every denial and some of what it allows, and \
                      only the latest of them. Another node may have made it";
        Problem::new(StatusCode::NOT_FOUND, "Not found", detail)
    })?;
    let mut body = found.json(observe.place());
    let (lines, passes) = found.explanation(observe.place());
    body["explanation"] = json!(lines);
    if let Some(passes) = passes {
        body["would_pass_at"] = json!(passes);
    }
    Ok(told(&body))
}

/// The beginning that the log would have kept: what is longer is found by it.
fn as_kept(mut key: String) -> String {
    let mut end = key.len().min(LONGEST_KEY);
    while !key.is_char_boundary(end) {
        end -= 1;
    }
    key.truncate(end);
    key
}

fn decision(text: &str) -> Result<DecisionId, Problem> {
    let wrong = || Problem::bad("a decision's id is 32 hexadecimal digits, as its answer had them").at("id");
    if text.len() != 32 {
        return Err(wrong());
    }
    text.parse().map_err(|_| wrong())
}

fn time(name: &str, text: &str) -> Result<Timestamp, Problem> {
    let read: Result<jiff::Timestamp, _> = text.parse();
    let micros = read.ok().and_then(|at| u64::try_from(at.as_microsecond()).ok());
    let wrong = || Problem::bad("write a time such as 2027-01-31T14:32:17Z").at(name);
    micros.map(Timestamp::from_micros).ok_or_else(wrong)
}
