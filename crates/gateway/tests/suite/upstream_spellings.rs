//! Real servers behind the gateway: any two spellings of a path that one of them routes alike are charged to one counter, or
//! refused. Servers that are not installed are left out, but for Python and nginx.

use crate::harness::{Gateway, eventually, plain};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const RULES: &str = "domain: d\ndescriptors:\n  - {key: path, name: path, limit: 1000000/hour}\n";

/// A server that ends with the test.
struct Upstream {
    name: &'static str,
    child: Child,
    address: SocketAddr,
    folder: PathBuf,
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn found(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/usr/local/go/bin";
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.exists())
}

impl Upstream {
    /// Starts one of the servers in `tests/upstreams`; `None` if it is not installed.
    fn start(name: &'static str) -> Option<Self> {
        let program = found(match name {
            "wsgi" => "python3",
            other => other,
        })?;
        let free = tollgate_testing::ports::free_address();
        let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/upstreams");
        let folder = std::env::temp_dir().join(format!("tollgate-upstream-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut command = Command::new(&program);
        match name {
            "wsgi" => command.arg(files.join("wsgi.py")),
            "node" => command.arg(files.join("node.js")),
            "go" => {
                let binary = folder.join("server");
                let mut build = Command::new(&program);
                build.arg("build").arg("-o").arg(&binary).arg(files.join("main.go"));
                assert!(build.env("GOFLAGS", "").status().expect("go runs").success(), "the server compiles");
                command = Command::new(binary);
                &mut command
            }
            _ => {
                let text = std::fs::read_to_string(files.join("nginx.conf")).expect("a file");
                let text = text.replace("PORT", &free.port().to_string());
                let text = text.replace("FOLDER", folder.to_str().expect("text"));
                std::fs::write(folder.join("nginx.conf"), text).expect("a file");
                command.arg("-c").arg(folder.join("nginx.conf")).arg("-p").arg(&folder)
            }
        };
        if name != "nginx" {
            command.arg(free.port().to_string());
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it runs");
        let mut upstream = Self { name, child, address: free, folder };
        eventually(name, || {
            if let Ok(Some(status)) = upstream.child.try_wait() {
                panic!("{name} ended with {status}");
            }
            TcpStream::connect(upstream.address).ok()
        });
        Some(upstream)
    }

    /// Returns how applications of this server route a response's request: the style of routing, and the route.
    fn routes(&self, body: &[u8]) -> Vec<(String, Vec<u8>)> {
        if self.name == "nginx" {
            return vec![("uri".to_owned(), body.to_vec())];
        }
        let text = std::str::from_utf8(body).expect("text");
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.map(|(style, path)| (style.to_owned(), path.as_bytes().to_vec())).collect()
    }
}

/// Returns paths in many spellings: all sequences of a few parts, and those that once were fresh limits.
fn spellings() -> Vec<String> {
    let parts = [
        "a", "%61", "A", "/", "//", "%2F", "%2f", "%5C", ".", "%2e", "..", ";x", "%3Bx", "%25", "%2561",
        "%2e%2e", "%", "%00", "%0a", "+", "%2B", "%20", "%c0%af", "\\",
    ];
    let mut paths: Vec<String> = Vec::new();
    for one in parts {
        paths.push(format!("/{one}"));
        paths.push(format!("/api/login{one}"));
        for two in parts {
            paths.push(format!("/{one}{two}"));
            paths.push(format!("/api{one}login{two}"));
        }
    }
    for path in [
        "/login",
        "/login/",
        "//login",
        "/%6Cogin",
        "/%6cogin",
        "/login%2F",
        "/api%2Flogin",
        "/api/login?a",
        "/%256Cogin",
    ] {
        paths.push(path.to_owned());
    }
    paths
}

/// Sends every spelling and compares the counters of those that `upstream` routes alike in one of `styles`.
fn check(upstream: &Upstream, escapes: &str, styles: &[&str]) {
    let more = format!("identity: {{escapes: {escapes}, unmatched: path}}\nresponses: {{bucket: true}}\n");
    let gateway = Gateway::start_with(RULES, &more, &plain(upstream.address, ""));
    let mut counters: HashMap<(String, Vec<u8>), (String, String)> = HashMap::new();
    let (mut routed, mut alike) = (0, 0);
    let first = gateway.get("/a");
    assert_eq!(first.status, 200, "{}: {}", upstream.name, first.text());
    for path in spellings() {
        let response = gateway.get(&path);
        // A refusal of the gateway, or of the server.
        let Some(bucket) = response.header("x-ratelimit-bucket").filter(|_| response.status == 200) else {
            continue;
        };
        routed += 1;
        for route in upstream.routes(&response.body) {
            if !styles.is_empty() && !styles.contains(&route.0.as_str()) {
                continue;
            }
            let counted = (path.clone(), bucket.to_owned());
            let (first, counter) = counters.entry(route.clone()).or_insert(counted);
            alike += usize::from(*first != path);
            assert_eq!(
                counter, bucket,
                "{} by {} routes `{first}` and `{path}` alike ({escapes})",
                upstream.name, route.0
            );
        }
    }
    assert!(routed > 50 && alike > 10, "{}: {routed} routed, {alike} alike", upstream.name);
    let [get, head] = ["GET", "HEAD"].map(|method| {
        let request = format!("{method} /login HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n");
        let mut open = gateway.open();
        open.send(request.as_bytes()).expect("sent");
        open.head().expect("a head").header("x-ratelimit-bucket").map(str::to_owned)
    });
    assert!(get.is_some() && get == head, "{}", upstream.name);
}

#[test]
fn what_real_servers_route_alike_is_counted_alike_or_refused() {
    for (name, decoding, keeping) in [
        ("wsgi", &["path_info", "merged"][..], &[][..]),
        ("nginx", &["uri"], &[]),
        ("node", &[], &["raw", "segments", "unslashed"]),
        ("go", &["path", "cleaned"], &[]),
    ] {
        let Some(upstream) = Upstream::start(name) else {
            assert!(!matches!(name, "wsgi" | "nginx"), "no {name}: run `make setup`");
            continue;
        };
        check(&upstream, "refuse", &[]);
        for (escapes, styles) in [("decode", decoding), ("keep", keeping)] {
            if !styles.is_empty() {
                check(&upstream, escapes, styles);
            }
        }
    }
}
