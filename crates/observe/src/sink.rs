//! Lines for a file that is rotated, or for the standard output, written by a thread of its own behind a bounded queue. A
//! full disk or a reader that does not read costs lines, which are counted, and nothing else.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Where lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// The standard output.
    Stdout,
    /// A file; when it is longer than `bytes`, it is renamed to `….1` and a new one begun; `files` are kept in all.
    File {
        /// Its path.
        path: PathBuf,
        /// How long it may get.
        bytes: u64,
        /// How many there may be.
        files: u32,
    },
}

/// Batches that wait to be written. With what the worker gathers at once this bounds the memory.
const QUEUE: usize = 16;

/// Writes lines, or drops them.
#[derive(Debug)]
pub(crate) struct Sink {
    queue: SyncSender<(String, u64)>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    dropped: AtomicU64,
}

impl Sink {
    /// Opens the output and starts its writer.
    pub(crate) fn open(output: Output) -> std::io::Result<Self> {
        let (queue, batches) = sync_channel(QUEUE);
        let counts = Arc::new(Counts::default());
        let told = Arc::clone(&counts);
        let mut writer = match output {
            Output::Stdout => Writer::Stdout,
            Output::File { path, bytes, files } => {
                let file = OpenOptions::new().create(true).append(true).open(&path)?;
                let about = file.metadata()?;
                // A device is never renamed, whatever was written to it.
                let bytes = if about.is_file() { bytes.max(1) } else { u64::MAX };
                Writer::File { path, file, length: about.len(), bytes, files: files.max(1) }
            }
        };
        std::thread::Builder::new()
            .name("decision-log".to_owned())
            .spawn(move || writer.run(&batches, &told))?;
        Ok(Self { queue, counts })
    }

    /// Hands lines over, if the writer keeps up.
    pub(crate) fn write(&self, text: String, lines: u64) {
        if self.queue.try_send((text, lines)).is_err() {
            self.counts.dropped.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Lines that were written, and lines that could not be.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.counts.written.load(Ordering::Relaxed), self.counts.dropped.load(Ordering::Relaxed))
    }
}

enum Writer {
    Stdout,
    File { path: PathBuf, file: File, length: u64, bytes: u64, files: u32 },
}

impl Writer {
    fn run(&mut self, batches: &Receiver<(String, u64)>, counts: &Counts) {
        let mut failing = false;
        for (text, lines) in batches {
            match self.write(text.as_bytes()) {
                Ok(()) => {
                    failing = false;
                    counts.written.fetch_add(lines, Ordering::Relaxed);
                }
                Err(error) => {
                    counts.dropped.fetch_add(lines, Ordering::Relaxed);
                    // Once for each time that it begins: a full disk must not fill the other log as well.
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "the decision log cannot be written; decisions go on");
                    }
                }
            }
        }
    }

    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(text)?;
                out.flush()
            }
            Self::File { path, file, length, bytes, files } => {
                if *length > 0 && length.saturating_add(text.len() as u64) > *bytes {
                    *file = rotate(path, *files)?;
                    *length = 0;
                }
                *length += text.len() as u64;
                file.write_all(text)
            }
        }
    }
}

/// `log` becomes `log.1`, that `log.2`, and so on; the oldest goes.
fn rotate(path: &PathBuf, files: u32) -> std::io::Result<File> {
    let numbered = |number: u32| {
        let mut name = path.clone().into_os_string();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    for number in (1..files.saturating_sub(1)).rev() {
        let _ = std::fs::rename(numbered(number), numbered(number + 1));
    }
    if files > 1 {
        std::fs::rename(path, numbered(1))?;
    }
    OpenOptions::new().create(true).write(true).truncate(files == 1).append(files > 1).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(sink: &Sink, lines: u64) -> (u64, u64) {
        loop {
            let counts = sink.counts();
            if counts.0 + counts.1 >= lines {
                return counts;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_is_rotated_and_only_so_many_are_kept() {
        let folder = std::env::temp_dir().join(format!("tollgate-sink-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("log");
        let sink = Sink::open(Output::File { path: path.clone(), bytes: 100, files: 3 }).expect("a sink");
        for number in 0..10 {
            sink.write(format!("{number:059}\n"), 1);
            settled(&sink, number + 1);
        }
        let read = |name: &str| {
            std::fs::read_to_string(folder.join(name)).map(|text| text.trim_start_matches('0').to_owned())
        };
        assert_eq!(read("log").ok().as_deref(), Some("9\n"));
        assert_eq!(read("log.1").ok().as_deref(), Some("8\n"));
        assert_eq!(read("log.2").ok().as_deref(), Some("7\n"));
        assert!(read("log.3").is_err());
        std::fs::remove_dir_all(&folder).expect("gone");
    }

    /// A full disk costs lines, and those are counted.
    #[test]
    fn a_full_disk_is_counted() {
        let path = PathBuf::from("/dev/full");
        let sink = Sink::open(Output::File { path, bytes: 1 << 20, files: 3 }).expect("a sink");
        (0..50).for_each(|_| sink.write("line\n".to_owned(), 1));
        assert_eq!(settled(&sink, 50), (0, 50));
    }
}
