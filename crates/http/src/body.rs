//! Decodes JSON request bodies. Errors name the field that is wrong.

use crate::problem::Problem;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
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
            return Problem::bad(first.to_string());
        };
        // The path of a truncated body ends with `?`, or is only that.
        let field = error.path().to_string();
        let field = field.trim_end_matches(['?', '.']);
        let problem = Problem::bad(error.inner().to_string());
        if field.is_empty() { problem } else { problem.in_field(field) }
    })
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
