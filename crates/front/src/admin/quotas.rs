//! Quotas of single callers: list, read, agree, end. A change says which version it is of by `If-Match`, if it says any.

use super::{Admin, problem, query};
use crate::http::problem::Problem;
use crate::http::{Answer, body, json_answer};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ETAG, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode, Uri};
use serde_json::{Value, json};
use tollgate_control::{Actor, Expected, KeyHash, Quota, QuotaDraft};

pub(super) async fn list(admin: &Admin, uri: &Uri) -> Result<Answer, Problem> {
    let [tier, cursor] = query::words(uri, ["tier", "cursor"])?;
    let wrong = || Problem::bad("write a `next_cursor` of a page before, or leave it out").at("cursor");
    let after = cursor.map(|cursor| KeyHash::parse(&cursor).ok_or_else(wrong)).transpose()?;
    let page = admin.control.quotas(tier.as_deref(), after).await.map_err(problem)?;
    Ok(json_answer(StatusCode::OK, format!("{:#}\n", json!(page)).into_bytes()))
}

pub(super) async fn get(admin: &Admin, key: &str) -> Result<Answer, Problem> {
    let found = admin.control.quota(key).await.map_err(problem)?;
    let found = found.ok_or_else(|| {
        Problem::new(
            StatusCode::NOT_FOUND,
            "Not found",
            "nothing is agreed with this key; the rules act alone",
        )
    })?;
    Ok(told(key, &found))
}

pub(super) async fn put(
    admin: &Admin,
    key: &str,
    head: &Parts,
    body: &[u8],
    actor: &Actor,
) -> Result<Answer, Problem> {
    let draft: QuotaDraft = body::decode(body)?;
    let expected = expected(head)?;
    let put =
        admin.control.put_quota(key, draft, &(admin.rules)(), expected, actor).await.map_err(problem)?;
    let put = put.map_err(|wrong| {
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "It cannot act", wrong.detail).at(wrong.place)
    })?;
    Ok(told(key, &put))
}

pub(super) async fn delete(admin: &Admin, key: &str, head: &Parts, actor: &Actor) -> Result<Answer, Problem> {
    admin.control.delete_quota(key, expected(head)?, actor).await.map_err(problem)?;
    let mut answer = Response::new(Full::new(Bytes::new()));
    *answer.status_mut() = StatusCode::NO_CONTENT;
    Ok(answer)
}

/// The key is told to those alone who have sent it.
fn told(key: &str, quota: &Quota) -> Answer {
    let mut body = json!({"api_key": key});
    if let (Some(body), Value::Object(quota)) = (body.as_object_mut(), json!(quota)) {
        body.extend(quota);
    }
    let mut answer = json_answer(StatusCode::OK, format!("{body:#}\n").into_bytes());
    if let Ok(tag) = HeaderValue::from_str(&format!("\"r{}\"", quota.revision)) {
        answer.headers_mut().insert(ETAG, tag);
    }
    answer
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
