//! Server processes pinned to one core, and the location of their binaries.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub(crate) const SERVER_CORE: &str = "0";
pub(crate) const CLIENT_CORE: &str = "1";

/// A server process on its own core, killed on drop.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    /// Kept open: some servers fail if their output is closed.
    _output: Option<std::io::Lines<BufReader<std::process::ChildStdout>>>,
}

impl Server {
    /// Starts a server that prints `word` and its address on a line.
    pub(crate) fn start(program: &Path, arguments: &[&str], word: &str) -> Result<Self, String> {
        let mut pinned = Command::new("taskset");
        pinned.args(["-c", SERVER_CORE]).arg(program);
        Self::spawn_announced(pinned, program, arguments, word)
    }

    /// Does the same without pinning it to a core.
    pub(crate) fn start_anywhere(program: &Path, arguments: &[&str], word: &str) -> Result<Self, String> {
        Self::spawn_announced(Command::new(program), program, arguments, word)
    }

    fn spawn_announced(
        mut command: Command,
        program: &Path,
        arguments: &[&str],
        word: &str,
    ) -> Result<Self, String> {
        let mut child = command
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        let output = child.stdout.take().ok_or("no output")?;
        let mut lines = BufReader::new(output).lines();
        while let Some(line) = lines.next() {
            let line = line.map_err(|error| error.to_string())?;
            let mut words = line.split_whitespace();
            if words.next() == Some(word)
                && let Some(address) = words.next()
            {
                return Ok(Self { child, address: address.to_owned(), _output: Some(lines) });
            }
        }
        Err(format!("{} printed no address", program.display()))
    }

    /// Starts a server that prints nothing: it is ready when it accepts connections at `address`.
    pub(crate) fn start_at(program: &Path, arguments: &[&str], address: &str) -> Result<Self, String> {
        Self::start_with(SERVER_CORE, program, arguments, &[], address)
    }

    /// Does the same without pinning it to a core.
    pub(crate) fn start_anywhere_at(
        program: &Path,
        arguments: &[&str],
        address: &str,
    ) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.args(arguments);
        Self::spawn_silent(command, program, address)
    }

    /// Does the same without pinning it to a core, with these environment variables.
    pub(crate) fn start_anywhere_with(
        program: &Path,
        environment: &[(&str, &str)],
        address: &str,
    ) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.envs(environment.iter().copied());
        Self::spawn_silent(command, program, address)
    }

    /// Does the same on the given core, with these environment variables.
    pub(crate) fn start_with(
        core: &str,
        program: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
        address: &str,
    ) -> Result<Self, String> {
        let mut command = Command::new("taskset");
        command.args(["-c", core]).arg(program).args(arguments).envs(environment.iter().copied());
        Self::spawn_silent(command, program, address)
    }

    fn spawn_silent(command: Command, program: &Path, address: &str) -> Result<Self, String> {
        Self::start_anywhere_as(command, program, address, |_| {})
    }

    /// Starts a command, hands the id of its process to `identify`, and waits until it accepts connections.
    pub(crate) fn start_anywhere_as(
        mut command: Command,
        program: &Path,
        address: &str,
        identify: impl FnOnce(u32),
    ) -> Result<Self, String> {
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        identify(child.id());
        let server = Self { child, address: address.to_owned(), _output: None };
        for _ in 0..1_000 {
            if TcpStream::connect(address).is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(format!("{} does not listen on {address}", program.display()))
    }

    /// Returns its CPU time in kernel clock ticks (100 per second).
    pub(crate) fn ticks(&self) -> u64 {
        ticks(&self.child.id().to_string())
    }
}

impl Server {
    /// Returns its resident memory in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Returns its peak resident memory in KiB.
    pub(crate) fn peak_kib(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }
}

/// Returns the CPU time of a process (`self` for this one) in kernel clock ticks (100 per second).
pub(crate) fn ticks(process: &str) -> u64 {
    times(process, [11, 12])
}

/// Returns the CPU time of terminated child processes in kernel clock ticks.
pub(crate) fn children_ticks() -> u64 {
    times("self", [13, 14])
}

fn times(process: &str, which: [usize; 2]) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The fields after the name, which is in parentheses and may contain anything, start with the third.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    which.iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the path of the server's binary, which is in the folder of this program.
pub(crate) fn tollgate_binary(myself: &Path) -> Result<PathBuf, String> {
    let path = myself.with_file_name("tollgate");
    if path.exists() {
        Ok(path)
    } else {
        Err(format!(
            "{} not found; run cargo build --profile {} -p tollgate",
            path.display(),
            profile(myself)
        ))
    }
}

/// Returns the profile that a program was built with: the folder that cargo puts it in.
pub(crate) fn profile(program: &Path) -> &str {
    let folder = program.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    match folder.unwrap_or_default() {
        "debug" => "dev",
        other => other,
    }
}

pub(crate) fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// Returns a free port.
pub(crate) fn free_port() -> Result<String, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    listener.local_addr().map(|address| address.port().to_string()).map_err(|error| error.to_string())
}

/// Returns the path of a program in `.tools/bin`, where `make` puts it, or on `PATH`.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin").join(name);
    if made.exists() {
        return Some(made);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.exists())
}
