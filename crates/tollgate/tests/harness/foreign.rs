//! Third-party programs. A missing one fails the test, with what to do about it: a protocol that is only
//! tested against itself is not tested.

use super::eventually;
use super::server::{Ended, Said, Server};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(crate) fn program(variable: &str, default: &str, what: &str) -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(default);
    let path = std::env::var_os(variable).map_or_else(default, PathBuf::from);
    assert!(path.exists(), "no {what} at {}: run `make setup`, or set {variable}", path.display());
    path
}

pub(super) fn spawn(command: &mut Command) -> (Ended, Said, Said) {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Ended(command.spawn().expect("it runs"));
    let out = Said::of(child.0.stdout.take().expect("piped"));
    let err = Said::of(child.0.stderr.take().expect("piped"));
    (child, out, err)
}

/// One of the clients in `tests/foreign`, under way.
pub(crate) struct Foreign {
    child: Ended,
    script: &'static str,
    out: Said,
    err: Said,
}

impl Foreign {
    pub(crate) fn start(script: &'static str, server: &Server) -> Self {
        let python = program("TOLLGATE_TEST_PYTHON", ".venv/foreign/bin/python", "Python with a gRPC client");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(script);
        let mut command = Command::new(python);
        command.arg("-u").arg(path).arg(server.grpc.to_string()).arg(server.http.to_string());
        command.args(server.resp.map(|resp| resp.to_string()));
        let (child, out, err) = spawn(&mut command);
        Self { child, script, out, err }
    }

    pub(crate) fn output(&self) -> String {
        self.out.text()
    }

    /// Waits for its end, which must be a good one.
    pub(crate) fn finish(mut self, server: &Server) -> String {
        let status = self.child.wait(self.script);
        let (out, err) = (self.out.whole(), self.err.whole());
        assert!(status.success(), "{}:\n{out}{err}\nthe server's log:\n{}", self.script, server.log());
        out
    }
}

/// One of the servers in `tests/foreign`, which prints its address first.
pub(crate) struct ForeignServer {
    _child: Ended,
    pub(crate) address: SocketAddr,
}

impl ForeignServer {
    pub(crate) fn start(script: &str, args: &[&str]) -> Self {
        let python = program("TOLLGATE_TEST_PYTHON", ".venv/foreign/bin/python", "Python with a gRPC client");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(script);
        let (mut child, out, err) = spawn(Command::new(python).arg("-u").arg(path).args(args));
        let address = eventually(&format!("the address of {script}"), || {
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("{script} ended with {status}:\n{}", err.text());
            }
            out.text().lines().next()?.parse().ok()
        });
        Self { _child: child, address }
    }
}

/// Runs a client to its end.
pub(crate) fn foreign_client(script: &'static str, server: &Server) -> String {
    Foreign::start(script, server).finish(server)
}

/// A running Envoy.
pub(crate) struct Envoy {
    child: Ended,
    out: Said,
    log: Said,
}

impl Envoy {
    /// Starts it on a configuration, and waits until `is_ready`. It writes the address of its administration to a file.
    pub(crate) fn start(config: &Path, admin: &Path, mut is_ready: impl FnMut() -> bool) -> Self {
        let envoy = program("TOLLGATE_TEST_ENVOY", ".venv/envoy/bin/envoy", "Envoy");
        let mut command = Command::new(envoy);
        command.arg("-c").arg(config).arg("--admin-address-path").arg(admin).args([
            "--use-dynamic-base-id",
            "--file-flush-interval-msec",
            "50",
            "--concurrency",
            "1",
            "-l",
            "warn",
        ]);
        let (child, out, log) = spawn(&mut command);
        let mut envoy = Self { child, out, log };
        eventually("Envoy", || {
            if let Ok(Some(status)) = envoy.child.0.try_wait() {
                panic!("Envoy ended with {status}:\n{}", envoy.log());
            }
            is_ready().then_some(())
        });
        envoy
    }

    pub(crate) fn log(&self) -> String {
        self.log.text()
    }

    /// What it has printed: its access log.
    pub(crate) fn output(&self) -> String {
        self.out.text()
    }
}

/// Prometheus' own tool finds nothing wrong with these figures.
pub(crate) fn promtool(text: &str) {
    let mut tool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool runs");
    tool.stdin.take().expect("piped").write_all(text.as_bytes()).expect("it reads");
    let output = tool.wait_with_output().expect("it ends");
    let output_bytes = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success() && output_bytes.is_empty(),
        "{}\n{text}",
        String::from_utf8_lossy(&output_bytes)
    );
}
