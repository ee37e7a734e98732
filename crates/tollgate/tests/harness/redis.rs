//! A real Redis server on a free port of loopback, that can die and come back.

use super::server::Ended;
use super::{Folder, eventually};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

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

impl Redis {
    pub(crate) fn start() -> Self {
        let free =
            TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
        Dead { port: free.port(), folder: Folder::new() }.start_again()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Stops this process in its tracks, or lets it go on.
    pub(crate) fn signal(&self, name: &str) {
        let order = format!("kill -{name} {}", self.child.0.id());
        let status = Command::new("sh").args(["-c", &order]).status().expect("a shell");
        assert!(status.success(), "{order}");
    }

    /// Runs a command that answers OK.
    pub(crate) fn command(&self, words: &str) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a server");
        stream.write_all(format!("{words}\r\n").as_bytes()).expect("a server");
        let mut answer = [0; 3];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"+OK", "{words}");
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
