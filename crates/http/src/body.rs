//! Decoding the JSON body of a request, with the place of any mistake.

use crate::problem::Problem;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Decodes a body, which is an object. The place of a mistake is worked out only once there is one.
///
/// # Errors
/// A problem that names the place.
pub fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice::<Object<T>>(body).map(|object| object.0).map_err(|first| {
        let mut decoder = serde_json::Deserializer::from_slice(body);
        let Err(error) = serde_path_to_error::deserialize::<_, Object<T>>(&mut decoder) else {
            return Problem::bad(first.to_string());
        };
        // A body that ends too early has no name for the place where it does.
        let place = error.path().to_string();
        let place = place.trim_end_matches(['?', '.']);
        let problem = Problem::bad(error.inner().to_string());
        if place.is_empty() { problem } else { problem.in_field(place) }
    })
}

/// A `T` that is written as a JSON object. Without this, a list of its fields' values would do as well.
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
