//! Messages on a stream of bytes.

use crate::message::{self, Message, PREFIX};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

/// Maximum bytes of the first message.
const MAX_FIRST: usize = 4 << 10;
/// Bytes that are written together.
const COALESCED: usize = 64 << 10;

/// Reads one message; `None` at the end of the stream.
pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u64, Message)>> {
    read_up_to(message::MAX_MESSAGE, from).await
}

/// Reads the first message of a connection, of which nothing is known yet.
pub(super) async fn read_first(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u64, Message)>> {
    read_up_to(MAX_FIRST, from).await
}

async fn read_up_to(most: usize, from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u64, Message)>> {
    let mut prefix = [0; PREFIX];
    match from.read_exact(&mut prefix).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = message::length(prefix).map_err(invalid)?;
    if length > most {
        return Err(invalid(message::MessageError::TooLong(length)));
    }
    // The buffer grows with what arrives, not with what is announced.
    let mut bytes = Vec::with_capacity(length.min(16 << 10));
    let read = from.take(length as u64).read_to_end(&mut bytes).await?;
    if read < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    message::decode_leniently(&bytes).map(Some).map_err(invalid)
}

fn invalid(error: message::MessageError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Writes messages until the channel is closed.
pub(super) async fn write_all(
    to: &mut (impl AsyncWrite + Unpin),
    messages: &mut mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    while let Some(mut bytes) = messages.recv().await {
        while bytes.len() < COALESCED
            && let Ok(more) = messages.try_recv()
        {
            bytes.extend_from_slice(&more);
        }
        to.write_all(&bytes).await?;
        to.flush().await?;
    }
    Ok(())
}
