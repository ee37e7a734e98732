//! Requests to Tollgate's store: one or four limits of a tenant, allowed or denied.
//!
//! All counters stay live during the measurement: each unit takes a second to refill.

use crate::traffic::mix;
use std::sync::Arc;
use std::time::Instant;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, Rate, Scope,
    TimeDelta, nonzero,
};
use tollgate_store::RedisStore;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    One,
    Four,
    /// Of tenants that have exhausted a daily limit.
    DeniedOne,
    DeniedFour,
}

impl Kind {
    const fn limits(self) -> usize {
        match self {
            Self::One | Self::DeniedOne => 1,
            Self::Four | Self::DeniedFour => 4,
        }
    }

    const fn admission(self) -> Admission {
        match self {
            Self::One | Self::Four => Admission::Admitted,
            Self::DeniedOne | Self::DeniedFour => Admission::Denied,
        }
    }
}

/// Tenants and limits.
#[derive(Clone)]
pub(super) struct Requests(Arc<Inner>);

struct Inner {
    /// Names of 16 characters.
    tenants: Vec<String>,
    /// Scopes of each kind: kinds do not share counters.
    scopes: [[Scope; 4]; 4],
    ample: [Limit; 4],
    /// One per day.
    tight: Limit,
}

impl Requests {
    pub(super) fn new(tenants: u32) -> Self {
        let scopes = ["one", "four", "none", "nor"].map(|group| {
            ["1d", "1h", "1m", "1s"].map(|period| {
                Scope::in_group(format!("bench|{group}|gcra|{period}"), &format!("bench|{group}"))
            })
        });
        let ample = [86_400, 3_600, 60, 1].map(|seconds| {
            let quota = Rate::per(seconds, TimeDelta::from_secs(seconds));
            LimitSpec::new(Algorithm::Gcra, quota).burst(1_000_000).build().expect("a limit")
        });
        let tight = LimitSpec::new(Algorithm::Gcra, Rate::per_day(nonzero!(1))).build().expect("a limit");
        let tenants = (0..tenants).map(|tenant| format!("{:016x}", mix(u64::from(tenant) + 1))).collect();
        Self(Arc::new(Inner { tenants, scopes, ample, tight }))
    }

    /// Sends one request of the tenant with this number.
    pub(super) async fn send(
        &self,
        store: &RedisStore,
        kind: Kind,
        tenant: usize,
    ) -> Result<Admission, String> {
        let Inner { tenants, scopes, ample, tight } = &*self.0;
        let parts = [KeyPart::Text(&tenants[tenant % tenants.len()])];
        let charge = |at: usize| {
            let key = CounterKey { scope: &scopes[kind as usize][at], parts: &parts };
            let limit = if at == 0 && kind.admission() == Admission::Denied { tight } else { &ample[at] };
            Charge::new(key, limit, Cost::ONE)
        };
        let charges = [charge(0), charge(1), charge(2), charge(3)];
        let outcomes = store.charge(&charges[..kind.limits()]).await.map_err(|error| error.to_string())?;
        Ok(outcomes.admission)
    }

    /// Sends one request per tenant and kind, so that all counters exist and those to be denied are exhausted.
    pub(super) async fn fill(&self, store: &RedisStore) -> Result<(), String> {
        for kind in [Kind::One, Kind::Four, Kind::DeniedOne, Kind::DeniedFour] {
            let all = self.0.tenants.len();
            let tasks: Vec<_> = (0..64)
                .map(|first| {
                    let (own, store) = (self.clone(), store.clone());
                    tokio::spawn(async move {
                        for tenant in (first..all).step_by(64) {
                            own.send(&store, kind, tenant).await?;
                        }
                        Ok::<(), String>(())
                    })
                })
                .collect();
            for task in tasks {
                task.await.map_err(|error| error.to_string())??;
            }
        }
        Ok(())
    }

    /// Sends `requests` requests with this many in flight; returns requests per second.
    #[allow(clippy::disallowed_methods, reason = "a stopwatch")]
    pub(super) async fn run(
        &self,
        store: &RedisStore,
        kind: Kind,
        requests: u32,
        in_flight: usize,
    ) -> Result<f64, String> {
        let start = Instant::now();
        let tasks: Vec<_> = (0..in_flight)
            .map(|task| {
                let (own, store) = (self.clone(), store.clone());
                tokio::spawn(async move {
                    for n in (task..requests as usize).step_by(in_flight) {
                        let admission = own.send(&store, kind, mix(n as u64) as usize).await?;
                        if admission != kind.admission() {
                            return Err(format!("{kind:?} was {admission:?}"));
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for task in tasks {
            task.await.map_err(|error| error.to_string())??;
        }
        Ok(f64::from(requests) / start.elapsed().as_secs_f64())
    }
}
