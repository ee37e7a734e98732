//! Reading and decoding a request's body: at most 64 KiB, in bounded time, and with the place of any mistake.

use super::problem::Problem;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::{Body, Incoming};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

const LARGEST: usize = 64 * 1024;
const SLOWEST: Duration = Duration::from_secs(10);
/// How much of a body that is too large is still read. A connection closed over bytes that nobody has read takes the
/// answer with it, and the caller would never learn what was wrong.
const DISCARDED: usize = 1024 * 1024;

pub(crate) async fn read(body: Incoming) -> Result<Bytes, Problem> {
    read_within(body, LARGEST).await
}

/// The same where more, or less, is let in.
pub(crate) async fn read_within(mut body: Incoming, largest: usize) -> Result<Bytes, Problem> {
    match tokio::time::timeout(SLOWEST, gather(&mut body, largest)).await {
        Ok(Ok(Some(whole))) => Ok(whole),
        Ok(Ok(None)) => {
            discard(body).await;
            let detail = format!("a body has at most {largest} bytes");
            Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", detail))
        }
        Ok(Err(error)) => Err(Problem::bad(format!("the body could not be read: {error}"))),
        Err(_) => {
            let detail = format!("the body did not arrive within {} s", SLOWEST.as_secs());
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "Body too slow", detail))
        }
    }
}

/// All of a body, or nothing if it is too large. Nearly every one comes in one piece, which is handed on as it is.
async fn gather(body: &mut Incoming, largest: usize) -> Result<Option<Bytes>, hyper::Error> {
    let mut whole = Bytes::new();
    let mut pieces = BytesMut::new();
    while !body.is_end_stream()
        && let Some(frame) = body.frame().await
    {
        let Ok(data) = frame?.into_data() else { continue };
        if whole.len() + pieces.len() + data.len() > largest {
            return Ok(None);
        }
        if whole.is_empty() && pieces.is_empty() {
            whole = data;
        } else {
            pieces.extend_from_slice(&std::mem::take(&mut whole));
            pieces.extend_from_slice(&data);
        }
    }
    Ok(Some(if pieces.is_empty() { whole } else { pieces.freeze() }))
}

/// Reads what nobody needs, for a while.
pub(crate) async fn discard(mut body: Incoming) {
    let reading = async {
        let mut read = 0;
        while let Some(Ok(frame)) = body.frame().await {
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > DISCARDED {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(SLOWEST, reading).await;
}

/// Decodes a body, which is an object. The place of a mistake is worked out only once there is one.
pub(crate) fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice::<Object<T>>(body).map(|object| object.0).map_err(|first| {
        let mut decoder = serde_json::Deserializer::from_slice(body);
        let Err(error) = serde_path_to_error::deserialize::<_, Object<T>>(&mut decoder) else {
            return Problem::bad(first.to_string());
        };
        // A body that ends too early has no name for the place where it does.
        let place = error.path().to_string();
        let place = place.trim_end_matches(['?', '.']);
        let problem = Problem::bad(error.inner().to_string());
        if place.is_empty() { problem } else { problem.at(place) }
    })
}

/// A `T` that is written as a JSON object. Without this, a list of its fields' values would do as well.
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        decoder.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}
