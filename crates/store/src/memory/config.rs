//! Memory settings of the store.
//!
//! One number, the cap, because that is what an operator has to give; how it is divided follows from it. Numbers of keys
//! were rejected: how many fit depends on the limits, and the machine's memory does not.

use super::huge_pages::HugePages;

/// How much memory the store may take, and how.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemoryConfig {
    /// The most bytes that counters take, all told. It is reserved at once and touched as keys come.
    pub bytes: usize,
    /// Of these, for states that do not fit a slot (strict windows, logs, permits); an eighth if absent.
    pub wide_bytes: Option<usize>,
    /// When to use huge pages.
    pub huge_pages: HugePages,
}

impl MemoryConfig {
    /// The least that is accepted.
    pub const MIN_BYTES: usize = 64 << 10;

    /// A cap of so many bytes, the rest by default.
    ///
    /// ```
    /// assert_eq!(tollgate_store::MemoryConfig::with_bytes(64 << 20).bytes, 64 << 20);
    /// ```
    #[must_use]
    pub const fn with_bytes(bytes: usize) -> Self {
        Self { bytes, wide_bytes: None, huge_pages: HugePages::WhenDense }
    }
}

impl Default for MemoryConfig {
    /// 512 MiB.
    fn default() -> Self {
        Self::with_bytes(512 << 20)
    }
}

/// Why a store could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Less memory than the tables need.
    #[error("{given} bytes are too few for the counters; give at least {least}", least = MemoryConfig::MIN_BYTES)]
    TooSmall {
        /// What was given.
        given: usize,
    },
    /// States aside would take more than half.
    #[error("{wide} bytes for states aside are more than half of the {bytes} bytes in all")]
    WideTooLarge {
        /// What was asked for.
        wide: usize,
        /// Out of these.
        bytes: usize,
    },
    /// The system does not give that much.
    #[error("cannot reserve {bytes} bytes for the counters")]
    Map {
        /// What was asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
}
