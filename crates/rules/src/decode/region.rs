//! Decodes `region`: a mode, or a mapping with the mode and its owner or weights.

use crate::reader::{Reader, Spanned, scalar};
use crate::region::{OwnerSetting, RegionSetting, is_region_name};
use crate::yaml::{YamlNode, YamlValue, shorten};
use tollgate_core::RegionMode;

const MODES: [&str; 4] = ["shared", "split", "owner", "leased"];
const KEYS: [&str; 4] = ["mode", "owner", "home", "weights"];
const EXAMPLE: &str = "{mode: owner, owner: eu}";
/// Largest weight: the products that divide a limit stay exact.
const MAX_WEIGHT: u64 = 1_000_000;
const MAX_WEIGHTS: usize = 64;

pub(super) fn read(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<RegionSetting>> {
    if !matches!(node.value, YamlValue::Mapping(_)) {
        let mode = mode(reader, node)?;
        return Some(Spanned { at: node.at, value: RegionSetting { mode, ..RegionSetting::default() } });
    }
    let (mut found, mut owner, mut home, mut weights) = (None, None, None, None);
    for (key, node) in reader.mapping(node, "region", EXAMPLE)? {
        match scalar(key) {
            "mode" => found = mode(reader, node),
            "owner" => owner = name(reader, node, "owner"),
            "home" => home = reader.text(node, "home", "home_region").filter(|text| !text.value.is_empty()),
            "weights" => weights = self::weights(reader, node).map(|value| Spanned { at: node.at, value }),
            _ => reader.unknown_key(key, "`region`", &KEYS),
        }
    }
    let Some(mode) = found else {
        reader.error_help(node.at, "`region` has no `mode`", format!("write it as in `region: {EXAMPLE}`"));
        return None;
    };
    let own = [
        ("owner", owner.as_ref().map(|given| given.at), mode.has_owner(), "owner or leased"),
        ("home", home.as_ref().map(|given| given.at), mode.has_owner(), "owner or leased"),
        ("weights", weights.as_ref().map(|given| given.at), !mode.has_owner(), "split or shared"),
    ];
    for (name, at, fits, modes) in own {
        if let (Some(at), false) = (at, fits) {
            let message = format!("`{name}` has no meaning for `mode: {}`", mode.name());
            reader.error_help(at, message, format!("it is for {modes}; leave it out"));
            return None;
        }
    }
    if let (Some(_), Some(home)) = (&owner, &home) {
        reader.error_help(
            home.at,
            "`home` beside `owner`: it is not clear which cell decides",
            "keep one of them",
        );
        return None;
    }
    let owner = match (owner, home) {
        (Some(region), _) => OwnerSetting::Region(region.value),
        (None, Some(attribute)) => OwnerSetting::Home(attribute.value),
        (None, None) => OwnerSetting::Hash,
    };
    let weights = weights.map(|given| given.value).unwrap_or_default();
    Some(Spanned { at: node.at, value: RegionSetting { mode, owner, weights } })
}

fn mode(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<RegionMode> {
    let Spanned { at, value } = reader.text(node, "region", "shared")?;
    let known = RegionMode::ALL.into_iter().find(|mode| mode.name() == value);
    if known.is_none() {
        reader.unknown_value(at, "mode of `region`", &value, &MODES);
    }
    known
}

fn name(reader: &mut Reader<'_>, node: &YamlNode<'_>, key: &str) -> Option<Spanned<String>> {
    let name = reader.text(node, key, "eu")?;
    is_name(reader, &name).then_some(name)
}

fn is_name(reader: &mut Reader<'_>, name: &Spanned<String>) -> bool {
    let is_name = is_region_name(&name.value);
    if !is_name {
        reader.error_help(
            name.at,
            format!("`{}` is no name of a region", shorten(&name.value)),
            "write 1 to 64 letters, digits, `-`, `_` or `.`, as in `eu-west-1`",
        );
    }
    is_name
}

/// Decodes the weights of the regions, sorted by name.
fn weights(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Vec<(String, u64)>> {
    let mut all: Vec<(String, u64)> = Vec::new();
    for (key, weight) in reader.mapping(node, "weights", "{eu: 2, us: 1}")? {
        let region = Spanned { at: key.at, value: scalar(key).to_owned() };
        if !is_name(reader, &region) {
            return None;
        }
        all.push((region.value, reader.count(weight, "weights", MAX_WEIGHT)?.value));
    }
    all.sort();
    if all.len() > MAX_WEIGHTS || all.iter().all(|(_, weight)| *weight == 0) {
        reader.error_help(
            node.at,
            "`weights` must name up to 64 regions, one of them with a weight above 0",
            "write it as in `weights: {eu: 2, us: 1}`, or leave it out for equal parts",
        );
        return None;
    }
    Some(all)
}
