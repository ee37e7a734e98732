//! Asking endpoints whether they are well, each on its own, and closing connections that have waited for too long.

use crate::config::HealthConfig;
use crate::pool::Pool;
use crate::upstream;
use std::sync::Arc;
use std::time::Duration;

const SWEEP: Duration = Duration::from_secs(5);

/// Watches an upstream for as long as it is polled.
pub(crate) async fn watch(pool: Arc<Pool>) {
    let mut asking = tokio::task::JoinSet::new();
    if let Some(health) = &pool.config.health {
        for at in 0..pool.backends.len() {
            asking.spawn(probe_backend(Arc::clone(&pool), at, health.clone()));
        }
    }
    loop {
        tokio::time::sleep(SWEEP).await;
        for endpoint in &pool.backends {
            endpoint.sweep();
        }
    }
}

async fn probe_backend(pool: Arc<Pool>, at: usize, health: HealthConfig) {
    let (mut well, mut unwell) = (0, 0);
    loop {
        let probe = upstream::probe(&pool, at, &health.path, health.timeout.0);
        match tokio::time::timeout(health.timeout.0, probe).await.unwrap_or(Some(false)) {
            Some(true) => (well, unwell) = (well + 1, 0),
            Some(false) => (well, unwell) = (0, unwell + 1),
            None => {}
        }
        if well >= health.healthy_after {
            pool.backends[at].set_healthy(true);
        }
        if unwell >= health.unhealthy_after {
            pool.backends[at].set_healthy(false);
        }
        tokio::time::sleep(health.every.0).await;
    }
}
