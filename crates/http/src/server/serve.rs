//! Serves a client's connection, request after request, within one task.

use super::body::{BodyError, BodyReader, BufferedRead, ReadReturn, RequestBody};
use super::connection::{Connection, ConnectionIo, Gone, Next, Settings};
use super::connections::Activity;
use super::drain::Drain;
use super::io::Io;
use super::lazy_timeout::LazyTimeout;
use super::service::{
    BodyMode, Payload, Rejection, Request, Response, ResponseBody, Scope, Service, Streamed, Upgrade,
};
use super::write::{self, Frames, MAX_COPIED};
use crate::h1::head::Framing;
use crate::h1::{ConnectionMode, RawResponse, ResponseBodyMode, ScannedHead};
use bytes::{Bytes, BytesMut};
use http::Version;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use tollgate_core::{Clock, SystemClock};

/// Maximum bytes of responses that are gathered before they are sent.
const MAX_UNSENT: usize = 64 * 1024;
/// Capacity that is sufficient for most responses, in bytes.
const RESPONSE_SIZE: usize = 1024;

/// The reason a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The last response was written.
    Close,
    /// The client may still be sending a body that is not read.
    CloseWhileSending,
    /// The request was rejected; a last response names the reason.
    Reject(Rejection),
    /// The client has disconnected, or its response failed: nothing more can be sent.
    Gone,
}

impl From<Gone> for Stop {
    fn from(Gone: Gone) -> Self {
        Self::Gone
    }
}

/// Serves one connection to its end. `first` are bytes that were already read from it.
pub async fn serve<V: Service>(
    io: Io,
    first: BytesMut,
    settings: &Settings,
    drain: &Drain,
    activity: &Arc<Activity>,
    service: &V,
) {
    let mut begun = pin!(drain.begun());
    Drain::wake_on_begin(begun.as_mut()).await;
    let (read, write) = io.split();
    let io = ConnectionIo {
        source: Some(BufferedRead { read, buffer: first }),
        leftover: None,
        lent: None,
        expects_continue: false,
        write,
        out: BytesMut::new(),
        half_closed: None,
        half_closed_timeout: settings.half_closed_timeout,
    };
    let timeout = LazyTimeout::new(settings.header_timeout);
    let mut connection = Connection { io, timeout, settings, drain, activity, clock: SystemClock::new() };
    let mut is_new = true;
    let stop = loop {
        let end = match connection.next_head(is_new).await {
            Next::Head(end) => end,
            Next::End => break Stop::Close,
            Next::Slow => break Stop::Reject(Rejection::SlowHead),
            Next::Reject(error) => break Stop::Reject(Rejection::Head(error)),
        };
        is_new = false;
        if let Err(stop) = connection.serve_one(service, end).await {
            break stop;
        }
    };
    Box::pin(connection.finish(service, stop)).await;
}

impl Connection<'_> {
    /// Serves the request whose head ends at `end`.
    async fn serve_one<V: Service>(&mut self, service: &V, end: usize) -> Result<(), Stop> {
        let Some(source) = &mut self.io.source else { return Err(Stop::Gone) };
        let parsed = service.parse(&source.buffer[..end], &self.settings.head);
        let head = parsed.map_err(|error| Stop::Reject(Rejection::Head(error)))?;
        let scan: &ScannedHead = head.as_ref();
        let mut whole = end;
        if scan.framing != Framing::None {
            match (scan.framing, service.body_mode(&head, &source.buffer[..end])) {
                (Framing::Length(length), BodyMode::Whole { max }) if length <= max as u64 => {
                    whole += length as usize;
                    if source.buffer.len() < whole {
                        self.fill_to(scan, whole).await?;
                    }
                }
                (_, mode) => return Box::pin(self.serve_unusual(service, &head, end, mode)).await,
            }
        }
        let Some(source) = &mut self.io.source else { return Err(Stop::Gone) };
        // Taken, so that more can be read while the request borrows from it.
        let input = std::mem::take(&mut source.buffer);
        let body = if whole > end { Payload::Whole(&input[end..whole]) } else { Payload::None };
        let request = Request { head: &head, bytes: &input[..end], body };
        let (response, fields) = self.handle(service, request).await?;
        self.io.restore(input, whole);
        self.respond(scan, response, fields).await
    }

    /// Waits for the handler of one request. Returns its response, and the head that it wrote.
    async fn handle<V: Service>(
        &mut self,
        service: &V,
        request: Request<'_, V::Head>,
    ) -> Result<(Response<V::Body>, BytesMut), Gone> {
        let Self { io, timeout, activity, .. } = self;
        activity.busy();
        // If no other response is unsent, the handler writes directly into the output buffer.
        let mut fields = if io.out.is_empty() { std::mem::take(&mut io.out) } else { BytesMut::new() };
        let response = {
            let mut handling = pin!(service.handle(request, Scope { out: &mut fields, timeout }));
            poll_fn(|cx| io.poll_handler(cx, handling.as_mut())).await?
        };
        Ok((response, fields))
    }

    /// Serves a request whose body is chunked, too large, skipped or streamed.
    async fn serve_unusual<V: Service>(
        &mut self,
        service: &V,
        head: &V::Head,
        end: usize,
        mode: BodyMode,
    ) -> Result<(), Stop> {
        let scan: &ScannedHead = head.as_ref();
        let Some(mut source) = self.io.source.take() else { return Err(Stop::Gone) };
        let rest = source.buffer.split_off(end);
        let input = std::mem::replace(&mut source.buffer, rest);
        let mut reader = BodyReader::new(scan.framing);
        self.io.expects_continue = scan.expects_continue;
        let mut gathered = Vec::new();
        let body = match mode {
            BodyMode::Stream => {
                let lent = Arc::new(ReadReturn::default());
                self.io.lent = Some(Arc::clone(&lent));
                let idle = self.settings.body_timeout;
                Payload::Stream(RequestBody::new(source, scan.framing, lent, idle, Arc::clone(self.activity)))
            }
            BodyMode::Skip => {
                self.io.source = Some(source);
                self.io.leftover = Some(reader);
                Payload::None
            }
            BodyMode::Whole { max } => {
                self.io.source = Some(source);
                let is_short = scan.framing.length().is_none_or(|length| length <= max as u64);
                if !is_short || !self.gather(&mut reader, &mut gathered, max).await? {
                    self.io.leftover = Some(reader);
                    let response = service.reject(Rejection::TooLarge { max });
                    return self.respond::<V::Body>(scan, Response::Whole(response), BytesMut::new()).await;
                }
                Payload::Whole(&gathered)
            }
        };
        let (response, fields) = self.handle(service, Request { head, bytes: &input, body }).await?;
        self.io.reclaim();
        self.respond(scan, response, fields).await
    }

    /// Starts the time for a body. Until all of it has arrived, the connection waits for its client.
    fn await_body(&mut self) {
        let now = self.timeout.set(self.settings.body_timeout);
        self.activity.idle_unless_silent(now);
    }

    /// Waits until the buffer has `whole` bytes.
    async fn fill_to(&mut self, scan: &ScannedHead, whole: usize) -> Result<(), Stop> {
        self.await_body();
        if scan.expects_continue {
            self.io.put_continue();
        }
        while self.io.source.as_ref().is_some_and(|source| source.buffer.len() < whole) {
            if !self.fill().await? {
                return Err(Stop::Reject(Rejection::SlowBody));
            }
        }
        Ok(())
    }

    /// Reads a chunked body. Returns false if it is larger than `max`.
    async fn gather(
        &mut self,
        reader: &mut BodyReader,
        body: &mut Vec<u8>,
        max: usize,
    ) -> Result<bool, Stop> {
        self.await_body();
        if self.io.expects_continue {
            self.io.put_continue();
        }
        let failed = |error| match error {
            BodyError::TooSlow => Stop::Reject(Rejection::SlowBody),
            BodyError::Malformed => Stop::Reject(Rejection::Chunks),
            _ => Stop::Gone,
        };
        while let Some(frame) = self.next_frame(reader).await.map_err(failed)? {
            let Ok(data) = frame.into_data() else { continue };
            if body.len() + data.len() > max {
                return Ok(false);
            }
            body.extend_from_slice(&data);
        }
        Ok(true)
    }

    /// Returns whether another request may follow this one.
    fn is_keep_alive(&self, scan: &ScannedHead) -> bool {
        scan.keep_alive && self.can_discard() && !self.waits_to_send() && !self.drain.has_begun()
    }

    /// Returns whether the client waits for a `100 Continue` that is not sent.
    fn waits_to_send(&self) -> bool {
        let has_sent_nothing = || self.io.source.as_ref().is_none_or(|source| source.buffer.is_empty());
        self.io.expects_continue && has_sent_nothing()
    }

    /// Returns whether the rest of the request's body is short enough to discard.
    fn can_discard(&self) -> bool {
        let max = self.settings.max_discarded;
        let is_short = |reader: &BodyReader| max > 0 && reader.length().is_none_or(|length| length <= max);
        self.io.leftover.as_ref().is_none_or(is_short)
    }

    /// Writes a response and prepares the connection for the next request.
    async fn respond<B: ResponseBody>(
        &mut self,
        scan: &ScannedHead,
        response: Response<B>,
        fields: BytesMut,
    ) -> Result<(), Stop> {
        let mut is_kept = self.is_keep_alive(scan);
        if let Some(lent) = &self.io.lent {
            lent.set_answered();
            self.activity.busy();
        }
        match response {
            Response::Whole(response) => {
                if self.io.out.is_empty() {
                    // Reuses the allocation.
                    self.io.out = fields;
                    self.io.out.clear();
                }
                self.put_response(scan, &response, is_kept);
            }
            Response::Stream(streamed) => is_kept = self.put_stream(scan, streamed, fields, is_kept).await?,
            Response::Upgrade(upgrade) => return Err(Box::pin(self.upgrade(upgrade, fields)).await),
        }
        self.io.reclaim();
        // The response may precede the end of the request's body.
        if !is_kept || self.io.source.is_none() || !self.can_discard() {
            return Err(Stop::Close);
        }
        if let Some(reader) = self.io.leftover.take() {
            Box::pin(self.skip(reader)).await?;
        }
        if self.io.out.len() > MAX_UNSENT {
            self.flush(Bytes::new()).await?;
        }
        Ok(())
    }

    fn put_response(&mut self, scan: &ScannedHead, response: &RawResponse, is_kept: bool) {
        let after = match scan.version {
            _ if !is_kept => ConnectionMode::Close,
            Version::HTTP_10 => ConnectionMode::KeepAliveHttp10,
            _ => ConnectionMode::KeepAlive,
        };
        let wants = if scan.is_head { ResponseBodyMode::Head } else { ResponseBodyMode::All };
        self.io.out.reserve(RESPONSE_SIZE);
        response.write(&mut self.io.out, wants, after, self.clock.now());
    }

    /// Writes the rest of a streamed response's head, and its body. Returns whether the connection stays open.
    async fn put_stream<B: ResponseBody>(
        &mut self,
        scan: &ScannedHead,
        streamed: Streamed<B>,
        fields: BytesMut,
        is_kept: bool,
    ) -> Result<bool, Stop> {
        let Streamed { status, stated_length, mut body } = streamed;
        let frames = Frames::for_response(status, scan.is_head, scan.version, body.size_hint().exact());
        let is_kept = is_kept && frames != Frames::UntilClose;
        self.put_head(fields);
        let out = &mut self.io.out;
        if !is_kept {
            out.extend_from_slice(b"connection: close\r\n");
        }
        write::end_of_response_fields(out, frames, stated_length);
        if frames == Frames::None {
            body.skip();
        } else if body.take_short(MAX_COPIED, out) {
            drop(body);
        } else {
            Box::pin(self.write_body(body, frames)).await?;
        }
        Ok(is_kept)
    }

    /// Appends the head that a handler wrote to the output.
    fn put_head(&mut self, fields: BytesMut) {
        if self.io.out.is_empty() {
            self.io.out = fields;
        } else {
            self.io.out.extend_from_slice(&fields);
        }
    }

    /// Discards the unread rest of a body.
    async fn skip(&mut self, reader: BodyReader) -> Result<(), Stop> {
        if self.waits_to_send() {
            return Err(Stop::CloseWhileSending);
        }
        self.discard(reader).await.map_err(|Gone| Stop::CloseWhileSending)
    }

    /// Hands the connection over to another protocol.
    async fn upgrade(&mut self, upgrade: Upgrade, fields: BytesMut) -> Stop {
        self.put_head(fields);
        self.io.out.extend_from_slice(b"\r\n");
        if self.flush(Bytes::new()).await.is_ok()
            && let Some(source) = self.io.source.take()
        {
            // Both halves move into the tunnel, which closes the connection.
            let write = std::mem::replace(&mut self.io.write, super::io::WriteHalf::Closed);
            (upgrade.0)(source, write).await;
        }
        Stop::Gone
    }

    /// Ends the connection, with a last response after a rejection.
    async fn finish<V: Service>(&mut self, service: &V, stop: Stop) {
        let is_sending = match stop {
            Stop::Gone => return,
            Stop::Close => false,
            Stop::CloseWhileSending => true,
            Stop::Reject(rejection) => {
                let response = service.reject(rejection);
                response.write(
                    &mut self.io.out,
                    ResponseBodyMode::All,
                    ConnectionMode::Close,
                    self.clock.now(),
                );
                true
            }
        };
        self.close(is_sending).await;
    }
}
