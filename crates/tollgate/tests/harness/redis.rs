//! A real Redis server on a free port of loopback, that can die and come back.

use super::server::{Ended, Said};
use super::{Folder, eventually};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use tollgate_testing::{ports, signals};

pub(crate) struct Redis {
    child: Ended,
    port: u16,
    folder: Folder,
}

/// One that has been killed; its port is kept in mind.
pub(crate) struct Dead {
    port: u16,
    folder: Folder,
}

/// What a server is seen to do.
pub(crate) struct Monitor {
    _child: Ended,
    seen: Said,
}

impl Monitor {
    /// Watches the server on a port of loopback.
    pub(crate) fn at(port: &str) -> Self {
        let mut child = Ended(
            Command::new("redis-cli")
                .args(["-p", port, "MONITOR"])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .expect("redis-cli is installed: make setup"),
        );
        let seen = Said::of(child.0.stdout.take().expect("piped"));
        eventually("MONITOR to begin", || seen.text().starts_with("OK").then_some(()));
        Self { _child: child, seen }
    }

    pub(crate) fn text(&self) -> String {
        self.seen.text()
    }
}

impl Redis {
    pub(crate) fn start() -> Self {
        Dead { port: ports::free(), folder: Folder::new() }.start_again()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Stops this process in its tracks, or lets it go on.
    pub(crate) fn signal(&self, name: &str) {
        signals::send(self.child.0.id(), name);
    }

    /// Runs a command that answers OK.
    pub(crate) fn command(&self, words: &str) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a server");
        stream.write_all(format!("{words}\r\n").as_bytes()).expect("a server");
        let mut answer = [0; 3];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"+OK", "{words}");
    }

    /// The output of `redis-cli` for a command.
    pub(crate) fn cli(&self, words: &[&str]) -> String {
        let port = self.port.to_string();
        super::foreign("redis-cli", &[&["-p", &port], words].concat())
    }

    /// Every command that it runs from now on, by its `MONITOR`.
    pub(crate) fn monitor(&self) -> Monitor {
        Monitor::at(&self.port.to_string())
    }

    /// Kills it.
    pub(crate) fn stop(self) -> Dead {
        let Self { child, port, folder } = self;
        drop(child);
        Dead { port, folder }
    }
}

impl Dead {
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn start_again(self) -> Redis {
        let Self { port, folder } = self;
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .arg("--dir")
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed: make setup");
        let redis = Redis { child: Ended(child), port, folder };
        eventually("an answer of Redis", || {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            stream.write_all(b"PING\r\n").ok()?;
            let mut answer = [0; 5];
            stream.read_exact(&mut answer).ok()?;
            (&answer == b"+PONG").then_some(())
        });
        redis
    }
}
