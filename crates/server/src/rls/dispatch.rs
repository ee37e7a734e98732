//! Dispatch of gRPC calls by service: checks go straight to theirs, all others through tonic's router, which boxes each
//! call twice more and keeps its path in an extension of the request.

use futures_util::future::Either;
use std::convert::Infallible;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::service::Routes;

/// A service beside all others.
#[derive(Clone)]
pub(super) struct Dispatch<S> {
    pub(super) first: S,
    pub(super) others: Routes,
}

impl<S: NamedService> Dispatch<S> {
    fn is_for_first(path: &str) -> bool {
        let method = path.strip_prefix('/').and_then(|path| path.strip_prefix(S::NAME));
        method.is_some_and(|method| method.starts_with('/'))
    }
}

impl<S> Service<Request<Body>> for Dispatch<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + NamedService,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, <Routes as Service<Request<Body>>>::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        match self.first.poll_ready(context) {
            Poll::Ready(Ok(())) => Service::<Request<Body>>::poll_ready(&mut self.others, context),
            other => other,
        }
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if Self::is_for_first(request.uri().path()) {
            Either::Left(self.first.call(request))
        } else {
            Either::Right(self.others.call(request))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone)]
    struct Named;

    impl NamedService for Named {
        const NAME: &'static str = "a.B";
    }

    #[test]
    fn only_methods_of_the_service_are_for_it() {
        let is_for_first = Dispatch::<Named>::is_for_first;
        assert!(is_for_first("/a.B/Method") && is_for_first("/a.B/"));
        for other in ["", "/", "/a.B", "a.B/Method", "/a.Bc/Method", "/a/B/Method", "//a.B/Method"] {
            assert!(!is_for_first(other), "{other}");
        }
    }
}
