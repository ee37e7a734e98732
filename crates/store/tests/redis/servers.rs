//! Real servers on free ports: started by name, ended by the handle that started them.

use redis::{Cmd, Connection, FromRedisValue, Value};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tollgate_store::RedisConfig;

/// One redis-server process.
pub(crate) struct Server {
    pub(crate) port: u16,
    /// The port of the bus, of a server in a cluster.
    pub(crate) bus: u16,
    child: Child,
    folder: std::path::PathBuf,
}

pub(crate) use tollgate_testing::ports::free as free_port;

impl Server {
    pub(crate) fn start(extra: &[&str]) -> Self {
        Self::start_on(free_port(), extra)
    }

    pub(crate) fn start_on(port: u16, extra: &[&str]) -> Self {
        let server = Self::spawn(port, extra);
        wait_until("the server answers", || server.try_command(&redis::cmd("PING")).is_some());
        server
    }

    /// The same server again, on what it has saved; it may still be loading that.
    pub(crate) fn restart(&mut self, extra: &[&str]) -> Self {
        self.kill();
        let again = Self::spawn(self.port, extra);
        wait_until("the port is open", || std::net::TcpStream::connect(("127.0.0.1", again.port)).is_ok());
        again
    }

    fn spawn(port: u16, extra: &[&str]) -> Self {
        let folder = std::env::temp_dir().join(format!("tollgate-redis-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let bus = if extra.contains(&"--cluster-enabled") { free_port() } else { 0 };
        let child = Command::new("redis-server")
            .args(if bus == 0 { vec![] } else { vec!["--cluster-port".to_owned(), bus.to_string()] })
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"])
            .args(["--dir", &folder.display().to_string(), "--enable-debug-command", "yes"])
            .args(extra)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server on the path (Debian: apt-get install redis-server)");
        Self { port, bus, child, folder }
    }

    /// A sentinel with this configuration, which it writes its own findings to.
    pub(crate) fn sentinel(configuration: &str) -> Self {
        let port = free_port();
        let folder = std::env::temp_dir().join(format!("tollgate-redis-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("sentinel.conf");
        std::fs::write(&file, format!("port {port}\nbind 127.0.0.1\n{configuration}")).expect("a file");
        let mut command = Command::new("redis-server");
        command.arg(&file).arg("--sentinel").stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("redis-server on the path");
        let server = Self { port, bus: 0, child, folder };
        wait_until("the sentinel answers", || server.try_command(&redis::cmd("PING")).is_some());
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn connection(&self) -> Option<Connection> {
        let client = redis::Client::open(self.url()).expect("a url");
        client.get_connection_with_timeout(Duration::from_secs(1)).ok()
    }

    fn try_command(&self, command: &Cmd) -> Option<Value> {
        command.query(&mut self.connection()?).ok()
    }

    /// Runs a command, which must work.
    pub(crate) fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(word);
        }
        command
            .query(&mut self.connection().expect("a server"))
            .unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// Runs a command that may not work yet.
    pub(crate) fn try_words(&self, words: &[&str]) -> bool {
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|word| {
            command.arg(word);
        });
        self.try_command(&command).is_some()
    }

    /// One field of CLUSTER INFO.
    pub(crate) fn cluster_info(&self, field: &str) -> String {
        let all: String = self.command(&["CLUSTER", "INFO"]);
        let prefix = format!("{field}:");
        all.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default().to_owned()
    }

    /// One field of INFO.
    pub(crate) fn info(&self, field: &str) -> String {
        let all: String = self.command(&["INFO", "everything"]);
        let prefix = format!("{field}:");
        all.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default().to_owned()
    }

    /// Stops the process in its tracks, or lets it go on.
    pub(crate) fn signal(&self, name: &str) {
        tollgate_testing::signals::send(self.child.id(), name);
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Every key has an expiry: what users would lose otherwise is their server's memory.
    pub(crate) fn keys_without_expiry(&self) -> Vec<String> {
        let mut connection = self.connection().expect("a server");
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("keys");
        keys.into_iter()
            .filter(|key| redis::cmd("PTTL").arg(key).query::<i64>(&mut connection).expect("a ttl") == -1)
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A store's configuration for tests that are about answers, on a machine that may be busy.
pub(crate) fn patient(url: &str) -> RedisConfig {
    let mut config = RedisConfig::parse(url).expect("a url");
    config.deadline = Duration::from_secs(10);
    config.connect_timeout = Duration::from_secs(5);
    config
}

/// Waits for something that can be observed.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..3_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never came: {what}");
}
