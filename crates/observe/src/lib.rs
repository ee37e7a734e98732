//! Telemetry: metrics, decision log, top callers and traces. Knows no protocol, and never blocks a decision.
//!
//! | file | what it is |
//! |---|---|
//! | `telemetry` | the whole of it, and the worker that drains the buffers |
//! | `recorder` | the part on the request path: counting, and capturing some decisions |
//! | `recorder/inline` | the same for inline limits |
//! | `recorder/stripe` | per-thread counters |
//! | `recorder/sampling` | which decisions the sketches see |
//! | `recorder/capture` | a captured decision |
//! | `decision_log` | records for people, the searchable ring, explanations, cached descriptions |
//! | `sink` | decision records as NDJSON lines, written to a file or standard output |
//! | `mask` | masking of secrets and attributes |
//! | `top` | top callers, top denied callers, callers near a limit, shared networks |
//! | `metrics` | labels, stats, latency histograms, series, the Prometheus exposition, process figures |
//! | `trace` | spans of sampled traces, and OTLP |
//! | `process_status` | readiness and status of the process, for the servers |

mod decision_log;
mod mask;
mod metrics;
mod process_status;
mod recorder;
mod sink;
mod telemetry;
mod top;
mod trace;

pub use decision_log::buffer::DecisionQuery;
pub use decision_log::record::{DecisionRecord, NodeInfo, rfc3339};
pub use mask::{Mask, MaskStyle, MaskedAttributes};
pub use metrics::exposition::{ExpositionFormat, MetricFamily, MetricsWriter};
pub use metrics::process::resident_bytes;
pub use process_status::{ProcessStatus, Verbosity};
pub use recorder::capture::LoggedVerdict;
pub use sink::{Output, Sink};
pub use telemetry::{Event, Telemetry, TelemetryConfig};
pub use trace::buffer::{SpanBatch, SpanBuffer};
