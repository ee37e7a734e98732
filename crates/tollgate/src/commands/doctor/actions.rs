//! Rate limit actions of Envoy: the descriptors that they send, as far as they are known before a request.

use super::envoy::field;
use serde_json::Value;

/// A descriptor before a request: keys, and the values that are fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    /// File, document and path of its actions.
    pub(super) place: String,
    /// Stage of the filter that it is for.
    pub(super) stage: u64,
    /// Place of the filter that has it, if it is not of a route or virtual host.
    pub(super) owner: Option<String>,
    pub(super) entries: Vec<(String, Option<String>)>,
    /// An action that cannot be judged.
    pub(super) unknown: Option<String>,
    /// Whether the descriptor brings its own limit.
    pub(super) has_limit: bool,
}

impl std::fmt::Display for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let entries = self.entries.iter().map(|(key, value)| match value {
            Some(value) => format!("{key}={value}"),
            None => key.clone(),
        });
        f.write_str(&entries.collect::<Vec<_>>().join(" → "))
    }
}

impl Template {
    /// Returns whether it is of the settings that a route has for a filter: these take the place of the filter's own.
    pub(super) fn is_per_route(&self) -> bool {
        ["typed_per_filter_config", "typedPerFilterConfig"].iter().any(|name| self.place.contains(name))
    }
}

/// Reads one entry of `rate_limits`. Returns what is wrong with it.
pub(super) fn template(entry: &Value, place: &str) -> Result<Template, String> {
    let actions = field(entry, "actions").and_then(Value::as_array).ok_or("it has no `actions`")?;
    if actions.is_empty() {
        return Err("its `actions` are empty".to_owned());
    }
    let mut template = Template {
        place: place.to_owned(),
        stage: field(entry, "stage").and_then(Value::as_u64).unwrap_or(0),
        owner: None,
        entries: Vec::with_capacity(actions.len()),
        unknown: None,
        has_limit: field(entry, "limit").is_some(),
    };
    for action in actions {
        let (name, settings) =
            action.as_object().and_then(|action| action.iter().next()).ok_or("an action is empty")?;
        match one(&super::envoy::snake(name), settings)? {
            Some(found) => template.entries.push(found),
            None => template.unknown = Some(name.clone()),
        }
    }
    Ok(template)
}

/// Returns the entry of an action; `None` if its key is not known here.
fn one(name: &str, settings: &Value) -> Result<Option<(String, Option<String>)>, String> {
    let text = |key: &str| {
        field(settings, key).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let needed = |key: &str| text(key).ok_or_else(|| format!("`{name}` has no `{key}`"));
    // A value with operators such as `%REQ(x)%` is known at run time.
    let fixed = |value: String| (!value.contains('%')).then_some(value);
    let named = |default: &str| text("descriptor_key").unwrap_or_else(|| default.to_owned());
    Ok(Some(match name {
        "source_cluster" | "destination_cluster" | "remote_address" | "masked_remote_address" => {
            (name.to_owned(), None)
        }
        "request_headers" | "query_parameters" | "dynamic_metadata" | "metadata" => {
            (needed("descriptor_key")?, None)
        }
        "generic_key" => (named("generic_key"), fixed(needed("descriptor_value")?)),
        "header_value_match" => (named("header_match"), fixed(needed("descriptor_value")?)),
        "query_parameter_value_match" => (named("query_match"), fixed(needed("descriptor_value")?)),
        "remote_address_match" => (named("remote_address_match"), fixed(needed("descriptor_value")?)),
        _ => return Ok(None),
    }))
}
