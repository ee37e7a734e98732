//! Access log: one line of JSON per request, including those without a route, rejected ones and those whose clients
//! disconnect early. A request never waits for it ([`Sink`]): lines that cannot be written are dropped and counted.

use serde_json::json;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_observe::{Output, Sink, escape};

/// Status of a request whose client disconnected before the response, as in nginx.
const CLIENT_CLOSED: u16 = 499;

/// Writer of the access log.
pub(crate) struct AccessLog {
    path: PathBuf,
    sink: Sink,
    clock: SystemClock,
}

/// Fields of one line.
pub(crate) struct AccessRecord {
    pub(crate) started_at: Timestamp,
    pub(crate) remote: IpAddr,
    /// Response status; 0 while there is none.
    pub(crate) status: u16,
    pub(crate) method: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) route: Option<String>,
    pub(crate) upstream: Option<String>,
    pub(crate) decision: Option<String>,
    pub(crate) denied_by: Option<String>,
    pub(crate) degraded_by: Option<String>,
    /// Bytes of the response body.
    pub(crate) bytes: u64,
    pub(crate) error: Option<String>,
}

impl AccessRecord {
    pub(crate) const fn new(began: Timestamp, remote: IpAddr) -> Self {
        Self {
            started_at: began,
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

/// A line that is written on drop, whatever happens to its request.
pub(crate) struct AccessLogGuard {
    log: Arc<AccessLog>,
    pub(crate) entry: AccessRecord,
    /// Whether the response is complete.
    pub(crate) is_complete: bool,
}

impl AccessLogGuard {
    pub(crate) const fn new(log: Arc<AccessLog>, entry: AccessRecord) -> Self {
        Self { log, entry, is_complete: false }
    }
}

impl Drop for AccessLogGuard {
    fn drop(&mut self) {
        let Self { log, entry, is_complete } = self;
        if entry.status == 0 {
            entry.status = CLIENT_CLOSED;
            entry.error = Some("client disconnected before the response".to_owned());
        } else if !*is_complete && entry.error.is_none() {
            entry.error = Some("client disconnected before the end of the response".to_owned());
        }
        log.write(entry);
    }
}

impl AccessLog {
    /// Opens the log and starts its writer.
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let output = match path.as_os_str() == "-" {
            true => Output::Stdout,
            // Unbounded: rotation is up to external tools.
            false => Output::File { path: path.to_owned(), bytes: u64::MAX, files: 1 },
        };
        Ok(Self { path: path.to_owned(), sink: Sink::open("access log", output)?, clock: SystemClock::new() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Queues a line, or drops it.
    fn write(&self, entry: &AccessRecord) {
        let took = self.clock.now().since(entry.started_at);
        let mut line = json!({
            "time_us": entry.started_at.as_micros(),
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
        self.sink.write(format!("{}\n", escape::json(&line.to_string())), 1);
    }

    /// Returns the number of lines dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.sink.counts().1
    }

    /// Closes the log and waits up to `timeout` for queued lines. Returns how many lines were lost.
    pub(crate) fn flush(&self, timeout: Duration) -> u64 {
        self.sink.flush(timeout)
    }
}
