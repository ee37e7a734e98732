//! Chunked transfer coding, parsed strictly: input that a lenient parser could split at another byte is rejected.
//!
//! Chunk extensions are skipped and not forwarded. Trailer fields are forwarded, except those that would change how the
//! message is read.

use super::head::{self, HeadLimits, are_values};
use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, header};

/// Maximum length of a chunk-size line with its extensions, in bytes.
const MAX_LINE: usize = 256;
const MAX_TRAILERS: HeadLimits = HeadLimits { bytes: 8 * 1024, target: 0, fields: 32 };

/// Error for a malformed chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed chunked body")]
pub struct ChunkError;

/// The next part of a chunked body.
#[derive(Debug)]
pub enum Chunk {
    /// Bytes of the body.
    Data(Bytes),
    /// The end of the body, and its trailer fields.
    End(Option<HeaderMap>),
    /// More input is needed.
    Incomplete,
}

/// Chunked body parser; its state is the position in the body.
#[derive(Debug, Default)]
pub enum Chunks {
    /// Before a chunk-size line.
    #[default]
    Size,
    /// Inside a chunk; the number of bytes left in it.
    Data(u64),
    /// Before the CR LF that ends a chunk.
    DataEnd,
    /// After the last chunk.
    Trailers,
    /// After the body and its trailers.
    Done,
}

impl Chunks {
    /// Parses the next part from the front of `bytes` and removes it.
    ///
    /// # Errors
    /// [`ChunkError`] if the bytes are malformed.
    pub fn read(&mut self, bytes: &mut BytesMut) -> Result<Chunk, ChunkError> {
        loop {
            match self {
                Self::Size => {
                    let Some(size) = size(bytes)? else { return Ok(Chunk::Incomplete) };
                    *self = if size == 0 { Self::Trailers } else { Self::Data(size) };
                }
                Self::Data(left) => {
                    if bytes.is_empty() {
                        return Ok(Chunk::Incomplete);
                    }
                    let take = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= take as u64;
                    if *left == 0 {
                        *self = Self::DataEnd;
                    }
                    return Ok(Chunk::Data(bytes.split_to(take).freeze()));
                }
                Self::DataEnd => {
                    match bytes.get(..2) {
                        Some(b"\r\n") => bytes.advance(2),
                        None if bytes.is_empty() || bytes[0] == b'\r' => return Ok(Chunk::Incomplete),
                        _ => return Err(ChunkError),
                    }
                    *self = Self::Size;
                }
                Self::Trailers => {
                    let Some(trailers) = trailers(bytes)? else { return Ok(Chunk::Incomplete) };
                    *self = Self::Done;
                    return Ok(Chunk::End((!trailers.is_empty()).then_some(trailers)));
                }
                Self::Done => return Ok(Chunk::End(None)),
            }
        }
    }
}

/// Parses a chunk-size line; `None` while it is incomplete.
fn size(bytes: &mut BytesMut) -> Result<Option<u64>, ChunkError> {
    let window = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(feed) = memchr::memchr(b'\n', window) else {
        // Reject early what does not start with a digit.
        let wrong = window.first().is_some_and(|byte| !byte.is_ascii_hexdigit()) || window.len() == MAX_LINE;
        return if wrong { Err(ChunkError) } else { Ok(None) };
    };
    let line = window[..feed].strip_suffix(b"\r").ok_or(ChunkError)?;
    let digits = line.iter().position(|byte| !byte.is_ascii_hexdigit()).unwrap_or(line.len());
    if digits == 0 || digits > 15 {
        return Err(ChunkError);
    }
    if digits < line.len() && (line[digits] != b';' || !are_values(line)) {
        return Err(ChunkError);
    }
    let digit = |byte: u8| u64::from((byte as char).to_digit(16).unwrap_or(0));
    let size = line[..digits].iter().fold(0, |size, byte| size << 4 | digit(*byte));
    bytes.advance(feed + 1);
    Ok(Some(size))
}

/// Parses the trailer section; `None` while it is incomplete.
fn trailers(bytes: &mut BytesMut) -> Result<Option<HeaderMap>, ChunkError> {
    match bytes.get(..2) {
        Some(b"\r\n") => {
            bytes.advance(2);
            return Ok(Some(HeaderMap::new()));
        }
        None if bytes.is_empty() || bytes[0] == b'\r' => return Ok(None),
        _ => {}
    }
    let end = head::end_of_head(bytes, &mut 0, &MAX_TRAILERS).map_err(|_| ChunkError)?;
    let Some(end) = end else { return Ok(None) };
    let mut trailers =
        head::fields(&bytes.split_to(end).freeze(), 0, &MAX_TRAILERS).map_err(|_| ChunkError)?;
    drop_forbidden(&mut trailers);
    Ok(Some(trailers))
}

/// Removes trailer fields that would change how the message is framed, routed or authorized.
pub fn drop_forbidden(trailers: &mut HeaderMap) {
    for name in [
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::HOST,
        header::CONNECTION,
        header::UPGRADE,
        header::TE,
        header::TRAILER,
        header::AUTHORIZATION,
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::CONTENT_RANGE,
        header::SET_COOKIE,
        header::EXPECT,
    ] {
        trailers.remove(name);
    }
}
