//! Reservations at a server: an estimate that is charged now, and settled or canceled later.

use super::{Remote, send};
use crate::check_request::CheckRequest;
use crate::checks::{CheckReason, Checks, Subject};
use crate::rls::RateLimitRequest;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// An estimate that a server has charged. Dropping it lets the estimate stand.
#[must_use = "settle or cancel it, or the estimate stands"]
pub struct RemoteReservation {
    channel: Channel,
    /// `None` if no limit counts the request, or the fail policy let it pass: there is nothing to settle.
    id: Option<String>,
    delay: Duration,
    deadline: Duration,
    checks: Arc<Checks>,
    /// Keys of denials that are out of date once the reservation is closed.
    keys: [Option<String>; 2],
}

impl fmt::Debug for RemoteReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The ID suffices to settle the reservation.
        f.debug_struct("RemoteReservation").field("delay", &self.delay).finish_non_exhaustive()
    }
}

/// Why nothing was reserved, or why a reservation is not closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteReservationError {
    /// The estimate does not fit a limit; nothing is charged.
    #[error("over the limit{}", match .retry_after {
        Some(wait) => format!("; retry after {wait:?}"),
        None => "; the estimate is more than the limit ever has".to_owned(),
    })]
    Denied {
        /// Time after which the same estimate would fit if no other request is made; `None` if it never can.
        retry_after: Option<Duration>,
    },
    /// The server has no such reservation any more: it was settled or canceled, or its time has passed.
    #[error("{0}")]
    Ended(String),
    /// The server refused the request.
    #[error("{0}")]
    Refused(String),
    /// No server answered in time.
    #[error("no server answered: {0}")]
    Unavailable(String),
}

impl From<Status> for RemoteReservationError {
    fn from(status: Status) -> Self {
        let text = status.message().to_owned();
        match status.code() {
            Code::NotFound | Code::FailedPrecondition => Self::Ended(text),
            Code::InvalidArgument | Code::ResourceExhausted => Self::Refused(text),
            _ => Self::Unavailable(text),
        }
    }
}

impl Remote {
    /// Charges the estimated cost of `request`, to be settled or canceled before `ttl` has passed (a day at most); after
    /// that the estimate stands. While no server answers, the fail policy decides: with [`FailPolicy::Open`] nothing is
    /// charged, and nothing is to be settled.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tollgate_sdk::{CheckRequest, Remote, RemoteConfig};
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let remote = Remote::new(RemoteConfig::new("http://127.0.0.1:8081", "llm"))?;
    /// let request = CheckRequest::attributes([("user", "ann")]).with_cost(900);
    /// let reserved = remote.reserve(request, Duration::from_secs(60)).await?;
    /// // The model's answer took 90 tokens.
    /// reserved.settle(90).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RemoteReservationError`] if the estimate does not fit, or nothing could be reserved.
    pub async fn reserve(
        &self,
        request: CheckRequest,
        ttl: Duration,
    ) -> Result<RemoteReservation, RemoteReservationError> {
        let subject = Subject::from_request(&request);
        let checked = self.ask(request, Some(ttl), None).await;
        let result = checked.answer.result;
        if let Some((_, Err(status))) = checked.from {
            return Err(status.into());
        }
        if !result.is_allowed {
            return Err(match result.reason {
                CheckReason::Fault(fault) => RemoteReservationError::Unavailable(fault.as_str().to_owned()),
                _ => RemoteReservationError::Denied { retry_after: result.retry_after },
            });
        }
        Ok(RemoteReservation {
            channel: self.servers.channel(checked.from.map_or(0, |(server, _)| server)),
            id: checked.answer.reservation,
            delay: result.delay,
            deadline: self.config.deadline,
            checks: Arc::clone(&self.checks),
            keys: [false, true].map(|is_reservation| subject.cache_key(is_reservation)),
        })
    }
}

impl RemoteReservation {
    /// Returns the time to hold the request back; zero unless a rule has `action: delay`.
    #[must_use]
    pub const fn delay(&self) -> Duration {
        self.delay
    }

    /// Replaces the estimate by the real cost. It may be repeated if the server did not answer.
    ///
    /// # Errors
    /// [`RemoteReservationError`] if its time has passed, or the server did not answer.
    pub async fn settle(&self, cost: u64) -> Result<(), RemoteReservationError> {
        let request = self.id.as_deref().map(|id| settle(id, cost));
        self.close(request).await
    }

    /// Refunds the estimate. It may be repeated if the server did not answer.
    ///
    /// # Errors
    /// [`RemoteReservationError`] if its time has passed, or the server did not answer.
    pub async fn cancel(&self) -> Result<(), RemoteReservationError> {
        let request = self.id.as_deref().map(cancel);
        self.close(request).await
    }

    async fn close(&self, request: Option<Request<RateLimitRequest>>) -> Result<(), RemoteReservationError> {
        let Some(request) = request else { return Ok(()) };
        let closed = send(self.channel.clone(), request, self.deadline).await;
        // There may be room again.
        self.checks.forget(self.keys.iter().flatten());
        closed?;
        Ok(())
    }
}

fn closing(ask: &'static str, id: &str) -> Request<RateLimitRequest> {
    let mut request = Request::new(RateLimitRequest::default());
    request.metadata_mut().insert("tollgate-ask", MetadataValue::from_static(ask));
    if let Ok(id) = id.try_into() {
        request.metadata_mut().insert("tollgate-reservation", id);
    }
    request
}

fn settle(id: &str, cost: u64) -> Request<RateLimitRequest> {
    let mut request = closing("settle", id);
    request.metadata_mut().insert("tollgate-cost", cost.into());
    request
}

pub(super) fn cancel(id: &str) -> Request<RateLimitRequest> {
    closing("cancel", id)
}
