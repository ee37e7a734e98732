//! A running `tollgate gateway` before an upstream.

use super::server::{Ended, Said, command};
use super::{Folder, eventually};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, ExitStatus};
use tollgate_testing::signals;
use tollgate_testing::web::{self, WebConnection, WebResponse};

pub(crate) struct Gateway {
    child: Ended,
    /// Its listeners, in order.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) http: SocketAddr,
    /// Where operators come in.
    pub(crate) admin: SocketAddr,
    out: Said,
    log: Said,
    pub(crate) folder: Folder,
}

impl Gateway {
    /// With these rules, and this section `gateway` (indented by two), in a folder of their own.
    pub(crate) fn start(rules: &str, section: &str) -> Self {
        Self::start_in(Folder::new(), rules, "", section)
    }

    /// The same with files that are in the folder already, and more settings beside the section.
    pub(crate) fn start_in(folder: Folder, rules: &str, more: &str, section: &str) -> Self {
        Self::start_with(folder, rules, more, section, &[])
    }

    /// The same with these variables in its environment.
    pub(crate) fn start_with(
        folder: Folder,
        rules: &str,
        more: &str,
        section: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        folder.write("rules.yaml", rules);
        let path = folder.write("gateway.yaml", settings(more, section));
        let mut child = Ended(
            command(&[
                "gateway",
                "--admin",
                "127.0.0.1:0",
                "--log",
                "debug",
                "--config",
                path.to_str().expect("a plain path"),
            ])
            .envs(environment.iter().copied())
            .spawn()
            .expect("the binary runs"),
        );
        let log = Said::of(child.0.stderr.take().expect("piped"));
        let out = Said::of(child.0.stdout.take().expect("piped"));
        let (addresses, http, admin) = eventually("the gateway's greeting", || {
            // Where the standard output is for data, the banner is on standard error.
            let greeting = out.text() + &log.text();
            if let Ok(Some(status)) = child.0.try_wait() {
                panic!("the gateway ended with {status}:\n{greeting}{}", log.text());
            }
            let listed = |word: &str| -> Vec<SocketAddr> {
                let lines = greeting.lines().filter_map(|line| line.trim().strip_prefix(word));
                let first = lines.filter_map(|line| line.split_whitespace().next());
                first
                    .map(|text| text.rsplit('/').next().expect("a part").parse().expect("an address"))
                    .collect()
            };
            let all = || (listed("gateway "), listed("http ")[0], listed("admin ")[0]);
            greeting.contains("\n  rules ").then(all)
        });
        Self { child, addresses, http, admin, out, log, folder }
    }

    /// Changes its settings, while it serves.
    pub(crate) fn change(&self, more: &str, section: &str) {
        self.folder.write("gateway.yaml", settings(more, section));
    }

    /// What `/readyz?verbose` says.
    pub(crate) fn details(&self) -> serde_json::Value {
        let answer = web::exchange(self.http, &web::request("GET", "/readyz?verbose", b""));
        answer.expect("an answer").json()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// The address of a protocol server, from the banner.
    pub(crate) fn listener(&self, name: &str) -> Option<SocketAddr> {
        let greeting = self.output();
        let line = greeting.lines().find_map(|line| line.trim_start().strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    }

    pub(crate) fn get(&self, path: &str) -> WebResponse {
        self.exchange(&web::request("GET", path, b""))
    }

    pub(crate) fn exchange(&self, bytes: &[u8]) -> WebResponse {
        web::exchange(self.address(), bytes)
            .unwrap_or_else(|error| panic!("no answer: {error}\n{}", self.log()))
    }

    pub(crate) fn open(&self) -> WebConnection {
        WebConnection::to(self.address()).expect("a connection")
    }

    /// A figure of `/metrics`, by its name with labels.
    pub(crate) fn figure(&self, name: &str) -> u64 {
        let text = web::exchange(self.http, &web::request("GET", "/metrics", b"")).expect("metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        line.unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    pub(crate) fn log(&self) -> String {
        self.log.text()
    }

    /// Waits until this is in the log: messages are written after the answer to the request that they are about.
    pub(crate) fn wait_for_log(&self, text: &str) {
        self.log.wait_for(text);
    }

    /// What it has printed: its access log too.
    pub(crate) fn output(&self) -> String {
        self.out.text()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.0.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        signals::send(self.child.0.id(), name);
    }

    /// Waits for the end, and for the last that it has written.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let status = self.child.wait("tollgate gateway");
        self.log.wait_for_end();
        self.out.wait_for_end();
        status
    }
}

fn settings(more: &str, section: &str) -> String {
    format!("rules: [rules.yaml]\nmemory: 16MiB\nhttp: 127.0.0.1:0\n{more}\ngateway:\n{section}")
}

/// One listener, one upstream, one route for everything; `route` is added to that route.
pub(crate) fn plain(upstream: SocketAddr, route: &str) -> String {
    format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams: {{api: {{addresses: [\"{upstream}\"]}}}}\n  routes:\n    - {{path: \"/{{*rest}}\", upstream: api, domain: d{route}}}\n"
    )
}

/// Runs a third-party program to its end and returns its output; it must succeed.
pub(crate) fn foreign(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}: run `make setup`"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// A certificate for `localhost` and 127.0.0.1 that vouches for itself, with its key.
pub(crate) fn certificate(folder: &Folder, name: &str) {
    let (key, certificate) = (folder.join(format!("{name}.key")), folder.join(format!("{name}.crt")));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    foreign(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            &text(&key),
            "-out",
            &text(&certificate),
        ],
    );
}
