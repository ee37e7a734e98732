//! Reservations: an estimate that is charged now, and settled or canceled later.

use super::client::{Client, Closing};
use super::{HttpRemote, Wanted, wanted};
use crate::check_request::CheckRequest;
use crate::checks::{CheckResult, Checks, Closed, Subject};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The least time that closing a reservation may take.
const MIN_CLOSING_TIME: Duration = Duration::from_secs(1);

/// An estimate that a server has charged, or why it has not. Dropping it lets the estimate stand.
#[must_use = "settle or cancel it, or the estimate stands"]
pub struct HttpReservation {
    result: CheckResult,
    /// `None` if nothing was charged.
    id: Option<String>,
    server: usize,
    client: Arc<Client>,
    checks: Arc<Checks>,
    /// Keys of denials that are out of date once the reservation is closed.
    keys: [Option<String>; 2],
    deadline: Duration,
}

impl fmt::Debug for HttpReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The ID suffices to settle the reservation.
        f.debug_struct("HttpReservation").field("result", &self.result).finish_non_exhaustive()
    }
}

impl HttpRemote {
    /// Charges the estimated cost of `request`, to be settled or canceled before `ttl` has passed (a day at most); after
    /// that the estimate stands. While no server can be used, the fail policy decides, and there is nothing to settle.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tollgate_sdk::{CheckRequest, HttpRemote, HttpRemoteConfig};
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let remote = HttpRemote::new(HttpRemoteConfig::new("http://127.0.0.1:8080", "llm"))?;
    /// let request = CheckRequest::attributes([("user", "ann")]).with_cost(900);
    /// let reserved = remote.reserve(&request, Duration::from_secs(60)).await;
    /// if reserved.result().is_allowed {
    ///     // The model's answer took 90 tokens.
    ///     reserved.settle(90).await;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn reserve(&self, request: &CheckRequest, ttl: Duration) -> HttpReservation {
        let subject = Subject::from_request(request);
        let checked = self.ask(&subject, Wanted { reserve: Some(ttl), ..wanted(request) }).await;
        HttpReservation {
            result: checked.answer.result,
            id: checked.answer.reservation,
            server: checked.from.map_or(0, |(server, _)| server),
            client: Arc::clone(&self.client),
            checks: Arc::clone(&self.checks),
            keys: [false, true].map(|is_reservation| subject.cache_key(is_reservation)),
            deadline: self.config.deadline.max(MIN_CLOSING_TIME),
        }
    }
}

impl HttpReservation {
    /// Returns the decision about the estimate.
    #[must_use]
    pub const fn result(&self) -> &CheckResult {
        &self.result
    }

    /// Replaces the estimate by the real cost. It may be repeated after a fault.
    pub async fn settle(&self, cost: u64) -> Closed {
        self.close(|id| Closing::Settle(id, cost)).await
    }

    /// Refunds the estimate. It may be repeated after a fault.
    pub async fn cancel(&self) -> Closed {
        self.close(Closing::Cancel).await
    }

    async fn close<'a>(&'a self, closing: impl FnOnce(&'a str) -> Closing<'a>) -> Closed {
        let Some(id) = &self.id else { return Closed::Unknown };
        let closed = self.client.close(self.server, &closing(id), self.deadline).await;
        // There may be room again.
        self.checks.forget(self.keys.iter().flatten());
        closed
    }
}
