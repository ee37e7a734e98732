//! The names that the standard health service answers for, and what they follow.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, HealthService};

/// How often a health that can change is read for those who watch it.
const INTERVAL: Duration = Duration::from_millis(100);

/// Names of the health service.
#[derive(Clone, Default)]
pub enum HealthNames {
    /// The empty name and those of the services: serving until the drain.
    #[default]
    Service,
    /// This name, which follows `is_healthy`, as envoyproxy/ratelimit has it. The empty name serves as long as the process
    /// lives, and every other name is unknown.
    Named {
        /// The name.
        name: &'static str,
        /// Whether it is healthy now.
        is_healthy: Arc<dyn Fn() -> bool + Send + Sync>,
    },
}

impl fmt::Debug for HealthNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service => f.write_str("Service"),
            Self::Named { name, .. } => write!(f, "Named({name})"),
        }
    }
}

/// The standard health service. A check reads the health at that moment, as every other probe of the process does; those who
/// watch get changes within [`INTERVAL`].
#[derive(Clone)]
pub(super) struct NamedHealth {
    names: HealthNames,
    services: &'static [&'static str],
    reporter: HealthReporter,
    reported: Arc<Mutex<Reported>>,
}

/// What the reporter has of a name that follows the process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reported {
    Nothing,
    Health(bool),
    /// The drain has begun, after which nothing changes.
    End,
}

impl NamedHealth {
    /// Creates the service; `services` are the names of the gRPC services.
    pub(super) async fn new(names: HealthNames, services: &'static [&'static str]) -> Self {
        let (reporter, reported) = (HealthReporter::new(), Arc::new(Mutex::new(Reported::Nothing)));
        let health = Self { names, services, reporter, reported };
        if matches!(health.names, HealthNames::Service) {
            for service in services {
                health.reporter.set_service_status(*service, ServingStatus::Serving).await;
            }
        }
        health.report().await;
        health
    }

    /// Reports the health at this moment, if it has changed.
    async fn report(&self) {
        let HealthNames::Named { name, is_healthy } = &self.names else { return };
        let mut reported = self.reported.lock().await;
        let now = is_healthy();
        if *reported != Reported::End && *reported != Reported::Health(now) {
            self.reporter.set_service_status(*name, status(now)).await;
            *reported = Reported::Health(now);
        }
    }

    /// Reports every change, for as long as the future is polled.
    pub(super) async fn follow(&self) {
        if matches!(self.names, HealthNames::Service) {
            return std::future::pending().await;
        }
        loop {
            self.report().await;
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Reports that the server drains, and ends the `Watch` streams after the update: they would otherwise keep it from
    /// shutting down. Checks on connections that are still open get the same status.
    pub(super) async fn end(&self) {
        let mut reported = self.reported.lock().await;
        *reported = Reported::End;
        let (own, empty) = match &self.names {
            HealthNames::Service => (self.services, ServingStatus::NotServing),
            HealthNames::Named { name, .. } => (std::slice::from_ref(name), ServingStatus::Serving),
        };
        let last = || own.iter().map(|name| (*name, ServingStatus::NotServing)).chain([("", empty)]);
        let mut clearing = self.reporter.clone();
        for (name, status) in last() {
            self.reporter.set_service_status(name, status).await;
            clearing.clear_service_status(name).await;
            self.reporter.set_service_status(name, status).await;
        }
    }

    fn service(&self) -> HealthService {
        HealthService::from_health_reporter(self.reporter.clone())
    }
}

#[tonic::async_trait]
impl Health for NamedHealth {
    type WatchStream = <HealthService as Health>::WatchStream;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        self.report().await;
        self.service().check(request).await
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        self.report().await;
        self.service().watch(request).await
    }
}

const fn status(is_healthy: bool) -> ServingStatus {
    if is_healthy { ServingStatus::Serving } else { ServingStatus::NotServing }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    async fn check(health: &NamedHealth, name: &str) -> Option<i32> {
        let checked = health.check(Request::new(HealthCheckRequest { service: name.to_owned() })).await;
        checked.ok().map(|response| response.into_inner().status)
    }

    /// A probe on an open connection must read what the drain means, not that the name is unknown.
    #[tokio::test]
    async fn names_keep_their_status_while_the_server_drains() {
        let named = HealthNames::Named { name: "ratelimit", is_healthy: Arc::new(|| true) };
        for (names, expected) in [
            (named, [("", Some(1)), ("ratelimit", Some(2)), ("other", None)]),
            (HealthNames::Service, [("", Some(2)), ("rls", Some(2)), ("other", None)]),
        ] {
            let health = NamedHealth::new(names, &["rls"]).await;
            health.end().await;
            for (name, expected) in expected {
                assert_eq!(check(&health, name).await, expected, "{name:?} of {:?}", health.names);
            }
        }
    }

    /// Whoever has read 200 at `/healthcheck` must not read that the service does not serve.
    #[tokio::test]
    async fn a_check_reads_the_health_at_that_moment() {
        let is_healthy = Arc::new(AtomicBool::new(false));
        let now = Arc::clone(&is_healthy);
        let is_healthy_now = Arc::new(move || now.load(Ordering::Relaxed));
        let names = HealthNames::Named { name: "ratelimit", is_healthy: is_healthy_now };
        let health = NamedHealth::new(names, &[]).await;
        for (value, expected) in [(false, 2), (true, 1), (false, 2), (true, 1)] {
            is_healthy.store(value, Ordering::Relaxed);
            assert_eq!(check(&health, "ratelimit").await, Some(expected));
        }
    }
}
