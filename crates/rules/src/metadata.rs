//! Metadata of a rule: any YAML value under a name, returned to the proxy as it is written.
//!
//! The types are those of `google.protobuf.Struct`, because that is what carries them to Envoy. A plain scalar has the
//! type of YAML's core schema. A whole number that a double cannot represent stays text, so that no digit is lost.

use crate::reader::{Reader, parse_number, scalar};
use crate::yaml::{YamlNode, YamlValue};
use std::collections::BTreeMap;
use std::fmt;

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// `null`, or nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<MetadataValue>),
    /// A mapping.
    Map(BTreeMap<String, MetadataValue>),
}

/// The metadata of a rule, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(BTreeMap<String, MetadataValue>);

impl Metadata {
    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the value with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&MetadataValue> {
        self.0.get(name)
    }

    /// Returns the values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &MetadataValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Takes over the names that it does not have itself.
    pub(crate) fn inherit(&mut self, from: &Self) {
        for (name, value) in &from.0 {
            self.0.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Self {
        // Names only: a null value is a value here.
        if reader.mapping(node, "metadata", "{team: payments}").is_none() {
            return Self::default();
        }
        match read(reader, node, "metadata") {
            Some(MetadataValue::Map(values)) => Self(values),
            _ => Self::default(),
        }
    }
}

/// The largest whole number up to which a double represents all.
const MAX_EXACT: i128 = 1 << 53;

fn read(reader: &mut Reader<'_>, node: &YamlNode<'_>, path: &str) -> Option<MetadataValue> {
    match &node.value {
        YamlValue::Scalar { plain: true, .. } if node.is_null() => Some(MetadataValue::Null),
        YamlValue::Scalar { text, plain } => {
            let typed = if *plain { plain_scalar(text) } else { None };
            typed.or_else(|| reader.text(node, path, "payments").map(|text| MetadataValue::Text(text.value)))
        }
        YamlValue::Sequence(items) => {
            items.iter().map(|item| read(reader, item, path)).collect::<Option<_>>().map(MetadataValue::List)
        }
        YamlValue::Mapping(pairs) => {
            let mut values = BTreeMap::new();
            for (key, value) in pairs {
                let name = reader.text(key, path, "team")?.value;
                values.insert(name, read(reader, value, &format!("{path}.{}", scalar(key)))?);
            }
            Some(MetadataValue::Map(values))
        }
    }
}

/// Returns the value of a plain scalar that is not text.
fn plain_scalar(text: &str) -> Option<MetadataValue> {
    match text {
        "true" | "True" | "TRUE" => return Some(MetadataValue::Bool(true)),
        "false" | "False" | "FALSE" => return Some(MetadataValue::Bool(false)),
        _ => {}
    }
    // A leading zero is not a number to everybody: `007` stays as it is written.
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    if let Some(whole) = parse_number(text) {
        #[expect(clippy::cast_precision_loss, reason = "exact up to MAX_EXACT")]
        let number = whole as f64;
        return (whole.abs() <= MAX_EXACT).then_some(MetadataValue::Number(number));
    }
    let is_float = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'-' | b'+'))
        && digits.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E'));
    let number = text.parse::<f64>().ok().filter(|number| is_float && number.is_finite())?;
    Some(MetadataValue::Number(number))
}

impl fmt::Display for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        map(f, &self.0)
    }
}

/// Writes it as JSON, in one line.
impl fmt::Display for MetadataValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(items) => {
                f.write_str("[")?;
                for (at, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if at == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Self::Map(values) => map(f, values),
        }
    }
}

fn map(f: &mut fmt::Formatter<'_>, values: &BTreeMap<String, MetadataValue>) -> fmt::Result {
    f.write_str("{")?;
    for (at, (name, value)) in values.iter().enumerate() {
        write!(f, "{}{name:?}: {value}", if at == 0 { "" } else { ", " })?;
    }
    f.write_str("}")
}
