//! A program in the place of envoyproxy/ratelimit, and the client that calls it.

use super::server::{Ended, Said, command};
use super::{Folder, eventually, program};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use tollgate_testing::web::{self, WebResponse};
use tollgate_testing::{ports, signals};

/// A running `tollgate ratelimit` on free ports of loopback.
pub(crate) struct Ratelimit {
    child: Ended,
    log: Said,
    pub(crate) http: SocketAddr,
    /// Address, or `unix:PATH`.
    pub(crate) grpc: String,
    pub(crate) debug: SocketAddr,
    /// Where its metrics are, with Prometheus.
    pub(crate) metrics: Option<SocketAddr>,
}

/// A running envoyproxy/ratelimit.
pub(crate) struct Original {
    _child: Ended,
    pub(crate) grpc: String,
}

/// Variables for free ports, and for a machine that is busy.
const USUAL: [(&str, &str); 10] = [
    ("HOST", "127.0.0.1"),
    ("PORT", "0"),
    ("GRPC_HOST", "127.0.0.1"),
    ("GRPC_PORT", "0"),
    ("DEBUG_HOST", "127.0.0.1"),
    ("DEBUG_PORT", "0"),
    ("USE_STATSD", "false"),
    ("LOG_LEVEL", "debug"),
    ("TOLLGATE_STORE_DEADLINE_MS", "10000"),
    ("TOLLGATE_MEMORY", "16MiB"),
];

impl Ratelimit {
    /// Starts it with these variables.
    pub(crate) fn start(variables: &[(&str, &str)]) -> Self {
        let mut process = command(&["ratelimit", "--ignored", "-x", "arguments"]);
        process.envs(USUAL).envs(variables.iter().copied());
        Self::from_command(process)
    }

    /// The same, by a link with that name and without arguments.
    pub(crate) fn start_by_name(folder: &Folder, variables: &[(&str, &str)]) -> Self {
        std::fs::create_dir_all(folder.join("bin")).expect("a folder");
        let link = folder.join("bin/ratelimit");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tollgate"), &link).expect("a link");
        let mut process = Command::new(link);
        process.env_clear().envs(USUAL).envs(variables.iter().copied());
        process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::from_command(process)
    }

    /// Starts envoyproxy/ratelimit itself, on free ports of loopback.
    pub(crate) fn start_original(program: &Path, variables: &[(&str, &str)]) -> Original {
        let port = || ports::free().to_string();
        let (http, grpc, debug) = (port(), port(), port());
        let mut process = Command::new(program);
        process.env_clear().envs(USUAL).envs(variables.iter().copied());
        process.envs([("PORT", &http), ("GRPC_PORT", &grpc), ("DEBUG_PORT", &debug)]);
        process.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = Ended(process.spawn().expect("it runs"));
        let address = |port: &str| -> SocketAddr { format!("127.0.0.1:{port}").parse().expect("an address") };
        let (http, grpc) = (address(&http), address(&grpc));
        eventually("envoyproxy/ratelimit", || {
            let answer = web::exchange(http, &web::request("GET", "/healthcheck", b"")).ok()?;
            (answer.status == 200).then_some(())
        });
        Original { _child: child, grpc: grpc.to_string() }
    }

    fn from_command(mut process: Command) -> Self {
        let mut child = Ended(process.spawn().expect("the binary runs"));
        let log = Said::of(child.0.stderr.take().expect("piped"));
        let place = |log: &str, name: &str| -> Option<String> {
            let (_, rest) = log.split_once(&format!("Listening for {name} on '"))?;
            let place = rest.split_once('\'')?.0;
            Some(if place.starts_with('/') { format!("unix:{place}") } else { place.to_owned() })
        };
        let address = |log: &str, name: &str| -> Option<SocketAddr> { place(log, name)?.parse().ok() };
        let (http, grpc, debug, metrics) = eventually("its ports", || {
            let text = log.text();
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("it ended with {status}:\n{text}");
            }
            let all = (address(&text, "HTTP"), place(&text, "gRPC"), address(&text, "debug"));
            match all {
                (Some(http), Some(grpc), Some(debug)) => Some((http, grpc, debug, address(&text, "metrics"))),
                _ => None,
            }
        });
        // Written last, after that of HTTP.
        let metrics = metrics.or_else(|| address(&log.text(), "metrics"));
        Self { child, log, http, grpc, debug, metrics }
    }

    pub(crate) fn log(&self) -> String {
        self.log.text()
    }

    /// Waits until this is in the log: messages are written after the answer to the request that they are about.
    pub(crate) fn wait_for_log(&self, text: &str) {
        self.log.wait_for(text);
    }

    pub(crate) fn get(&self, address: SocketAddr, path: &str) -> WebResponse {
        self.exchange(address, &web::request("GET", path, b""))
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> WebResponse {
        self.exchange(self.http, &web::request("POST", path, body.as_bytes()))
    }

    fn exchange(&self, address: SocketAddr, bytes: &[u8]) -> WebResponse {
        web::exchange(address, bytes).unwrap_or_else(|error| panic!("no answer: {error}\n{}", self.log()))
    }

    /// Waits until it is healthy.
    pub(crate) fn healthy(self) -> Self {
        eventually("health", || (self.get(self.http, "/healthcheck").status == 200).then_some(()));
        self
    }

    /// Calls it, and returns one answer for each call.
    pub(crate) fn calls(&self, calls: &Value) -> Vec<Value> {
        calls_at(&self.grpc, calls, &[])
    }

    pub(crate) fn signal(&self, name: &str) {
        signals::send(self.child.0.id(), name);
    }

    /// Waits for the end, and for the last that it has logged.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let status = self.child.wait("tollgate ratelimit");
        self.log.wait_for_end();
        status
    }
}

/// Calls a service at an address, with these files for TLS.
pub(crate) fn calls_at(address: &str, calls: &Value, files: &[&Path]) -> Vec<Value> {
    let python = program("TOLLGATE_TEST_PYTHON", ".venv/foreign/bin/python", "Python with a gRPC client");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/calls.py");
    let output = Command::new(python)
        .arg(script)
        .arg(address)
        .arg(calls.to_string())
        .args(files)
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}
