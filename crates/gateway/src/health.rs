//! Health checks: probes each backend of an upstream on its own schedule, and closes expired idle connections.

use crate::config::HealthConfig;
use crate::pool::Pool;
use crate::upstream;
use std::sync::Arc;
use std::time::Duration;

const SWEEP: Duration = Duration::from_secs(5);

/// Checks an upstream's backends for as long as it is polled.
pub(crate) async fn watch(pool: Arc<Pool>) {
    let mut probes = tokio::task::JoinSet::new();
    if let Some(health) = &pool.config.health {
        for at in 0..pool.backends.len() {
            probes.spawn(probe_backend(Arc::clone(&pool), at, health.clone()));
        }
    }
    loop {
        tokio::time::sleep(SWEEP).await;
        for backend in &pool.backends {
            backend.sweep();
        }
    }
}

async fn probe_backend(pool: Arc<Pool>, at: usize, health: HealthConfig) {
    let (mut healthy, mut unhealthy) = (0, 0);
    loop {
        let probe = upstream::probe(&pool, at, &health.path, health.timeout.0);
        match tokio::time::timeout(health.timeout.0, probe).await.unwrap_or(Some(false)) {
            Some(true) => (healthy, unhealthy) = (healthy + 1, 0),
            Some(false) => (healthy, unhealthy) = (0, unhealthy + 1),
            None => {}
        }
        if healthy >= health.healthy_after {
            pool.backends[at].set_healthy(true);
        }
        if unhealthy >= health.unhealthy_after {
            pool.backends[at].set_healthy(false);
        }
        tokio::time::sleep(health.every.0).await;
    }
}
