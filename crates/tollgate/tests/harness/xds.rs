//! A third-party management server: go-control-plane (`foreign/xds`), as Envoy Gateway uses it.

use super::eventually;
use super::server::{Ended, Said};
use serde_json::{Value, json};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use tollgate_testing::ports::free_address;

/// The node ID of these tests.
pub(crate) const NODE: &str = "envoy-ratelimit";

pub(crate) struct XdsServer {
    child: Ended,
    input: ChildStdin,
    out: Said,
    err: Said,
    pub(crate) address: SocketAddr,
}

/// Builds it, once a process; Go's own cache makes the next time quick.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("xds-management-server");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/xds");
        let built = Command::new("go").args(["build", "-o"]).arg(&path).arg(".").current_dir(source).output();
        let built = built.unwrap_or_else(|error| panic!("no Go ({error}): install Go 1.26 or newer"));
        assert!(built.status.success(), "go build: {}", String::from_utf8_lossy(&built.stderr));
        path
    })
}

impl XdsServer {
    /// On an address that another can take when it has ended.
    pub(crate) fn start() -> Self {
        Self::start_at(&free_address().to_string(), &[])
    }

    /// On an address, with more flags.
    pub(crate) fn start_at(address: &str, flags: &[&str]) -> Self {
        let mut command = Command::new(binary());
        command.args(["-address", address]).args(flags);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Ended(command.spawn().expect("it runs"));
        let input = child.0.stdin.take().expect("piped");
        let out = Said::of(child.0.stdout.take().expect("piped"));
        let err = Said::of(child.0.stderr.take().expect("piped"));
        let address = eventually("the management server", || {
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("the management server ended with {status}:\n{}", err.text());
            }
            let first = out.text().lines().next().map(str::to_owned)?;
            let event: Value = serde_json::from_str(&first).expect("JSON");
            event["address"].as_str().expect("an address").parse().ok()
        });
        Self { child, input, out, err, address }
    }

    /// Sets what the tests' node gets.
    pub(crate) fn set(&mut self, version: &str, configs: &Value) {
        let line = json!({"node": NODE, "version": version, "configs": configs});
        writeln!(self.input, "{line}").unwrap_or_else(|error| panic!("{error}: {}", self.err.text()));
    }

    /// What has happened so far, of this kind.
    pub(crate) fn events(&self, kind: &str) -> Vec<Value> {
        let text = self.out.text();
        let all = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        all.filter(|event| event["event"] == kind).collect()
    }

    /// Waits for a request of a client that `is_it`.
    pub(crate) fn request(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || self.events("request").into_iter().find(|event| is_it(event)))
    }

    /// Waits until this version is acknowledged.
    pub(crate) fn acknowledged(&self, version: &str) -> Value {
        self.request(&format!("the acknowledgment of version {version}"), |request| {
            request["version"] == version && request["error"] == ""
        })
    }

    /// Ends it; another can take its address.
    pub(crate) fn stop(mut self) -> SocketAddr {
        let _ = self.child.0.kill();
        let _ = self.child.0.wait();
        self.address
    }
}
