//! The rooms of the design: a crate depends only on crates above it, so that the request path never learns of SQL, and
//! the algorithms never of protocols.

use serde_json::Value;
use std::process::Command;

/// From the top of the house down; a crate that is not built yet has its place already.
const ROOMS: [&str; 13] = [
    "tollgate-core",
    "tollgate-rules",
    "tollgate-store",
    "tollgate-engine",
    "tollgate-control",
    "tollgate-observe",
    "tollgate-edge",
    "tollgate-sdk",
    "tollgate-regions",
    "tollgate-front",
    "tollgate-gateway",
    "tollgate-sim",
    "tollgate",
];

/// Beside the house: these may use any room, and no room uses them.
const BESIDE: [&str; 3] = ["bench", "tollgate-bench", "example-axum"];

/// What a room must not know, beyond the rooms below it.
const FORBIDDEN: [(&str, &[&str]); 7] = [
    ("tollgate-core", &["tokio", "hyper", "tonic", "serde_json"]),
    ("tollgate-rules", &["tollgate-store", "tokio", "hyper", "tonic"]),
    ("tollgate-store", &["tollgate-rules", "hyper", "tonic"]),
    ("tollgate-observe", &["tollgate-store", "tollgate-control", "hyper", "http", "tonic", "sqlx"]),
    ("tollgate-edge", &["tollgate-store", "tokio", "hyper", "tonic"]),
    ("tollgate-sdk", &["hyper", "axum"]),
    ("tollgate-gateway", &["tollgate-store", "tollgate-control", "tollgate-front", "sqlx"]),
];

fn workspace() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").expect("cargo runs its tests with this");
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let arguments =
        ["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path", manifest];
    let output = Command::new(cargo).args(arguments).output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

/// A change that crosses rooms the wrong way is found here and not in a rewrite a year later.
#[test]
fn a_crate_depends_only_on_crates_above_it() {
    let packages = workspace();
    assert!(packages.len() >= 6, "the workspace was read");
    let place = |name: &str| ROOMS.iter().position(|room| *room == name);
    let mut wrong = Vec::new();
    for package in &packages {
        let name = package["name"].as_str().expect("a name");
        let beside = BESIDE.contains(&name);
        if place(name).is_none() && !beside {
            wrong.push(format!("{name} has no place in the design's list"));
        }
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            // What only tests use is the tests' affair.
            if dependency["kind"] == "dev" || beside {
                continue;
            }
            let other = dependency["name"].as_str().expect("a name");
            if BESIDE.contains(&other) {
                wrong.push(format!("{name} uses {other}"));
            }
            if let (Some(own), Some(other_place)) = (place(name), place(other))
                && other_place >= own
            {
                wrong.push(format!("{name} uses {other}, which stands below it"));
            }
            // The server part of the edge is behind a feature, and may know its runtime.
            if dependency["optional"] == true {
                continue;
            }
            if FORBIDDEN.iter().any(|(room, others)| *room == name && others.contains(&other)) {
                wrong.push(format!("{name} must not know {other}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
