//! What the clients of a server share, whichever protocol they ask by (`clients/conformance/README.md`): a denial that is
//! still in force is repeated without a server, without a decision the fail policy decides, and the result has the reason.
//!
//! | file | contents |
//! |---|---|
//! | `result` | [`CheckResult`] and its parts |
//! | `answer` | reads a server's decisions |
//! | `subject` | what is checked |
//! | `deny_cache` | denials that are still in force |
//! | `respond` | the decision for a layer |

mod answer;
mod deny_cache;
mod respond;
mod result;
mod subject;

pub(crate) use self::answer::{Answer, read_check};
#[cfg(feature = "remote-http")]
pub(crate) use self::answer::{MAX_BODY, read_closed};
pub(crate) use self::deny_cache::DEFAULT_ENTRIES;
pub(crate) use self::respond::layer_decision;
pub use self::result::{CallerProblem, CheckReason, CheckResult, Closed, Fault, ResultSource, RuleResponse};
pub(crate) use self::subject::Subject;
#[cfg(feature = "remote-http")]
pub(crate) use self::subject::json;

use self::deny_cache::DenyCache;
use crate::fail_policy::FailPolicy;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Decides without a server where that is possible, and where it is necessary.
#[derive(Debug)]
pub(crate) struct Checks {
    cache: Mutex<DenyCache>,
    has_cache: bool,
    fail_policy: FailPolicy,
    /// The time that the cache counts from.
    began: Instant,
    /// The last request got no decision; changes are logged once, not for every request.
    is_unavailable: AtomicBool,
}

/// A decision, and where it came from.
pub(crate) struct Checked<T> {
    pub(crate) answer: Answer,
    /// The server that decided, and what else its response has; `None` if none did.
    pub(crate) from: Option<(usize, T)>,
}

impl Checks {
    pub(crate) fn new(fail_policy: FailPolicy, deny_cache: usize) -> Self {
        Self {
            cache: Mutex::new(DenyCache::new(deny_cache)),
            has_cache: deny_cache > 0,
            fail_policy,
            began: Instant::now(),
            is_unavailable: AtomicBool::new(false),
        }
    }

    /// Returns the key of a subject in the cache; `None` if its denials are not stored.
    pub(crate) fn key(&self, subject: &Subject, is_reservation: bool) -> Option<String> {
        if self.has_cache { subject.cache_key(is_reservation) } else { None }
    }

    /// Decides a request: by a denial that is still in force, by the server that `ask` finds, or by the fail policy.
    pub(crate) async fn decide<T>(
        &self,
        key: Option<String>,
        cost: u64,
        ask: impl Future<Output = Result<(usize, Answer, T), Fault>>,
    ) -> Checked<T> {
        let sent_at_ms = self.now_ms();
        if let Some(key) = &key
            && let Some(denial) = self.lock().lookup(key, cost, sent_at_ms)
        {
            return Checked { answer: denial.into(), from: None };
        }
        let asked = ask.await;
        self.log(asked.as_ref().err());
        match asked {
            Ok((server, answer, rest)) => {
                if let Some(key) = key.filter(|_| answer.is_cacheable) {
                    self.lock().store(key, cost, answer.result.clone(), sent_at_ms);
                }
                Checked { answer, from: Some((server, rest)) }
            }
            Err(fault) => {
                let result = CheckResult::by_policy(self.fail_policy == FailPolicy::Open, fault);
                Checked { answer: result.into(), from: None }
            }
        }
    }

    /// Forgets denials of requests whose reservation was closed: there may be room again.
    pub(crate) fn forget<'k>(&self, keys: impl IntoIterator<Item = &'k String>) {
        let mut cache = self.lock();
        keys.into_iter().for_each(|key| cache.remove(key));
    }

    /// Forgets all denials.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    fn now_ms(&self) -> u64 {
        millis(self.began.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, DenyCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs that no server could be used, and that one can be again: once each.
    fn log(&self, fault: Option<&Fault>) {
        let was = self.is_unavailable.load(Ordering::Relaxed);
        if was == fault.is_some() || self.is_unavailable.swap(fault.is_some(), Ordering::Relaxed) != was {
            return;
        }
        match fault {
            Some(fault) => tracing::warn!(%fault, "Tollgate server unavailable"),
            None => tracing::info!("Tollgate server available again"),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
