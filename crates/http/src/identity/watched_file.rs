//! A file that is read again when it changes.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// The size and modification time of a file.
type FileStamp = Option<(u64, Option<SystemTime>)>;

/// Whether a file that was cut off in the middle is recognized when it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartialFile {
    /// It is an error: the previous content stays in use.
    Invalid,
    /// It looks complete, so a file is read only when it has stopped changing.
    Valid,
}

pub(super) struct WatchedFile {
    path: PathBuf,
    partial: PartialFile,
    state: Mutex<WatchState>,
}

struct WatchState {
    /// The stamp of the content that was read.
    read: FileStamp,
    /// The stamp that the last poll found.
    seen: FileStamp,
    /// Why the last change could not be used.
    error: Option<String>,
}

impl WatchedFile {
    /// Call it before the file is read, so that no change in between is missed.
    pub(super) fn new(path: &Path, partial: PartialFile) -> Self {
        let stamp = stamp(path);
        let state = Mutex::new(WatchState { read: stamp, seen: stamp, error: None });
        Self { path: path.to_owned(), partial, state }
    }

    /// Reads the file if it has changed; returns whether it has. An error stays until the file can be read.
    pub(super) fn poll<E: std::fmt::Display>(&self, read: impl FnOnce(&Path) -> Result<(), E>) -> bool {
        let now = stamp(&self.path);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_settled = state.seen == now || self.partial == PartialFile::Invalid;
        state.seen = now;
        if state.read == now || !is_settled {
            return false;
        }
        state.read = now;
        state.error = read(&self.path).err().map(|error| error.to_string());
        true
    }

    /// Returns why the last change could not be used.
    pub(super) fn error(&self) -> Option<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).error.clone()
    }
}

fn stamp(path: &Path) -> FileStamp {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.len(), metadata.modified().ok()))
}
