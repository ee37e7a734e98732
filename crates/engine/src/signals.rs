//! Signals: how a service is doing, for limits that follow it.
//!
//! Programs push them, the gateway and the layer measure them (`upstream_meters.rs`), and the server asks a Prometheus. The
//! highest value counts, from any source. What other nodes have reported is recorded like the rest, but not passed on
//! again.

use crate::adapt::DomainAdaptation;
use crate::limiter::Limiter;
use std::sync::atomic::Ordering;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_rules::{Signal, SignalSource};

/// Why a signal was not recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// The domain's rules do not adapt limits.
    #[error("domain `{0}` does not adapt limits; add `adapt` to the `overload` section of its rules")]
    NotAdaptive(String),
    /// No rule uses the signal.
    #[error("unknown signal `{name}`; the rules use: {known}")]
    Unknown {
        /// Name that was reported.
        name: String,
        /// Names that the rules use.
        known: String,
    },
    /// The signal is not pushed: the rules say where it comes from.
    #[error("signal `{name}` is not pushed: the rules have its source (`{key}`)")]
    NotPushed {
        /// Name that was reported.
        name: String,
        /// Key of the source in the rules.
        key: &'static str,
    },
    /// The value is not a number, or negative.
    #[error("the value of `{0}` must be a finite number of at least 0")]
    Value(String),
}

/// State of a signal.
#[derive(Clone, Debug, PartialEq)]
pub struct SignalState {
    /// Name.
    pub name: String,
    /// Highest value of late; 0 if it is no longer reported.
    pub value: f64,
    /// Value above which limits are tightened.
    pub bound: f64,
    /// Where its values come from: `pushed`, `measured` or `query`.
    pub source: &'static str,
}

/// A value of a signal, for other nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedSignal {
    /// Domain of the rules.
    pub domain: String,
    /// Name of the signal.
    pub signal: String,
    /// Its highest value.
    pub value: f64,
    /// How long the value bears on other nodes: the time between two steps of the limits that follow it.
    pub lasts: TimeDelta,
}

/// A signal that a Prometheus is to be asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SignalQuery {
    /// Domain of the rules.
    pub domain: String,
    /// Name of the signal.
    pub signal: String,
    /// The query.
    pub query: String,
    /// Time between two steps of the limits that follow it.
    pub step: TimeDelta,
}

impl DomainAdaptation {
    fn position(&self, name: &str) -> Option<usize> {
        self.adapt.signals.iter().position(|signal| signal.name == name)
    }

    /// Finds a signal that is reported by name, if `accepts` its source.
    pub(crate) fn find(
        &self,
        name: &str,
        value: f64,
        accepts: impl Fn(&SignalSource) -> bool,
    ) -> Result<(usize, f64), SignalError> {
        let pushed = |signal: &&Signal| accepts(&signal.source);
        let Some(at) = self.position(name) else {
            let known = self.adapt.signals.iter().filter(pushed).map(|signal| signal.name.as_str());
            let known = known.collect::<Vec<&str>>().join(", ");
            return Err(SignalError::Unknown { name: name.to_owned(), known });
        };
        let source = &self.adapt.signals[at].source;
        if !accepts(source) {
            let key = if matches!(source, SignalSource::Query(_)) { "query" } else { "measure" };
            return Err(SignalError::NotPushed { name: name.to_owned(), key });
        }
        match value.is_finite() && value >= 0.0 {
            true => Ok((at, value)),
            false => Err(SignalError::Value(name.to_owned())),
        }
    }

    /// Keeps values that this node has reported, for other nodes.
    fn keep_own(&self, values: &[(usize, f64)]) {
        let mut state = self.state();
        for (at, value) in values {
            if let Some(own) = state.own.get_mut(*at) {
                *own = Some(own.map_or(*value, |known| known.max(*value)));
            }
        }
    }
}

impl<S> Limiter<S> {
    /// Records signals of a service: how long its queues are, how slow it is. Limits of the domain follow them if its
    /// rules say so (`adapt`). Records all of them or none.
    ///
    /// # Errors
    /// [`SignalError`] if no rule of the domain uses a signal, or its value is not a number.
    pub fn record_signals<'s>(
        &self,
        domain: &str,
        signals: impl IntoIterator<Item = (&'s str, f64)>,
    ) -> Result<(), SignalError> {
        self.record_from(domain, signals, |source| *source == SignalSource::Pushed)
    }

    /// Records the value that a Prometheus has returned for a signal of [`Limiter::signal_queries`].
    ///
    /// # Errors
    /// [`SignalError`] if no rule of the domain queries the signal any more, or its value is not a number.
    pub fn record_query(&self, domain: &str, signal: &str, value: f64) -> Result<(), SignalError> {
        self.record_from(domain, [(signal, value)], |source| matches!(source, SignalSource::Query(_)))
    }

    /// Records signals whatever their sources are: for tests of rules, which have neither an upstream nor a Prometheus.
    ///
    /// # Errors
    /// As [`Limiter::record_signals`].
    pub fn rehearse_signals<'s>(
        &self,
        domain: &str,
        signals: impl IntoIterator<Item = (&'s str, f64)>,
    ) -> Result<(), SignalError> {
        self.record_from(domain, signals, |_| true)
    }

    fn record_from<'s>(
        &self,
        domain: &str,
        signals: impl IntoIterator<Item = (&'s str, f64)>,
        accepts: impl Fn(&SignalSource) -> bool,
    ) -> Result<(), SignalError> {
        let domains = self.adaptations.domains.load();
        let Some(own) = domains.get(domain) else { return Err(SignalError::NotAdaptive(domain.to_owned())) };
        let found = signals.into_iter().map(|(name, value)| own.find(name, value, &accepts));
        let found: Vec<(usize, f64)> = found.collect::<Result<_, _>>()?;
        self.report(domain, own, found, self.clock.now());
        Ok(())
    }

    /// Records what this node has reported, and makes the steps whose time has come.
    fn report(&self, domain: &str, own: &DomainAdaptation, values: Vec<(usize, f64)>, now: Timestamp) {
        own.keep_own(&values);
        self.adaptations.make_steps(domain, own, now, |controller, now| controller.report(values, now));
    }

    /// Records what other nodes have reported, each report once. Signals that no rule here uses are ignored.
    pub fn record_shared_signals<'s>(&self, signals: impl IntoIterator<Item = &'s SharedSignal>) {
        let domains = self.adaptations.domains.load();
        for SharedSignal { domain, signal, value, .. } in signals {
            let Some(own) = domains.get(domain.as_str()) else { continue };
            let Some(at) = own.position(signal).filter(|_| value.is_finite() && *value >= 0.0) else {
                continue;
            };
            let now = self.clock.now();
            self.adaptations
                .make_steps(domain, own, now, |controller, now| controller.report([(at, *value)], now));
        }
    }

    /// Takes the highest value of each signal that this process has reported since the last call, for other nodes.
    #[must_use]
    pub fn take_own_signals(&self) -> Vec<SharedSignal> {
        let domains = self.adaptations.domains.load();
        let mut taken = Vec::new();
        for (domain, own) in domains.iter() {
            let mut state = own.state();
            let values = own.adapt.signals.iter().zip(&mut state.own);
            taken.extend(values.filter_map(|(signal, value)| {
                let (domain, signal) = (domain.to_string(), signal.name.clone());
                Some(SharedSignal { domain, signal, value: value.take()?, lasts: own.adapt.step })
            }));
        }
        taken
    }

    /// Returns the shortest time between two steps of limits that follow signals; `None` if there are none.
    #[must_use]
    pub fn shortest_adapt_step(&self) -> Option<TimeDelta> {
        self.adaptations.domains.load().values().map(|own| own.adapt.step).min()
    }

    /// Returns the signals that a Prometheus is to be asked for.
    #[must_use]
    pub fn signal_queries(&self) -> Vec<SignalQuery> {
        let domains = self.adaptations.domains.load();
        let mut queries: Vec<SignalQuery> = Vec::new();
        for (domain, own) in domains.iter() {
            queries.extend(own.adapt.signals.iter().filter_map(|signal| match &signal.source {
                SignalSource::Query(query) => Some(SignalQuery {
                    domain: domain.to_string(),
                    signal: signal.name.clone(),
                    query: query.clone(),
                    step: own.adapt.step,
                }),
                _ => None,
            }));
        }
        queries.sort_by(|a, b| (&a.domain, &a.signal).cmp(&(&b.domain, &b.signal)));
        queries
    }

    /// Reads the meters of a domain's upstreams if their time has come and no other thread does, and makes a step.
    pub(crate) fn measure_if_due(&self, domain: &str, now: Timestamp) {
        let domains = self.adaptations.domains.load();
        let Some(own) = domains.get(domain) else { return };
        let due = own.next_reading.load(Ordering::Relaxed);
        let next = (now + own.adapt.step).as_micros();
        if now.as_micros() < due
            || own.next_reading.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        let value = self.read_meters(domain);
        let measured = own.adapt.signals.iter().enumerate().filter_map(|(at, signal)| match &signal.source {
            SignalSource::Measured { measure, upstream } => Some((at, value(*measure, upstream.as_deref())?)),
            _ => None,
        });
        self.report(domain, own, measured.collect(), now);
    }
}
