//! Envoy Gateway's own test policies and the brief's rule files, from every source of rules: files, a management server, and
//! published revisions. A user who moves rules from one to another must get the same limits.

use super::variables;
use crate::databases::Place;
use crate::harness::{self, Folder, NODE, Node, Ratelimit, XdsServer, calls_at};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The number of a unit on the wire: the library of the management server does not know all names.
fn number(unit: &str) -> usize {
    let all = ["second", "minute", "hour", "day", "month", "year", "week"];
    1 + all.iter().position(|name| unit.eq_ignore_ascii_case(name)).expect("a unit")
}

/// A rule file: its name, its text, and what it says.
struct Policy {
    file: String,
    text: String,
    value: Value,
}

impl Policy {
    /// Reads a document. The files have the same domains, so each gets the name of its file before it.
    fn read(stem: &str, number: usize, text: &str) -> Self {
        let line = |line: &str| match line.split_once(": ") {
            Some(("domain", value)) => format!("domain: {stem}/{value}\n"),
            // envoyproxy/ratelimit has no such key.
            Some((key, _)) if key.trim_start() == "action" => String::new(),
            _ => format!("{line}\n"),
        };
        let text: String = text.lines().map(line).collect();
        let value = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{stem}: {error}"));
        Self { file: format!("{stem}-{number}.yaml"), text, value }
    }

    /// The calls that meet its limits, each once.
    fn calls(&self) -> Vec<Value> {
        fn walk(descriptors: &Value, path: &mut Vec<[String; 2]>, found: &mut Vec<Vec<[String; 2]>>) {
            for descriptor in descriptors.as_array().into_iter().flatten() {
                let text = |name: &str| descriptor[name].as_str().unwrap_or_default().to_owned();
                let value = Some(text("value")).filter(|value| !value.is_empty());
                path.push([text("key"), value.unwrap_or_else(|| "v".to_owned())]);
                if descriptor["rate_limit"].is_object() {
                    found.push(path.clone());
                }
                walk(&descriptor["descriptors"], path, found);
                path.pop();
            }
        }
        let mut found = Vec::new();
        walk(&self.value["descriptors"], &mut Vec::new(), &mut found);
        let call = |entries| json!({"domain": self.value["domain"], "descriptors": [{"entries": entries}]});
        found.into_iter().map(call).collect()
    }

    /// The same as a resource of xDS. Management servers keep one resource for each name.
    fn resource(&self) -> Value {
        fn resource(value: &Value) -> Value {
            match value {
                Value::Object(fields) => {
                    // What xDS does not have, or not yet in the library of the management server.
                    let left_out = ["value_to_metric", "share_threshold", "quota_mode"];
                    let fields = fields.iter().filter(|(name, value)| {
                        let is_out = left_out.contains(&name.as_str());
                        assert!(!is_out || **value == Value::Bool(false), "{name}: {value}");
                        !is_out
                    });
                    let field = |(name, value): (&String, &Value)| match (name.as_str(), value.as_str()) {
                        ("unit", Some(unit)) => (name.clone(), json!(number(unit))),
                        _ => (name.clone(), resource(value)),
                    };
                    fields.map(field).collect()
                }
                Value::Array(items) => items.iter().map(resource).collect(),
                value => value.clone(),
            }
        }
        let mut made = resource(&self.value);
        made["name"] = self.value["domain"].clone();
        made
    }
}

/// What Envoy Gateway makes of its own test policies, in the Go module that the check of Kubernetes objects is built with. `None`
/// if there is no Go to ask for it.
fn of_envoy_gateway(root: &Path) -> Option<Vec<PathBuf>> {
    let asked = Command::new("go")
        .args(["mod", "download", "-json", "github.com/envoyproxy/gateway"])
        .current_dir(root.join("../../deploy/helm/check"))
        .output()
        .ok()?;
    let module: Value = serde_json::from_slice(&asked.stdout).expect("JSON");
    let folder = Path::new(module["Dir"].as_str().unwrap_or_else(|| panic!("{module}")))
        .join("internal/xds/translator/testdata/out/ratelimit-config");
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let is_policy = |file: &PathBuf| {
        let name = file.to_string_lossy();
        name.ends_with(".yaml") && !name.ends_with(".routes.yaml")
    };
    Some(files.filter(is_policy).collect())
}

fn policies() -> Vec<Policy> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = ["seed-api-platform.yaml", "seed-api-gateway.yaml"];
    let mut files = Vec::from(own.map(|name| root.join("../../examples").join(name)));
    match of_envoy_gateway(root) {
        Some(more) => {
            assert!(more.len() > 20, "{more:?}");
            files.extend(more);
        }
        None => harness::note("no Go: Envoy Gateway's policies are left out"),
    }
    let mut all = Vec::new();
    for file in &files {
        let stem = file.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(file).expect("text");
        all.extend((1..).zip(text.split("\n---\n")).map(|(number, text)| Policy::read(&stem, number, text)));
    }
    all
}

#[test]
fn policies_mean_the_same_from_every_source() {
    let policies = policies();
    let calls: Vec<Value> = policies.iter().flat_map(Policy::calls).collect();

    let folder = Folder::new();
    std::fs::create_dir_all(folder.join("ratelimit/config")).expect("a folder");
    for policy in &policies {
        folder.write(Path::new("ratelimit/config").join(&policy.file), &policy.text);
    }
    let mut all = variables(&folder, "127.0.0.1:1");
    all.push(("TOLLGATE_STORE", "memory"));
    let files = Ratelimit::start(&all).healthy();
    assert!(!files.log().contains("Error loading"), "{}", files.log());

    let mut manager = XdsServer::start();
    let server = manager.address.to_string();
    manager.set("1", &policies.iter().map(Policy::resource).collect());
    let xds = Ratelimit::start(&[
        ("TOLLGATE_STORE", "memory"),
        ("RUNTIME_ROOT", "/nowhere"),
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("CONFIG_GRPC_XDS_SERVER_URL", &server),
        ("CONFIG_GRPC_XDS_NODE_ID", NODE),
    ]);
    manager.acknowledged("1");

    let (place, own) = (Place::new(), "domain: own\ndescriptors: [{key: k, limit: 1/hour}]\n");
    let node = Node::start(own, &place.sqlite("rules"), &["--profile", "envoy"]);
    let mut sent = vec![json!({"name": "own.yaml", "text": own})];
    sent.extend(policies.iter().map(|policy| json!({"name": policy.file, "text": policy.text})));
    let made = node.ask("POST", "/admin/v1/rules", &[], &json!({"files": sent, "reason": "all"}));
    assert_eq!(made.status, 201, "{}", made.text());

    // Of a window that ends meanwhile, less is used.
    let met = |answers: Vec<Value>| -> Vec<Value> {
        let status = |answer: Value| json!([answer["overallCode"], answer["statuses"][0]["currentLimit"]]);
        answers.into_iter().map(status).collect()
    };
    let of_files = met(files.calls(&json!(calls)));
    let of_xds = met(xds.calls(&json!(calls)));
    let published = met(calls_at(&node.server.grpc.to_string(), &json!(calls), &[]));
    for (at, call) in calls.iter().enumerate() {
        assert!(of_files[at][1]["unit"].is_string(), "{call}: {}", of_files[at]);
        assert_eq!((&of_files[at], &of_files[at]), (&of_xds[at], &published[at]), "{call}");
    }
    let shown = |service: &Ratelimit| {
        let text = service.get(service.debug, "/rlconfig").text();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(shown(&files), shown(&xds));
}
