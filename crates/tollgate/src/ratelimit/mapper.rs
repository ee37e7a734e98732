//! The file of `PROMETHEUS_MAPPER_YAML`, which gives metrics other names and labels there. It has no effect here, where the
//! names are those of that service's built-in mapper; Envoy Gateway's file repeats them. Any other file means dashboards that
//! ask for names which do not exist, so it is named.

use super::environment::Environment;
use super::series::Counted;

/// Metrics without counts of their own by descriptor.
const NAMES: [&str; 8] = [
    "ratelimit_service_rate_limit_domain_not_found",
    "ratelimit_service_should_rate_limit_error",
    "ratelimit_service_total_requests",
    "ratelimit_service_response_time_seconds",
    "ratelimit_service_config_load_success",
    "ratelimit_service_config_load_error",
    "ratelimit_service_global_shadow_mode",
    // What the last mapping calls that which it drops.
    "dropped",
];
const LABELS: [&str; 5] = ["domain", "key1", "key2", "err_type", "grpc_method"];

/// Returns what to report about the file, if it has names of its own.
pub(super) fn warning(environment: &Environment) -> Option<String> {
    const VARIABLE: &str = "PROMETHEUS_MAPPER_YAML";
    let path = environment.some_text(VARIABLE).filter(|_| environment.flag("USE_PROMETHEUS"))?;
    let text = std::fs::read_to_string(&path).ok()?;
    let own = own_name(&text)?;
    Some(format!(
        "{VARIABLE} has no effect: metrics keep the names and labels of the built-in mapper, and {path} has `{own}`; change \
         the names in Prometheus (metric_relabel_configs) or in dashboards"
    ))
}

/// Returns the first name of a metric or label that the built-in mapper does not have.
fn own_name(text: &str) -> Option<&str> {
    text.lines().find_map(|line| {
        let (key, value) = line.trim().trim_start_matches("- ").split_once(':')?;
        let (key, value) = (unquoted(key), unquoted(value));
        let counted = || value.strip_prefix("ratelimit_service_rate_limit_");
        let is_counted = || counted().is_some_and(|name| Counted::ALL.iter().any(|what| what.name() == name));
        if key == "name" {
            (!NAMES.contains(&value) && !is_counted()).then_some(value)
        } else {
            (value.starts_with('$') && !LABELS.contains(&key)).then_some(key)
        }
    })
}

fn unquoted(text: &str) -> &str {
    text.trim().trim_matches(['"', '\''])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Envoy Gateway's file must not alarm anybody, and one that renames metrics must not be ignored in silence.
    #[test]
    fn a_file_with_names_of_its_own_is_found() {
        let usual = "mappings:\n  - match: \"ratelimit.service.rate_limit.*.*.near_limit\"\n    \
                     name: \"ratelimit_service_rate_limit_near_limit\"\n    timer_type: \"histogram\"\n    labels:\n      \
                     domain: \"$1\"\n      key1: \"$2\"\n  - name: 'ratelimit_service_total_requests'\n    \
                     labels: {grpc_method: \"$1\"}\n  - match: \".\"\n    action: \"drop\"\n    name: \"dropped\"\n";
        assert_eq!(own_name(usual), None);
        assert_eq!(
            own_name(&usual.replace("rate_limit_near_limit\"\n    timer", "near\"\n    timer")),
            Some("ratelimit_service_near")
        );
        assert_eq!(own_name(&usual.replace("key1: ", "caller: ")), Some("caller"));

        let path = std::env::temp_dir().join(format!("tollgate-mapper-{}.yaml", std::process::id()));
        std::fs::write(&path, "mappings:\n- match: a\n  name: mine\n").expect("a file");
        let file = path.to_str().expect("a path").to_owned();
        let read = |prometheus: &str, file: &str| {
            let value = |name: &str| match name {
                "USE_PROMETHEUS" => Some(prometheus.to_owned()),
                "PROMETHEUS_MAPPER_YAML" => Some(file.to_owned()),
                _ => None,
            };
            warning(&Environment::read(value).expect("types"))
        };
        assert!(read("true", &file).is_some_and(|text| text.contains("`mine`")));
        assert_eq!(read("false", &file), None, "nothing is exposed");
        assert_eq!(read("true", "/no/such/file"), None);
        std::fs::remove_file(path).expect("removed");
    }
}
