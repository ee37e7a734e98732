//! Keys that verify tokens, rotated while traffic flows: at `/check` and in the gateway.

use crate::harness::{self, Folder, Gateway, Origin, Server, eventually, exchange, plain};
use serde_json::{Value, json};
use std::net::SocketAddr;

const RULES: &str = "domain: d\ndescriptors: [{key: user_id, name: per-user, limit: 100000/hour}]\n";
/// The tokens are of 1970.
const WHO: &str = "identity: {jwt: {jwks: keys.json, leeway: 4000000000}}\n";

fn fixture() -> Value {
    serde_json::from_str(include_str!("../../../http/tests/jwt/pyjwt.json")).expect("JSON")
}

fn write_keys(folder: &Folder, ids: &[&str]) {
    let all = fixture();
    let kept = |key: &&Value| ids.iter().any(|id| key["kid"] == **id);
    let kept: Vec<&Value> = all["keys"].as_array().expect("keys").iter().filter(kept).collect();
    folder.write("keys.json", json!({ "keys": kept }).to_string());
}

/// Whether a request with this token is known as its user's.
fn believed(address: SocketAddr, path: &str, algorithm: &str) -> bool {
    let token = fixture()["tokens"][algorithm].as_str().expect("a token").to_owned();
    let text = format!(
        "GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\r\n"
    );
    let answer = exchange(address, text.as_bytes()).expect("an answer");
    if answer.status == 401 {
        return false;
    }
    assert_eq!(answer.status, 200);
    answer.header("ratelimit").is_some()
}

/// A key that was taken out because it leaked must verify nothing a second later, without a restart.
fn keys_are_rotated(folder: &Folder, address: SocketAddr, path: &str, http: SocketAddr) {
    let believed = |algorithm| believed(address, path, algorithm);
    assert!(believed("RS256") && believed("RS256") && !believed("ES256"));
    write_keys(folder, &["e1"]);
    eventually("the removed key to be gone", || (!believed("RS256")).then_some(()));
    assert!(believed("ES256"));
    let key_error = || {
        let answer = exchange(http, &harness::request("GET", "/readyz?verbose", b"")).expect("an answer");
        answer.json()["keys"]["error"].clone()
    };
    assert_eq!(key_error(), Value::Null);
    folder.write("keys.json", "{\"keys\": [");
    let error = eventually("the error of the broken file", || key_error().as_str().map(str::to_owned));
    assert!(error.contains("keys.json") && error.contains("invalid JWKS"), "{error}");
    assert!(believed("ES256"), "the last good keys stay");
    write_keys(folder, &["r1"]);
    eventually("the new key", || believed("RS256").then_some(()));
    assert_eq!(key_error(), Value::Null);
}

#[test]
fn at_the_check_keys_are_rotated() {
    let folder = Folder::new();
    write_keys(&folder, &["r1"]);
    folder.write("rules.yaml", RULES);
    let settings = format!("rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n{WHO}");
    let path = folder.write("tollgate.yml", settings);
    let server = Server::start(&["--config", path.to_str().expect("a plain path")]);
    keys_are_rotated(&folder, server.http, "/check/a", server.http);
}

#[test]
fn in_the_gateway_keys_are_rotated() {
    let (folder, origin) = (Folder::new(), Origin::start());
    write_keys(&folder, &["r1"]);
    let gateway = Gateway::start_in(folder, RULES, WHO, &plain(origin.address, ""));
    keys_are_rotated(&gateway.folder, gateway.address(), "/a", gateway.http);
}
