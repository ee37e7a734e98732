//! Signals: how a service is doing, in numbers, and where these come from.
//!
//! A signal has a name and a bound. Programs push most of them; the gateway and the layer measure some themselves, and a
//! Prometheus has the rest.

use std::fmt;

/// A signal of a domain.
#[derive(Clone, Debug, PartialEq)]
pub struct Signal {
    /// Name, as in reports of it.
    pub name: String,
    /// Value above which limits are tightened.
    pub above: f64,
    /// Where its values come from.
    pub source: SignalSource,
}

/// Where the values of a signal come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignalSource {
    /// Programs push them.
    Pushed,
    /// The gateway or the layer measures them.
    Measured {
        /// What is measured.
        measure: UpstreamMeasure,
        /// The upstream; without one, the highest value of all upstreams of the domain counts.
        upstream: Option<String>,
    },
    /// A Prometheus returns them for this query.
    Query(String),
}

impl SignalSource {
    /// Returns the kind of source, as in reports.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Pushed => "pushed",
            Self::Measured { .. } => "measured",
            Self::Query(_) => "query",
        }
    }
}

/// What the gateway or the layer measures of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamMeasure {
    /// 99th percentile of the time to the head of a response, in milliseconds.
    P99Ms,
    /// Mean number of requests in flight, as arriving requests find it.
    InFlight,
    /// Mean number of requests that wait for a place in flight.
    Waiting,
    /// Requests in flight as a part of their limit.
    Utilization,
}

impl UpstreamMeasure {
    /// All measures.
    pub const ALL: [Self; 4] = [Self::P99Ms, Self::InFlight, Self::Waiting, Self::Utilization];

    /// Returns the name in rule files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::P99Ms => "upstream_p99_ms",
            Self::InFlight => "upstream_in_flight",
            Self::Waiting => "upstream_waiting",
            Self::Utilization => "upstream_utilization",
        }
    }

    /// Returns the measure of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|measure| measure.name() == name)
    }

    /// Returns whether it needs a limit of requests in flight (`workers`).
    #[must_use]
    pub const fn needs_limit(self) -> bool {
        matches!(self, Self::Waiting | Self::Utilization)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.above)?;
        match &self.source {
            SignalSource::Pushed => Ok(()),
            SignalSource::Measured { measure, upstream: None } => write!(f, " ({})", measure.name()),
            SignalSource::Measured { measure, upstream: Some(upstream) } => {
                write!(f, " ({} of {upstream})", measure.name())
            }
            SignalSource::Query(query) => write!(f, " (query {query})"),
        }
    }
}
