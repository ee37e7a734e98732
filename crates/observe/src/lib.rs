//! Telemetry: metrics, decision log, top callers and traces. Independent of protocols; never blocks a decision.
//!
//! | module | contents |
//! |---|---|
//! | `telemetry` | the entry point, and the worker thread that drains the buffers |
//! | `recorder` | the part on the request path: counts every decision and captures some |
//! | `recorder/inline` | the recorder for inline limits |
//! | `recorder/stripe` | per-thread counters |
//! | `recorder/sampling` | sampling of decisions for the sketches |
//! | `recorder/capture` | captured decisions and their buffer |
//! | `decision_log` | decision records, the searchable ring buffer, explanations, cached descriptions |
//! | `sink` | line writer for the decision log and other logs: a file, standard output or standard error |
//! | `mask` | masking of secrets and attributes |
//! | `top` | top callers, top denied callers, callers near a limit, shared networks |
//! | `metrics` | labels, stats, latency histograms, time series, Prometheus exposition, process metrics |
//! | `trace` | spans of sampled traces, and their OTLP encoding |
//! | `process_status` | readiness and status of the process, served by the protocol servers and the admin API |

mod decision_log;
pub mod escape;
mod mask;
mod metrics;
mod process_status;
mod recorder;
mod sink;
mod telemetry;
mod top;
mod trace;
mod unknown_domains;

pub use decision_log::buffer::DecisionQuery;
pub use decision_log::explain::humanize;
pub use decision_log::record::{DecisionRecord, NodeInfo, rfc3339};
pub use mask::{Mask, MaskStyle, MaskedAttributes};
pub use metrics::exposition::{ExpositionFormat, MetricFamily, MetricsWriter};
pub use metrics::minute::{Minute, MinuteCaller, MinuteRule, MinuteTotals};
pub use metrics::process::resident_bytes;
pub use process_status::{ProcessStatus, Verbosity};
pub use recorder::capture::LoggedVerdict;
pub use sink::{Output, Sink};
pub use telemetry::{Event, Telemetry, TelemetryConfig};
pub use trace::buffer::{SpanBatch, SpanBuffer};
