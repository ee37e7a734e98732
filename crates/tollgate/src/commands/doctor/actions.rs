//! Rate limit actions of Envoy: the descriptors that they send, as far as they are known before a request.

use super::finding::Report;
use super::proto::{field, flag, list, number, snake, text, unknown_fields};
use serde_json::Value;
use std::fmt;

/// A descriptor before a request: keys, and what is known of their values.
#[derive(Clone, Debug)]
pub(super) struct Template {
    /// File, document and path of its actions.
    pub(super) place: String,
    /// Stage of the filter that it is for.
    pub(super) stage: u64,
    pub(super) entries: Vec<Entry>,
    /// An action whose key is not known before a request, so that the descriptor cannot be checked.
    pub(super) unknown: Option<String>,
    /// Whether the descriptor brings its own limit.
    pub(super) has_limit: bool,
}

/// One entry of a descriptor.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) value: EntryValue,
    /// Whether the descriptor is sent without it if the request lacks its value.
    pub(super) is_optional: bool,
}

/// What is known of a value before a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EntryValue {
    Fixed(String),
    /// Any address.
    Address,
    /// The network of any address, with prefixes of these lengths.
    Network {
        v4: u8,
        v6: u8,
    },
    Any,
}

impl Entry {
    pub(super) fn new(key: impl Into<String>, value: EntryValue) -> Self {
        Self { key: key.into(), value, is_optional: false }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.iter().map(|entry| match &entry.value {
            EntryValue::Fixed(value) => format!("{}={value}", entry.key),
            _ => entry.key.clone(),
        });
        f.write_str(&entries.collect::<Vec<_>>().join(" → "))
    }
}

/// Where `rate_limits` are: Envoy reads them by different code, with different results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A route or virtual host.
    Route,
    /// A filter, or the settings that a route has for one.
    Filter,
}

/// Highest stage that Envoy accepts.
pub(super) const MAX_STAGE: u64 = 10;

/// Fields of an entry of `rate_limits`.
const FIELDS: [&str; 7] =
    ["stage", "disable_key", "actions", "limit", "hits_addend", "apply_on_stream_done", "x_ratelimit_option"];

/// Actions and their fields. Those that must be there come first, up to the number.
const ACTIONS: [(&str, usize, &[&str]); 13] = [
    ("source_cluster", 0, &[]),
    ("destination_cluster", 0, &[]),
    ("remote_address", 0, &[]),
    ("request_headers", 2, &["header_name", "descriptor_key", "skip_if_absent"]),
    ("query_parameters", 2, &["query_parameter_name", "descriptor_key", "skip_if_absent"]),
    ("generic_key", 1, &["descriptor_value", "descriptor_key", "default_value"]),
    (
        "header_value_match",
        2,
        &["descriptor_value", "headers", "descriptor_key", "expect_match", "default_value"],
    ),
    (
        "query_parameter_value_match",
        2,
        &["descriptor_value", "query_parameters", "descriptor_key", "expect_match", "default_value"],
    ),
    (
        "remote_address_match",
        2,
        &["descriptor_value", "address_matcher", "descriptor_key", "invert_match", "default_value"],
    ),
    ("dynamic_metadata", 2, &["descriptor_key", "metadata_key", "default_value"]),
    ("metadata", 2, &["descriptor_key", "metadata_key", "default_value", "source", "skip_if_absent"]),
    ("masked_remote_address", 0, &["v4_prefix_mask_len", "v6_prefix_mask_len"]),
    ("extension", 2, &["name", "typed_config"]),
];

/// Reads the entries of `rate_limits`, and reports those that Envoy refuses.
pub(super) fn templates(entries: &[Value], place: &str, owner: Owner, report: &mut Report) -> Vec<Template> {
    let mut all = Vec::with_capacity(entries.len());
    for (number, entry) in entries.iter().enumerate() {
        let place = format!("{place}[{number}]");
        match template(entry, &place, owner, report) {
            Ok(template) => all.push(template),
            Err(error) => report.problem(
                &place,
                format!("Envoy refuses this entry: {error}"),
                "write it as in `actions: [{remote_address: {}}]`",
            ),
        }
    }
    all
}

/// Reads one entry of `rate_limits`. Returns what is wrong with it.
fn template(entry: &Value, place: &str, owner: Owner, report: &mut Report) -> Result<Template, String> {
    check_fields(entry, &FIELDS, place, report)?;
    let actions = field(entry, "actions").and_then(Value::as_array).ok_or("it has no `actions`")?;
    if actions.is_empty() {
        return Err("its `actions` are empty".to_owned());
    }
    let stage = number(entry, "stage").unwrap_or(0);
    match owner {
        Owner::Route if stage > MAX_STAGE => {
            return Err(format!("`stage: {stage}` is above {MAX_STAGE}"));
        }
        Owner::Route if field(entry, "hits_addend").is_some() => report.problem(
            place,
            "Envoy ignores `hits_addend` in `rate_limits` of routes and virtual hosts: each request counts as one",
            "move the entry into `rate_limits` of the filter, or of RateLimitPerRoute in the route's `typed_per_filter_config`",
        ),
        Owner::Filter if field(entry, "stage").is_some() || text(entry, "disable_key").is_some() => {
            return Err("`stage` and `disable_key` are only for `rate_limits` of routes and virtual hosts".to_owned());
        }
        _ => {}
    }
    let mut template = Template {
        place: place.to_owned(),
        stage,
        entries: Vec::with_capacity(actions.len()),
        unknown: None,
        has_limit: field(entry, "limit").is_some(),
    };
    for action in actions {
        let mut fields = action.as_object().into_iter().flatten();
        let (name, settings) = fields.next().ok_or("an action is empty")?;
        if let Some((other, _)) = fields.next() {
            return Err(format!("an action has both `{name}` and `{other}`; each needs one of its own"));
        }
        match one(&snake(name), settings, place, report)? {
            Some(found) => template.entries.push(found),
            None => template.unknown = Some(name.clone()),
        }
    }
    Ok(template)
}

/// Reports fields that a message does not have. Those that resemble one of its own are errors; others may be of a later
/// Envoy.
fn check_fields(value: &Value, known: &[&str], place: &str, report: &mut Report) -> Result<(), String> {
    for unknown in unknown_fields(value, known) {
        match unknown.meant {
            Some(meant) => return Err(format!("there is no `{}`; did you mean `{meant}`?", unknown.name)),
            None => report.note(
                place,
                format!("`{}` is not known here; Envoy refuses what it does not know", unknown.name),
            ),
        }
    }
    Ok(())
}

/// Returns the entry of an action; `None` if its key is known at run time only.
fn one(name: &str, settings: &Value, place: &str, report: &mut Report) -> Result<Option<Entry>, String> {
    let Some((_, required, fields)) = ACTIONS.iter().find(|(known, ..)| *known == name) else {
        let names = ACTIONS.map(|(name, ..)| name);
        let meant = tollgate_rules::closest(name, &names);
        let meant = meant.map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
        return Err(format!("there is no action `{name}`{meant}"));
    };
    check_fields(settings, fields, place, report)?;
    for needed in &fields[..*required] {
        let is_there = match *needed {
            "descriptor_value" | "descriptor_key" | "header_name" | "query_parameter_name" | "name" => {
                text(settings, needed).is_some()
            }
            "headers" | "query_parameters" => !list(settings, needed).is_empty(),
            _ => field(settings, needed).is_some(),
        };
        if !is_there {
            return Err(format!("`{name}` has no `{needed}`, or not as text"));
        }
    }
    let key = |default: &str| text(settings, "descriptor_key").unwrap_or(default).to_owned();
    let mut fixed = |default: &str| {
        let value = text(settings, "descriptor_value").unwrap_or_default();
        Entry::new(key(default), written(value, place, report))
    };
    Ok(Some(match name {
        "source_cluster" | "destination_cluster" => Entry::new(name, EntryValue::Any),
        "remote_address" => Entry::new(name, EntryValue::Address),
        "masked_remote_address" => {
            let mask = |family: &str, max: u8| {
                let bits = number(settings, &format!("{family}_prefix_mask_len")).unwrap_or(max.into());
                u8::try_from(bits)
                    .ok()
                    .filter(|bits| *bits <= max)
                    .ok_or_else(|| format!("`{family}_prefix_mask_len` is above {max}"))
            };
            Entry::new(name, EntryValue::Network { v4: mask("v4", 32)?, v6: mask("v6", 128)? })
        }
        "generic_key" => fixed("generic_key"),
        "header_value_match" => fixed("header_match"),
        "query_parameter_value_match" => fixed("query_match"),
        "remote_address_match" => fixed("remote_address_match"),
        "extension" => return Ok(None),
        _ => Entry { is_optional: flag(settings, "skip_if_absent"), ..Entry::new(key(""), EntryValue::Any) },
    }))
}

/// The feature of Envoy that turns operators in values into what they stand for; off by default.
const FORMATTER: &str = "envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value";

/// Returns what is known of a written value.
fn written(value: &str, place: &str, report: &mut Report) -> EntryValue {
    if !has_operator(value) {
        return EntryValue::Fixed(value.to_owned());
    }
    report.warning(
        place,
        format!("Envoy sends `{value}` as it is written, unless its runtime has `{FORMATTER}: true`"),
        "use an action that sends the value, such as `request_headers`, or turn the feature on",
    );
    EntryValue::Any
}

/// Returns whether a value has operators such as `%REQ(x)%`.
pub(super) fn has_operator(value: &str) -> bool {
    value.match_indices('%').any(|(at, _)| {
        let rest = &value[at + 1..];
        let name = rest
            .find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
            .unwrap_or(rest.len());
        let after = &rest[name..];
        name > 0 && (after.starts_with('%') || (after.starts_with('(') && after.contains(")%")))
    })
}
