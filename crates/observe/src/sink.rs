//! Lines for a file that is rotated, for the standard output or the standard error, written by a thread of its own behind a
//! bounded queue, all that waits at once. A full disk or a reader that does not read costs lines, which are counted, and
//! nothing else. A file that somebody else has moved away is begun anew within a second.

mod target;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use target::SinkTarget;

/// Where lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// The standard output.
    Stdout,
    /// The standard error: the messages of the process itself.
    Stderr,
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

/// What waits to be written: so many batches of lines, and so many bytes of them.
const QUEUE: usize = 8_192;
const MAX_PENDING: u64 = 4 << 20;
/// What is written at once, if batches are small.
const BATCH_BYTES: usize = 64 << 10;
/// How soon it is seen that a file has been moved away, where nothing is written.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The messages of the process itself: what is wrong with other logs is written there.
const MESSAGES: &str = "messages";

/// Writes lines, or drops them.
#[derive(Debug)]
pub struct Sink {
    /// Until the end.
    queue: Mutex<Option<SyncSender<LineBatch>>>,
    counts: Arc<Counts>,
    /// Closed when the writer has written its last.
    ended: Mutex<Receiver<()>>,
}

type LineBatch = (String, u64);

#[derive(Debug, Default)]
struct Counts {
    /// Lines that were handed over, and what became of them.
    submitted: AtomicU64,
    written: AtomicU64,
    dropped: AtomicU64,
    /// Bytes in the queue.
    pending: AtomicU64,
}

impl Sink {
    /// Opens the output and starts its writer; `name` is that of the log, for the thread and for messages.
    ///
    /// # Errors
    /// If the output cannot be opened, or there can be no thread.
    pub fn open(what: &'static str, output: Output) -> std::io::Result<Self> {
        let (queue, batches) = sync_channel(QUEUE);
        let (end, ended) = sync_channel(0);
        let counts = Arc::new(Counts::default());
        let told = Arc::clone(&counts);
        let place = SinkTarget::open(output)?;
        let mut writer = Writer { name: what, is_torn: place.ends_in_partial_line(), target: place };
        std::thread::Builder::new().name(what.replace(' ', "-")).spawn(move || {
            writer.run(&batches, &told);
            drop(end);
        })?;
        Ok(Self { queue: Mutex::new(Some(queue)), counts, ended: Mutex::new(ended) })
    }

    /// Hands lines over, if the writer keeps up.
    pub fn write(&self, text: String, lines: u64) {
        let counts = &*self.counts;
        counts.submitted.fetch_add(lines, Ordering::Relaxed);
        let length = text.len() as u64;
        // One at a time looks, so that together they do not go beyond.
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = counts.pending.load(Ordering::Relaxed) + length <= MAX_PENDING;
        let queue = queue.as_ref().filter(|_| has_room);
        // Before the writer can take it off.
        counts.pending.fetch_add(length, Ordering::Relaxed);
        if queue.is_none_or(|queue| queue.try_send((text, lines)).is_err()) {
            counts.pending.fetch_sub(length, Ordering::Relaxed);
            counts.dropped.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Lines that were written, and lines that could not be.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.counts.written.load(Ordering::Relaxed), self.counts.dropped.load(Ordering::Relaxed))
    }

    /// Takes nothing any more, and waits for so long until all is written that was handed over: how many lines were not.
    pub fn flush(&self, patience: Duration) -> u64 {
        let unsettled = || {
            let (written, dropped) = self.counts();
            self.counts.submitted.load(Ordering::Relaxed).saturating_sub(written + dropped)
        };
        let before = self.counts().1;
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(patience);
        unsettled() + (self.counts().1 - before)
    }
}

/// Writes until there will be no more.
struct Writer {
    name: &'static str,
    target: SinkTarget,
    /// Whether the last that was written is half a line: the next is not to be joined to it.
    is_torn: bool,
}

impl Writer {
    fn run(&mut self, batches: &Receiver<LineBatch>, counts: &Counts) {
        let is_messages = self.name == MESSAGES;
        let (mut failing, mut told) = (false, 0);
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
                // Once for each time that it begins: a full disk must not fill the other log as well.
                Err(error) if !std::mem::replace(&mut failing, true) && !is_messages => {
                    tracing::warn!(%error, "the {} cannot be written; requests go on", self.name);
                }
                Err(_) => {}
                Ok(()) => {
                    failing = false;
                    let lost = counts.dropped.load(Ordering::Relaxed);
                    // Whoever reads again is told what is missing, once there is room for that.
                    if is_messages && left == 0 && lost > std::mem::replace(&mut told, lost) {
                        tracing::warn!(lost, "messages were lost: nobody read the standard error");
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

    /// Writes, as far as that goes: how many lines are whole.
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

    /// A full disk costs lines, and those are counted.
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

    /// All that was handed over is there at the end; after it, lines are counted as lost.
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
        assert_eq!(mode & 0o777, 0o600, "it tells of callers");
        std::fs::remove_file(&path).expect("gone");
    }

    /// Whoever rotates logs by other means finds the next lines in a new file, also where nothing is written for a while.
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

    /// Nobody reads: only so much waits, all else is counted, and the end does not wait for ever.
    #[test]
    fn a_blocked_reader_does_not_block_the_writer() {
        let (mut reader, pipe) = std::io::pipe().expect("a pipe");
        let (queue, batches) = sync_channel(QUEUE);
        let (end, ended) = sync_channel(0);
        let counts = Arc::new(Counts::default());
        let told = Arc::clone(&counts);
        let mut writer =
            Writer { name: MESSAGES, target: SinkTarget::Stderr(OwnedFd::from(pipe).into()), is_torn: false };
        let thread = std::thread::spawn(move || {
            writer.run(&batches, &told);
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

    /// What was cut off stays a line of its own.
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

    /// The same where a write fails half way; the lines before it were written.
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
