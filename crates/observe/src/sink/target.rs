//! The places that lines are written to; files are rotated, and begun anew where somebody has moved them away.

use super::Output;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub(super) enum SinkTarget {
    Stdout,
    /// Its own, not the library's: who holds that one's lock and waits for a reader would stop all others.
    Stderr(File),
    File {
        path: PathBuf,
        file: File,
        /// What file that is: its device and its number there. Nothing, if it is no plain file.
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
            // It tells of callers: for nobody else, unless somebody lets them.
            Output::File { path, bytes, files } => Self::file(path, 0o600, bytes, files)?,
        })
    }

    fn file(path: PathBuf, mode: u32, bytes: u64, files: u32) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(mode).open(&path)?;
        let about = file.metadata()?;
        // A device is never renamed, whatever was written to it.
        let bytes = if about.is_file() { bytes.max(1) } else { u64::MAX };
        Ok(Self::File { path, file, which: which(&about), length: about.len(), bytes, files: files.max(1) })
    }

    /// Opens a file anew that somebody has moved away, if that can be: whether it was.
    pub(super) fn reopen_if_moved(&mut self) -> bool {
        let Self::File { path, file, which: Some(own), bytes, files, .. } = self else { return false };
        if std::fs::metadata(&*path).is_ok_and(|about| which(&about) == Some(*own)) {
            return false;
        }
        Self::file(path.clone(), mode(file), *bytes, *files).map(|opened| *self = opened).is_ok()
    }

    /// Whether somebody was ended while it wrote.
    pub(super) fn ends_in_partial_line(&self) -> bool {
        let Self::File { path, file, length: 1.., .. } = self else { return false };
        if !file.metadata().is_ok_and(|about| about.is_file()) {
            return false;
        }
        let last = File::open(path).and_then(|mut file| {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last).map(|()| last)
        });
        last.is_ok_and(|last| last != *b"\n")
    }

    /// How much was written, and why no more was.
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

fn which(about: &Metadata) -> Option<(u64, u64)> {
    about.is_file().then(|| (about.dev(), about.ino()))
}

/// `write_all` that tells how far it came.
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

/// Whoever may read the one may read the next.
fn mode(file: &File) -> u32 {
    file.metadata().map_or(0o600, |about| about.permissions().mode() & 0o666)
}

/// `log` becomes `log.1`, that `log.2`, and so on; the oldest goes.
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
