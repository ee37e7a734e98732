//! Bodies in chunks, read strictly: what a lenient reader would cut elsewhere is refused.
//!
//! Extensions are read over and not passed on. Fields after the last chunk are passed on, but for those that would
//! change how the message is read.

use super::head::{self, HeadLimits, are_values};
use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, header};

/// The longest line of a size with its extensions.
const MAX_LINE: usize = 256;
const MAX_TRAILERS: HeadLimits = HeadLimits { bytes: 8 * 1024, target: 0, fields: 32 };

/// A body is not what it says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the chunks of the body are malformed")]
pub struct ChunkError;

/// What has been read.
#[derive(Debug)]
pub enum Chunk {
    /// Bytes of the body.
    Data(Bytes),
    /// The end, and the fields that follow the body.
    End(Option<HeaderMap>),
    /// Nothing yet: more bytes are needed.
    Incomplete,
}

/// Where in the body the reader stands.
#[derive(Debug, Default)]
pub enum Chunks {
    /// Before a size.
    #[default]
    Size,
    /// Inside a chunk, with so many bytes to come.
    Data(u64),
    /// Before the end of a chunk's last line.
    DataEnd,
    /// After the last chunk.
    Trailers,
    /// Behind everything.
    Done,
}

impl Chunks {
    /// Reads on from the front of `bytes`.
    ///
    /// # Errors
    /// [`ChunkError`] if the bytes are no chunks.
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

/// One line with a size, if it is whole.
fn size(bytes: &mut BytesMut) -> Result<Option<u64>, ChunkError> {
    let window = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(feed) = memchr::memchr(b'\n', window) else {
        // What is there must at least begin like a size.
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

/// The fields after the last chunk, if they are whole.
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

/// What would change how the message is read, routed or paid for has no place behind it.
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
