//! Decodes JSON request bodies. Errors name the field that is wrong.

use crate::problem::Problem;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::error::Category;
use std::fmt;
use std::marker::PhantomData;

/// Decodes a body, which must be a JSON object. Only after a failure is it decoded again with the field's path tracked.
///
/// # Errors
/// A problem that names the field.
pub fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice::<Object<T>>(body).map(|object| object.0).map_err(|first| {
        let mut decoder = serde_json::Deserializer::from_slice(body);
        let Err(error) = serde_path_to_error::deserialize::<_, Object<T>>(&mut decoder) else {
            return Problem::bad(explain(&first, ""));
        };
        // The path of a truncated body ends with `?`, or is only that.
        let field = error.path().to_string();
        let field = field.trim_end_matches(['?', '.']);
        let problem = Problem::bad(explain(error.inner(), field));
        if field.is_empty() { problem } else { problem.in_field(field) }
    })
}

/// Returns what is wrong with a body and what to send. The position is given where the text is not JSON; elsewhere the
/// field is. Many bodies are one line, and some a line of a file: only the column of the first line is given.
fn explain(error: &serde_json::Error, field: &str) -> String {
    let text = error.to_string();
    let (line, column) = (error.line(), error.column());
    let message = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    let place = if line == 1 { format!("column {column}") } else { format!("line {line}, column {column}") };
    match error.classify() {
        Category::Eof => format!("the JSON ends too early ({message}); send one complete object"),
        Category::Syntax | Category::Io => {
            format!("invalid JSON at {place}: {message}; send one JSON object")
        }
        Category::Data => in_plain_words(message, field),
    }
}

/// Maximum length of what a message repeats of the body, in characters.
const MAX_REPEATED: usize = 60;

/// Returns a message of the JSON library as someone says it who does not know Rust. A message of our own stays.
fn in_plain_words(message: &str, field: &str) -> String {
    let name = if field.is_empty() { "the body".to_owned() } else { format!("`{field}`") };
    let mismatch = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    if let Some((found, expected)) = mismatch.and_then(|rest| rest.rsplit_once(", expected ")) {
        return format!("{name} must be {}, not {}", wanted(expected), given(found));
    }
    if let Some((_, expected)) =
        message.strip_prefix("invalid length ").and_then(|rest| rest.split_once(", expected "))
    {
        return format!("{name} has the wrong length; write {}", wanted(expected));
    }
    match message.split_once(", expected ") {
        Some((unknown, expected)) if message.starts_with("unknown ") => {
            format!("{}; write {expected}", shortened(unknown))
        }
        _ if message.starts_with("missing field ") => format!("{message}; add it"),
        _ if message.starts_with("duplicate field ") => format!("{message}; send it once"),
        _ => message.to_owned(),
    }
}

fn wanted(expected: &str) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number from 0 to 18446744073709551615",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a string" | "a borrowed string" | "a character" => "text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        _ if expected.starts_with("struct ") => "an object",
        _ => expected,
    }
}

fn given(found: &str) -> String {
    let number = found.strip_prefix("integer ").or_else(|| found.strip_prefix("floating point "));
    match (number, found) {
        (Some(number), _) => format!("the number {}", number.trim_matches('`')),
        (_, "null" | "unit value" | "Option value") => "null; send a value, or leave it out".to_owned(),
        (_, "sequence") => "a list".to_owned(),
        (_, "map") => "an object".to_owned(),
        _ => match (found.strip_prefix("string "), found.strip_prefix("boolean ")) {
            (Some(text), _) => format!("the text {}", shortened(text)),
            (_, Some(value)) => value.trim_matches('`').to_owned(),
            _ => shortened(found),
        },
    }
}

/// Cuts what a caller sent, so that a response is no larger than a line.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_REPEATED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Decodes a field that may be absent but not `null`: a client that sends `null` for a number meant some number.
///
/// # Errors
/// The field is not a `T`.
pub fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(decoder: D) -> Result<Option<T>, D::Error> {
    T::deserialize(decoder).map(Some)
}

/// Decodes a `T` from a JSON object only. Plain serde would also accept an array of the field values.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        decoder.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only the errors matter")]
    struct Fields {
        name: String,
        #[serde(default, deserialize_with = "present")]
        cost: Option<u64>,
        #[serde(default)]
        list: Vec<u32>,
        #[serde(default)]
        is_set: bool,
    }

    proptest! {
        /// Whatever is sent, the answer is short, in words that need no Rust, and names the field.
        #[test]
        fn errors_are_short_and_in_plain_words(
            field in prop::sample::select(vec!["name", "cost", "list", "is_set", "other"]),
            value in prop_oneof![
                "\\PC{0,200}".prop_map(|text| serde_json::Value::from(text).to_string()),
                any::<i64>().prop_map(|number| number.to_string()),
                Just("null".to_owned()), Just("[[]]".to_owned()), Just("{}".to_owned()), Just("1.5".to_owned()),
                Just("true".to_owned()), Just("1e400".to_owned()),
            ],
        ) {
            let name = if field == "name" { "" } else { r#""name":"n","# };
            let body = format!("{{{name}\"{field}\":{value}}}");
            let Err(problem) = decode::<Fields>(body.as_bytes()) else { return Ok(()) };
            for word in ["invalid type", "u64", "u32", "sequence", "struct", "unit value"] {
                prop_assert!(!problem.detail.replace(&value, "").contains(word) || value.contains(word), "{}", problem.detail);
            }
            prop_assert!(problem.detail.chars().count() < 260, "{}", problem.detail);
            prop_assert!(problem.detail.contains(field) || problem.detail.contains("JSON"), "{}", problem.detail);
        }
    }

    /// The error of a malformed body names where it is malformed and what to send, with one position.
    #[test]
    fn broken_json_is_explained() {
        for (body, detail) in [
            ("", "the JSON ends too early (EOF while parsing a value); send one complete object"),
            ("{\"a\":", "the JSON ends too early (EOF while parsing a value); send one complete object"),
            ("{a}", "invalid JSON at column 2: key must be a string; send one JSON object"),
            ("{\n\"a\" 1}", "invalid JSON at line 2, column 5: expected `:`; send one JSON object"),
            ("[1]", "the body must be an object, not a list"),
            (
                r#"{"a": "5"}"#,
                r#"`a` must be a whole number from 0 to 18446744073709551615, not the text "5""#,
            ),
            (r#"{"a": -1}"#, "`a` must be a whole number from 0 to 18446744073709551615, not the number -1"),
            (
                r#"{"a": 1.5}"#,
                "`a` must be a whole number from 0 to 18446744073709551615, not the number 1.5",
            ),
            (r#"{"a": true}"#, "`a` must be a whole number from 0 to 18446744073709551615, not true"),
            (
                r#"{"a": null}"#,
                "`a` must be a whole number from 0 to 18446744073709551615, not null; send a value, or leave it out",
            ),
        ] {
            let problem = decode::<BTreeMap<String, u64>>(body.as_bytes()).expect_err(body);
            assert_eq!(problem.detail, detail, "{body}");
        }
    }
}
