//! A running `tollgate serve`, and commands that end by themselves.

use super::{Folder, LONG, Stopwatch, eventually};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tollgate_testing::signals;
use tollgate_testing::web::{self, WebResponse};

const BINARY: &str = env!("CARGO_BIN_EXE_tollgate");

/// Output and exit code of a command.
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// The binary, with none of the settings that the caller's environment may hold.
pub(super) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    for (name, _) in std::env::vars_os() {
        if ["TOLLGATE_", "OTEL_"].iter().any(|ours| name.to_string_lossy().starts_with(ours)) {
            command.env_remove(name);
        }
    }
    // Tests leave nothing behind in the home of the user who runs them.
    command.env("TOLLGATE_SNAPSHOT", "off");
    command.env_remove("STATE_DIRECTORY").env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    // A server may be running on the default addresses: no test talks to it.
    command.env("TOLLGATE_ADMIN_URL", "http://127.0.0.1:9");
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The same, with a limit of open files.
fn command_with_files(files: u32, args: &[&str]) -> Command {
    let mut all = vec!["-c".to_owned(), format!("ulimit -n {files}; exec \"$0\" \"$@\""), BINARY.to_owned()];
    all.extend(args.iter().map(|arg| (*arg).to_owned()));
    let plain = command(&[]);
    let mut command = Command::new("sh");
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.args(all).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command to its end.
pub(crate) fn run(args: &[&str]) -> Run {
    run_with(args, &[])
}

pub(crate) fn run_with(args: &[&str], environment: &[(&str, &str)]) -> Run {
    let mut command = command(args);
    if args.first() == Some(&"serve") {
        // For what is opened before a mistake is found: nothing opens a default address.
        for listener in ["TOLLGATE_HTTP", "TOLLGATE_GRPC", "TOLLGATE_RESP", "TOLLGATE_ADMIN"] {
            command.env(listener, "127.0.0.1:0");
        }
    }
    command.envs(environment.iter().copied());
    let mut ended = Ended(command.spawn().expect("the binary runs"));
    let out = Said::of(ended.0.stdout.take().expect("piped"));
    let err = Said::of(ended.0.stderr.take().expect("piped"));
    let status = ended.wait(&args.join(" "));
    Run { code: status.code(), out: out.whole(), err: err.whole() }
}

/// What a process says, as it says it.
pub(super) struct Said {
    text: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
    /// Whether it is not read before the test says so.
    is_gated: bool,
}

impl Said {
    pub(super) fn of(stream: impl Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let mut text = sink.lock().expect("text");
                text.push_str(&line);
                text.push('\n');
            }
        });
        Self { text, reader, is_gated: false }
    }

    /// Its log so far.
    pub(super) fn text(&self) -> String {
        self.text.lock().expect("text").clone()
    }

    /// Waits until this has been said.
    pub(super) fn wait_for(&self, text: &str) {
        let watch = Stopwatch::start();
        while !self.text().contains(text) {
            assert!(watch.elapsed() < LONG, "`{text}` is not in\n{}", self.text());
            std::thread::sleep(watch.pause());
        }
    }

    /// Waits until all is read that a process has written which has ended.
    pub(super) fn wait_for_end(&self) {
        if !self.is_gated {
            eventually("the end of its output", || self.reader.is_finished().then_some(()));
        }
    }

    /// Its complete log, once it has ended.
    pub(super) fn whole(self) -> String {
        self.reader.join().expect("a reader");
        self.text.lock().expect("text").clone()
    }
}

/// A stream that is not read until the test starts reading.
struct Unread {
    stream: ChildStderr,
    gate: Option<Receiver<()>>,
}

impl Read for Unread {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(gate) = self.gate.take() {
            let _ = gate.recv();
        }
        self.stream.read(buffer)
    }
}

/// A child that never outlives its test. Only its own id is ever signalled.
pub(super) struct Ended(pub(super) Child);

impl Ended {
    pub(super) fn wait(&mut self, what: &str) -> ExitStatus {
        eventually(&format!("the end of `{what}`"), || self.0.try_wait().expect("a child"))
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server on free ports of loopback.
pub(crate) struct Server {
    child: Ended,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    /// Where the Redis protocol is, unless it is off.
    pub(crate) resp: Option<SocketAddr>,
    /// Where operators come in, unless it is off.
    pub(crate) admin: Option<SocketAddr>,
    /// All that it printed before and after it listened.
    pub(crate) greeting: String,
    log: Said,
    out: Said,
    rules: Option<Folder>,
}

impl Server {
    /// With these rules, in a folder of their own.
    pub(crate) fn with_rules(text: &str) -> Self {
        Self::start_with_rules(text, &[])
    }

    /// The same, with more flags.
    pub(crate) fn start_with_rules(text: &str, flags: &[&str]) -> Self {
        let folder = Folder::new();
        let path = folder.write("rules.yaml", text);
        let mut all = vec!["--rules", path.to_str().expect("a plain path")];
        all.extend(flags);
        let mut server = Self::start(&all);
        server.rules = Some(folder);
        server
    }

    /// With these flags beside the addresses.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, &[])
    }

    /// One whose messages are not read until the sender has sent or is gone.
    pub(crate) fn start_unread(flags: &[&str]) -> (Self, Sender<()>) {
        let (open, gate) = channel();
        let server = Self::launch(None, flags, &[], |stream| Said {
            is_gated: true,
            ..Said::of(Unread { stream, gate: Some(gate) })
        });
        (server, open)
    }

    pub(crate) fn start_with(flags: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::launch(None, flags, environment, Said::of)
    }

    /// One that may have so many files open.
    pub(crate) fn start_with_files(files: u32, flags: &[&str]) -> Self {
        Self::launch(Some(files), flags, &[], Said::of)
    }

    fn launch(
        files: Option<u32>,
        flags: &[&str],
        environment: &[(&str, &str)],
        reader: impl FnOnce(ChildStderr) -> Said,
    ) -> Self {
        let mut args = vec!["serve"];
        if !environment.iter().any(|(name, _)| *name == "TOLLGATE_HTTP") && !flags.contains(&"--config") {
            args.extend(["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
        }
        if !environment.iter().any(|(name, _)| *name == "TOLLGATE_RESP") && !flags.contains(&"--resp") {
            args.extend(["--resp", "127.0.0.1:0"]);
        }
        if !environment.iter().any(|(name, _)| *name == "TOLLGATE_ADMIN") && !flags.contains(&"--admin") {
            args.extend(["--admin", "127.0.0.1:0"]);
        }
        // Tests are many and their keys few.
        if !flags.contains(&"--memory") {
            args.extend(["--memory", "16MiB"]);
        }
        args.extend(flags);
        let mut command = match files {
            Some(files) => command_with_files(files, &args),
            None => command(&args),
        };
        command.envs(environment.iter().copied());
        let mut child = Ended(command.spawn().expect("the binary runs"));
        let log = reader(child.0.stderr.take().expect("piped"));
        let greeted = Said::of(child.0.stdout.take().expect("piped"));
        let address = |banner: &str, protocol: &str| -> Option<SocketAddr> {
            let line = banner.lines().find(|line| line.trim_start().starts_with(protocol))?;
            line.split_whitespace().nth(1)?.parse().ok()
        };
        let (http, grpc, greeting) = eventually("the server's greeting", || {
            // Where the standard output is for data, the banner is on standard error, as one JSON message where all messages are JSON.
            let greeting = greeted.text() + &log.text().replace("\\n", "\n");
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("the server ended with {status}:\n{greeting}{}", log.text());
            }
            let both = (address(&greeting, "http"), address(&greeting, "grpc"));
            // The last line is about the rules.
            let whole = greeting.contains("\n  rules ") || greeting.contains("readyz?verbose");
            if let ((Some(http), Some(grpc)), true) = (both, whole) {
                Some((http, grpc, greeting))
            } else {
                None
            }
        });
        let (resp, admin) = (address(&greeting, "resp"), address(&greeting, "admin"));
        for used in [Some(http), Some(grpc), resp, admin].into_iter().flatten() {
            let is_default = [8080, 8081, 8082, 6380].contains(&used.port());
            assert!(
                !is_default,
                "a test must not use a default address, where a server may be running: {used}"
            );
        }
        let server = Self { child, http, grpc, resp, admin, greeting, log, out: greeted, rules: None };
        eventually("readiness", || (server.get("/readyz").status == 200).then_some(()));
        server
    }

    pub(crate) fn rules_path(&self) -> PathBuf {
        self.rules.as_ref().expect("started with rules").join("rules.yaml")
    }

    pub(crate) fn get(&self, path: &str) -> WebResponse {
        self.exchange(&web::request("GET", path, b""))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> WebResponse {
        self.exchange(&web::request("POST", path, body.to_string().as_bytes()))
    }

    /// `POST /v1/check` with attributes.
    pub(crate) fn check(&self, domain: &str, attributes: &Value) -> WebResponse {
        self.post("/v1/check", &json!({"domain": domain, "attributes": attributes}))
    }

    pub(crate) fn exchange(&self, bytes: &[u8]) -> WebResponse {
        web::exchange(self.http, bytes).unwrap_or_else(|error| panic!("no answer: {error}\n{}", self.log()))
    }

    /// What it has written to its standard output.
    pub(crate) fn output(&self) -> String {
        self.out.text()
    }

    pub(crate) fn log(&self) -> String {
        self.log.text()
    }

    /// Waits until this is in the log: messages are written after the answer to the request that they are about.
    pub(crate) fn wait_for_log(&self, text: &str) {
        self.log.wait_for(text);
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.0.id()
    }

    /// Sends a signal to this process and no other.
    pub(crate) fn signal(&self, name: &str) {
        signals::send(self.child.0.id(), name);
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.0.try_wait().expect("a child").is_some()
    }

    /// Waits for the end, and for the last that it has written.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let status = self.child.wait("tollgate serve");
        self.log.wait_for_end();
        self.out.wait_for_end();
        status
    }
}
