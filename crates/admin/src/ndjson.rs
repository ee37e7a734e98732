//! NDJSON responses, produced page by page while the client reads: a slow client blocks nothing, and memory holds one
//! page.

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
use tollgate_observe::escape;

/// A page of lines, and the cursor of the next page.
type Step<C> = Option<(Vec<u8>, C)>;

/// Streams the pages that `next` returns for each cursor, until there are no more. The first page is read before the
/// response starts, so that an unavailable database still yields an error response; a later failure aborts the
/// response.
pub(crate) async fn reply<C, N, F>(file: &str, first: C, next: N) -> Result<Response, ControlError>
where
    C: Send + 'static,
    N: Fn(C) -> F + Send + 'static,
    F: Future<Output = Result<Step<C>, ControlError>> + Send + 'static,
{
    let first_page = next(first).await?;
    let pages = stream::try_unfold((first_page, next), async |(page, next)| {
        let Some((text, cursor)) = page else { return Ok::<_, std::io::Error>(None) };
        let after = next(cursor).await.map_err(|error| {
            tracing::warn!(%error, "export aborted");
            std::io::Error::other(error)
        })?;
        Ok(Some((Bytes::from(text), (after, next))))
    });
    let mut response = response::typed(StatusCode::OK, "application/x-ndjson", Body::from_stream(pages));
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{file}\"")) {
        response.headers_mut().insert(CONTENT_DISPOSITION, value);
    }
    Ok(response)
}

/// Appends a line.
pub(crate) fn write(text: &mut Vec<u8>, line: &impl Serialize) {
    // Writing to memory cannot fail, and no exported type has keys that are not strings.
    if let Ok(line) = serde_json::to_string(line) {
        text.extend_from_slice(escape::json(&line).as_bytes());
        text.push(b'\n');
    }
}
