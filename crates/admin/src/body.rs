//! Reading the body of a request: at most 64 KiB unless a handler says otherwise, in bounded time, and strictly: an unknown
//! field is an error that names its place. The `Content-Type` is not looked at, so that `curl -d` works.

use crate::error::ApiError;
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::Body as _;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use std::time::Duration;
use tollgate_http::body::decode;
use tollgate_http::problem::Problem;

const MAX_BODY: usize = 64 * 1024;
const TIMEOUT: Duration = Duration::from_secs(10);
/// How much of a body that is too large is still read. A connection closed over bytes that nobody has read takes the
/// answer with it, and the client would never learn what was wrong.
const MAX_DISCARDED: usize = 1024 * 1024;

/// A JSON object.
pub(crate) struct Json<T, const MAX: usize = MAX_BODY>(pub(crate) T);

/// A JSON object, or nothing.
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
            let detail = format!("a body has at most {max} bytes");
            Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", detail))
        }
        Ok(Err(error)) => Err(Problem::bad(format!("the body could not be read: {error}"))),
        Err(_) => {
            let detail = format!("the body did not arrive within {} s", TIMEOUT.as_secs());
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "Body too slow", detail))
        }
    }
}

/// All of a body, or nothing if it is too large.
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

/// Reads what nobody needs, for a while.
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
