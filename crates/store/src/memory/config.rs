//! Memory settings of the store.
//!
//! One number, the cap, because that is what an operator has to provide; its division follows from it. A number of keys
//! was rejected: how many fit depends on the limits, and the machine's memory does not.

use super::huge_pages::HugePages;

/// Memory settings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemoryConfig {
    /// Maximum bytes for all counters. Reserved at the start, and touched as keys arrive.
    pub bytes: usize,
    /// Bytes of the cap for wide counters (strict windows, logs, permits); an eighth if absent.
    pub wide_bytes: Option<usize>,
    /// Bytes of the cap that something other than counters uses: reservations.
    pub other_bytes: usize,
    /// When to use huge pages.
    pub huge_pages: HugePages,
}

impl MemoryConfig {
    /// Minimum cap, in bytes.
    pub const MIN_BYTES: usize = 64 << 10;

    /// Returns settings with a cap of `bytes`, the rest by default.
    ///
    /// ```
    /// assert_eq!(tollgate_store::MemoryConfig::with_bytes(64 << 20).bytes, 64 << 20);
    /// ```
    #[must_use]
    pub const fn with_bytes(bytes: usize) -> Self {
        Self { bytes, wide_bytes: None, other_bytes: 0, huge_pages: HugePages::WhenDense }
    }
}

impl Default for MemoryConfig {
    /// 512 MiB.
    fn default() -> Self {
        Self::with_bytes(512 << 20)
    }
}

/// Why a store could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The cap is smaller than the tables need.
    #[error("{given} bytes are too few for the counters; give at least {least}", least = MemoryConfig::MIN_BYTES)]
    TooSmall {
        /// Configured bytes.
        given: usize,
    },
    /// Wide counters would take more than half of the cap.
    #[error(
        "{wide} bytes for wide counters are more than half of the {bytes} bytes in all; lower them or raise the total"
    )]
    WideTooLarge {
        /// Bytes configured for wide counters.
        wide: usize,
        /// Cap in bytes.
        bytes: usize,
    },
    /// The system cannot provide that much memory.
    #[error("cannot reserve {bytes} bytes for the counters")]
    Map {
        /// Requested bytes.
        bytes: usize,
        /// Error of the system.
        source: std::io::Error,
    },
}
