//! Counter state: what a limit stores for one key.

use crate::algorithm::bucket::Tat;
use crate::algorithm::concurrency::Permits;
use crate::algorithm::fixed_window::WindowCount;
use crate::algorithm::sliding_log::AdmissionLog;
use crate::algorithm::sliding_window::SlidingCounts;
use crate::algorithm::strict_window::StrictCounts;

/// The state of one counter. A state that another algorithm left counts as unused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Unused.
    #[default]
    Unused,
    /// A bucket's TAT.
    Bucket(Tat),
    /// A fixed window.
    Window(WindowCount),
    /// A two-counter sliding window.
    Sliding(SlidingCounts),
    /// A strict window.
    Strict(StrictCounts),
    /// A sliding log.
    Log(AdmissionLog),
    /// Permits.
    Permits(Permits),
}

/// Returns `self` as one variant, replaced by a new one if it is another.
macro_rules! as_variant {
    ($name:ident, $variant:ident, $kind:ty) => {
        #[inline]
        pub(crate) fn $name(&mut self) -> &mut $kind {
            if !matches!(self, Self::$variant(_)) {
                *self = Self::$variant(<$kind>::default());
            }
            match self {
                Self::$variant(inner) => inner,
                _ => unreachable!("just put there"),
            }
        }
    };
}

impl State {
    as_variant!(bucket, Bucket, Tat);
    as_variant!(window, Window, WindowCount);
    as_variant!(sliding, Sliding, SlidingCounts);
    as_variant!(strict, Strict, StrictCounts);
    as_variant!(log, Log, AdmissionLog);
    as_variant!(permits, Permits, Permits);
}
