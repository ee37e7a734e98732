//! Ports for programs that cannot choose one themselves, and for addresses where nothing listens.
//!
//! A port that the kernel has chosen (`bind` to port 0) and that is closed again belongs to no one: the next program that
//! asks for any port, or connects to anywhere, may get it before the server that it was chosen for starts, or while that
//! server is being restarted. So these ports are outside the range that the kernel chooses from, and each is locked, by a
//! file, until the process of the test ends: test programs that run at a time do not get the same one.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Below the ports that the kernel chooses from (32768 and up), and those of the dashboard's tests; above most that are
/// someone's by convention.
const PORTS: std::ops::Range<u16> = 10_000..26_000;

/// The lock files of this process, and the port to try next.
static LOCKED: Mutex<(Vec<File>, u16)> = Mutex::new((Vec::new(), 0));

/// Returns a loopback port that no test program gets while this process runs.
///
/// # Panics
///
/// If none is left.
#[must_use]
pub fn free() -> u16 {
    let mut locked = LOCKED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder();
    for _ in PORTS {
        let port = match locked.1 {
            // Processes that start together look in different places first.
            0 => PORTS.start + (std::process::id() * 37 % u32::from(PORTS.end - PORTS.start)) as u16,
            next if next == PORTS.end => PORTS.start,
            next => next,
        };
        locked.1 = port + 1;
        let file = File::create(folder.join(port.to_string())).expect("a lock file");
        if file.try_lock().is_ok() && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            locked.0.push(file);
            return port;
        }
    }
    panic!("no free port between {} and {}", PORTS.start, PORTS.end);
}

/// Returns the loopback address with such a port: nothing listens there until the test starts something.
#[must_use]
pub fn free_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free()).into()
}

/// The folder of the lock files. Another user could not write to it.
fn folder() -> PathBuf {
    let user = rustix::process::getuid().as_raw();
    let folder = std::env::temp_dir().join(format!("tollgate-test-ports-{user}"));
    std::fs::create_dir_all(&folder).expect("a folder for lock files");
    folder
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice() {
        let ports: std::collections::BTreeSet<u16> = (0..100).map(|_| free()).collect();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| PORTS.contains(port)));
        assert!(TcpListener::bind(free_address()).is_ok());
        // After the last port the first ones follow, wherever a process begins.
        LOCKED.lock().unwrap_or_else(PoisonError::into_inner).1 = PORTS.end - 1;
        let ports: Vec<u16> = (0..10).map(|_| free()).collect();
        assert!(ports.iter().all(|port| PORTS.contains(port)), "{ports:?}");
        assert!(ports[9] < PORTS.end - 1000, "{ports:?}");
    }
}
