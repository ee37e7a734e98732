//! Rule file decoder: the keys of a file and of a descriptor, and the type of each.
//!
//! A key that is absent and a key whose value is null mean the same. Unknown keys are errors at every level. A key that
//! is not supported yet is rejected when used, never ignored.

mod adapt;
mod descriptor;
mod limit;
pub(crate) mod overload;
mod region;

use crate::denial_response::DenialResponse;
use crate::draft::{FileDraft, RuleDraft};
use crate::reader::{Reader, Spanned, scalar};
use crate::rule::{Class, DescriptorMatch, Profile};
use crate::tree::GLOBAL;
use crate::yaml::{Position, Strictness, SyntaxError, YamlNode, parse, shorten};
use tollgate_core::Algorithm;

const FILE_KEYS: [&str; 15] = [
    "domain",
    "descriptors",
    "profile",
    "match",
    "algorithm",
    "class",
    "jitter",
    "tier_key",
    "shard_by",
    "store",
    "region",
    "billing",
    "durable",
    "overload",
    "response",
];

/// Decodes a file and reports errors to the reader. Returns `None` if nothing useful is left.
pub(crate) fn file(reader: &mut Reader<'_>) -> Option<FileDraft> {
    const TOP: Position = Position { line: 1, column: 1, width: 1 };
    let source = reader.source;
    let strictness = if reader.is_ratelimit_file { Strictness::AsGo } else { Strictness::Strict };
    let document = parse(&source.text, strictness).map(|document| {
        for SyntaxError { at, message, help } in document.tolerated {
            reader.warning(at, message, help.unwrap_or_default());
        }
        document.root
    });
    let root = match document {
        Ok(Some(root)) if !root.is_null() => root,
        Ok(_) => {
            reader.error_help(TOP, "the file is empty", "a rule file starts with `domain: name`");
            reader.errors.envoy_reason("config file cannot have empty domain".to_owned());
            return None;
        }
        Err(error) => {
            match error.help {
                Some(help) => reader.error_help(error.at, error.message.clone(), help),
                None => reader.error(error.at, error.message.clone()),
            }
            reader.errors.envoy_reason(format!("error loading config file: {}", error.message));
            return None;
        }
    };
    let mut draft = FileDraft::default();
    let mut misread = false;
    let pairs = reader.mapping(&root, "a rule file", "{domain: api, descriptors: [...]}")?;
    let pairs: Vec<_> = pairs.collect();
    reader.is_ratelimit_file |=
        pairs.iter().any(|(key, node)| scalar(key) == "profile" && scalar(node) == "envoy");
    for (key, node) in pairs {
        match scalar(key) {
            "domain" => {
                draft.domain = reader.text(node, "domain", "api");
                misread = draft.domain.is_none();
            }
            "descriptors" => draft.rules = descriptors(reader, node, 1),
            "profile" => draft.profile = profile(reader, node),
            "match" => draft.matching = matching(reader, node),
            "algorithm" => draft.shape.algorithm = algorithm(reader, node),
            "jitter" => draft.shape.jitter = reader.boolean(node, "jitter"),
            "class" => draft.class = class(reader, node),
            "tier_key" => draft.tier_key = reader.text(node, "tier_key", "tier").map(|text| text.value),
            "shard_by" => draft.shard_by = shard_by(reader, node),
            "store" => draft.store = store(reader, node),
            "region" => draft.region = region::read(reader, node),
            "billing" => draft.billing = reader.boolean(node, "billing").is_some_and(|on| on.value),
            "durable" => draft.durable = reader.boolean(node, "durable").map(|on| on.value),
            "overload" => draft.overload = overload::read(reader, node),
            "response" => draft.response = DenialResponse::read(reader, node),
            _ => reader.unknown_key(key, "a rule file", &FILE_KEYS),
        }
    }
    if !misread && draft.domain.as_ref().is_none_or(|domain| domain.value.is_empty()) {
        let at = draft.domain.as_ref().map_or(root.at, |domain| domain.at);
        reader.error_help(at, "empty domain: a rule file needs a `domain`", "write `domain: name`");
        reader.errors.envoy_reason("config file cannot have empty domain".to_owned());
        draft.domain = None;
    }
    Some(draft)
}

/// The maximum nesting depth of descriptors.
const MAX_DEPTH: usize = 32;

fn descriptors(reader: &mut Reader<'_>, node: &YamlNode<'_>, depth: usize) -> Vec<RuleDraft> {
    if depth > MAX_DEPTH {
        reader.error(node.at, format!("descriptors may be nested {MAX_DEPTH} deep"));
        return Vec::new();
    }
    let Some(items) = reader.sequence(node, "descriptors", "[{key: user, limit: 100/minute}]") else {
        return Vec::new();
    };
    let mut drafts = Vec::with_capacity(items.len());
    drafts.extend(items.iter().filter_map(|item| descriptor::read(reader, item, depth)));
    drafts
}

fn profile(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<Profile>> {
    let Spanned { at, value } = reader.text(node, "profile", "envoy")?;
    let value = match value.as_str() {
        "envoy" => Profile::Envoy,
        "native" => Profile::Native,
        other => {
            reader.unknown_value(at, "profile", other, &["native", "envoy"]);
            return None;
        }
    };
    Some(Spanned { at, value })
}

fn matching(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> DescriptorMatch {
    match reader.text(node, "match", "all").as_ref().map(|text| text.value.as_str()) {
        Some("all") => DescriptorMatch::All,
        Some(other) if other != "one" => {
            reader.unknown_value(node.at, "match", other, &["one", "all"]);
            DescriptorMatch::One
        }
        Some(_) | None => DescriptorMatch::One,
    }
}

/// Decodes the name of a store. Whether it is configured is known when the rules are compiled.
pub(super) fn store(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<String>> {
    let name = reader.text(node, "store", "eu")?;
    if !crate::is_store_name(&name.value) {
        reader.error_help(
            name.at,
            format!("`{}` is no name of a store", shorten(&name.value)),
            "write 1 to 64 letters, digits, `-`, `_` or `.`, as in `store: eu`",
        );
        return None;
    }
    Some(name)
}

fn shard_by(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<String>> {
    let attribute = reader.text(node, "shard_by", "customer")?;
    if attribute.value.is_empty() || attribute.value == GLOBAL.0 {
        reader.error_help(
            attribute.at,
            "`shard_by` must name an attribute that differs between callers",
            "write it as in `shard_by: customer`",
        );
        return None;
    }
    Some(attribute)
}

fn class(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Class> {
    let Spanned { at, value } = reader.text(node, "class", "security")?;
    match value.as_str() {
        "comfort" => Some(Class::Comfort),
        "security" => Some(Class::Security),
        "cost" => Some(Class::Cost),
        "strict" => Some(Class::Strict),
        other => {
            reader.unknown_value(at, "class", other, &["comfort", "security", "cost", "strict"]);
            None
        }
    }
}

fn algorithm(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<Algorithm>> {
    let Spanned { at, value } = reader.text(node, "algorithm", "gcra")?;
    let known = Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Concurrency);
    if let Some(algorithm) = known.clone().find(|algorithm| algorithm.name() == value) {
        return Some(Spanned { at, value: algorithm });
    }
    if value == Algorithm::Concurrency.name() {
        reader.error_help(
            at,
            "concurrency is a limit of its own, not an algorithm",
            "write `concurrency: 20`",
        );
        return None;
    }
    let names: Vec<&str> = known.map(Algorithm::name).collect();
    reader.unknown_value(at, "algorithm", &value, &names);
    None
}
