//! The layers of the design: a crate depends only on crates above it, and on nothing that it must not know, however many
//! crates lie between. Features are as users would set them: each crate's defaults.

use serde_json::Value;
use std::process::Command;

/// From the bottom layer up. A crate that is not built yet has its place already.
const LAYERS: [&str; 17] = [
    "tollgate-core",
    "tollgate-testing",
    "tollgate-rules",
    "tollgate-store",
    "tollgate-overload",
    "tollgate-engine",
    "tollgate-replica",
    "tollgate-control",
    "tollgate-observe",
    "tollgate-http",
    "tollgate-sdk",
    "tollgate-cells",
    "tollgate-server",
    "tollgate-admin",
    "tollgate-gateway",
    "tollgate-sim",
    "tollgate",
];

/// Beside the layers: these may use any crate, and no crate uses them.
const BESIDE: [&str; 4] = ["bench", "tollgate-bench", "example-axum", "example-follow"];

/// What a crate must not have among its dependencies, direct or transitive.
const FORBIDDEN: [(&str, &[&str]); 15] = [
    ("tollgate-core", &["tokio", "hyper", "tonic", "serde_json"]),
    ("tollgate-rules", &["tollgate-store", "tokio", "hyper", "tonic"]),
    ("tollgate-store", &["tollgate-rules", "hyper", "tonic", "redis", "rustls"]),
    ("tollgate-overload", &["tollgate-rules", "tollgate-store", "tokio", "hyper", "tonic"]),
    ("tollgate-engine", &["tollgate-store", "redis", "rustls", "hyper", "tonic", "sqlx"]),
    ("tollgate-replica", &["tollgate-store", "redis", "rustls", "hyper", "tonic", "sqlx"]),
    ("tollgate-control", &["redis", "hyper", "tonic"]),
    ("tollgate-observe", &["tollgate-store", "tollgate-control", "hyper", "http", "tonic", "sqlx"]),
    ("tollgate-http", &["tollgate-store", "hyper", "tonic", "rustls", "redis", "sqlx"]),
    // What a program compiles that decides in its own process.
    ("tollgate-sdk", &["redis", "rustls", "tonic", "sqlx", "hyper", "axum"]),
    ("tollgate-cells", &["tollgate-rules", "tollgate-engine", "redis", "rustls", "hyper", "tonic", "sqlx"]),
    ("tollgate-server", &["tollgate-control", "redis", "sqlx"]),
    ("tollgate-admin", &["tollgate-server", "redis", "tonic"]),
    ("tollgate-gateway", &["tollgate-control", "tollgate-server", "redis", "sqlx", "tonic"]),
    ("tollgate-sim", &["tollgate-http", "redis", "rustls", "hyper", "tonic", "sqlx"]),
];

fn cargo(arguments: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").expect("cargo runs its tests with this");
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output = Command::new(cargo)
        .args(arguments)
        .args(["--offline", "--manifest-path", manifest])
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Dependencies that cross layers the wrong way.
#[test]
fn a_crate_depends_only_on_crates_above_it() {
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() >= 6, "the workspace was read");
    let layer = |name: &str| LAYERS.iter().position(|known| *known == name);
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        if BESIDE.contains(&name) {
            continue;
        }
        let Some(own) = layer(name) else {
            wrong.push(format!("{name} has no layer in the design's list"));
            continue;
        };
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            // What only tests use is the tests' affair.
            if dependency["kind"] == "dev" {
                continue;
            }
            let other = dependency["name"].as_str().expect("a name");
            if BESIDE.contains(&other) || layer(other).is_some_and(|other| other >= own) {
                wrong.push(format!("{name} uses {other}, which is not below it"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a crate's users compile, through however many crates.
#[test]
fn no_crate_pulls_in_what_it_must_not_know() {
    let mut wrong = Vec::new();
    for (name, others) in FORBIDDEN {
        let tree =
            cargo(&["tree", "--package", name, "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
        let mut found: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
        assert!(found.contains(&name), "the tree of {name} was read");
        found.retain(|dependency| others.contains(dependency));
        found.sort_unstable();
        found.dedup();
        wrong.extend(found.iter().map(|other| format!("{name} pulls in {other}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// `dist` inherits from `release`, which is quick to build: without an entry of its own, a package is released slow.
#[test]
fn the_released_profile_says_itself_how_packages_are_optimized() {
    let manifest = include_str!("../../../Cargo.toml");
    let packages = |profile: &str| -> Vec<&str> {
        let section = manifest.split(&format!("[profile.{profile}.package]\n")).nth(1).expect("a section");
        let lines = section.lines().take_while(|line| !line.starts_with('['));
        lines.filter_map(|line| line.split_once(".opt-level = ").map(|(name, _)| name)).collect()
    };
    let (quick, released) = (packages("release"), packages("dist"));
    assert!(!quick.is_empty());
    let missing: Vec<_> = quick.into_iter().filter(|name| !released.contains(name)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}
