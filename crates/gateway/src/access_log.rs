//! One line of JSON a request: also of those that no route takes, that are refused as bad, and whose callers leave early. A
//! request never waits for it ([`Sink`]): what cannot be written is dropped, and counted.

use serde_json::json;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_observe::{Output, Sink};

/// What the status of a request is whose caller left before there was an answer; nginx's number for it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Where lines go.
pub(crate) struct AccessLog {
    path: PathBuf,
    sink: Sink,
    clock: SystemClock,
}

/// What is known of a request.
pub(crate) struct AccessRecord {
    pub(crate) started_at: Timestamp,
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

/// A line that is written when it is dropped, whatever becomes of its request.
pub(crate) struct AccessLogGuard {
    log: Arc<AccessLog>,
    pub(crate) entry: AccessRecord,
    /// Whether the answer has come to its end.
    pub(crate) is_complete: bool,
}

impl AccessLogGuard {
    pub(crate) const fn new(log: Arc<AccessLog>, entry: AccessRecord) -> Self {
        Self { log, entry, is_complete: false }
    }
}

impl Drop for AccessLogGuard {
    fn drop(&mut self) {
        let Self { log, entry, is_complete: is_whole } = self;
        if entry.status == 0 {
            entry.status = CLIENT_CLOSED_REQUEST;
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
        let output = match path.as_os_str() == "-" {
            true => Output::Stdout,
            // How much is kept is for whoever moves it away.
            false => Output::File { path: path.to_owned(), bytes: u64::MAX, files: 1 },
        };
        Ok(Self { path: path.to_owned(), sink: Sink::open("access log", output)?, clock: SystemClock::new() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Hands a line over, or drops it.
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
        self.sink.write(format!("{line}\n"), 1);
    }

    /// Lines that could not be written.
    pub(crate) fn dropped(&self) -> u64 {
        self.sink.counts().1
    }

    /// Waits for so long until all is written: how many lines were not. It takes none after that.
    pub(crate) fn flush(&self, patience: Duration) -> u64 {
        self.sink.flush(patience)
    }
}
