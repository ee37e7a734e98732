//! Answers of one JSON text a line (NDJSON), made page by page while they are read: whoever reads slowly holds up nobody,
//! and memory holds a page.

use super::routes::Reply;
use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::Response;
use hyper::body::Frame;
use hyper::header::{CONTENT_DISPOSITION, CONTENT_TYPE, HeaderValue};
use serde::Serialize;
use std::future::Future;
use tollgate_control::ControlError;

/// A page of lines, and what to ask the next with.
type Step<C> = Option<(Vec<u8>, C)>;

/// Answers with what `next` makes of each cursor, from the first one until it has no more. The first page is made before the
/// answer begins, so that a database that is away can still be told of; later the answer breaks off.
pub(super) async fn reply<C, N, F>(file: &str, first: C, next: N) -> Result<Reply, ControlError>
where
    C: Send + 'static,
    N: Fn(C) -> F + Send + 'static,
    F: Future<Output = Result<Step<C>, ControlError>> + Send + 'static,
{
    let begun = next(first).await?;
    let pages = stream::try_unfold((begun, next), async |(page, next)| {
        let Some((text, cursor)) = page else { return Ok(None) };
        let after = next(cursor).await.map_err(|error| {
            tracing::warn!(%error, "an export broke off");
            std::io::Error::other(error)
        })?;
        Ok(Some((Frame::data(Bytes::from(text)), (after, next))))
    });
    let mut answer = Response::new(StreamBody::new(pages).boxed_unsync());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{file}\"")) {
        headers.insert(CONTENT_DISPOSITION, value);
    }
    Ok(answer)
}

/// Adds a line.
pub(super) fn write(text: &mut Vec<u8>, line: &impl Serialize) {
    // Writing to memory cannot fail, and nothing that is told of has keys that are no strings.
    if serde_json::to_writer(&mut *text, line).is_ok() {
        text.push(b'\n');
    }
}
