//! What ends when an answer's body does: its line in the access log, and what its request held.

use crate::access_log::{AccessLog, Entry};
use std::sync::Arc;

/// Something that is given back by being dropped.
pub(crate) trait Ends: Send {}
impl<T: Send> Ends for T {}

/// Dropped when the answer has been written, has failed, or the caller has left.
pub(crate) struct Finish {
    pub(crate) bytes: u64,
    pub(crate) failed: Option<String>,
    pub(crate) log: Option<(Arc<AccessLog>, Entry)>,
    pub(crate) _held: Option<Box<dyn Ends>>,
}

impl Drop for Finish {
    fn drop(&mut self) {
        if let Some((log, entry)) = self.log.take() {
            log.write(&entry, self.bytes, self.failed.as_deref());
        }
    }
}
