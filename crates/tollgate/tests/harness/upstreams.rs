//! Third-party programs around the gateway: nginx by every version of HTTP and a WebSocket server behind it, HAProxy
//! before it.

use super::foreign::{program, spawn};
use super::server::{Ended, Said};
use super::{Folder, LONG, eventually};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use tollgate_testing::ports::free_address;

/// nginx: `/spoken` answers with the version that it was asked by, `/large` with 300,000 bytes.
pub(crate) struct Nginx {
    _child: Ended,
    pub(crate) plain: SocketAddr,
    pub(crate) http2: SocketAddr,
    pub(crate) tls: SocketAddr,
    pub(crate) folder: Folder,
}

impl Nginx {
    /// With `upstream.crt` and `upstream.key` of the folder.
    pub(crate) fn start(folder: Folder) -> Self {
        let (plain, http2, tls) = (free_address(), free_address(), free_address());
        std::fs::create_dir(folder.join("html")).expect("a folder");
        folder.write("html/large", vec![b'x'; 300_000]);
        let places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {}/{name};", folder.path().display()))
            .concat();
        let config = format!(
            "daemon off; master_process off; pid nginx.pid; error_log stderr; events {{}} http {{ access_log off; {places} root html; server {{ listen {plain}; listen {http2} http2; listen {tls} ssl http2; ssl_certificate upstream.crt; ssl_certificate_key upstream.key; location = /spoken {{ return 200 $server_protocol; }} }} }}"
        );
        let config = folder.write("nginx.conf", config);
        let found = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"].map(PathBuf::from);
        let nginx = found.iter().find(|path| path.exists()).expect("nginx: run `make setup`");
        let mut command = Command::new(nginx);
        command.arg("-p").arg(folder.path()).arg("-c").arg(config);
        let (mut child, _, log) = spawn(&mut command);
        eventually("nginx", || {
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("nginx ended with {status}:\n{}", log.text());
            }
            TcpStream::connect_timeout(&tls, LONG).ok()
        });
        Self { _child: child, plain, http2, tls, folder }
    }
}

/// HAProxy as a load balancer that passes bytes and says whose they are.
pub(crate) struct Haproxy {
    _child: Ended,
    pub(crate) address: SocketAddr,
    _folder: Folder,
}

impl Haproxy {
    /// `version` is its word for which PROXY header it writes.
    pub(crate) fn start(towards: SocketAddr, version: &str) -> Self {
        Self::run("", towards, version)
    }

    /// By TLS and HTTP/2 towards callers, with the certificate and key of this file; HTTP/2 towards the other side.
    pub(crate) fn with_tls(towards: SocketAddr, pair: &Path) -> Self {
        Self::run(&format!("ssl crt {} alpn h2", pair.display()), towards, "")
    }

    fn run(bind: &str, towards: SocketAddr, server: &str) -> Self {
        let (address, folder) = (free_address(), Folder::new());
        let config = folder.write(
            "haproxy.cfg",
            format!(
                "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\nlisten gateway\n  bind {address} {bind}\n  server gateway {towards} {server}\n"
            ),
        );
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(config).env("PATH", "/usr/sbin:/usr/bin:/bin");
        let (mut child, _, log) = spawn(&mut command);
        eventually("HAProxy", || {
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("HAProxy ended with {status}:\n{}", log.text());
            }
            TcpStream::connect_timeout(&address, LONG).ok()
        });
        Self { _child: child, address, _folder: folder }
    }
}

/// The `websockets` package as a server.
pub(crate) struct WebSockets {
    _child: Ended,
    _out: Said,
    pub(crate) address: SocketAddr,
}

fn script(args: &[&str]) -> Command {
    let python = program("TOLLGATE_TEST_PYTHON", ".venv/foreign/bin/python", "Python with websockets");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/websocket.py");
    let mut command = Command::new(python);
    command.arg("-u").arg(path).args(args);
    command
}

impl WebSockets {
    pub(crate) fn serve() -> Self {
        let (mut child, out, log) = spawn(&mut script(&["serve"]));
        let address = eventually("the WebSocket server", || {
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("it ended with {status}:\n{}", log.text());
            }
            out.text().strip_prefix("listening ")?.trim().parse().ok()
        });
        Self { _child: child, _out: out, address }
    }

    /// Talks to an address as a client; its output.
    pub(crate) fn talk(address: SocketAddr) -> String {
        let (mut child, out, log) = spawn(&mut script(&["talk", &address.to_string()]));
        let status = child.wait("the WebSocket client");
        let (out, log) = (out.whole(), log.whole());
        assert!(status.success(), "{out}{log}");
        out
    }
}
