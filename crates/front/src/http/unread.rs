//! What of a request's body has not been read: a length, or chunks; piece by piece, and what follows it is kept apart.

use bytes::{Bytes, BytesMut};
use tollgate_edge::h1::chunked::{Chunk, ChunkError, Chunks};
use tollgate_edge::h1::head::Framing;

/// A body on its way.
pub(super) struct Unread {
    bytes: BytesMut,
    form: Form,
}

enum Form {
    Length(u64),
    Chunked(Chunks),
}

/// What comes next of a body.
pub(super) enum Piece {
    Data(Bytes),
    End,
    /// More has to come first.
    Wait,
}

impl Unread {
    /// A body that begins with the first of `bytes`.
    pub(super) fn new(framing: Framing, bytes: &[u8]) -> Self {
        let form = match framing {
            Framing::Chunked => Form::Chunked(Chunks::default()),
            Framing::Length(length) => Form::Length(length),
            // A request never ends with its connection.
            Framing::None | Framing::UntilClose => Form::Length(0),
        };
        Self { bytes: BytesMut::from(bytes), form }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn next(&mut self) -> Result<Piece, ChunkError> {
        Ok(match &mut self.form {
            Form::Length(0) => Piece::End,
            Form::Length(_) if self.bytes.is_empty() => Piece::Wait,
            Form::Length(left) => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(self.bytes.len());
                *left -= take as u64;
                Piece::Data(self.bytes.split_to(take).freeze())
            }
            Form::Chunked(chunks) => match chunks.read(&mut self.bytes)? {
                Chunk::Data(data) => Piece::Data(data),
                Chunk::End(_) => Piece::End,
                Chunk::Incomplete => Piece::Wait,
            },
        })
    }

    /// What follows the body.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes.to_vec()
    }
}
