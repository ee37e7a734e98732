//! The cases that the clients in every language share, for tests.

/// Reads a file of the cases that the clients in every language share.
pub(crate) fn load_cases(name: &str) -> serde_json::Value {
    let path = format!("{}/../../clients/conformance/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("a file of cases");
    serde_json::from_str(&text).expect("JSON")
}
