//! Query parameter extractors and the API key in a path. Strict: an unknown parameter is an error that lists the
//! known ones. Rejected: axum's extractor, because it reports neither the parameter nor the expected value.

use crate::caller_path::{KEY_EXPECTED, Spelled};
use crate::error::ApiError;
use axum::extract::FromRequestParts;
use http::request::Parts;
use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Error, Visitor};
use serde_json::Value;
use std::fmt;
use tollgate_http::problem::Problem;
use utoipa::IntoParams;

const MAX_KEY: usize = 512;
const MAX_REASON: usize = 512;

/// Decodes and validates the API key in a path.
pub(crate) fn api_key(text: &str) -> Result<String, Problem> {
    let key = decode(text)
        .ok_or_else(|| Problem::bad("the API key in the path is not valid percent-encoded UTF-8"))?;
    if key.is_empty() || key.len() > MAX_KEY || key.chars().any(char::is_control) {
        let detail = format!("must have 1 to {MAX_KEY} bytes and no control characters");
        return Err(Problem::bad(detail).in_field("api_key"));
    }
    Ok(key)
}

/// Extractor for query parameters: the fields of the struct are all parameters allowed. An empty value counts as
/// absent.
pub(crate) struct StrictQuery<T>(pub(crate) T);

/// A query without parameters.
#[derive(Debug, Deserialize)]
pub(crate) struct NoParameters {}

/// Confirmation of a change that the guard would reject.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConfirmParameter {
    /// `true` makes the change even if it allows nothing, or less than the caller uses.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    confirm: Switch,
}

impl ConfirmParameter {
    pub(crate) fn is_confirmed(self) -> bool {
        self.confirm.0
    }
}

/// How a value in the place of an API key is meant. Where the key is in the path, `CallerPath` reads the parameter.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct KeyParameter {
    /// The attribute that identifies the caller and that the value is of: `user_id`, `tenant`, `remote_address` or any
    /// other that the rules count by. With `api_key`, the value is an API key even if it is spelled like the id of a
    /// caller that is not known.
    #[serde(default)]
    #[param(value_type = Option<String>, max_length = 128)]
    key: KeyAttribute,
}

impl KeyParameter {
    pub(crate) fn spelled(self) -> Spelled {
        self.key.0
    }
}

/// The attribute that a value is of.
#[derive(Clone, Debug, Default)]
struct KeyAttribute(Spelled);

impl<'de> Deserialize<'de> for KeyAttribute {
    fn deserialize<D: Deserializer<'de>>(text: D) -> Result<Self, D::Error> {
        parsed(text, KEY_EXPECTED, |text| Spelled::parse(text).map(Self))
    }
}

/// `true` or `false`, as text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Switch(pub(crate) bool);

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(text: D) -> Result<Self, D::Error> {
        parsed(text, "must be true or false", |text| text.parse().ok().map(Self))
    }
}

/// The reason for a deletion, in the query because the request has no body.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReasonParameter {
    /// Recorded in the audit log; at most 512 bytes.
    #[param(max_length = 512)]
    reason: Option<String>,
}

impl ReasonParameter {
    /// Returns the reason; empty if none was given.
    pub(crate) fn get(&self) -> Result<&str, Problem> {
        given_reason(self.reason.as_deref())
    }
}

/// The reason for the deletion of a quota, and its confirmation.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct QuotaDeletion {
    /// Recorded in the audit log; at most 512 bytes.
    #[param(max_length = 512)]
    reason: Option<String>,
    /// `true` deletes the quota even if the rules allow less than the caller uses.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    confirm: Switch,
}

impl QuotaDeletion {
    /// Returns the reason; empty if none was given.
    pub(crate) fn reason(&self) -> Result<&str, Problem> {
        given_reason(self.reason.as_deref())
    }

    pub(crate) fn is_confirmed(&self) -> bool {
        self.confirm.0
    }
}

fn given_reason(reason: Option<&str>) -> Result<&str, Problem> {
    let reason = reason.unwrap_or_default();
    if reason.len() > MAX_REASON || reason.chars().any(char::is_control) {
        let detail = format!("must have at most {MAX_REASON} bytes and no control characters");
        return Err(Problem::bad(detail).in_field("reason"));
    }
    Ok(reason)
}

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for StrictQuery<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Ok(Self(read(parts.uri.query().unwrap_or_default())?))
    }
}

fn read<T: DeserializeOwned>(query: &str) -> Result<T, Problem> {
    let names = field_names::<T>();
    let (values, others) = with_attributes(query, names)?;
    if let Some((name, _)) = others.first() {
        return Err(unknown(&format!("attr.{name}"), names));
    }
    let given = names.iter().zip(values).filter_map(|(name, value)| Some((*name, Value::String(value?))));
    let given = MapDeserializer::<_, serde_json::Error>::new(given);
    serde_path_to_error::deserialize(given)
        .map_err(|error| Problem::bad(error.inner().to_string()).in_field(error.path().to_string()))
}

/// A number from 1 to `MAX`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number<const MAX: u64>(pub(crate) u64);

impl<'de, const MAX: u64> Deserialize<'de> for Number<MAX> {
    fn deserialize<D: Deserializer<'de>>(text: D) -> Result<Self, D::Error> {
        parsed(text, format_args!("must be between 1 and {MAX}"), |text| {
            text.parse().ok().filter(|number| (1..=MAX).contains(number)).map(Self)
        })
    }
}

impl<const MAX: u64> Number<MAX> {
    /// Returns the number as the signed type that databases use.
    pub(crate) fn signed(self) -> i64 {
        i64::try_from(self.0).unwrap_or(i64::MAX)
    }
}

/// Parses a parameter; on failure, `expected` is the error message.
pub(crate) fn parsed<'de, D: Deserializer<'de>, T>(
    text: D,
    expected: impl fmt::Display,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, D::Error> {
    let text = String::deserialize(text)?;
    parse(&text).ok_or_else(|| D::Error::custom(expected))
}

/// Request attributes: names and values.
type Attributes = Vec<(String, String)>;

/// Returns the values of the parameters `names`, in their order, and the attributes from `attr.NAME=VALUE`. Any other
/// parameter is an error.
pub(crate) fn with_attributes(
    query: &str,
    names: &[&str],
) -> Result<(Vec<Option<String>>, Attributes), Problem> {
    let mut values = vec![None; names.len()];
    let mut attributes = Attributes::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decode(&value.replace('+', " "));
        let value = value.ok_or_else(|| Problem::bad("not valid percent-encoded UTF-8").in_field(name))?;
        if let Some(known) = names.iter().position(|known| *known == name) {
            values[known] = Some(value).filter(|value| !value.is_empty());
            continue;
        }
        let attribute = name.strip_prefix("attr.").and_then(decode).filter(|name| !name.is_empty());
        attributes.push((attribute.ok_or_else(|| unknown(name, names))?, value));
        if attributes.len() > MAX_ATTRIBUTES {
            return Err(Problem::bad(format!("too many attributes; at most {MAX_ATTRIBUTES} are allowed")));
        }
    }
    Ok((values, attributes))
}

/// Returns the names of a struct's fields, by running its `Deserialize` implementation.
fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    struct FieldNames<'n>(&'n mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for FieldNames<'_> {
        type Error = serde::de::value::Error;
        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Self::Error::custom("only structs have names"))
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }
        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut names: &'static [&'static str] = &[];
    let _ = T::deserialize(FieldNames(&mut names));
    names
}

/// Maximum number of attributes in a query.
const MAX_ATTRIBUTES: usize = 32;

fn unknown(name: &str, names: &[&str]) -> Problem {
    let shown: String = name.chars().take(50).collect();
    let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Problem::bad(format!("unknown parameter `{shown}`; known parameters: {known}"))
}

pub(crate) fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = after.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::{Number, api_key, read};
    use serde::Deserialize;

    #[test]
    fn keys_are_read_as_they_were_written() {
        assert_eq!(api_key("abc%2F1%20%C3%A9").ok().as_deref(), Some("abc/1 é"));
        for wrong in ["", "%", "%2", "%zz", "%+1", "%ff", "a%00b", &"x".repeat(513)] {
            assert!(api_key(wrong).is_err(), "{wrong}");
        }
    }

    #[derive(Debug, Deserialize, PartialEq)]
    struct Parameters {
        cursor: Option<String>,
        tier: Option<String>,
    }

    #[test]
    fn only_known_parameters_are_read() {
        let tier = |tier: &str| Parameters { cursor: None, tier: Some(tier.to_owned()) };
        assert_eq!(read("tier=a%20b&cursor=").ok(), Some(tier("a b")));
        assert_eq!(read("tier=a&&tier=b+c").ok(), Some(tier("b c")));
        for wrong in ["teir=a", "attr.tier=a", "tier=%zz"] {
            assert!(read::<Parameters>(wrong).is_err(), "{wrong}");
        }
        let problem = read::<Parameters>("teir=a").expect_err("no such parameter");
        assert_eq!(problem.detail, "unknown parameter `teir`; known parameters: cursor, tier");
    }

    #[test]
    fn a_wrong_number_is_named() {
        #[derive(Debug, Deserialize)]
        struct Limited {
            limit: Option<Number<1_000>>,
        }
        let limit = |query: &str| read::<Limited>(query).map(|read| read.limit.map(|limit| limit.0));
        assert_eq!((limit("limit=1000").ok(), limit("limit=").ok()), (Some(Some(1_000)), Some(None)));
        for wrong in ["limit=0", "limit=1001", "limit=-1", "limit=x"] {
            let problem = limit(wrong).expect_err("no such limit");
            assert_eq!(
                (problem.detail.as_str(), problem.place.as_deref()),
                ("must be between 1 and 1000", Some("limit"))
            );
        }
    }
}
