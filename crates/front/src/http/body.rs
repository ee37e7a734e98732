//! Reading and decoding a request's body: at most 64 KiB, in bounded time, and with the place of any mistake.

use super::problem::Problem;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::StatusCode;
use hyper::body::Incoming;
use serde::Deserialize;
use std::time::Duration;

const LARGEST: usize = 64 * 1024;
const SLOWEST: Duration = Duration::from_secs(10);

pub(crate) async fn read(body: Incoming) -> Result<Bytes, Problem> {
    let too_large = || {
        let detail = format!("a body has at most {LARGEST} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", detail)
    };
    match tokio::time::timeout(SLOWEST, Limited::new(body, LARGEST).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(Problem::bad(format!("the body could not be read: {error}"))),
        Err(_) => {
            let detail = format!("the body did not arrive within {} s", SLOWEST.as_secs());
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "Body too slow", detail))
        }
    }
}

/// Decodes a body. The place of a mistake is worked out only once there is one.
pub(crate) fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|first| {
        let mut decoder = serde_json::Deserializer::from_slice(body);
        match serde_path_to_error::deserialize::<_, T>(&mut decoder) {
            Err(error) if error.path().iter().next().is_some() => {
                Problem::bad(error.inner().to_string()).at(error.path().to_string())
            }
            _ => Problem::bad(first.to_string()),
        }
    })
}
