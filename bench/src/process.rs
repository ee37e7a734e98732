//! Servers as processes of their own on one core, and where their binaries are.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub(crate) const SERVER_CORE: &str = "0";
pub(crate) const CLIENT_CORE: &str = "1";

/// A server process on its own core, ended when this is dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    /// Kept open: a server whose output is closed under it may mind.
    _output: Option<std::io::Lines<BufReader<std::process::ChildStdout>>>,
}

impl Server {
    /// Starts one that prints `word` and its address on a line.
    pub(crate) fn start(program: &Path, arguments: &[&str], word: &str) -> Result<Self, String> {
        let mut pinned = Command::new("taskset");
        pinned.args(["-c", SERVER_CORE]).arg(program);
        Self::telling(pinned, program, arguments, word)
    }

    /// The same on whichever cores there are.
    pub(crate) fn start_anywhere(program: &Path, arguments: &[&str], word: &str) -> Result<Self, String> {
        Self::telling(Command::new(program), program, arguments, word)
    }

    fn telling(mut command: Command, program: &Path, arguments: &[&str], word: &str) -> Result<Self, String> {
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
        Err(format!("{} did not say where it listens", program.display()))
    }

    /// Starts one that says nothing: it is there when it takes connections at `address`.
    pub(crate) fn start_at(program: &Path, arguments: &[&str], address: &str) -> Result<Self, String> {
        Self::start_with(SERVER_CORE, program, arguments, &[], address)
    }

    /// The same on a core of the caller's choice, with these variables in its environment.
    pub(crate) fn start_with(
        core: &str,
        program: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
        address: &str,
    ) -> Result<Self, String> {
        let child = Command::new("taskset")
            .args(["-c", core])
            .arg(program)
            .args(arguments)
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        let server = Self { child, address: address.to_owned(), _output: None };
        for _ in 0..1_000 {
            if TcpStream::connect(address).is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(format!("{} does not listen on {address}", program.display()))
    }

    /// The processor time that it has used, in clock ticks of the kernel (100 a second).
    pub(crate) fn ticks(&self) -> u64 {
        ticks(&self.child.id().to_string())
    }
}

impl Server {
    /// The memory that it holds, in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// The most that it has ever held, in KiB.
    pub(crate) fn peak_kib(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }
}

/// The processor time that a process has used (`self` for this one), in clock ticks of the kernel (100 a second).
pub(crate) fn ticks(process: &str) -> u64 {
    times(process, [11, 12])
}

/// The same of those processes that this one has started and seen the end of.
pub(crate) fn children_ticks() -> u64 {
    times("self", [13, 14])
}

fn times(process: &str, which: [usize; 2]) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // What follows the name, which is in parentheses and may hold anything, begins with the third field.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    which.iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server lies beside this program, built by the same profile.
pub(crate) fn tollgate_binary(myself: &Path) -> Result<PathBuf, String> {
    let path = myself.with_file_name("tollgate");
    if path.exists() {
        Ok(path)
    } else {
        Err(format!("{} is missing: cargo build --profile {} -p tollgate", path.display(), profile(myself)))
    }
}

/// The profile that a program was built by: the folder that cargo puts it in.
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

/// A port that nobody listens on.
pub(crate) fn free_port() -> Result<String, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    listener.local_addr().map(|address| address.port().to_string()).map_err(|error| error.to_string())
}

/// A program that `make` puts into `.tools/bin`, or wherever else it is found.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin").join(name);
    if made.exists() {
        return Some(made);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.exists())
}
