//! Reservations: an estimated cost that is charged now and settled later with the real one, such as the tokens of a
//! language model.

use crate::check_request::{CheckRequest, descriptors};
use crate::in_process::InProcess;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::{CounterStore, TimeDelta};
use tollgate_engine::{Check, Limiter, ReservationId, ReserveError, SettleError};

/// An estimate that has been charged. Dropping it lets the estimate stand.
#[must_use = "settle or cancel it, or the estimate stands"]
pub struct Reservation<S> {
    limiter: Arc<Limiter<S>>,
    /// `None` if no limit counts the request: there is nothing to settle.
    id: Option<ReservationId>,
    delay: Duration,
}

impl<S> fmt::Debug for Reservation<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Why nothing was reserved. Nothing is charged then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReservationError {
    /// The estimate does not fit a limit.
    #[error("over the limit{}", match .retry_after {
        Some(wait) => format!("; retry after {wait:?}"),
        None => "; the estimate is more than the limit ever has".to_owned(),
    })]
    Denied {
        /// Time after which the same estimate would fit if no other request is made; `None` if it never can.
        retry_after: Option<Duration>,
    },
    /// The reservation cannot be stored.
    #[error(transparent)]
    Store(#[from] ReserveError),
}

impl<S: CounterStore + 'static> InProcess<S> {
    /// Charges the estimated cost of `request`, to be settled or canceled before `ttl` has passed; after that the estimate
    /// stands.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate_sdk::{CheckRequest, InProcess, ReservationError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limits = InProcess::from_rules("{domain: llm, descriptors: [{key: user, limit: 1000/hour}]}", "llm")?;
    /// let request = |tokens| CheckRequest::attributes([("user", "ann")]).with_cost(tokens);
    /// let reserved = limits.reserve(&request(900), Duration::from_secs(60)).await?;
    /// assert!(matches!(
    ///     limits.reserve(&request(900), Duration::from_secs(60)).await,
    ///     Err(ReservationError::Denied { .. })
    /// ));
    /// reserved.settle(90).await?;
    /// limits.reserve(&request(900), Duration::from_secs(60)).await?.cancel().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ReservationError`] if the estimate does not fit, or too many reservations are open.
    pub async fn reserve(
        &self,
        request: &CheckRequest,
        ttl: Duration,
    ) -> Result<Reservation<S>, ReservationError> {
        let request = self.with_endpoint(request.clone());
        let entries = request.entries();
        let descriptors = descriptors(&entries);
        let check = Check {
            domain: &self.domain,
            input: request.engine_request(&entries, &descriptors),
            cost: request.engine_cost(),
            protocol: "sdk",
            trace: None,
            address: None,
            reason: None,
        };
        let ttl = TimeDelta::from_micros(u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX));
        let reserved = self.limiter.reserve(&check, ttl, None).await?;
        match reserved.id {
            id if reserved.decision.is_allowed() => {
                let delay = reserved.decision.delay().into();
                Ok(Reservation { limiter: Arc::clone(&self.limiter), id, delay })
            }
            _ => {
                let retry_after = reserved.decision.retry_after().map(Duration::from);
                Err(ReservationError::Denied { retry_after })
            }
        }
    }
}

impl<S: CounterStore> Reservation<S> {
    /// Returns the time to hold the request back; zero unless a rule has `action: delay`.
    #[must_use]
    pub const fn delay(&self) -> Duration {
        self.delay
    }

    /// Replaces the estimate by the real cost.
    ///
    /// # Errors
    /// [`SettleError`] if its time has passed, or the store did not take the difference.
    pub async fn settle(self, cost: u64) -> Result<(), SettleError> {
        match self.id {
            Some(id) => self.limiter.settle(id, cost).await.map(drop),
            None => Ok(()),
        }
    }

    /// Refunds the estimate.
    ///
    /// # Errors
    /// [`SettleError`] if its time has passed, or the store did not take it.
    pub async fn cancel(self) -> Result<(), SettleError> {
        match self.id {
            Some(id) => self.limiter.cancel(id).await.map(drop),
            None => Ok(()),
        }
    }
}
