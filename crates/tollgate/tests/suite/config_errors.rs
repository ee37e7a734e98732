//! Mistakes in the configuration, as an operator meets them: the server does not start, and one message names the file, the
//! place and the correction. And what the server reports about its store when it does start.

use crate::harness::{Folder, Server, eventually, run, run_with};

const OFF: [&str; 6] = ["--grpc", "off", "--resp", "off", "--admin", "off"];

/// Returns what `tollgate COMMAND` prints with this configuration file, which it must refuse.
fn refused(command: &str, config: &str) -> String {
    let folder = Folder::new();
    folder.write("rules.yaml", "{domain: web, descriptors: [{key: k, limit: 1/hour}]}\n");
    let path = folder.write("tollgate.yml", config);
    let mut flags = vec![command, "--config", path.to_str().expect("a plain path"), "--http", "127.0.0.1:0"];
    flags.extend(OFF);
    let run = run(&flags);
    assert_eq!(run.code, Some(1), "{}{}", run.out, run.err);
    run.err
}

#[test]
fn a_mistake_in_the_file_is_reported_once_with_its_place() {
    for (command, config, message) in [
        (
            "serve",
            "rules: rules.yaml\ngatewy: {}\n",
            "tollgate.yml:2:1: unknown key `gatewy`; did you mean `gateway`?",
        ),
        (
            "serve",
            "store_deadline_ms: 10ms\n",
            "a whole number of milliseconds between 1 and 10000, got `10ms`",
        ),
        ("serve", "http: [\n", "invalid YAML"),
        (
            "serve",
            "rules: rules.yaml\nforward_auth: {domain: nope}\n",
            "unknown domain `nope`; use one of those loaded: web",
        ),
        ("gateway", "gateway: {listeners: [], upstreams: {}, rutes: []}\n", "did you mean `routes`?"),
    ] {
        let printed = refused(command, config);
        assert_eq!(printed.matches(message).count(), 1, "{message} in {printed}");
        assert_eq!(printed.matches("tollgate.yml").count(), 1, "{printed}");
        assert!(!printed.contains("`who`") && !printed.contains("<input>"), "{printed}");
    }
}

/// A password for a store that has none is a mistake of the address.
#[test]
fn a_store_password_without_a_store_is_an_error() {
    let run = run(&["serve", "--store-password-file", "nope"]);
    assert!(run.code == Some(1) && run.err.contains("set --store to the address of Redis"), "{}", run.err);
}

/// The variable is named, not a flag that was not given.
#[test]
fn an_invalid_variable_is_named() {
    let run = run_with(&["serve"], &[("TOLLGATE_STORE_DEADLINE_MS", "abc")]);
    assert!(run.code == Some(2) && run.err.contains("TOLLGATE_STORE_DEADLINE_MS"), "{}", run.err);
}

/// A wrong address is found when the server starts, not by the first denied request.
#[test]
fn an_unreachable_store_is_reported_at_startup() {
    let free = tollgate_testing::ports::free_address();
    let store = format!("redis://:geheim@{free}");
    let server = Server::start(&["--store", &store]);
    assert!(server.greeting.contains(&format!("store redis://{free}\n")), "{}", server.greeting);
    let warning = "connection refused; is Redis running there?";
    eventually("a warning", || server.log().contains(warning).then_some(()));
    assert!(!server.log().contains("geheim") && !server.greeting.contains("geheim"), "{}", server.log());
}
