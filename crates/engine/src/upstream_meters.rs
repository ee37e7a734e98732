//! Meters of upstreams: what the gateway and the layer measure themselves, for signals that limits follow.
//!
//! Only domains whose rules measure something have meters; other requests pay for reading one flag. Nothing runs beside
//! the requests: in each step of a domain's limits one of them reads the meters. Without requests there is nothing to
//! measure, and the signals are calm.

use crate::check::Check;
use crate::limiter::Limiter;
use arc_swap::ArcSwap;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{Clock, Timestamp};
use tollgate_overload::{Ended, Measured, UpstreamMeter};
use tollgate_rules::{Ruleset, UpstreamMeasure};

/// Most meters of a domain: upstreams have names in configurations, not in requests.
const MAX_METERS: usize = 1_024;

/// Meter of one upstream.
pub(crate) struct Meter {
    meter: UpstreamMeter,
    clock: Arc<dyn Clock>,
}

type OfDomain = HashMap<Box<str>, Arc<Meter>, RandomState>;

/// Meters of all upstreams, by domain. A domain that measures nothing has no entry.
#[derive(Default)]
pub(crate) struct UpstreamMeters {
    is_enabled: AtomicBool,
    meters: ArcSwap<HashMap<Box<str>, OfDomain, RandomState>>,
}

impl UpstreamMeters {
    pub(crate) fn new(rules: &Ruleset) -> Self {
        let meters = Self::default();
        meters.on_rules_changed(rules);
        meters
    }

    /// Adjusts to new rules: domains that still measure keep their meters.
    pub(crate) fn on_rules_changed(&self, rules: &Ruleset) {
        let measures = |domain: &&tollgate_rules::Domain| {
            let adapt = domain.overload().and_then(|overload| overload.adapt.as_ref());
            adapt.is_some_and(tollgate_rules::Adapt::is_measured)
        };
        self.meters.rcu(|meters| {
            let kept = |name: &str| meters.get(name).cloned().unwrap_or_default();
            let of_domain = |domain: &tollgate_rules::Domain| (domain.name().into(), kept(domain.name()));
            rules.domains().filter(measures).map(of_domain).collect::<HashMap<_, _, RandomState>>()
        });
        self.is_enabled.store(!self.meters.load().is_empty(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_enabled(&self) -> bool {
        self.is_enabled.load(Ordering::Relaxed)
    }

    /// Returns the meter of an upstream, created if it is new; `None` if the domain measures nothing.
    fn meter(&self, domain: &str, upstream: &str, clock: &Arc<dyn Clock>) -> Option<Arc<Meter>> {
        let meters = self.meters.load();
        let known = meters.get(domain)?.get(upstream);
        known.cloned().or_else(|| self.create(domain, upstream, clock))
    }

    #[cold]
    fn create(&self, domain: &str, upstream: &str, clock: &Arc<dyn Clock>) -> Option<Arc<Meter>> {
        let new = Arc::new(Meter { meter: UpstreamMeter::default(), clock: Arc::clone(clock) });
        self.meters.rcu(|meters| {
            let mut meters = HashMap::clone(meters);
            if let Some(own) = meters.get_mut(domain).filter(|own| own.len() < MAX_METERS) {
                // Another thread may have been faster; requests must share one meter.
                own.entry(upstream.into()).or_insert_with(|| Arc::clone(&new));
            }
            meters
        });
        self.meters.load().get(domain)?.get(upstream).cloned()
    }

    /// Reads the meters of a domain's upstreams.
    fn read(&self, domain: &str) -> Vec<(Box<str>, Measured)> {
        let meters = self.meters.load();
        let own = meters.get(domain).into_iter().flatten();
        own.map(|(upstream, own)| (upstream.clone(), own.meter.read())).collect()
    }
}

/// A request in flight to an upstream that is measured.
pub(crate) struct MeteredRequest {
    meter: Arc<Meter>,
    began: Timestamp,
    ended: Ended,
    is_paused: bool,
}

impl MeteredRequest {
    pub(crate) fn begin(meter: Arc<Meter>, began: Timestamp) -> Self {
        meter.meter.begin();
        Self { began, meter, ended: Ended::Abandoned, is_paused: false }
    }

    /// Sets how the request ended. Completed or failed, its latency is the time until now.
    pub(crate) fn ended(&mut self, ended: Ended) {
        if matches!(ended, Ended::Completed | Ended::Failed) && self.ended != ended && !self.is_paused {
            self.meter.meter.respond(self.meter.clock.now().since(self.began));
        }
        self.ended = ended;
    }

    /// Counts the request as not in flight while it waits for its client.
    pub(crate) fn pause(&mut self) {
        if !std::mem::replace(&mut self.is_paused, true) {
            self.meter.meter.end(None);
        }
    }

    /// Counts the request as in flight again; its latency is the time from now on.
    pub(crate) fn resume(&mut self) {
        if std::mem::replace(&mut self.is_paused, false) {
            self.meter.meter.begin();
            self.began = self.meter.clock.now();
        }
    }
}

impl Drop for MeteredRequest {
    fn drop(&mut self) {
        if self.is_paused {
            return;
        }
        let is_abandoned = self.ended == Ended::Abandoned;
        let age = is_abandoned.then(|| self.meter.clock.now().since(self.began));
        self.meter.meter.end(age);
    }
}

impl<S> Limiter<S> {
    /// Counts a request that arrives for an upstream, and reads the meters if their time has come. Returns the upstream's
    /// meter.
    pub(crate) fn meter_arrival(
        &self,
        check: &Check<'_>,
        upstream: &str,
        now: Timestamp,
    ) -> Option<Arc<Meter>> {
        if !self.meters.is_enabled() {
            return None;
        }
        let meter = self.meters.meter(check.domain, upstream, &self.clock)?;
        meter.meter.arrive(self.workers.occupancy(check.domain, upstream).map_or(0, |(waiting, _)| waiting));
        self.measure_if_due(check.domain, now);
        Some(meter)
    }

    /// Reads the meters of a domain. Returns the value of a measure by upstream: the highest of all, or that of one.
    pub(crate) fn read_meters(
        &self,
        domain: &str,
    ) -> impl Fn(UpstreamMeasure, Option<&str>) -> Option<f64> + use<S> {
        let readings: Vec<(Box<str>, Measured, Option<u32>)> = self
            .meters
            .read(domain)
            .into_iter()
            .map(|(upstream, measured)| {
                let limit = self.workers.occupancy(domain, &upstream).map(|(_, limit)| limit);
                (upstream, measured, limit)
            })
            .collect();
        move |measure, upstream| {
            let own = readings.iter().filter(|(name, ..)| upstream.is_none_or(|wanted| wanted == &**name));
            let value = |(_, measured, limit): &(Box<str>, Measured, Option<u32>)| match measure {
                UpstreamMeasure::P99Ms => measured.p99.map(|seconds| seconds * 1e3),
                UpstreamMeasure::InFlight => Some(measured.in_flight),
                UpstreamMeasure::Waiting => Some(measured.waiting),
                UpstreamMeasure::Utilization => {
                    limit.map(|limit| measured.in_flight / f64::from(limit.max(1)))
                }
            };
            own.filter_map(value).reduce(f64::max)
        }
    }
}
