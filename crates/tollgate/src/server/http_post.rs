//! Client of one HTTP endpoint that takes posts: a trace collector, a webhook. Keeps a connection between posts.

use crate::admin_client::{Client, RequestBody};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{HOST, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, StatusCode, Uri};
use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

/// Timeout of one post.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;

/// Endpoint with its connection state.
pub(crate) struct PostClient {
    uri: Uri,
    client: Client,
    /// Idle connection from the last post; the server may have closed it.
    connection: Option<SendRequest<RequestBody>>,
}

/// Reason that a post was not accepted.
pub(crate) enum PostError {
    /// No answer.
    Failed(anyhow::Error),
    /// An answer other than success, with its `Retry-After`, if any.
    Refused(StatusCode, Option<Duration>),
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "{error:#}"),
            Self::Refused(status, _) => write!(f, "it answers {status}"),
        }
    }
}

impl PostClient {
    pub(crate) fn new(uri: Uri, client: Client) -> Self {
        Self { uri, client, connection: None }
    }

    /// Posts a body, once. Returns the body of the response.
    pub(crate) async fn post(
        &mut self,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Bytes, PostError> {
        let late = |_| Err(PostError::Failed(anyhow::anyhow!("no answer in {} s", TIMEOUT.as_secs())));
        tokio::time::timeout(TIMEOUT, self.exchange(headers, body)).await.unwrap_or_else(late)
    }

    async fn exchange(
        &mut self,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Bytes, PostError> {
        let mut sender = match self.connection.take().filter(|kept| !kept.is_closed()) {
            Some(kept) => kept,
            None => self.client.connect().await.map_err(PostError::Failed)?,
        };
        let body = Full::new(body).map_err(|never: Infallible| match never {}).boxed_unsync();
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.path_and_query().cloned().map(Uri::from).unwrap_or_default();
        let own = request.headers_mut();
        own.insert(HOST, self.client.host().map_err(PostError::Failed)?);
        own.extend(headers.iter().cloned());
        sender.ready().await.map_err(|error| PostError::Failed(error.into()))?;
        let answer = sender.send_request(request).await.map_err(|error| PostError::Failed(error.into()))?;
        let status = answer.status();
        if !status.is_success() {
            let after = answer.headers().get(RETRY_AFTER).and_then(|text| text.to_str().ok()?.parse().ok());
            return Err(PostError::Refused(status, after.map(Duration::from_secs)));
        }
        let answer = Limited::new(answer.into_body(), MAX_RESPONSE).collect().await;
        // The server has accepted the post, even if the rest of its response is lost.
        let Ok(answer) = answer else { return Ok(Bytes::new()) };
        self.connection = Some(sender);
        Ok(answer.to_bytes())
    }
}
