//! Documents: YAML or JSON files with one or more of them, read within bounds and distinguished by what they contain.

use anyhow::{Context, ensure};
use serde_json::Value;
use std::io::Read;
use std::path::Path;

/// Maximum size of a file, in bytes.
const MAX_BYTES: u64 = 8 << 20;
/// Maximum number of documents in a file.
const MAX_DOCUMENTS: usize = 1_000;

/// One document.
#[derive(Debug)]
pub(super) struct Document {
    /// File and number of the document.
    pub(super) place: String,
    pub(super) kind: Kind,
    pub(super) value: Value,
    /// What is written, on the lines of the file: rules mean what their text says, which their value may not show
    /// (`100k`, `1.10`).
    pub(super) text: String,
}

/// What a document is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Configuration of Envoy, or a part of it.
    Envoy,
    /// Istio's patch of Envoy's configuration, or Envoy Gateway's.
    EnvoyPatch,
    /// Envoy Gateway's policy.
    BackendTrafficPolicy,
    /// Envoy Gateway's own configuration.
    EnvoyGateway,
    /// A ConfigMap, which may have rule files.
    ConfigMap,
    /// A rule file.
    Rules,
    /// A Deployment or another workload of Kubernetes, which may run the rate limit service.
    Workload,
    /// Another object of Kubernetes.
    Other(String),
}

/// Reads the documents of a file; `-` is the standard input.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Document>> {
    let name = path.display().to_string();
    let cannot = || format!("cannot read {name}");
    let mut text = String::new();
    let read = if name == "-" {
        std::io::stdin().lock().take(MAX_BYTES + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).with_context(cannot)?.take(MAX_BYTES + 1).read_to_string(&mut text)
    };
    read.with_context(cannot)?;
    ensure!(text.len() as u64 <= MAX_BYTES, "{name}: larger than {} MiB", MAX_BYTES >> 20);
    parse(&name, &text)
}

/// Parses the documents of a text.
pub(super) fn parse(name: &str, text: &str) -> anyhow::Result<Vec<Document>> {
    let mut all = Vec::new();
    for written in split(text) {
        let value: Value = serde_saphyr::from_str(written.text).map_err(|error| {
            let at = error.location().map_or_else(String::new, |at| {
                format!(":{}:{}", at.line() + written.lines_before as u64, at.column())
            });
            let what = error.without_snippet().render_with_formatter(&serde_saphyr::UserMessageFormatter);
            anyhow::anyhow!("{name}{at}: invalid YAML: {what}")
        })?;
        all.push((value, written));
    }
    ensure!(!all.is_empty(), "{name}: there is no document in it");
    ensure!(all.len() <= MAX_DOCUMENTS, "{name}: more than {MAX_DOCUMENTS} documents");
    let several = all.len() > 1;
    let mut documents = Vec::with_capacity(all.len());
    for (number, (value, written)) in (1..).zip(all) {
        let place = if several { format!("{name} (document {number})") } else { name.to_owned() };
        ensure!(
            value.is_object(),
            "{place}: expected a mapping, such as an Envoy configuration or a Kubernetes object"
        );
        // `kubectl get -o yaml` prints lists.
        match value["items"]
            .as_array()
            .filter(|_| value["kind"].as_str().is_some_and(|kind| kind.ends_with("List")))
        {
            Some(items) => documents.extend((1..).zip(items).map(|(item, value)| Document {
                place: format!("{place}, item {item}"),
                kind: kind(value),
                value: value.clone(),
                text: value.to_string(),
            })),
            None => {
                let kind = kind(&value);
                let text = if kind == Kind::Rules { written.on_its_lines() } else { String::new() };
                documents.push(Document { place, kind, value, text });
            }
        }
    }
    Ok(documents)
}

/// The text of one document.
#[derive(Clone, Copy, Debug)]
struct Written<'t> {
    text: &'t str,
    lines_before: usize,
}

impl Written<'_> {
    /// Returns the text with as many empty lines before it as the file has lines there, so that errors name its lines.
    fn on_its_lines(self) -> String {
        "\n".repeat(self.lines_before) + self.text
    }
}

/// Splits a text at the marks between documents, which are never part of a value: nothing else may begin a line with them.
fn split(text: &str) -> Vec<Written<'_>> {
    let mut documents = Vec::new();
    let (mut start, mut start_line, mut at) = (0, 0, 0);
    for (line, content) in text.split_inclusive('\n').enumerate() {
        let is_mark = |mark: &str| {
            content
                .strip_prefix(mark)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
        };
        // Directives come before the mark and belong to its document.
        if is_mark("---") && !is_head(&text[start..at]) {
            documents.push(Written { text: &text[start..at], lines_before: start_line });
            (start, start_line) = (at, line);
        } else if is_mark("...") {
            documents.push(Written { text: &text[start..at], lines_before: start_line });
            (start, start_line) = (at + content.len(), line + 1);
        }
        at += content.len();
    }
    documents.push(Written { text: &text[start..], lines_before: start_line });
    documents.retain(|document| !is_head(document.text.strip_prefix("---").unwrap_or(document.text)));
    documents
}

/// Returns whether a text has nothing but comments and directives.
fn is_head(text: &str) -> bool {
    text.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with(['%', '#']))
}

/// Returns what a document is.
pub(super) fn kind(value: &Value) -> Kind {
    let group = value["apiVersion"].as_str().unwrap_or_default().split('/').next().unwrap_or_default();
    match (group, value["kind"].as_str()) {
        ("networking.istio.io", Some("EnvoyFilter"))
        | ("gateway.envoyproxy.io", Some("EnvoyPatchPolicy")) => Kind::EnvoyPatch,
        ("gateway.envoyproxy.io", Some("BackendTrafficPolicy")) => Kind::BackendTrafficPolicy,
        ("gateway.envoyproxy.io", Some("EnvoyGateway")) => Kind::EnvoyGateway,
        (_, Some("ConfigMap")) => Kind::ConfigMap,
        ("apps", Some("Deployment" | "StatefulSet" | "DaemonSet")) => Kind::Workload,
        (_, Some(kind)) => Kind::Other(kind.to_owned()),
        (_, None)
            if value["domain"].is_string()
                && (value["descriptors"].is_array() || value["descriptors"].is_null())
                && value["@type"].is_null() =>
        {
            Kind::Rules
        }
        (_, None) => Kind::Envoy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_distinguished() {
        let text = "static_resources: {}\n---\n# nothing\n---\napiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\n---\n\
            {apiVersion: gateway.envoyproxy.io/v1alpha1, kind: BackendTrafficPolicy}\n---\n{domain: d, descriptors: []}\n---\n\
            {apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: ConfigMap}, {apiVersion: v1, kind: Service}]}\n";
        let kinds: Vec<Kind> =
            parse("f", text).expect("valid").into_iter().map(|document| document.kind).collect();
        let other = Kind::Other("Service".to_owned());
        assert_eq!(
            kinds,
            [Kind::Envoy, Kind::EnvoyPatch, Kind::BackendTrafficPolicy, Kind::Rules, Kind::ConfigMap, other]
        );
    }

    #[test]
    fn what_is_no_document_is_bad_input() {
        for (text, part) in
            [("a: [", "f:1:"), ("", "no document"), ("- a", "a mapping"), ("a: 1\na: 2", "f:2")]
        {
            let error = parse("f", text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
