//! How to be limited well by the APIs that a program calls, as pure steps: time and chance are arguments. The rules are
//! those of Tollgate's clients in other languages, and the same cases test them (`clients/conformance`).
//!
//! [`PacedLayer`](crate::PacedLayer) applies them to any tower client. A program with another HTTP client uses the
//! steps themselves:
//!
//! ```
//! use tollgate_sdk::pace::{Pacer, Signals};
//!
//! let mut pacer = Pacer::default();
//! assert_eq!(pacer.send(0), 0, "nothing is known yet");
//! let fields = |name: &str| match name {
//!     "ratelimit" => Some("\"api\";r=10;t=60".to_owned()),
//!     "ratelimit-policy" => Some("\"api\";q=100;w=60".to_owned()),
//!     _ => None,
//! };
//! pacer.response(20, &Signals::from_fields(200, fields, 1_700_000_000_000), 0.5);
//! // Less than half of the limit remains: it is spread over the time to the reset.
//! assert_eq!(pacer.send(20), 5_980);
//! ```
//!
//! Times are in milliseconds: `now` of [`Pacer`] and [`AdaptiveThrottle`] on any clock that never goes back.

mod http_date;
mod pacer;
mod retry;
mod signals;
mod throttle;

pub use pacer::{Pacer, pace_delay};
pub use retry::{RetryBudget, backoff};
pub use signals::Signals;
pub use throttle::AdaptiveThrottle;
