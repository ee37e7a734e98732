//! A running server with a database, and its admin address.

use super::{Folder, Server, WebResponse, exchange};
use serde_json::Value;
use std::net::SocketAddr;

pub(crate) struct Node {
    pub(crate) server: Server,
    pub(crate) admin: SocketAddr,
    pub(crate) rules: Folder,
}

impl Node {
    /// With these rules in a file, and these flags beside.
    pub(crate) fn start(rules: &str, db: &str, flags: &[&str]) -> Self {
        let folder = Folder::new();
        let path = folder.write("rules.yaml", rules);
        let mut all =
            vec!["--rules", path.to_str().expect("a plain path"), "--db", db, "--admin", "127.0.0.1:0"];
        all.extend(flags);
        Self::from(Server::start(&all), folder)
    }

    /// One that runs already.
    pub(crate) fn from(server: Server, folder: Folder) -> Self {
        let line = server.greeting.lines().find(|line| line.trim_start().starts_with("admin "));
        let admin = line.and_then(|line| line.split_whitespace().nth(1)).expect("an admin address");
        Self { admin: admin.parse().expect("an address"), server, rules: folder }
    }

    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> WebResponse {
        self.try_ask(method, path, headers, body)
            .unwrap_or_else(|error| panic!("no answer: {error}\n{}", self.server.log()))
    }

    pub(crate) fn try_ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> std::io::Result<WebResponse> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            head.push_str("host: localhost\r\n");
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        exchange(self.admin, format!("{head}\r\n{body}").as_bytes())
    }

    /// Agrees on something with a caller.
    pub(crate) fn put(&self, key: &str, body: &Value) -> WebResponse {
        self.ask("PUT", &format!("/admin/v1/quotas/{key}"), &[], body)
    }

    /// How many requests in a row pass, up to twenty.
    pub(crate) fn passes(&self, domain: &str, attributes: &Value) -> usize {
        (0..20).take_while(|_| self.server.check(domain, attributes).status == 200).count()
    }
}
