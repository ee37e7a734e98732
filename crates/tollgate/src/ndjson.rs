//! Long files of one JSON text a line, to a server and from it, without ever holding one whole.

use crate::admin_client::{AdminResponse, Client, RequestBody};
use anyhow::Context;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::Method;
use hyper::body::Frame;
use hyper::header::CONTENT_TYPE;
use std::convert::Infallible;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use tokio::sync::mpsc;

const CHUNK: usize = 256 * 1024;

/// Sends a file, or the standard input for `-`.
pub(crate) async fn send(client: &Client, path: &str, file: &Path) -> anyhow::Result<AdminResponse> {
    let source: Box<dyn Read + Send> = if file == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(File::open(file).with_context(|| format!("cannot read {}", file.display()))?)
    };
    let body = streamed(source);
    let headers = [(CONTENT_TYPE, "application/x-ndjson")];
    let answer = client.send(Method::POST, path, &headers, body).await?;
    client.read_response(answer).await
}

/// A thread reads, so that a slow source does not hold the connection up.
fn streamed(mut source: Box<dyn Read + Send>) -> RequestBody {
    let (sender, receiver) = mpsc::channel::<std::io::Result<Bytes>>(4);
    std::thread::spawn(move || {
        loop {
            let mut piece = BytesMut::zeroed(CHUNK);
            let read = match source.read(&mut piece) {
                Ok(0) => return,
                Ok(read) => Ok(piece.split_to(read).freeze()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let failed = read.is_err();
            if sender.blocking_send(read).is_err() || failed {
                return;
            }
        }
    });
    let pieces = stream::unfold(receiver, async |mut receiver| {
        let piece = receiver.recv().await?;
        Some((piece.map(Frame::data), receiver))
    });
    UnsyncBoxBody::new(StreamBody::new(pieces))
}

/// Writes what a server answers, as it comes.
pub(crate) async fn receive(client: &Client, path: &str, mut out: impl Write) -> anyhow::Result<()> {
    let nothing = Empty::new().map_err(|never: Infallible| match never {}).boxed_unsync();
    let answer = client.send(Method::GET, path, &[], nothing).await?;
    if !answer.status().is_success() {
        return Err(client.read_response(answer).await?.problem());
    }
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the answer broke off: what was written is not all")?;
        if let Some(data) = frame.data_ref() {
            out.write_all(data)?;
        }
    }
    Ok(out.flush()?)
}
