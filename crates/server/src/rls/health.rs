//! The names that the standard health service answers for, and what they follow.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// How often a health that can change is read.
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

impl HealthNames {
    /// Reports the first health; `services` are the names of the gRPC services.
    pub(super) async fn begin(&self, reporter: &HealthReporter, services: &[&'static str]) {
        match self {
            Self::Service => {
                for service in services {
                    reporter.set_service_status(*service, ServingStatus::Serving).await;
                }
            }
            Self::Named { name, is_healthy } => {
                reporter.set_service_status(*name, status(is_healthy())).await;
            }
        }
    }

    /// Reports every change, for as long as the future is polled.
    pub(super) async fn follow(&self, reporter: &HealthReporter) {
        let Self::Named { name, is_healthy } = self else { return std::future::pending().await };
        let mut last = None;
        loop {
            let now = is_healthy();
            if last != Some(now) {
                reporter.set_service_status(*name, status(now)).await;
                last = Some(now);
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Reports that the server drains, and ends the `Watch` streams after the update: they would otherwise keep it from
    /// shutting down. Checks on connections that are still open get the same status.
    pub(super) async fn end(&self, reporter: &HealthReporter, services: &[&'static str]) {
        let (own, empty) = match self {
            Self::Service => (services, ServingStatus::NotServing),
            Self::Named { name, .. } => (std::slice::from_ref(name), ServingStatus::Serving),
        };
        let last = || own.iter().map(|name| (*name, ServingStatus::NotServing)).chain([("", empty)]);
        let mut clearing = reporter.clone();
        for (name, status) in last() {
            reporter.set_service_status(name, status).await;
            clearing.clear_service_status(name).await;
            reporter.set_service_status(name, status).await;
        }
    }
}

const fn status(is_healthy: bool) -> ServingStatus {
    if is_healthy { ServingStatus::Serving } else { ServingStatus::NotServing }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Request;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_server::Health;
    use tonic_health::server::HealthService;

    /// A probe on an open connection must read what the drain means, not that the name is unknown.
    #[tokio::test]
    async fn names_keep_their_status_while_the_server_drains() {
        let named = HealthNames::Named { name: "ratelimit", is_healthy: Arc::new(|| true) };
        for (names, expected) in [
            (named, [("", Some(1)), ("ratelimit", Some(2)), ("other", None)]),
            (HealthNames::Service, [("", Some(2)), ("rls", Some(2)), ("other", None)]),
        ] {
            let reporter = HealthReporter::new();
            names.begin(&reporter, &["rls"]).await;
            names.end(&reporter, &["rls"]).await;
            let service = HealthService::from_health_reporter(reporter);
            for (name, expected) in expected {
                let checked =
                    service.check(Request::new(HealthCheckRequest { service: name.to_owned() })).await;
                let status = checked.ok().map(|response| response.into_inner().status);
                assert_eq!(status, expected, "{name:?} of {names:?}");
            }
        }
    }
}
