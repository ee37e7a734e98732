//! NDJSON import and export through a server, streamed, with a progress bar.

use crate::admin_client::{self, AdminResponse, Client, RequestBody};
use crate::cli::Progress;
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

/// Sends a file, or standard input for `-`.
pub(crate) async fn send(client: &Client, path: &str, file: &Path) -> anyhow::Result<AdminResponse> {
    let (source, size): (Box<dyn Read + Send>, _) = if file == Path::new("-") {
        (Box::new(std::io::stdin()), None)
    } else {
        let file = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
        let size = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|about| about.len());
        (Box::new(file), size)
    };
    let progress = Progress::bytes("importing", size);
    let body = streamed(source, progress.counter());
    let headers = [(CONTENT_TYPE, "application/x-ndjson")];
    let answer = client.send(Method::POST, path, &headers, body).await?;
    client.read_response(answer, path).await
}

/// Reads on a separate thread, so that a slow source does not block the connection.
fn streamed(mut source: Box<dyn Read + Send>, count: impl Fn(u64) + Send + 'static) -> RequestBody {
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
            let bytes = read.as_ref().map_or(0, Bytes::len) as u64;
            if sender.blocking_send(read).is_err() || failed {
                return;
            }
            count(bytes);
        }
    });
    let pieces = stream::unfold(receiver, async |mut receiver| {
        let piece = receiver.recv().await?;
        Some((piece.map(Frame::data), receiver))
    });
    UnsyncBoxBody::new(StreamBody::new(pieces))
}

/// Writes a server's response to a file or standard output as it arrives.
pub(crate) async fn receive(client: &Client, path: &str, file: Option<&Path>) -> anyhow::Result<()> {
    let nothing = Empty::new().map_err(|never: Infallible| match never {}).boxed_unsync();
    let answer = client.send(Method::GET, path, &[], nothing).await?;
    if !answer.status().is_success() {
        return Err(client.read_response(answer, path).await?.problem());
    }
    let mut out = admin_client::output(file)?;
    let progress = Progress::bytes("exporting", None).unless_on_screen(file);
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.context("connection closed before the response was complete; the output is truncated")?;
        if let Some(data) = frame.data_ref() {
            out.write_all(data)?;
            progress.advance(data.len() as u64);
        }
    }
    Ok(out.flush()?)
}
