//! Workloads of Kubernetes that run the rate limit service: what Tollgate makes of its environment, before the image is changed.

use super::finding::Report;
use super::proto::list;
use crate::cli::ProfileName;
use crate::ratelimit::{self, Notice};
use serde_json::Value;
use tollgate_rules::Options;

/// Returns whether a container of a workload runs the service.
pub(super) fn has_service(workload: &Value) -> bool {
    containers(workload).iter().any(runs_service)
}

/// Examines the containers of a workload that run the service. Returns how the first of them reads rule files.
pub(super) fn check(workload: &Value, place: &str, report: &mut Report) -> Option<Options> {
    let all = containers(workload).iter().enumerate().filter(|(_, container)| runs_service(container));
    let mut found = None;
    for (at, container) in all {
        let options = service(container, &format!("{place}.spec.template.spec.containers[{at}]"), report);
        found = found.or(options);
    }
    found
}

fn containers(workload: &Value) -> &[Value] {
    list(&workload["spec"]["template"]["spec"], "containers")
}

/// Returns whether a container runs envoyproxy/ratelimit, or Tollgate in its place.
fn runs_service(container: &Value) -> bool {
    let words = |name| list(container, name).iter().filter_map(Value::as_str);
    let program = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    let mut command = words("command").chain(words("args"));
    let (first, second) = (command.next().map(program), command.next());
    let image = container["image"].as_str().map(program).unwrap_or_default();
    match first.as_deref() {
        Some("ratelimit") => true,
        Some("tollgate") => second == Some("ratelimit"),
        _ => image.split([':', '@']).next() == Some("ratelimit"),
    }
}

fn service(container: &Value, place: &str, report: &mut Report) -> Option<Options> {
    let variables = list(container, "env");
    // What comes from elsewhere (`valueFrom`) is not known.
    let lookup = |name: &str| {
        let variable = variables.iter().find(|variable| variable["name"] == name)?;
        Some(variable["value"].as_str()?.to_owned())
    };
    let examined = match ratelimit::examine(lookup) {
        Ok(examined) => examined,
        Err(error) => {
            let fix = "correct the variable: docs/deployment/envoyproxy-ratelimit.md has all of them";
            report.problem(place, format!("Tollgate would not start here: {error}"), fix);
            return None;
        }
    };
    let is_native = lookup("TOLLGATE_PROFILE").as_deref() == Some("native");
    let profile = if is_native { ProfileName::Native } else { ProfileName::Envoy };
    let arithmetic = if is_native { "exact limits" } else { "the arithmetic of envoyproxy/ratelimit" };
    report.note(place, format!("the rate limit service, with {arithmetic}: {}", examined.rules));
    for notice in examined.notices {
        match notice {
            Notice::Info(text) => report.note(place, text),
            Notice::Warning(text) => {
                report.warning(place, text, "remove the variable, or do what is said of it");
            }
        }
    }
    Some(Options { profile: Some(profile.into()), ..examined.options })
}
