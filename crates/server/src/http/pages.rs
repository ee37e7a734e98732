//! A listener with pages for people and scrapers beside the API, such as the debug and metrics ports of
//! envoyproxy/ratelimit. Each page is rendered on a blocking thread, so that none delays decisions.

use super::request::Request;
use super::server::{bad_head, settings};
use bytes::BytesMut;
use http::StatusCode;
use http::header::ACCEPT;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tollgate_http::h1::head::{HeadError, HeadLimits};
use tollgate_http::h1::{RawResponse, ScannedHead};
use tollgate_http::headers::HeaderLookup;
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::{ConnectionBudget, LATE, PortLimits, WhenFull};
use tollgate_http::server::{self, BodyMode, Io, NoStream, Rejection, Response, Scope, Service};

/// Maximum number of open connections of such a listener.
const CONNECTIONS: usize = 256;
const DRAIN: Duration = Duration::from_secs(5);

/// One rendered page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Status of the response.
    pub status: StatusCode,
    /// Media type.
    pub media_type: &'static str,
    /// Body.
    pub text: String,
}

impl Page {
    /// Creates a page of plain text.
    #[must_use]
    pub fn text(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, media_type: "text/plain; charset=utf-8", text: text.into() }
    }
}

/// Renders the page at a path; `accept` is the request's `Accept` field.
pub trait Pages: Send + Sync {
    /// Returns the page.
    fn page(&self, path: &str, accept: &str) -> Page;
}

struct Session {
    pages: Arc<dyn Pages>,
    peer: IpAddr,
}

impl Service for Session {
    type Head = ScannedHead;
    type Body = NoStream;

    fn parse(&self, head: &[u8], limits: &HeadLimits) -> Result<ScannedHead, HeadError> {
        ScannedHead::new(head, limits)
    }

    fn body_mode(&self, _: &ScannedHead, _: &[u8]) -> BodyMode {
        BodyMode::Skip
    }

    async fn handle<'r>(
        &'r self,
        request: server::Request<'r, ScannedHead>,
        _: Scope<'r>,
    ) -> Response<NoStream> {
        let request = Request::new(self.peer, request.head, request.bytes, request.body.whole());
        let accept = request.fields.all(&ACCEPT).next().map(String::from_utf8_lossy).unwrap_or_default();
        let (path, accept) = (request.path.to_owned(), accept.into_owned());
        let pages = Arc::clone(&self.pages);
        let failed = |_| Page::text(StatusCode::INTERNAL_SERVER_ERROR, "internal error; try again\n");
        let rendered = tokio::task::spawn_blocking(move || pages.page(&path, &accept)).await;
        let Page { status, media_type, text } = rendered.unwrap_or_else(failed);
        Response::Whole(RawResponse::new(status, media_type, text))
    }

    fn reject(&self, rejection: Rejection) -> RawResponse {
        bad_head(rejection)
    }
}

/// Serves pages until `drain` resolves and the open connections have finished.
pub async fn serve_pages(
    listener: TcpListener,
    pages: Arc<dyn Pages>,
    budget: ConnectionBudget,
    guaranteed: usize,
    first_request: Duration,
    drain: impl Future<Output = ()> + Send,
) {
    let slots = budget.port(PortLimits {
        guaranteed,
        first_request: first_request + LATE,
        ..PortLimits::new(CONNECTIONS, WhenFull::Wait)
    });
    let shutdown = Shutdown { timeout: DRAIN, new_connections: NewConnections::Reject };
    let settings = settings(first_request, Duration::from_secs(60), first_request);
    accept::serve(listener, slots, shutdown, drain, |stream, peer, drain, activity| {
        let session = Session { pages: Arc::clone(&pages), peer: peer.ip() };
        async move {
            server::serve(Io::Tcp(stream), BytesMut::new(), &settings, &drain, &activity, &session).await;
        }
    })
    .await;
}
