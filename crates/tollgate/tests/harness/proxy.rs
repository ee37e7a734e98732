//! A third-party proxy, on the configuration that the documentation shows, in front of a service.

use super::foreign::{program, spawn};
use super::server::{Ended, Said};
use super::{Folder, LONG, Server, Service, WebResponse, eventually, exchange_from};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use tollgate_testing::ports::free_address;

pub(crate) struct Proxy {
    name: &'static str,
    child: Ended,
    out: Said,
    log: Said,
    address: SocketAddr,
    _folder: Folder,
}

/// A server of Debian's, which may be where not everyone looks.
fn debian(name: &str) -> PathBuf {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no {name}: run `make setup`"))
}

impl Proxy {
    /// Starts one of them on the files of `examples/<name>`, with the ports of this test.
    pub(crate) fn start(name: &'static str, main: &str, server: &Server, service: &Service) -> Self {
        let folder = Folder::new();
        let free = free_address();
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
        let ports = [(":10080", free), (":9000", service.address), (":8080", server.http)];
        let mut changed = [false; 3];
        for entry in std::fs::read_dir(examples).expect("the examples").flatten() {
            let mut text = std::fs::read_to_string(entry.path()).expect("a file");
            for ((documented, address), changed) in ports.iter().zip(&mut changed) {
                *changed |= text.contains(documented);
                text = text.replace(documented, &format!(":{}", address.port()));
                let spelled =
                    (format!("port_value: {}", &documented[1..]), format!("port_value: {}", address.port()));
                *changed |= text.contains(&spelled.0);
                text = text.replace(&spelled.0, &spelled.1);
            }
            folder.write(entry.file_name(), text);
        }
        assert_eq!(changed, [true; 3], "the examples of {name} name the documented ports");
        let mut command = command(name, main, &folder);
        command.current_dir(folder.path());
        let (child, out, log) = spawn(&mut command);
        let mut proxy = Self { name, child, out, log, address: free, _folder: folder };
        eventually(name, || {
            if let Ok(Some(status)) = proxy.child.0.try_wait() {
                panic!("{name} ended with {status}:\n{}", proxy.output());
            }
            TcpStream::connect_timeout(&proxy.address, LONG).ok()
        });
        proxy
    }

    pub(crate) fn output(&self) -> String {
        format!("{}{}", self.out.text(), self.log.text())
    }

    /// A request from an address of loopback. `headers` end each in a line's end.
    pub(crate) fn ask(&self, source: &str, method: &str, path: &str, headers: &str) -> WebResponse {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: Shop.example\r\nconnection: close\r\ncontent-length: 0\r\n{headers}\r\n"
        );
        exchange_from(source, self.address, request.as_bytes())
            .unwrap_or_else(|error| panic!("{}: {error}\n{}", self.name, self.output()))
    }
}

fn command(name: &str, main: &str, folder: &Folder) -> Command {
    let path = folder.path().to_str().expect("a plain path");
    let (program, arguments) = match name {
        "nginx" => (debian(name), vec!["-p", path, "-c", main, "-g", "master_process off;"]),
        "caddy" => (debian(name), vec!["run", "--adapter", "caddyfile", "--config", main]),
        "haproxy" => (debian(name), vec!["-db", "-f", main]),
        "traefik" => {
            let program = program("TOLLGATE_TEST_TRAEFIK", ".venv/traefik/bin/traefik", "Traefik");
            (program, vec!["--configfile", main])
        }
        "envoy" => {
            let program = program("TOLLGATE_TEST_ENVOY", ".venv/envoy/bin/envoy", "Envoy");
            (program, vec!["-c", main, "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"])
        }
        other => panic!("how is {other} started?"),
    };
    let mut command = Command::new(program);
    // What Caddy keeps for itself, it keeps here.
    command.args(arguments).env("HOME", path).env("XDG_DATA_HOME", path).env("XDG_CONFIG_HOME", path);
    command
}
