//! Metrics: labels of rules, added-up stats, latency histograms, time series, and the Prometheus exposition.

pub(crate) mod exposition;
pub(crate) mod labels;
pub(crate) mod latency;
pub(crate) mod minute;
pub(crate) mod process;
pub(crate) mod series;
pub(crate) mod stats;
