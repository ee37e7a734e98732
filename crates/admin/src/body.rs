//! Request body extractors: at most 64 KiB unless a handler allows more, in bounded time, and strict: an unknown
//! field is an error that names the field. The `Content-Type` is ignored, so that `curl -d` works.

use crate::error::ApiError;
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::Body as _;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use std::time::Duration;
use tollgate_http::json_request::decode;
use tollgate_http::problem::Problem;

const MAX_BODY: usize = 64 * 1024;
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of bytes read and discarded from a body that is too large. Closing a connection with unread bytes
/// discards the response too, and the client would never learn what was wrong.
const MAX_DISCARDED: usize = 1024 * 1024;

/// Extractor for a JSON object.
pub(crate) struct Json<T, const MAX: usize = MAX_BODY>(pub(crate) T);

/// Extractor for a JSON object or an empty body.
pub(crate) struct JsonOrDefault<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync, const MAX: usize> FromRequest<S> for Json<T, MAX> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = read(request.into_body(), MAX).await?;
        Ok(Self(decode(&body)?))
    }
}

impl<T: DeserializeOwned + Default, S: Sync> FromRequest<S> for JsonOrDefault<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = read(request.into_body(), MAX_BODY).await?;
        Ok(Self(if body.is_empty() { T::default() } else { decode(&body)? }))
    }
}

async fn read(mut body: Body, max: usize) -> Result<Bytes, Problem> {
    match tokio::time::timeout(TIMEOUT, gather(&mut body, max)).await {
        Ok(Ok(Some(whole))) => Ok(whole),
        Ok(Ok(None)) => {
            discard(body).await;
            let detail = format!("the body exceeds {max} bytes");
            Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", detail))
        }
        Ok(Err(error)) => Err(Problem::bad(format!("cannot read the body: {error}"))),
        Err(_) => {
            let detail = format!("the body did not arrive within {} s", TIMEOUT.as_secs());
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "Body too slow", detail))
        }
    }
}

/// Reads the whole body; returns `None` if it exceeds `max` bytes.
async fn gather(body: &mut Body, max: usize) -> Result<Option<Bytes>, axum::Error> {
    let mut whole = BytesMut::new();
    while !body.is_end_stream()
        && let Some(frame) = body.frame().await
    {
        let Ok(data) = frame?.into_data() else { continue };
        if whole.len() + data.len() > max {
            return Ok(None);
        }
        whole.extend_from_slice(&data);
    }
    Ok(Some(whole.freeze()))
}

/// Reads and discards a body, up to a size and a time limit.
pub(crate) async fn discard(mut body: Body) {
    let reading = async {
        let mut read = 0;
        while let Some(Ok(frame)) = body.frame().await {
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > MAX_DISCARDED {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(TIMEOUT, reading).await;
}
