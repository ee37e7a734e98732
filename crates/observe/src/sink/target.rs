//! Sink targets: standard streams and files, with rotation and reopening after an external move.

use super::Output;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub(super) enum SinkTarget {
    Stdout,
    /// A handle of its own: the standard library's stderr lock would block all its users while a reader is blocked.
    Stderr(File),
    File {
        path: PathBuf,
        file: File,
        /// Device and inode of the file; `None` if it is not a regular file.
        which: Option<(u64, u64)>,
        length: u64,
        bytes: u64,
        files: u32,
    },
}

impl SinkTarget {
    pub(super) fn open(output: Output) -> std::io::Result<Self> {
        Ok(match output {
            Output::Stdout => Self::Stdout,
            Output::Stderr => Self::Stderr(std::io::stderr().as_fd().try_clone_to_owned()?.into()),
            // The log contains data on callers: only the owner may read it, unless an operator changes the mode.
            Output::File { path, bytes, files } => Self::file(path, 0o600, bytes, files)?,
        })
    }

    fn file(path: PathBuf, mode: u32, bytes: u64, files: u32) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(mode).open(&path)?;
        let metadata = file.metadata()?;
        // A device is never rotated.
        let bytes = if metadata.is_file() { bytes.max(1) } else { u64::MAX };
        Ok(Self::File {
            path,
            file,
            which: which(&metadata),
            length: metadata.len(),
            bytes,
            files: files.max(1),
        })
    }

    /// Reopens a file that was moved away, and returns whether it did.
    pub(super) fn reopen_if_moved(&mut self) -> bool {
        let Self::File { path, file, which: Some(own), bytes, files, .. } = self else { return false };
        if std::fs::metadata(&*path).is_ok_and(|metadata| which(&metadata) == Some(*own)) {
            return false;
        }
        Self::file(path.clone(), mode(file), *bytes, *files).map(|opened| *self = opened).is_ok()
    }

    /// Returns whether the file ends in a partial line, as after a crash of its writer.
    pub(super) fn ends_in_partial_line(&self) -> bool {
        let Self::File { path, file, length: 1.., .. } = self else { return false };
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return false;
        }
        let last = File::open(path).and_then(|mut file| {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last).map(|()| last)
        });
        last.is_ok_and(|last| last != *b"\n")
    }

    /// Writes `text`; returns the number of bytes written and the error that stopped it.
    pub(super) fn write(&mut self, text: &[u8]) -> (usize, std::io::Result<()>) {
        match self {
            Self::Stdout => {
                let mut out = std::io::stdout().lock();
                match write(&mut out, text) {
                    (written, Ok(())) => (written, out.flush()),
                    failed => failed,
                }
            }
            Self::Stderr(file) => write(file, text),
            Self::File { path, file, which: own, length, bytes, files } => {
                if *length > 0 && length.saturating_add(text.len() as u64) > *bytes {
                    match rotate(path, file, *files) {
                        Ok(new) => {
                            *own = new.metadata().ok().as_ref().and_then(which);
                            (*file, *length) = (new, 0);
                        }
                        Err(error) => return (0, Err(error)),
                    }
                }
                let (written, outcome) = write(file, text);
                *length += written as u64;
                (written, outcome)
            }
        }
    }
}

fn which(metadata: &Metadata) -> Option<(u64, u64)> {
    metadata.is_file().then(|| (metadata.dev(), metadata.ino()))
}

/// `write_all` that also returns the number of bytes written.
fn write(out: &mut impl Write, text: &[u8]) -> (usize, std::io::Result<()>) {
    let mut written = 0;
    while written < text.len() {
        match out.write(&text[written..]) {
            Ok(0) => return (written, Err(std::io::ErrorKind::WriteZero.into())),
            Ok(more) => written += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}

/// Returns the permissions of a file, for its successor.
fn mode(file: &File) -> u32 {
    file.metadata().map_or(0o600, |metadata| metadata.permissions().mode() & 0o666)
}

/// Renames `log` to `log.1`, `log.1` to `log.2` and so on, dropping the oldest, and opens a new `log`.
fn rotate(path: &Path, file: &File, files: u32) -> std::io::Result<File> {
    let numbered = |number: u32| {
        let mut name = path.to_path_buf().into_os_string();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    for number in (1..files.saturating_sub(1)).rev() {
        let _ = std::fs::rename(numbered(number), numbered(number + 1));
    }
    if files > 1 {
        std::fs::rename(path, numbered(1))?;
    }
    let mut options = OpenOptions::new();
    options.create(true).write(true).truncate(files == 1).append(files > 1).mode(mode(file)).open(path)
}
