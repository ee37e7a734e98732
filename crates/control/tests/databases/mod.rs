//! A real PostgreSQL server on a free loopback port, with its own data folder, that can be stopped and restarted; and
//! a folder for SQLite files. Shared by the tests of other crates.
#![allow(dead_code, reason = "each test file uses only a part")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Number of polls, ten milliseconds apart, before a test gives up.
const POLLS: u32 = 6_000;

/// A temporary folder, removed on drop. Not below the build folder: the server's user may have no access to it.
pub(crate) struct Place(PathBuf);

impl Place {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tollgate-db-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder for the test");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the address of a SQLite file in the folder.
    pub(crate) fn sqlite(&self, name: &str) -> String {
        format!("sqlite:{}", self.0.join(format!("{name}.db")).display())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A PostgreSQL server, stopped by its process id.
pub(crate) struct Postgres {
    child: Option<Child>,
    port: u16,
    data: PathBuf,
    _place: Place,
}

impl Postgres {
    pub(crate) fn start() -> Self {
        let place = Place::new();
        let port = tollgate_testing::ports::free();
        let data = place.path().join("data");
        if let Some((user, group)) = other_user() {
            std::os::unix::fs::chown(place.path(), Some(user), Some(group))
                .expect("a folder of another user");
        }
        let made = run_as(&program("initdb"))
            .args(["-U", "tollgate", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale", "C", "-D"])
            .arg(&data)
            .current_dir(place.path())
            .stdin(Stdio::null())
            .output()
            .expect("initdb runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut server = Self { child: None, port, data, _place: place };
        server.start_again();
        server
    }

    /// Starts the server again, with the same data and port.
    pub(crate) fn start_again(&mut self) {
        let child = run_as(&program("postgres"))
            .args(["-p", &self.port.to_string(), "-h", "127.0.0.1", "-c", "unix_socket_directories="])
            // Tests kill the server, not the machine: what it has written is in the system's memory, synced or not.
            .args(["-c", "fsync=off", "-c", "full_page_writes=off"])
            .args(["-c", "shared_buffers=16MB", "-D"])
            .arg(&self.data)
            .current_dir(&self.data)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.expect("postgres runs"));
        eventually("PostgreSQL to accept clients", || self.answers().then_some(()));
    }

    /// Creates a database and returns its address.
    pub(crate) fn database(&self, name: &str) -> String {
        let made = Command::new("psql")
            .args([
                "-h",
                "127.0.0.1",
                "-p",
                &self.port.to_string(),
                "-U",
                "tollgate",
                "-d",
                "postgres",
                "-qc",
            ])
            .arg(format!("CREATE DATABASE {name}"))
            .output()
            .expect("psql runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        format!("postgres://tollgate@127.0.0.1:{}/{name}", self.port)
    }

    /// Returns whether the server accepts clients: it responds to a startup message with an authentication request.
    fn answers(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        let words = b"user\0tollgate\0database\0postgres\0\0";
        let length = u32::try_from(8 + words.len()).expect("a short message");
        let mut message = length.to_be_bytes().to_vec();
        message.extend(196_608_u32.to_be_bytes());
        message.extend(words);
        let mut kind = [0];
        stream.write_all(&message).is_ok() && stream.read_exact(&mut kind).is_ok() && &kind == b"R"
    }

    /// Sends a signal to this process only, and waits for its end.
    pub(crate) fn stop(&mut self, signal: &str) {
        let Some(mut child) = self.child.take() else { return };
        let order = format!("kill -{signal} {}", child.id());
        let _ = Command::new("sh").args(["-c", &order]).status();
        let _ = child.wait();
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop("INT");
    }
}

/// PostgreSQL refuses to run as root; then it runs as the user that its package creates, or as `nobody`.
fn other_user() -> Option<(u32, u32)> {
    let root = std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let user = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut numbers = line.split(':').skip(2).map_while(|number| number.parse().ok());
        Some((numbers.next()?, numbers.next()?))
    };
    root.then(|| user("postgres").or_else(|| user("nobody")).unwrap_or((65_534, 65_534)))
}

fn run_as(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some((user, group)) = other_user() {
        command.uid(user).gid(group);
    }
    command
}

/// Debian does not put the server's programs in the PATH.
fn program(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        versions.map(|version| version.path().join("bin").join(name)).filter(|path| path.exists()).collect();
    found.sort();
    found.pop().unwrap_or_else(|| PathBuf::from(name))
}

/// Polls until `look` returns something.
pub(crate) fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    for _ in 0..POLLS {
        if let Some(found) = poll() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}")
}
