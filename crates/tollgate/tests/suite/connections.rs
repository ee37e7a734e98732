//! Clients that connect and say nothing, on any port, are dropped in seconds and starve no one: neither the other ports
//! nor the probes on their own.

use crate::harness::{self, Folder, Server, Stopwatch, eventually, note};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tollgate_sdk::{CheckRequest, Decider, Remote, RemoteConfig};
use tollgate_testing::web::{self, WebConnection};

const RULES: &str = "domain: d\ndescriptors:\n  - {key: user, limit: 1000/hour}\n";

fn start(files: u32, first_request_ms: u32) -> (Server, Folder) {
    let folder = Folder::new();
    let rules = folder.write("rules.yaml", RULES);
    let config = folder.write(
        "config.yaml",
        format!(
            "rules: {}\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\nconnections: {{first_request_ms: {first_request_ms}}}\n",
            rules.display()
        ),
    );
    (Server::start_with_files(files, &["--config", config.to_str().expect("a plain path")]), folder)
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(harness::LONG)).expect("a timeout");
    stream
}

/// Whether the server has closed a connection; does not wait.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let closed = match stream.read(&mut [0; 256]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).expect("a socket");
    closed
}

fn ping(resp: &mut TcpStream) {
    resp.write_all(b"*1\r\n$4\r\nPING\r\n").expect("sent");
    let mut reply = [0; 7];
    resp.read_exact(&mut reply).expect("a reply");
    assert_eq!(&reply, b"+PONG\r\n");
}

#[test]
fn floods_of_silent_connections_starve_no_client() {
    let (server, _folder) = start(256, 300_000);
    let (resp, admin) = (server.resp.expect("an address"), server.admin.expect("an address"));
    let mut kept = WebConnection::to(server.http).expect("a connection");
    let check = web::request("POST", "/v1/check", br#"{"domain":"d","attributes":{"user":"u"}}"#);
    let check = String::from_utf8(check).expect("text").replace("connection: close\r\n", "");
    let mut ask = || {
        kept.send(check.as_bytes()).expect("sent");
        assert_eq!(kept.response().expect("a response").status, 200);
    };
    let mut redis = connect(resp);
    ping(&mut redis);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let remote = runtime.block_on(async {
        let settings = RemoteConfig {
            deadline: harness::LONG,
            ..RemoteConfig::new(format!("http://{}", server.grpc), "d")
        };
        Remote::new(settings).expect("an address")
    });
    let rls = || {
        runtime.block_on(async {
            assert!(remote.decide(CheckRequest::attributes([("user", "grpc".to_owned())])).await.is_allowed);
        });
    };
    rls();
    for flooded in [server.grpc, server.http, resp, admin] {
        let watch = Stopwatch::start();
        let flood: Vec<TcpStream> = (0..400).map(|_| connect(flooded)).collect();
        for address in [server.http, admin] {
            let probed = web::exchange(address, &web::request("GET", "/healthz", b"")).expect("an answer");
            assert_eq!(probed.status, 200);
        }
        // Those who were there before are still there, and new ones are served.
        ask();
        ping(&mut redis);
        ping(&mut connect(resp));
        rls();
        note(&format!("{flooded}: {} ms", watch.elapsed().as_millis()));
        drop(flood);
    }
    assert!(!server.log().contains("accept failed"), "{}", server.log());
}

/// Half a request, or one request and then nothing, keeps the probes out no longer than silence does: without reading
/// what connections wait for, it would be until their timeouts.
#[test]
fn floods_of_half_sent_and_idle_connections_starve_no_client() {
    let (server, _folder) = start(256, 300_000);
    let admin = server.admin.expect("an address");
    let half_sent: [(SocketAddr, &[u8]); 4] = [
        (
            server.http,
            b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40\r\n\r\n{\"domain\":",
        ),
        (server.http, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (admin, b"POST /admin/v1/rules HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40\r\n\r\n{"),
        (admin, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    ];
    for (flooded, bytes) in half_sent {
        let flood: Vec<TcpStream> = (0..400)
            .map(|_| {
                let mut stream = connect(flooded);
                // The server may have closed it already.
                let _ = stream.write_all(bytes);
                stream
            })
            .collect();
        let watch = Stopwatch::start();
        for address in [server.http, admin] {
            let probed = web::exchange(address, &web::request("GET", "/healthz", b"")).expect("an answer");
            assert_eq!(probed.status, 200);
        }
        note(&format!("{flooded}: {} ms", watch.elapsed().as_millis()));
        // A body may take ten seconds.
        assert!(watch.elapsed() < Duration::from_secs(9), "{flooded}: {:?}", watch.elapsed());
        drop(flood);
    }
}

#[test]
fn silent_connections_are_closed_in_time_on_every_port() {
    let (server, _folder) = start(1024, 2_000);
    let (resp, admin) = (server.resp.expect("an address"), server.admin.expect("an address"));
    let mut redis = connect(resp);
    ping(&mut redis);
    let mut kept = WebConnection::to(server.http).expect("a connection");
    kept.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    assert_eq!(kept.response().expect("a response").status, 200);
    let partly: [(SocketAddr, &[u8]); 9] = [
        (server.http, b""),
        (server.http, b"GET /healthz HT"),
        (server.grpc, b""),
        (server.grpc, b"PRI * HTT"),
        // A whole preface and SETTINGS, and then no request.
        (server.grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"),
        (resp, b""),
        (resp, b"*1\r\n$4\r\nPI"),
        (admin, b""),
        (admin, b"GET /healthz HT"),
    ];
    let watch = Stopwatch::start();
    let silent = partly.map(|(address, bytes)| {
        let mut silent = connect(address);
        silent.write_all(bytes).expect("sent");
        (silent, address, bytes)
    });
    for (mut silent, address, bytes) in silent {
        eventually("the end of a silent connection", || is_closed(&mut silent).then_some(()));
        note(&format!("{address} after {bytes:?}: {} ms", watch.elapsed().as_millis()));
    }
    ping(&mut redis);
    kept.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    assert_eq!(kept.response().expect("idle for seconds, and still served").status, 200);
}
