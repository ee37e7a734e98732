//! Protobuf codec for gRPC that reports malformed messages as the client's error (`invalid_argument`).
//!
//! Rejected: tonic's own codec, because it reports them as an internal server error, which would page the operator for
//! a client's bug.

use super::BadRequest;
use bytes::{Buf, Bytes};
use prost::Message;
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Encodes `T`, decodes `U`.
#[derive(Debug)]
pub(crate) struct StrictCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for StrictCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for StrictCodec<T, U>
where
    T: Message + Send + 'static,
    U: Readable + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = StrictEncoder<T>;
    type Decoder = StrictDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        StrictEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        StrictDecoder(PhantomData)
    }
}

#[derive(Debug)]
pub(crate) struct StrictEncoder<T>(PhantomData<T>);

impl<T: Message> Encoder for StrictEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

/// A message that clients send.
pub(crate) trait Readable: Message + Default {
    /// Checks a message before it is decoded, so that none takes far more memory than it has bytes.
    fn check(_: &[u8]) -> Result<(), BadRequest> {
        Ok(())
    }

    /// Reads a message that [`Message::decode`] rejects, if it is known how.
    fn repair(_: Bytes) -> Option<Self> {
        None
    }
}

#[derive(Debug)]
pub(crate) struct StrictDecoder<U>(PhantomData<U>);

impl<U: Readable> Decoder for StrictDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // Not a copy: the buffer hands out what it owns.
        decode(&buffer.copy_to_bytes(buffer.remaining())).map(Some)
    }
}

/// Decodes a message.
pub(crate) fn decode<U: Readable>(message: &[u8]) -> Result<U, Status> {
    U::check(message)?;
    U::decode(message)
        .or_else(|error| U::repair(Bytes::copy_from_slice(message)).ok_or(error))
        .map_err(|error| Status::invalid_argument(format!("malformed message: {error}")))
}
