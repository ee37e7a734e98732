//! Response body of a limited service: the service's own, which holds the request's permits until it ends or is
//! dropped, or the body of a denial.

use crate::decider::HeldResource;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

pin_project_lite::pin_project! {
    /// The body of a response from a service behind a [`crate::TollgateLayer`].
    #[derive(Debug)]
    pub struct LimitedBody<B> {
        #[pin]
        inner: Option<B>,
        denial: Option<Bytes>,
        hold: Option<Box<dyn HeldResource>>,
    }
}

impl<B: Body> LimitedBody<B> {
    pub(crate) fn passing(inner: B, hold: Option<Box<dyn HeldResource>>) -> Self {
        // A body that has already ended may never be polled.
        let hold = hold.filter(|_| !inner.is_end_stream());
        Self { inner: Some(inner), denial: None, hold }
    }

    pub(crate) fn denying(body: Bytes) -> Self {
        Self { inner: None, denial: Some(body).filter(|body| !body.is_empty()), hold: None }
    }
}

impl<B: Body<Data = Bytes>> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let Some(inner) = this.inner.as_pin_mut() else {
            return Poll::Ready(this.denial.take().map(|body| Ok(Frame::data(body))));
        };
        let frame = ready!(inner.poll_frame(context));
        // The end: nothing follows trailers or an error either.
        if frame.as_ref().is_none_or(|frame| frame.as_ref().map_or(true, Frame::is_trailers)) {
            *this.hold = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().map_or(self.denial.is_none(), Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let denial = || SizeHint::with_exact(self.denial.as_ref().map_or(0, |body| body.len() as u64));
        self.inner.as_ref().map_or_else(denial, Body::size_hint)
    }
}
