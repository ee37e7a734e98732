//! A client's HTTP/1 connection: passes its requests to the proxy.

use super::tunnel;
use crate::body::{ClientBody, ProxiedBody};
use crate::headers::Peer;
use crate::message::{Forwarded, Proxied};
use crate::problem;
use crate::proxy::Proxy;
use http::StatusCode;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_http::h1::RawResponse;
use tollgate_http::h1::head::{self, HeadError, HeadLimits, RequestHead};
use tollgate_http::identity::RequestView;
use tollgate_http::server::{
    BodyMode, Payload, Rejection, Request, Response, Scope, Service, Streamed, Upgrade,
};

/// One connection.
pub(crate) struct Session<S: CounterStore + 'static> {
    pub(crate) proxy: Arc<Proxy<S>>,
    pub(crate) peer: Peer,
}

impl<S: CounterStore + 'static> Service for Session<S> {
    type Head = RequestHead;
    type Body = ProxiedBody;

    fn parse(&self, head: &[u8], limits: &HeadLimits) -> Result<RequestHead, HeadError> {
        head::request(head, limits)
    }

    fn body_mode(&self, _: &RequestHead, _: &[u8]) -> BodyMode {
        BodyMode::Stream
    }

    async fn handle<'r>(
        &'r self,
        request: Request<'r, RequestHead>,
        scope: Scope<'r>,
    ) -> Response<ProxiedBody> {
        let Request { head, bytes, body } = request;
        let fields = head.fields(bytes);
        let forwarded = Forwarded {
            asked: RequestView {
                peer: self.peer.address,
                method: head.method.as_str(),
                path: head.path(bytes),
                authority: head.authority(),
                headers: &fields,
            },
            method: &head.method,
            target: head.path_and_query(bytes),
        };
        let body = match body {
            Payload::Stream(body) => Some(ClientBody::h1(body)),
            Payload::None | Payload::Whole(_) => None,
        };
        match self.proxy.handle(&self.peer, &forwarded, body, scope.out, scope.timeout).await {
            Proxied::Response { status, stated_length, body } => {
                Response::Stream(Streamed { status, stated_length, body })
            }
            Proxied::Tunnel(tunnel, finish) => Response::Upgrade(Upgrade(Box::new(|source, write| {
                Box::pin(async move {
                    tunnel::run(source, write, *tunnel).await;
                    drop(finish);
                })
            }))),
        }
    }

    fn reject(&self, rejection: Rejection) -> RawResponse {
        let (status, detail) = match rejection {
            Rejection::Head(error) => (error.status(), error.to_string()),
            Rejection::SlowHead => {
                (StatusCode::REQUEST_TIMEOUT, "the header section was not received in time".to_owned())
            }
            // Bodies are streamed, so the proxy reports their errors.
            _ => (StatusCode::BAD_REQUEST, "cannot read the body".to_owned()),
        };
        self.proxy.rejected(&self.peer, status, &detail);
        problem::response(status, &detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::BytesMut;
    use tollgate_core::SystemClock;
    use tollgate_http::server::connections::Activity;
    use tollgate_http::server::{self, Drain, Io, Settings};
    use tollgate_store::MemoryStore;

    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    /// An idle connection takes the memory of its largest state, so rare large states are boxed.
    #[test]
    fn a_connection_is_small() {
        type Parts<'a> =
            (Io, &'a Settings, &'a Drain, &'a Arc<Activity>, &'a Session<MemoryStore<SystemClock>>);
        let size = size_of_future(|(io, settings, drain, activity, session): Parts<'_>| {
            server::serve(io, BytesMut::new(), settings, drain, activity, session)
        });
        assert!(size <= 8 * 1024, "{size} bytes");
    }
}
