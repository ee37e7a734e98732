//! Messages of Envoy as YAML and JSON write them: names of fields, types, durations.

use serde_json::Value;
use std::borrow::Cow;
use tollgate_rules::closest;

/// Maximum depth of a tree.
pub(super) const MAX_DEPTH: usize = 128;

/// Returns a field, by its name in the protocol or in JSON (`failureModeDeny`).
pub(super) fn field<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    let found = value.get(name).or_else(|| value.get(camel(name).as_ref()));
    found.filter(|found| !found.is_null())
}

/// Returns a field that is a text and not empty.
pub(super) fn text<'v>(value: &'v Value, name: &str) -> Option<&'v str> {
    field(value, name)?.as_str().filter(|text| !text.is_empty())
}

/// Returns a field that is a list; an empty one if it is missing.
pub(super) fn list<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    field(value, name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Returns whether a field is `true`.
pub(super) fn flag(value: &Value, name: &str) -> bool {
    field(value, name).and_then(Value::as_bool).unwrap_or(false)
}

/// Returns a number, which JSON may also write as a text.
pub(super) fn number(value: &Value, name: &str) -> Option<u64> {
    let found = field(value, name)?;
    found.as_u64().or_else(|| found.as_str()?.parse().ok())
}

fn camel(name: &str) -> Cow<'_, str> {
    if !name.contains('_') {
        return Cow::Borrowed(name);
    }
    let mut parts = name.split('_');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let mut chars = part.chars();
        text.extend(chars.next().map(|first| first.to_ascii_uppercase()));
        text.push_str(chars.as_str());
    }
    Cow::Owned(text)
}

/// Returns the name of a field in the protocol.
pub(super) fn snake(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

/// Returns the settings of an object with its type: its own, or those that a TypedStruct wraps.
pub(super) fn message(value: &Value) -> Option<(&str, &Value)> {
    let name = |key: &str| value.get(key)?.as_str()?.rsplit('/').next();
    match name("type_url").or_else(|| name("typeUrl")) {
        Some(inner) => Some((inner, value.get("value")?)),
        None => Some((name("@type")?, value)),
    }
}

/// Returns the settings of an object if it is of this type.
pub(super) fn typed<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    message(value).filter(|(found, _)| *found == name).map(|(_, settings)| settings)
}

/// Returns the first object of this type in a tree, and its path below `value`.
pub(super) fn find_typed<'v>(value: &'v Value, name: &str) -> Option<(String, &'v Value)> {
    all_typed(value, name).into_iter().next()
}

/// Returns the objects of this type in a tree, with their paths below `value`.
pub(super) fn all_typed<'v>(value: &'v Value, name: &str) -> Vec<(String, &'v Value)> {
    let mut found = Vec::new();
    collect_typed(value, name, "", 0, &mut found);
    found
}

fn collect_typed<'v>(
    value: &'v Value,
    name: &str,
    path: &str,
    depth: usize,
    found: &mut Vec<(String, &'v Value)>,
) {
    if depth > MAX_DEPTH {
        return;
    }
    if let Some(settings) = typed(value, name) {
        found.push((path.to_owned(), settings));
        return;
    }
    match value {
        Value::Object(fields) => {
            for (key, below) in fields {
                collect_typed(below, name, &format!("{path}.{key}"), depth + 1, found);
            }
        }
        Value::Array(items) => {
            for (at, below) in items.iter().enumerate() {
                collect_typed(below, name, &format!("{path}[{at}]"), depth + 1, found);
            }
        }
        _ => {}
    }
}

/// A field that a message does not have.
#[derive(Debug)]
pub(super) struct UnknownField {
    pub(super) name: String,
    /// The field that is probably meant.
    pub(super) meant: Option<String>,
}

/// Returns the fields of a message that it does not have.
pub(super) fn unknown_fields(value: &Value, known: &[&str]) -> Vec<UnknownField> {
    let names = value.as_object().into_iter().flat_map(|fields| fields.keys());
    let unknown = names.filter(|name| *name != "@type" && !known.contains(&snake(name).as_str()));
    let meant = |name: &str| closest(&snake(name), known).map(str::to_owned);
    unknown.map(|name| UnknownField { name: name.clone(), meant: meant(name) }).collect()
}

/// Reads a duration of protobuf's JSON, such as `0.25s`.
pub(super) fn seconds(text: &str) -> Option<f64> {
    text.strip_suffix('s')?.parse().ok().filter(|time: &f64| time.is_finite() && *time >= 0.0)
}
