//! Quotas of single callers: list, read, agree, end. A change says which version it is of by `If-Match`, if it says any.

use super::meant::Meant;
use super::routes::{Asked, Reply, Route, done, whole};
use super::{problem, query};
use crate::http::problem::Problem;
use crate::http::{body, json_answer};
use hyper::header::{ETAG, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tollgate_control::{Cursor, Expected, Quota, QuotaDraft, Role, Wanted};

const ONE: &str = "/admin/v1/quotas/{api_key}";
/// By what stands for the key: those who read a list do not know the key itself.
const BY_ID: &str = "/admin/v1/quotas/by-id/{id}";

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, "/admin/v1/quotas", Role::Viewer, |asked| Box::pin(list(asked))),
    Route::new(Method::GET, ONE, Role::Viewer, |asked| Box::pin(get(asked))),
    Route::new(Method::PUT, ONE, Role::Operator, |asked| Box::pin(put(asked))),
    Route::new(Method::DELETE, ONE, Role::Operator, |asked| Box::pin(delete(asked))),
    Route::new(Method::GET, BY_ID, Role::Viewer, |asked| Box::pin(get(asked))),
    Route::new(Method::PUT, BY_ID, Role::Operator, |asked| Box::pin(put(asked))),
    Route::new(Method::DELETE, BY_ID, Role::Operator, |asked| Box::pin(delete(asked))),
];

async fn list(asked: Asked) -> Result<Reply, Problem> {
    let [tier, prefix, cursor] = query::words(&asked.head.uri, ["tier", "prefix", "cursor"])?;
    let wrong = || Problem::bad("write a `next_cursor` of a page before, or leave it out").at("cursor");
    let after = cursor.map(|cursor| Cursor::parse(&cursor).ok_or_else(wrong)).transpose()?;
    let page = asked.admin.control()?.quotas(&Wanted { tier, prefix, after }).await.map_err(problem)?;
    Ok(whole(json_answer(StatusCode::OK, format!("{:#}\n", json!(page)).into_bytes())))
}

async fn get(asked: Asked) -> Result<Reply, Problem> {
    let meant = Meant::by(&asked).await?;
    let found = asked.admin.control()?.quota(meant.caller()).await.map_err(problem)?;
    let detail = "nothing is agreed with this caller; the rules act alone";
    let found = found.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not found", detail))?;
    Ok(told(&meant, &found))
}

async fn put(asked: Asked) -> Result<Reply, Problem> {
    let meant = Meant::by(&asked).await?;
    let Asked { admin, head, body, actor, .. } = asked;
    let body = body::read(body).await?;
    let draft: QuotaDraft = body::decode(&body)?;
    let (rules, expected) = ((admin.rules)(), expected(&head)?);
    let put = admin.control()?.put_quota(meant.caller(), draft, &rules, expected, &actor).await;
    let put = put.map_err(problem)?.map_err(|wrong| {
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "It cannot act", wrong.detail).at(wrong.place)
    })?;
    Ok(told(&meant, &put))
}

async fn delete(asked: Asked) -> Result<Reply, Problem> {
    let meant = Meant::by(&asked).await?;
    let expected = expected(&asked.head)?;
    asked.admin.control()?.delete_quota(meant.caller(), expected, &asked.actor).await.map_err(problem)?;
    Ok(done())
}

fn told(meant: &Meant, quota: &Quota) -> Reply {
    let mut body = meant.sent().map_or_else(|| json!({}), |key| json!({"api_key": key}));
    if let (Some(body), Value::Object(quota)) = (body.as_object_mut(), json!(quota)) {
        body.extend(quota);
    }
    let mut answer = json_answer(StatusCode::OK, format!("{body:#}\n").into_bytes());
    if let Ok(tag) = HeaderValue::from_str(&format!("\"r{}\"", quota.revision)) {
        answer.headers_mut().insert(ETAG, tag);
    }
    whole(answer)
}

/// What the caller believes is there.
fn expected(head: &Parts) -> Result<Expected, Problem> {
    let text = |name| head.headers.get(name).map(|value| value.to_str().unwrap_or("").trim());
    match (text(IF_MATCH), text(IF_NONE_MATCH)) {
        (None, None) => Ok(Expected::Anything),
        (Some("*"), None) => Ok(Expected::Something),
        (None, Some("*")) => Ok(Expected::Nothing),
        (Some(tag), None) => {
            let revision = tag.strip_prefix("\"r").and_then(|tag| tag.strip_suffix('"'));
            revision.and_then(|revision| revision.parse().ok()).map(Expected::Revision).ok_or_else(|| {
                Problem::bad("write one ETag as GET has told it, such as If-Match: \"r12\", or *")
                    .at("If-Match")
            })
        }
        _ => Err(Problem::bad("write `If-Match: ETAG` or `If-None-Match: *`, not both").at("If-None-Match")),
    }
}
