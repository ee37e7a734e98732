//! A collector of traces, which knows OpenTelemetry's own messages (`foreign/collector.py`).

use super::eventually;
use super::foreign::{program, spawn};
use super::server::{Ended, Said};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

pub(crate) struct Collector {
    child: Ended,
    out: Said,
    err: Said,
    pub(crate) address: SocketAddr,
}

impl Collector {
    pub(crate) fn start() -> Self {
        Self::start_with(&["0"])
    }

    /// By its own arguments: a port, or 0 for a free one, and what its head says.
    pub(crate) fn start_with(args: &[&str]) -> Self {
        let python = program(
            "TOLLGATE_TEST_OPENTELEMETRY",
            ".venv/opentelemetry/bin/python",
            "Python with OpenTelemetry's messages",
        );
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/collector.py");
        let (mut child, out, err) = spawn(Command::new(python).arg("-u").arg(script).args(args));
        let address = eventually("the collector's address", || {
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("the collector ended with {status}:\n{}", err.text());
            }
            out.text().lines().next()?.parse().ok()
        });
        Self { child, out, err, address }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans that it was sent so far.
    pub(crate) fn spans(&mut self) -> Vec<Value> {
        if let Ok(Some(status)) = self.child.0.try_wait() {
            panic!("the collector ended with {status}:\n{}", self.err.text());
        }
        let text = self.out.text();
        text.lines().skip(1).map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// The same, once there are so many.
    pub(crate) fn wait_for(&mut self, many: usize) -> Vec<Value> {
        eventually(&format!("{many} spans"), || Some(self.spans()).filter(|spans| spans.len() >= many))
    }
}
