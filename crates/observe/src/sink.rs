//! Log sink: writes lines to a rotated file, standard output or standard error, on its own thread behind a bounded queue.
//! A full disk or a blocked reader costs lines, which are counted, and nothing else. A file that was moved away is reopened
//! within a second.

mod target;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use target::SinkTarget;

/// Destination of log lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error, for the log messages of the process.
    Stderr,
    /// A file. When it exceeds `bytes` it is renamed to `….1` and a new one is started; at most `files` exist.
    File {
        /// Path of the current file.
        path: PathBuf,
        /// Maximum size in bytes.
        bytes: u64,
        /// Maximum number of files.
        files: u32,
    },
}

/// Maximum number of queued batches, and of queued bytes.
const QUEUE: usize = 8_192;
const MAX_PENDING: u64 = 4 << 20;
/// Bytes up to which small batches are combined into one write.
const BATCH_BYTES: usize = 64 << 10;
/// Interval at which an idle writer checks whether its file was moved.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Name of the process log, where failures of other logs are reported.
const MESSAGES: &str = "messages";

/// Asynchronous line writer; drops lines that do not fit the queue.
#[derive(Debug)]
pub struct Sink {
    /// Queue to the writer; `None` after [`Self::flush`].
    queue: Mutex<Option<SyncSender<LineBatch>>>,
    counts: Arc<Counts>,
    /// Closed when the writer has finished.
    ended: Mutex<Receiver<()>>,
}

type LineBatch = (String, u64);

#[derive(Debug, Default)]
struct Counts {
    /// Lines passed to [`Sink::write`], and how many of them were written and dropped.
    submitted: AtomicU64,
    written: AtomicU64,
    dropped: AtomicU64,
    /// Bytes in the queue.
    pending: AtomicU64,
}

impl Sink {
    /// Opens the output and starts its writer; `name` is the name of the log, for the thread and for messages.
    ///
    /// # Errors
    /// If the output cannot be opened or the thread cannot be started.
    pub fn open(name: &'static str, output: Output) -> std::io::Result<Self> {
        let (queue, batches) = sync_channel(QUEUE);
        let (end, ended) = sync_channel(0);
        let counts = Arc::new(Counts::default());
        let writer_counts = Arc::clone(&counts);
        let target = SinkTarget::open(output)?;
        let mut writer = Writer { name, is_torn: target.ends_in_partial_line(), target };
        std::thread::Builder::new().name(name.replace(' ', "-")).spawn(move || {
            writer.run(&batches, &writer_counts);
            drop(end);
        })?;
        Ok(Self { queue: Mutex::new(Some(queue)), counts, ended: Mutex::new(ended) })
    }

    /// Queues lines, or drops them if the queue is full.
    pub fn write(&self, text: String, lines: u64) {
        let counts = &*self.counts;
        counts.submitted.fetch_add(lines, Ordering::Relaxed);
        let length = text.len() as u64;
        // Under the lock, so that concurrent writers do not exceed the bound together.
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = counts.pending.load(Ordering::Relaxed) + length <= MAX_PENDING;
        let queue = queue.as_ref().filter(|_| has_room);
        // Added before sending: the writer subtracts as soon as it receives.
        counts.pending.fetch_add(length, Ordering::Relaxed);
        if queue.is_none_or(|queue| queue.try_send((text, lines)).is_err()) {
            counts.pending.fetch_sub(length, Ordering::Relaxed);
            counts.dropped.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Returns the number of lines written and the number dropped.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.counts.written.load(Ordering::Relaxed), self.counts.dropped.load(Ordering::Relaxed))
    }

    /// Closes the queue and waits up to `timeout` for queued lines to be written. Returns how many lines were lost.
    pub fn flush(&self, timeout: Duration) -> u64 {
        let unsettled = || {
            let (written, dropped) = self.counts();
            self.counts.submitted.load(Ordering::Relaxed).saturating_sub(written + dropped)
        };
        let before = self.counts().1;
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(timeout);
        unsettled() + (self.counts().1 - before)
    }
}

/// The writer thread's state.
struct Writer {
    name: &'static str,
    target: SinkTarget,
    /// Whether the output ends in a partial line, which the next line must not be appended to.
    is_torn: bool,
}

impl Writer {
    fn run(&mut self, batches: &Receiver<LineBatch>, counts: &Counts) {
        let is_messages = self.name == MESSAGES;
        let (mut failing, mut reported) = (false, 0);
        loop {
            let (mut text, mut lines) = match batches.recv_timeout(CHECK_INTERVAL) {
                Ok(batch) => batch,
                Err(RecvTimeoutError::Timeout) => {
                    self.reopen_if_moved();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            while text.len() < BATCH_BYTES
                && let Ok((more, of_more)) = batches.try_recv()
            {
                text.push_str(&more);
                lines += of_more;
            }
            let (whole, outcome) = self.write(text.as_bytes());
            let whole = if outcome.is_ok() { lines } else { whole.min(lines) };
            counts.written.fetch_add(whole, Ordering::Relaxed);
            counts.dropped.fetch_add(lines - whole, Ordering::Relaxed);
            let left = counts.pending.fetch_sub(text.len() as u64, Ordering::Relaxed) - text.len() as u64;
            match outcome {
                // Reported once per failure period: a full disk must not flood the process log.
                Err(error) if !std::mem::replace(&mut failing, true) && !is_messages => {
                    tracing::warn!(%error, log = self.name, "cannot write log; lines are dropped");
                }
                Err(_) => {}
                Ok(()) => {
                    failing = false;
                    let lost = counts.dropped.load(Ordering::Relaxed);
                    // Reported when the reader has caught up and there is room for the message.
                    if is_messages && left == 0 && lost > std::mem::replace(&mut reported, lost) {
                        tracing::warn!(lost, "log messages dropped; standard error was blocked");
                    }
                }
            }
        }
    }

    fn reopen_if_moved(&mut self) {
        if self.target.reopen_if_moved() {
            self.is_torn = self.target.ends_in_partial_line();
        }
    }

    /// Writes as much as possible and returns the number of complete lines written.
    fn write(&mut self, text: &[u8]) -> (u64, std::io::Result<()>) {
        self.reopen_if_moved();
        if self.is_torn {
            if let Err(error) = self.target.write(b"\n").1 {
                return (0, Err(error));
            }
            self.is_torn = false;
        }
        let (written, outcome) = self.target.write(text);
        let written = &text[..written];
        self.is_torn = written.last().is_some_and(|last| *last != b'\n');
        (written.iter().filter(|byte| **byte == b'\n').count() as u64, outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

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
    fn a_file_is_rotated_and_old_ones_are_deleted() {
        let folder = std::env::temp_dir().join(format!("tollgate-sink-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("log");
        let sink =
            Sink::open("log", Output::File { path: path.clone(), bytes: 100, files: 3 }).expect("a sink");
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

    /// A full disk costs lines, which are counted.
    #[test]
    fn a_full_disk_is_counted() {
        let path = PathBuf::from("/dev/full");
        let sink = Sink::open("log", Output::File { path, bytes: 1 << 20, files: 3 }).expect("a sink");
        (0..50).for_each(|_| sink.write("line\n".to_owned(), 1));
        assert_eq!(settled(&sink, 50), (0, 50));
    }

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("tollgate-sink-{name}-{}", std::process::id()))
    }

    /// All lines are on disk after a flush; later lines are counted as dropped.
    #[test]
    fn flush_waits_for_all_submitted_lines() {
        let path = file("end");
        let output = Output::File { path: path.clone(), bytes: 1 << 20, files: 3 };
        let sink = Sink::open("log", output).expect("a sink");
        (0..500).for_each(|number| sink.write(format!("{number}\n"), 1));
        assert_eq!(sink.flush(Duration::from_secs(20)), 0);
        sink.write("late\n".to_owned(), 1);
        assert_eq!(sink.counts(), (500, 1));
        let text = std::fs::read_to_string(&path).expect("a file");
        assert!(text.lines().map(str::to_owned).eq((0..500).map(|number| number.to_string())), "{text}");
        let mode = std::fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the log contains data on callers");
        std::fs::remove_file(&path).expect("gone");
    }

    /// External log rotation works: lines after a move go to a new file, which is created even if nothing is written.
    #[test]
    fn a_moved_file_is_reopened() {
        let (path, moved) = (file("moved"), file("moved-away"));
        let output = Output::File { path: path.clone(), bytes: u64::MAX, files: 1 };
        let sink = Sink::open("log", output).expect("a sink");
        sink.write("before\n".to_owned(), 1);
        settled(&sink, 1);
        std::fs::rename(&path, &moved).expect("moved");
        sink.write("after\n".to_owned(), 1);
        settled(&sink, 2);
        let read = |path: &PathBuf| std::fs::read_to_string(path).expect("a file");
        assert_eq!((read(&moved).as_str(), read(&path).as_str()), ("before\n", "after\n"));
        std::fs::rename(&path, &moved).expect("moved");
        while !path.exists() {
            std::thread::yield_now();
        }
        assert_eq!((read(&moved).as_str(), read(&path).as_str()), ("after\n", ""));
        for path in [path, moved] {
            std::fs::remove_file(path).expect("gone");
        }
    }

    /// With a blocked reader the queue is bounded, everything else is counted as dropped, and flush does not wait forever.
    #[test]
    fn a_blocked_reader_does_not_block_the_writer() {
        let (mut reader, pipe) = std::io::pipe().expect("a pipe");
        let (queue, batches) = sync_channel(QUEUE);
        let (end, ended) = sync_channel(0);
        let counts = Arc::new(Counts::default());
        let writer_counts = Arc::clone(&counts);
        let mut writer =
            Writer { name: MESSAGES, target: SinkTarget::Stderr(OwnedFd::from(pipe).into()), is_torn: false };
        let thread = std::thread::spawn(move || {
            writer.run(&batches, &writer_counts);
            drop(end);
        });
        let sink = Sink { queue: Mutex::new(Some(queue)), counts, ended: Mutex::new(ended) };
        let line = format!("{}\n", "x".repeat(99_999));
        (0..200).for_each(|_| sink.write(line.clone(), 1));
        let lost = sink.counts().1;
        assert!(lost >= 200 - (MAX_PENDING / 100_000 + 2), "{lost}");
        assert_eq!(sink.flush(Duration::from_millis(10)), 200 - lost, "none was whole");
        let reading = std::thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).map(|_| text)
        });
        thread.join().expect("the writer");
        let text = reading.join().expect("a reader").expect("a text");
        assert_eq!(text.lines().count() as u64, 200 - lost);
        assert!(text.lines().all(|read| read.len() == 99_999));
        assert_eq!(sink.counts(), (200 - lost, lost));
    }

    /// A partial line from a previous process stays separate.
    #[test]
    fn no_line_is_appended_to_a_partial_one() {
        let path = file("torn");
        std::fs::write(&path, "whole\nha").expect("a file");
        let output = Output::File { path: path.clone(), bytes: 1 << 20, files: 3 };
        let sink = Sink::open("log", output).expect("a sink");
        sink.write("next\nand\n".to_owned(), 2);
        sink.write("last\n".to_owned(), 1);
        assert_eq!(sink.flush(Duration::from_secs(20)), 0);
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "whole\nha\nnext\nand\nlast\n");
        std::fs::remove_file(&path).expect("gone");
    }

    /// The same after a failed write; the complete lines before it count as written.
    #[test]
    fn a_partial_write_corrupts_no_other_line() {
        let (mut reader, full) = UnixStream::pair().expect("a pair");
        full.set_nonblocking(true).and_then(|()| reader.set_nonblocking(true)).expect("a pair");
        let mut writer =
            Writer { name: MESSAGES, target: SinkTarget::Stderr(OwnedFd::from(full).into()), is_torn: false };
        let long = format!("first\n{}\n", "x".repeat(8 << 20));
        let (whole, outcome) = writer.write(long.as_bytes());
        assert!(whole == 1 && outcome.is_err(), "{whole} lines, {outcome:?}");
        let mut text = Vec::new();
        let _ = reader.read_to_end(&mut text);
        assert!(text.starts_with(b"first\nx") && text.ends_with(b"x"));
        for line in ["next\n", "last\n"] {
            assert!(matches!(writer.write(line.as_bytes()), (1, Ok(()))));
        }
        drop(writer);
        text.clear();
        reader.read_to_end(&mut text).expect("the rest");
        assert_eq!(text, b"\nnext\nlast\n");
    }
}
