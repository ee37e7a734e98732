//! One line of JSON a request, written by a thread of its own: also of those that no route takes, that are refused as bad,
//! and whose callers leave early. A request never waits for it: what does not fit into the queue is dropped, and counted. A
//! file that was moved away is opened anew within a second.

use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;
use tollgate_core::{Clock, SystemClock, Timestamp};

/// Lines that wait to be written.
const QUEUE: usize = 8192;

/// What the status of a request is whose caller left before there was an answer; nginx's number for it.
const LEFT: u16 = 499;

/// Where lines go.
pub(crate) struct AccessLog {
    path: PathBuf,
    queue: SyncSender<String>,
    dropped: AtomicU64,
    clock: SystemClock,
}

/// What is known of a request.
pub(crate) struct Entry {
    pub(crate) began: Timestamp,
    pub(crate) remote: IpAddr,
    /// 0 while there is no answer.
    pub(crate) status: u16,
    pub(crate) method: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) route: Option<String>,
    pub(crate) upstream: Option<String>,
    pub(crate) decision: Option<String>,
    pub(crate) denied_by: Option<String>,
    pub(crate) degraded_by: Option<String>,
    /// Bytes of the answer's body.
    pub(crate) bytes: u64,
    pub(crate) error: Option<String>,
}

impl Entry {
    pub(crate) const fn new(began: Timestamp, remote: IpAddr) -> Self {
        Self {
            began,
            remote,
            status: 0,
            method: None,
            host: None,
            path: None,
            route: None,
            upstream: None,
            decision: None,
            denied_by: None,
            degraded_by: None,
            bytes: 0,
            error: None,
        }
    }
}

/// A line that is written when it is dropped, whatever becomes of its request.
pub(crate) struct Line {
    log: Arc<AccessLog>,
    pub(crate) entry: Entry,
    /// Whether the answer has come to its end.
    pub(crate) is_whole: bool,
}

impl Line {
    pub(crate) const fn new(log: Arc<AccessLog>, entry: Entry) -> Self {
        Self { log, entry, is_whole: false }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let Self { log, entry, is_whole } = self;
        if entry.status == 0 {
            entry.status = LEFT;
            entry.error = Some("the caller left before the answer".to_owned());
        } else if !*is_whole && entry.error.is_none() {
            entry.error = Some("the caller left before the end of the answer".to_owned());
        }
        log.write(entry);
    }
}

impl AccessLog {
    /// Opens the log and starts its writer.
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let (queue, lines) = sync_channel(QUEUE);
        let sink = if path.as_os_str() == "-" { Sink::Output } else { Sink::open(path)? };
        std::thread::Builder::new().name("access-log".to_owned()).spawn(move || sink.run(&lines))?;
        Ok(Self { path: path.to_owned(), queue, dropped: AtomicU64::new(0), clock: SystemClock::new() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Hands a line over, or drops it.
    fn write(&self, entry: &Entry) {
        let took = self.clock.now().since(entry.began);
        let mut line = json!({
            "time_us": entry.began.as_micros(),
            "remote_address": entry.remote.to_string(),
            "status": entry.status,
            "bytes": entry.bytes,
            "took_us": took.as_micros(),
        });
        let more = [
            ("method", &entry.method),
            ("host", &entry.host),
            ("path", &entry.path),
            ("route", &entry.route),
            ("upstream", &entry.upstream),
            ("decision", &entry.decision),
            ("denied_by", &entry.denied_by),
            ("degraded_by", &entry.degraded_by),
            ("error", &entry.error),
        ];
        for (name, value) in more {
            if let Some(value) = value {
                line[name] = value.as_str().into();
            }
        }
        if self.queue.try_send(line.to_string()).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lines that did not fit into the queue.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

enum Sink {
    Output,
    File { path: PathBuf, file: File },
}

impl Sink {
    fn open(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self::File { path: path.to_owned(), file })
    }

    /// Writes until the gateway is gone: all that waits at once.
    fn run(mut self, lines: &Receiver<String>) {
        let mut text = String::new();
        loop {
            match lines.recv_timeout(Duration::from_secs(1)) {
                Ok(line) => {
                    text.push_str(&line);
                    text.push('\n');
                    while text.len() < 64 * 1024
                        && let Ok(line) = lines.try_recv()
                    {
                        text.push_str(&line);
                        text.push('\n');
                    }
                    // A full disk must not stop the gateway.
                    let _ = self.write(text.as_bytes());
                    text.clear();
                }
                Err(RecvTimeoutError::Timeout) => self.follow(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.follow();
        match self {
            Self::Output => std::io::stdout().lock().write_all(bytes),
            Self::File { file, .. } => file.write_all(bytes),
        }
    }

    /// Opens the file anew if it has been moved away.
    fn follow(&mut self) {
        let Self::File { path, file } = self else { return };
        let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let same = std::fs::metadata(&*path).map(place).ok() == file.metadata().map(place).ok();
        if !same && let Ok(opened) = Self::open(path) {
            *self = opened;
        }
    }
}
