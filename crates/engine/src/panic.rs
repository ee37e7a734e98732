//! Panics while deciding: a bug in planning, in a store or in an observer must neither lose the request that met it nor
//! end the process. The request is decided as if the store had failed, by the fail policy of the rules that it has
//! matched so far; the panic is counted and logged.
//!
//! The guards cost nothing to speak of: catching is a table that is read only when something panics. Rejected: leaving
//! it to the runtime, which ends the connection's task and with it every other request of that connection, and answers
//! none of them.

use crate::decision::{DecisionDetails, DecisionVerdict, Origin};
use crate::fold::{self, decided_by, decides, push_unknown};
use crate::limiter::Limiter;
use futures_util::FutureExt;
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::{CounterStore, PermitId, StoreError, TimeDelta};
use tollgate_rules::{FailPolicy, Plan};

/// Minimum time between two log lines, in microseconds: a bug that every request meets must not flood the log.
const LOG_INTERVAL: u64 = 1_000_000;
/// Maximum length of a panic's message in the log, in characters.
const MAX_MESSAGE: usize = 200;

/// Panics so far.
#[derive(Debug, Default)]
pub(crate) struct Panics {
    count: AtomicU64,
    /// When the next one may be logged.
    next_log: AtomicU64,
}

/// Proof that something panicked; it has been counted and logged.
#[derive(Debug)]
pub(crate) struct Panicked(());

impl<S> Limiter<S> {
    /// Returns the number of panics while deciding. Each is a bug.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.panics.count.load(Ordering::Relaxed)
    }

    /// Runs a part of a decision.
    #[inline]
    pub(crate) fn guarded<T>(&self, part: impl FnOnce() -> T) -> Result<T, Panicked> {
        catch_unwind(AssertUnwindSafe(part)).map_err(|panic| self.record_panic(&*panic))
    }

    /// Awaits a part of a decision, which is pinned by the caller: here it would be copied.
    pub(crate) async fn guarded_future<T>(
        &self,
        part: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Panicked> {
        AssertUnwindSafe(part).catch_unwind().await.map_err(|panic| self.record_panic(&*panic))
    }

    #[cold]
    fn record_panic(&self, panic: &(dyn Any + Send)) -> Panicked {
        let panics = self.panics.count.fetch_add(1, Ordering::Relaxed) + 1;
        let (now, next) = (self.clock.now().as_micros(), self.panics.next_log.load(Ordering::Relaxed));
        let taken = || {
            let next_log = &self.panics.next_log;
            next_log.compare_exchange(next, now + LOG_INTERVAL, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if now >= next && taken() {
            let message = panic.downcast_ref::<&str>().copied();
            let message =
                message.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("");
            let message: String = message.chars().take(MAX_MESSAGE).collect();
            tracing::error!(
                panics,
                message,
                "panic while deciding; the fail policy decides. This is a bug: please report it"
            );
        }
        Panicked(())
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Decides a request whose decision panicked.
    #[cold]
    pub(crate) async fn decide_after_panic(
        &self,
        Panicked(()): Panicked,
        plan: &mut Plan<'_>,
        permit: PermitId,
        details: &mut DecisionDetails,
    ) {
        begin_again(plan, details);
        if plan.limits.is_empty() {
            details.origin = Origin::FailOpen;
            return;
        }
        let error = StoreError::Unavailable("panic while deciding".to_owned());
        let decided = {
            let deciding = pin!(self.apply_fail_policy(plan, permit, error, None, details));
            self.guarded_future(deciding).await
        };
        if decided.is_ok() {
            return;
        }
        // Local counters and refunds are part of what fails. The rules still say open or closed.
        begin_again(plan, details);
        push_unknown(plan, details);
        details.origin = Origin::FailOpen;
        let closed = plan.limits.iter().find(|matched| {
            let policy =
                matched.rule.map_or(FailPolicy::Open, |rule| rule.on_error.policy(plan.tier_for(rule)));
            policy == FailPolicy::Closed && decides(matched)
        });
        if let Some(matched) = closed {
            details.verdict = DecisionVerdict::Denied { retry_after: Some(TimeDelta::from_secs(1)) };
            details.origin = Origin::FailClosed;
            details.denied_by = Some(decided_by(matched));
        }
    }
}

/// Makes a decision what it was before the plan was charged.
fn begin_again(plan: &Plan<'_>, details: &mut DecisionDetails) {
    details.clear();
    fold::descriptors(plan, details);
}
