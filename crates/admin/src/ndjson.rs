//! Answers of one JSON text a line (NDJSON), made page by page while they are read: whoever reads slowly holds up nobody,
//! and memory holds a page.

use crate::response;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use http::header::{CONTENT_DISPOSITION, HeaderValue};
use serde::Serialize;
use std::future::Future;
use tollgate_control::ControlError;

/// A page of lines, and what to ask the next with.
type Step<C> = Option<(Vec<u8>, C)>;

/// Answers with what `next` makes of each cursor, from the first one until it has no more. The first page is made before the
/// answer begins, so that a database that is away can still be told of; later the answer breaks off.
pub(crate) async fn reply<C, N, F>(file: &str, first: C, next: N) -> Result<Response, ControlError>
where
    C: Send + 'static,
    N: Fn(C) -> F + Send + 'static,
    F: Future<Output = Result<Step<C>, ControlError>> + Send + 'static,
{
    let begun = next(first).await?;
    let pages = stream::try_unfold((begun, next), async |(page, next)| {
        let Some((text, cursor)) = page else { return Ok::<_, std::io::Error>(None) };
        let after = next(cursor).await.map_err(|error| {
            tracing::warn!(%error, "an export broke off");
            std::io::Error::other(error)
        })?;
        Ok(Some((Bytes::from(text), (after, next))))
    });
    let mut answer = response::typed(StatusCode::OK, "application/x-ndjson", Body::from_stream(pages));
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{file}\"")) {
        answer.headers_mut().insert(CONTENT_DISPOSITION, value);
    }
    Ok(answer)
}

/// Adds a line.
pub(crate) fn write(text: &mut Vec<u8>, line: &impl Serialize) {
    // Writing to memory cannot fail, and nothing that is told of has keys that are no strings.
    if serde_json::to_writer(&mut *text, line).is_ok() {
        text.push(b'\n');
    }
}
