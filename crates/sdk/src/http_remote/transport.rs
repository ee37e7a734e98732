//! Requests to several servers over kept connections, within bounds of size and time.

use crate::checks::{Fault, MAX_BODY};
use crate::http1::{Connection, Origin};
use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A server's response. A body beyond the bound is cut off behind it.
#[derive(Debug)]
pub(super) struct HttpResponse {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// The servers, and their idle connections.
#[derive(Debug)]
pub(super) struct Transport {
    servers: Vec<(Origin, Mutex<Vec<Connection>>)>,
    token: Option<HeaderValue>,
    max_idle: usize,
}

impl Transport {
    pub(super) fn new(servers: Vec<Origin>, token: Option<HeaderValue>, max_idle: usize) -> Self {
        let servers = servers.into_iter().map(|origin| (origin, Mutex::default())).collect();
        Self { servers, token, max_idle }
    }

    pub(super) fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Sends a body to a server, and reads the response.
    pub(super) async fn post(
        &self,
        server: usize,
        path: &'static str,
        body: Bytes,
        traceparent: Option<&HeaderValue>,
        within: Duration,
    ) -> Result<HttpResponse, Fault> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static(path);
        let headers = request.headers_mut();
        headers.insert(HOST, self.servers[server].0.host.clone());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        if let Some(parent) = traceparent {
            headers.insert("traceparent", parent.clone());
        }
        let exchange = self.exchange(server, request);
        tokio::time::timeout(within, exchange).await.unwrap_or(Err(Fault::Timeout))
    }

    async fn exchange(
        &self,
        server: usize,
        mut request: Request<Full<Bytes>>,
    ) -> Result<HttpResponse, Fault> {
        loop {
            let kept = self.idle(server).pop();
            let is_kept = kept.is_some();
            let mut connection = match kept {
                Some(kept) => kept,
                None => self.servers[server].0.connect().await.map_err(|_| Fault::Unreachable)?,
            };
            if connection.ready().await.is_err() {
                if is_kept {
                    continue;
                }
                return Err(Fault::Unreachable);
            }
            match connection.try_send_request(request).await {
                Ok(response) => return self.receive(server, connection, response).await,
                Err(mut error) => match error.take_message() {
                    // The server had closed the kept connection. Nothing was sent, so nothing is charged twice.
                    Some(unsent) if is_kept => request = unsent,
                    _ => return Err(Fault::Unreachable),
                },
            }
        }
    }

    async fn receive(
        &self,
        server: usize,
        connection: Connection,
        response: Response<Incoming>,
    ) -> Result<HttpResponse, Fault> {
        let (head, mut body) = response.into_parts();
        let mut whole = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Fault::Unreachable)?;
            if let Ok(data) = frame.into_data() {
                whole.extend_from_slice(&data);
            }
            if whole.len() > MAX_BODY {
                // The connection is closed: there may be no end of it.
                return Ok(HttpResponse {
                    status: head.status.as_u16(),
                    headers: head.headers,
                    body: whole.freeze(),
                });
            }
        }
        let mut idle = self.idle(server);
        if idle.len() < self.max_idle {
            idle.push(connection);
        }
        Ok(HttpResponse { status: head.status.as_u16(), headers: head.headers, body: whole.freeze() })
    }

    fn idle(&self, server: usize) -> MutexGuard<'_, Vec<Connection>> {
        self.servers[server].1.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
