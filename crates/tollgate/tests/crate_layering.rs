//! The layers of the design: a crate depends only on crates above it, and on nothing that it must not know, however many
//! crates lie between. Features are as users would set them: each crate's defaults, and those that the SDK is embedded with.

use serde_json::Value;
use std::collections::BTreeSet;
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

/// What a crate must not have among its dependencies, direct or transitive. `package/feature` is a dependency with that
/// feature.
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
    ("tollgate-server", &["tollgate-store", "tollgate-control", "redis", "sqlx"]),
    ("tollgate-admin", &["tollgate-server", "redis", "tonic"]),
    (
        "tollgate-gateway",
        &["tollgate-store", "tollgate-control", "tollgate-server", "redis", "sqlx", "tonic"],
    ),
    ("tollgate-sim", &["tollgate-http", "redis", "rustls", "hyper", "tonic", "sqlx"]),
];

/// What the SDK must not have among its dependencies with these features (and no default ones).
const FORBIDDEN_IN_SDK: [(&str, &[&str]); 9] = [
    ("", &["tollgate-store", "redis", "rustls", "tonic", "sqlx", "hyper", "axum"]),
    ("tower", &["tollgate-store", "redis", "rustls", "tonic", "sqlx", "hyper", "axum"]),
    ("in-process", &["redis", "rustls", "tonic", "sqlx", "hyper", "axum", "tower-service"]),
    ("redis", &["sqlx", "tonic", "hyper", "axum"]),
    ("axum", &["redis", "rustls", "sqlx", "tonic", "hyper/http1", "hyper/http2", "axum/json"]),
    ("control", &["redis", "sqlx", "tonic", "axum", "hyper/server"]),
    ("remote", &["tollgate-store", "redis", "sqlx", "axum", "hyper/server", "tonic/server", "tonic/router"]),
    ("remote-http", &["tollgate-store", "redis", "sqlx", "tonic", "axum", "hyper/server", "hyper/http2"]),
    ("redis,control,remote,remote-http,tower", &["sqlx", "axum", "hyper/server", "tonic/server"]),
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

/// Returns the packages that a crate is compiled with, by name, and each of their features as `package/feature`. Features
/// are resolved for this crate alone: in a build of the workspace another crate may turn on more.
fn dependencies(name: &str, features: &[&str]) -> BTreeSet<String> {
    let tree = ["tree", "--package", name, "--edges", "normal", "--prefix", "none", "--format", "{p}|{f}"];
    let output = cargo(&[&tree, features].concat());
    let mut found = BTreeSet::new();
    for line in output.lines() {
        let (package, features) = line.split_once('|').expect("a package and its features");
        let package = package.split(' ').next().expect("a name");
        // A package that was listed before is marked with `(*)`.
        let features = features.split(' ').next().unwrap_or_default().split(',');
        found.extend(
            features.filter(|feature| !feature.is_empty()).map(|feature| format!("{package}/{feature}")),
        );
        found.insert(package.to_owned());
    }
    assert!(found.contains(name), "the tree of {name} was read");
    found
}

/// What a crate's users compile, through however many crates.
#[test]
fn no_crate_pulls_in_what_it_must_not_know() {
    let mut wrong = Vec::new();
    let mut check = |name: &str, features: &[&str], forbidden: &[&str]| {
        let (found, built) = (dependencies(name, features), [&[name], features].concat().join(" "));
        let forbidden = forbidden.iter().chain(&["tollgate-testing"]).filter(|other| found.contains(**other));
        wrong.extend(forbidden.map(|other| format!("{built} pulls in {other}")));
    };
    for (name, forbidden) in FORBIDDEN {
        check(name, &[], forbidden);
    }
    check("tollgate", &[], &[]);
    for (features, forbidden) in FORBIDDEN_IN_SDK {
        check("tollgate-sdk", &["--no-default-features", "--features", features], forbidden);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Without this test, the one above could pass because it finds nothing.
#[test]
fn packages_and_their_features_are_found() {
    let found = dependencies("tollgate-sdk", &["--no-default-features", "--features", "remote"]);
    for expected in ["tonic", "tonic/channel", "rustls", "hyper/client", "tollgate-engine", "tollgate-core"] {
        assert!(found.contains(expected), "{expected} in {found:?}");
    }
    let found = dependencies("tollgate-sdk", &["--features", "redis"]);
    assert!(found.contains("redis") && found.contains("tollgate-store/redis"), "{found:?}");
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
