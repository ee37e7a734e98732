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
            return Problem::bad(explain(&first));
        };
        // The path of a truncated body ends with `?`, or is only that.
        let field = error.path().to_string();
        let field = field.trim_end_matches(['?', '.']);
        let problem = Problem::bad(explain(error.inner()));
        if field.is_empty() { problem } else { problem.in_field(field) }
    })
}

/// Returns what is wrong with a body and what to send. The position is given where the text is not JSON; elsewhere the
/// field is. Many bodies are one line, and some a line of a file: only the column of the first line is given.
fn explain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (line, column) = (error.line(), error.column());
    let message = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    let place = if line == 1 { format!("column {column}") } else { format!("line {line}, column {column}") };
    match error.classify() {
        Category::Eof => format!("the JSON ends too early ({message}); send one complete object"),
        Category::Syntax | Category::Io => {
            format!("invalid JSON at {place}: {message}; send one JSON object")
        }
        Category::Data => message.to_owned(),
    }
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
    use std::collections::BTreeMap;

    /// Whoever sends a broken body learns where it is broken and what to send, with one position.
    #[test]
    fn broken_json_is_explained() {
        for (body, detail) in [
            ("", "the JSON ends too early (EOF while parsing a value); send one complete object"),
            ("{\"a\":", "the JSON ends too early (EOF while parsing a value); send one complete object"),
            ("{a}", "invalid JSON at column 2: key must be a string; send one JSON object"),
            ("{\n\"a\" 1}", "invalid JSON at line 2, column 5: expected `:`; send one JSON object"),
            ("[1]", "invalid type: sequence, expected an object"),
        ] {
            let problem = decode::<BTreeMap<String, u64>>(body.as_bytes()).expect_err(body);
            assert_eq!(problem.detail, detail, "{body}");
        }
    }
}
