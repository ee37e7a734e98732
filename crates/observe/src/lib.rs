//! Watches decisions: counts them for metrics, logs some, says why one was made, and finds out who asks most. Knows no
//! protocol, and never holds a decision up.
//!
//! | file | answers |
//! |---|---|
//! | `watch` | what happens on the path of a request: counting, and setting some decisions aside |
//! | `throttled` | the same for limits that callers bring themselves |
//! | `stripe` | what one thread counts, apart from all others |
//! | `sampling` | which decisions the sketches are shown |
//! | `names` | under which number a rule is counted, whatever becomes of the rules |
//! | `capture` | what is set aside of a decision |
//! | [`observe`](Observe) | the whole of it, and the worker that empties what was set aside |
//! | `mask` | what is told of a caller, and what never is |
//! | `recall` | what is told of callers and limits, worked out once |
//! | `entry`, `log`, `sink` | a decision for people; the last of them, to be searched; all of them, as lines |
//! | `top` | who asks most, is denied most, stays near a limit, shares an address |
//! | `traces`, `otlp` | spans of what is part of a trace; OpenTelemetry's messages |
//! | `latency`, `series` | how long things take; figures second by second |
//! | `figures` | all that was counted, added up |
//! | [`status`](Status) | what servers report of the process they run in |
//! | `page`, `process` | figures as text; what the system says of the process |

mod capture;
mod entry;
mod figures;
mod latency;
mod log;
mod mask;
mod names;
mod observe;
mod otlp;
mod page;
mod process;
mod recall;
mod sampling;
mod series;
mod sink;
mod status;
mod stripe;
mod throttled;
mod top;
mod traces;
mod watch;

pub use capture::Ruled;
pub use entry::{Entry, Place, rfc3339};
pub use log::Search;
pub use mask::{HiddenAs, Hide, Mask};
pub use observe::{Event, Observe, Settings};
pub use page::{Family, Format, Page};
pub use process::resident_bytes;
pub use sink::{Output, Sink};
pub use status::{Status, Verbosity};
pub use traces::{Batch, Traces};
