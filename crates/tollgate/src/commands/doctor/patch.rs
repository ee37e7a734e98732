//! Patches of Envoy's configuration: EnvoyFilter of Istio and EnvoyPatchPolicy of Envoy Gateway. What they add is read as
//! the part of the configuration that it becomes.

use super::envoy::{EnvoyParts, after_router};
use super::finding::Report;
use super::proto::{field, find_typed};
use super::{filter, quota};
use serde_json::{Value, json};

/// Collects the parts of a patch.
pub(super) fn collect(document: &Value, place: &str, parts: &mut EnvoyParts, report: &mut Report) {
    // A patch is one part of a configuration that exists elsewhere.
    parts.mark_partial();
    let spec = &document["spec"];
    for (number, patch) in spec["configPatches"].as_array().into_iter().flatten().enumerate() {
        istio(patch, &format!("{place}.spec.configPatches[{number}]"), parts, report);
    }
    for (number, patch) in spec["jsonPatches"].as_array().into_iter().flatten().enumerate() {
        json_patch(
            &patch["operation"],
            &format!("{place}.spec.jsonPatches[{number}].operation"),
            parts,
            report,
        );
    }
}

fn has_limit_filter(value: &Value) -> bool {
    [filter::HTTP_FILTER, quota::QUOTA_FILTER].iter().any(|name| find_typed(value, name).is_some())
}

fn istio(patch: &Value, place: &str, parts: &mut EnvoyParts, report: &mut Report) {
    let operation = patch["patch"]["operation"].as_str().unwrap_or_default();
    let value = &patch["patch"]["value"];
    if operation == "REMOVE" {
        report.note(place, "the patch removes what it matches; its `value` is ignored");
        return;
    }
    let place = format!("{place}.patch.value");
    match patch["applyTo"].as_str().unwrap_or_default() {
        "HTTP_FILTER" => {
            if has_limit_filter(value) {
                let matched = &patch["match"]["listener"]["filterChain"]["filter"]["subFilter"];
                let is_router = matched["name"].as_str().is_some_and(|name| name.ends_with("router"));
                match operation {
                    // After no filter is after all of them.
                    "INSERT_AFTER" if is_router || matched.is_null() => after_router(&place, report),
                    // Istio appends what it adds to the list, whose last filter is the router.
                    "ADD" => after_router(&place, report),
                    "MERGE" if is_incomplete(value) => {
                        report.note(&place, "the patch changes a filter that is not here; it is not checked");
                        return;
                    }
                    _ => {}
                }
            }
            parts.add_filter(value, &place, report);
        }
        "VIRTUAL_HOST" => parts.virtual_host(value, &place, report),
        "HTTP_ROUTE" => parts.route(value, &place, report),
        "CLUSTER" => parts.cluster(value, &place),
        _ => parts.collect(value, &place, report),
    }
}

/// Returns whether a filter lacks settings that it must have.
fn is_incomplete(value: &Value) -> bool {
    find_typed(value, filter::HTTP_FILTER).is_some_and(|(_, settings)| {
        ["domain", "rate_limit_service"].iter().any(|name| field(settings, name).is_none())
    })
}

/// Reads an operation of a JSON patch: its value, wrapped into the objects and lists of its path.
fn json_patch(operation: &Value, place: &str, parts: &mut EnvoyParts, report: &mut Report) {
    match operation["op"].as_str() {
        Some("add" | "replace") => {}
        Some("remove") => {
            report.note(place, "the patch removes what its path names; a `value` is ignored");
            return;
        }
        _ => return,
    }
    let path = segments(operation);
    let mut value = operation["value"].clone();
    for segment in path.iter().rev() {
        value = match segment {
            Segment::Index | Segment::End => json!([value]),
            Segment::Name(name) => json!({name: value}),
        };
    }
    if let [.., Segment::Name(list), Segment::End] = &path[..]
        && list == "http_filters"
        && has_limit_filter(&value)
    {
        // Envoy Gateway's last filter is the router.
        after_router(place, report);
    }
    let place = if path.is_empty() { format!("{place}.value") } else { place.to_owned() };
    parts.collect(&value, &place, report);
}

/// A step from the resource that is patched to the value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Name(String),
    /// An item of a list, whichever.
    Index,
    /// Behind the last item of a list.
    End,
}

/// Returns the steps of an operation: those of its `jsonPath`, which may begin anywhere, and then those of its `path`.
fn segments(operation: &Value) -> Vec<Segment> {
    let mut all = json_path(operation["jsonPath"].as_str().unwrap_or_default());
    let path = operation["path"].as_str().unwrap_or_default();
    all.extend(path.split('/').filter(|segment| !segment.is_empty()).map(|segment| match segment {
        "-" => Segment::End,
        index if index.bytes().all(|byte| byte.is_ascii_digit()) => Segment::Index,
        name => Segment::Name(name.replace("~1", "/").replace("~0", "~")),
    }));
    all
}

/// Returns the steps of a JSONPath that are known: after `..`, what precedes may be anything.
fn json_path(path: &str) -> Vec<Segment> {
    let mut all = Vec::new();
    let mut rest = path.trim().trim_start_matches('$');
    while !rest.is_empty() {
        if let Some(below) = rest.strip_prefix("..") {
            all.clear();
            rest = below;
        } else if let Some(below) = rest.strip_prefix('.') {
            rest = below;
        } else if rest.starts_with('[') {
            let end = bracket_end(rest);
            let inside = rest[1..end].trim_end_matches(']').trim();
            let name = ['\'', '"']
                .into_iter()
                .find_map(|mark| inside.strip_prefix(mark).and_then(|inside| inside.strip_suffix(mark)));
            all.push(name.map_or(Segment::Index, |name| Segment::Name(name.to_owned())));
            rest = &rest[end..];
        } else {
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            match &rest[..end] {
                "*" => all.push(Segment::Index),
                name => all.push(Segment::Name(name.to_owned())),
            }
            rest = &rest[end..];
        }
    }
    all
}

/// Returns where the bracket that begins a text ends; brackets in it, and those in quotes, are its content.
fn bracket_end(text: &str) -> usize {
    let (mut depth, mut quote) = (0_usize, None);
    for (at, c) in text.char_indices() {
        match (c, quote) {
            (_, Some(mark)) if c == mark => quote = None,
            (_, Some(_)) => {}
            ('\'' | '"', None) => quote = Some(c),
            ('[', None) => depth += 1,
            (']', None) if depth == 1 => return at + 1,
            (']', None) => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_steps_of_a_json_path() {
        let name = |name: &str| Segment::Name(name.to_owned());
        for (path, steps) in [
            ("", vec![]),
            ("$.a.b", vec![name("a"), name("b")]),
            ("..b", vec![name("b")]),
            ("$.a..b[0].c", vec![name("b"), Segment::Index, name("c")]),
            (
                "..f[?(@.name == 'x]y' && @.z[0])].typed_config",
                vec![name("f"), Segment::Index, name("typed_config")],
            ),
            ("$['a.b'][*].*", vec![name("a.b"), Segment::Index, Segment::Index]),
            ("a[", vec![name("a"), Segment::Index]),
        ] {
            assert_eq!(json_path(path), steps, "{path}");
        }
    }
}
