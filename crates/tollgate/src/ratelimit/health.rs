//! Health as envoyproxy/ratelimit reports it: healthy once Redis has answered, until the shutdown begins, and as long as the
//! configured conditions hold. By default a rejected configuration or a later failure of Redis changes nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tollgate_store::RedisConfig;

/// What health requires beside a first answer of Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HealthPolicy {
    /// At least one domain has rules.
    pub(crate) needs_domain: bool,
    /// Redis can be used now.
    pub(crate) needs_connection: bool,
}

/// Pause between two probes of Redis.
const INTERVAL: Duration = Duration::from_millis(500);

/// What is known about Redis.
#[derive(Debug, Default)]
pub(crate) struct ServiceHealth {
    policy: HealthPolicy,
    has_answered: AtomicBool,
    is_connected: AtomicBool,
}

impl ServiceHealth {
    pub(crate) fn new(policy: HealthPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Returns whether the service is healthy.
    pub(crate) fn is_healthy(&self, has_domain: bool, is_any_store_down: bool) -> bool {
        let is_connected = self.is_connected.load(Ordering::Relaxed) && !is_any_store_down;
        self.has_answered.load(Ordering::Relaxed)
            && (has_domain || !self.policy.needs_domain)
            && (is_connected || !self.policy.needs_connection)
    }

    /// Probes every Redis: until all have answered, or for as long as the future is polled if health depends on it. Without
    /// Redis there is nothing to wait for.
    pub(crate) async fn probe(&self, stores: &[RedisConfig]) {
        loop {
            let mut answers = true;
            for redis in stores {
                answers = answers && redis.answers().await;
            }
            self.is_connected.store(answers, Ordering::Relaxed);
            if answers {
                self.has_answered.store(true, Ordering::Relaxed);
            }
            if stores.is_empty() || answers && !self.policy.needs_connection {
                return;
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn health_follows_what_is_asked_for() {
        let plain = ServiceHealth::new(HealthPolicy::default());
        assert!(!plain.is_healthy(true, false), "before Redis has answered");
        plain.probe(&[]).await;
        assert!(plain.is_healthy(false, true), "a dead Redis and no rules change nothing");
        let strict = ServiceHealth::new(HealthPolicy { needs_domain: true, needs_connection: true });
        strict.probe(&[]).await;
        assert!(strict.is_healthy(true, false));
        assert!(!strict.is_healthy(false, false) && !strict.is_healthy(true, true));
    }
}
