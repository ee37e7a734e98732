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
                let matched = &patch["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"];
                let is_router = matched.as_str().is_some_and(|name| name.ends_with("router"));
                match operation {
                    "INSERT_AFTER" if is_router => after_router(&place, report),
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
    let path = operation["path"].as_str().unwrap_or_default();
    let mut value = operation["value"].clone();
    for segment in path.split('/').skip(1).collect::<Vec<_>>().into_iter().rev() {
        let is_index =
            segment == "-" || (!segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit()));
        value = if is_index {
            json!([value])
        } else {
            json!({segment.replace("~1", "/").replace("~0", "~"): value})
        };
    }
    if path.ends_with("/http_filters/-") && has_limit_filter(&value) {
        // Envoy Gateway's last filter is the router.
        after_router(place, report);
    }
    let place = if path.is_empty() { format!("{place}.value") } else { place.to_owned() };
    parts.collect(&value, &place, report);
}
