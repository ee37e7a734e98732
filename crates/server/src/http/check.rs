//! `POST /v1/check`: checks `{domain, attributes, cost}`, `{domain, request, cost}` or `{domain, descriptors, cost}`.

use super::body::Object;
use super::problem::Problem;
use super::request_head::{IdentifiedCaller, RequestHead};
use super::{App, body, decision};
use serde::Deserialize;
use serde::de::{Deserializer, Error, Expected, MapAccess, SeqAccess, Visitor};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use tollgate_core::{Cost, CounterStore, TimeDelta, Timestamp};
use tollgate_engine::{Check, CheckInput, Decision, TraceContext};
use tollgate_http::h1::RawResponse;
use tollgate_http::value;
use tollgate_rules::{Descriptor, parse_inline_period};

pub(super) const MAX_ENTRIES: usize = 64;
const MAX_TEXT: usize = 8 * 1024;

/// The request body; strings are borrowed from it where possible.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckRequest<'a> {
    #[serde(borrow)]
    domain: Text<'a>,
    #[serde(borrow, default)]
    attributes: Option<Pairs<'a>>,
    #[serde(borrow, default)]
    descriptors: Option<Vec<Object<CheckDescriptor<'a>>>>,
    /// The head of the request that the client has received, from which the caller is identified.
    #[serde(borrow, default)]
    request: Option<Object<RequestHead<'a>>>,
    #[serde(default, deserialize_with = "body::present")]
    cost: Option<u64>,
    /// Only for reservations.
    #[serde(default, deserialize_with = "body::present")]
    pub(crate) deadline_ms: Option<u64>,
    /// Only for reservations.
    #[serde(default)]
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckDescriptor<'a> {
    #[serde(borrow)]
    entries: Vec<Entry<'a>>,
    #[serde(default, deserialize_with = "body::present")]
    hits: Option<u64>,
    #[serde(default)]
    limit: Option<Object<CheckLimit>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckLimit {
    requests_per_unit: u32,
    unit: InlinePeriod,
}

/// The period of an inline limit.
struct InlinePeriod(TimeDelta);

impl<'de> Deserialize<'de> for InlinePeriod {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        let name = Text::deserialize(decoder)?;
        let unknown = || {
            D::Error::custom(format!(
                "unknown unit `{}`; write second, minute, hour, day, week, month or year, or a length such as 15m or \
                 1500ms, from 1ms to 10 years",
                name.0
            ))
        };
        parse_inline_period(&name.0).map(Self).ok_or_else(unknown)
    }
}

fn check_length<E: Error>(text: &str, expected: &dyn Expected) -> Result<(), E> {
    if text.len() > MAX_TEXT { Err(E::invalid_length(text.len(), expected)) } else { Ok(()) }
}

/// Text of bounded length, borrowed if it has no escapes.
#[derive(Clone)]
pub(super) struct Text<'a>(pub(super) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Cow<'de, str>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a string of at most {MAX_TEXT} bytes")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                check_length(text, &self).map(|()| Cow::Borrowed(text))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                check_length(text, &self).map(|()| Cow::Owned(text.to_owned()))
            }
        }
        decoder.deserialize_str(TextVisitor).map(Text)
    }
}

/// The name of an attribute, [bounded](value).
struct AttributeName<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for AttributeName<'a> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl<'de> Visitor<'de> for NameVisitor {
            type Value = Cow<'de, str>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(value::bounded(Cow::Borrowed(text)))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(value::bounded(Cow::Owned(text.to_owned())))
            }
        }
        decoder.deserialize_str(NameVisitor).map(AttributeName)
    }
}

/// The value of an attribute: a [bounded](value) string, or a number in its one canonical form.
///
/// What is equal as a number is the same value, so `1`, `1.0` and `1e0` are all `1`: digits alone for a whole number, the
/// shortest decimal fraction otherwise, never an exponent. Beyond 2^53 parsers disagree on what a number is, and a
/// counter or a cost would depend on the client's, so such numbers are refused.
struct AttributeValue<'a>(Cow<'a, str>);

/// The largest number that every JSON parser reads exactly.
const MAX_NUMBER: u64 = 1 << 53;

impl<'de: 'a, 'a> Deserialize<'de> for AttributeValue<'a> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct ValueVisitor;
        impl ValueVisitor {
            fn whole<'de, E: Error>(sign: &str, units: u64) -> Result<Cow<'de, str>, E> {
                if units > MAX_NUMBER {
                    return Err(Self::too_large());
                }
                Ok(Cow::Owned(format!("{sign}{units}")))
            }

            fn too_large<E: Error>() -> E {
                E::custom("a number beyond 2^53 is not exact in JSON; send it as a string")
            }
        }
        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = Cow<'de, str>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a number")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(value::bounded(Cow::Borrowed(text)))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(value::bounded(Cow::Owned(text.to_owned())))
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
                Self::whole("", number)
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
                Self::whole(if number < 0 { "-" } else { "" }, number.unsigned_abs())
            }
            fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
                if number.abs() > MAX_NUMBER as f64 {
                    return Err(Self::too_large());
                }
                // The sign of zero has no meaning.
                Ok(Cow::Owned(if number == 0.0 { "0".to_owned() } else { number.to_string() }))
            }
        }
        decoder.deserialize_any(ValueVisitor).map(AttributeValue)
    }
}

/// A map from text to text or numbers, in order, without duplicates.
struct Pairs<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct PairsVisitor;
        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Pairs<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a map of at most {MAX_ENTRIES} attributes, each a string or a number")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some((AttributeName(key), AttributeValue(value))) = map.next_entry()? {
                    if pairs.len() == MAX_ENTRIES {
                        return Err(A::Error::custom(format!("at most {MAX_ENTRIES} attributes")));
                    }
                    if pairs.iter().any(|(known, _)| *known == key) {
                        return Err(A::Error::custom(format!("duplicate attribute `{key}`; send it once")));
                    }
                    pairs.push((key, value));
                }
                Ok(Pairs(pairs))
            }
        }
        decoder.deserialize_map(PairsVisitor)
    }
}

/// `{"key": k, "value": v}` or `[k, v]`.
struct Entry<'a>(Cow<'a, str>, Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Entry<'a> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct EntryVisitor;
        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an entry: {\"key\": …, \"value\": …} or [key, value]")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let AttributeName(key) =
                    list.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let AttributeValue(value) =
                    list.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                if list.next_element::<serde::de::IgnoredAny>()?.is_some() {
                    return Err(A::Error::invalid_length(3, &self));
                }
                Ok(Entry(key, value))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Named<'a> {
                    #[serde(borrow)]
                    key: AttributeName<'a>,
                    #[serde(borrow)]
                    value: AttributeValue<'a>,
                }
                let named = Named::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
                Ok(Entry(named.key.0, named.value.0))
            }
        }
        decoder.deserialize_any(EntryVisitor)
    }
}

/// The number of entries of one descriptor, and its other fields.
struct DescriptorRange {
    entries: usize,
    hits: Option<Cost>,
    limit: Option<(u32, TimeDelta)>,
}

/// A validated request in the layout that the engine takes.
pub(crate) struct NormalizedCheck<'a> {
    domain: &'a str,
    pairs: SmallVec<[(&'a str, &'a str); 8]>,
    ranges: Option<Vec<DescriptorRange>>,
    cost: Cost,
    address: Option<IpAddr>,
}

impl CheckRequest<'_> {
    /// Identifies the caller of the request head, if there is one.
    pub(crate) fn caller<S: CounterStore>(
        &self,
        app: &App<S>,
        now: Timestamp,
    ) -> Result<Option<Box<IdentifiedCaller>>, Problem> {
        let Some(Object(head)) = &self.request else { return Ok(None) };
        let identities = &app.forward_auth.identities;
        let active = identities.active(&app.limiter);
        let resolver = identities.resolver(&active, &self.domain.0)?;
        head.caller(resolver, now).map(|caller| Some(Box::new(caller)))
    }

    /// Attributes that the client states go before those of the caller that was identified in the request head.
    pub(crate) fn normalize<'c>(
        &'c self,
        caller: Option<&'c IdentifiedCaller>,
    ) -> Result<NormalizedCheck<'c>, Problem> {
        if self.domain.0.is_empty() {
            return Err(
                Problem::bad("the domain is empty; write the domain of a rule file").in_field("domain")
            );
        }
        let mut pairs = SmallVec::<[(&str, &str); 8]>::new();
        let ranges = match (&self.attributes, &self.descriptors) {
            (None, None) if caller.is_none() => {
                return Err(Problem::bad("write one of `attributes`, `request` and `descriptors`"));
            }
            (attributes, None) => {
                pairs.extend(attributes.iter().flat_map(|stated| &stated.0).map(|(k, v)| (&**k, &**v)));
                for (name, value) in caller.iter().flat_map(|caller| &caller.attributes) {
                    if !pairs.iter().any(|(stated, _)| stated == name) {
                        pairs.push((name.as_str(), value.as_str()));
                    }
                }
                None
            }
            (None, Some(descriptors)) if caller.is_none() => {
                if descriptors.is_empty() || descriptors.len() > MAX_ENTRIES {
                    return Err(
                        Problem::bad(format!("write 1 to {MAX_ENTRIES} descriptors")).in_field("descriptors")
                    );
                }
                let mut ranges = Vec::with_capacity(descriptors.len());
                for (at, Object(descriptor)) in descriptors.iter().enumerate() {
                    if descriptor.entries.is_empty() || descriptor.entries.len() > MAX_ENTRIES {
                        let field = format!("descriptors[{at}].entries");
                        return Err(Problem::bad(format!("write 1 to {MAX_ENTRIES} entries")).in_field(field));
                    }
                    pairs.extend(descriptor.entries.iter().map(|entry| (&*entry.0, &*entry.1)));
                    let limit = descriptor
                        .limit
                        .as_ref()
                        .map(|Object(limit)| (limit.requests_per_unit, limit.unit.0));
                    // Explicit, because a message of Envoy's means 1 by 0, and a cost of 0 here is a peek.
                    let hits = descriptor.hits.or(self.cost).map(Cost::new);
                    ranges.push(DescriptorRange { entries: descriptor.entries.len(), hits, limit });
                }
                Some(ranges)
            }
            _ => {
                let detail = "write either `descriptors`, or `attributes` and `request`";
                return Err(Problem::bad(detail).in_field("descriptors"));
            }
        };
        Ok(NormalizedCheck {
            domain: &self.domain.0,
            pairs,
            ranges,
            cost: self.cost.map_or(Cost::ONE, Cost::new),
            address: caller.map(|caller| caller.address),
        })
    }
}

impl NormalizedCheck<'_> {
    /// Returns the descriptors, which the engine's check borrows; empty for a check by attributes.
    pub(crate) fn descriptors(&self) -> Vec<Descriptor<'_>> {
        let mut rest = &self.pairs[..];
        let mut all = Vec::new();
        for range in self.ranges.iter().flatten() {
            let (entries, others) = rest.split_at(range.entries);
            rest = others;
            all.push(Descriptor { entries, hits: range.hits, limit: range.limit });
        }
        all
    }

    pub(crate) fn check<'c>(&'c self, descriptors: &'c [Descriptor<'c>]) -> Check<'c> {
        let request = match self.ranges {
            Some(_) => CheckInput::Descriptors(descriptors),
            None => CheckInput::Attributes(&self.pairs),
        };
        Check {
            domain: self.domain,
            input: request,
            cost: self.cost,
            protocol: "http",
            trace: None,
            address: self.address,
            reason: None,
        }
    }
}

fn decoded(body: &[u8]) -> Result<CheckRequest<'_>, Problem> {
    let request: CheckRequest<'_> = body::decode(body)?;
    for (field, is_present) in [
        ("deadline_ms", request.deadline_ms.is_some()),
        ("idempotency_key", request.idempotency_key.is_some()),
    ] {
        if is_present {
            return Err(Problem::bad("only /v1/reserve accepts this field; remove it").in_field(field));
        }
    }
    Ok(request)
}

/// Rejects a request whose cost cannot be read; nothing has been charged.
pub(crate) fn reject_malformed(decision: &Decision) -> Result<(), Problem> {
    match decision.malformed_cost_message() {
        Some(message) => {
            let attribute = decision.malformed_cost.as_deref().unwrap_or_default();
            Err(Problem::bad(message).in_field(format!("attributes.{attribute}")))
        }
        None => Ok(()),
    }
}

pub(crate) async fn handle<S: CounterStore>(
    app: &App<S>,
    body: &[u8],
    now: Timestamp,
    trace: Option<&TraceContext>,
) -> Result<RawResponse, Problem> {
    let request = decoded(body)?;
    let caller = request.caller(app, now)?;
    let normalized = request.normalize(caller.as_deref())?;
    let descriptors = normalized.descriptors();
    let check = normalized.check(&descriptors).with_trace(trace);
    let decision = app.limiter.check(&check).await;
    reject_malformed(&decision)?;
    Ok(decision::response(app, check.input, &decision, &decision::DecisionBody::new(&decision)))
}

/// Part of [`crate::properties::json_bodies`].
pub(super) fn properties(bytes: &[u8]) {
    let meaning = |body: &[u8]| -> Option<String> {
        let request = body::decode::<CheckRequest<'_>>(body).ok()?;
        let normalized = request.normalize(None).ok()?;
        let descriptors = normalized.descriptors();
        let check = normalized.check(&descriptors);
        assert!(!check.domain.is_empty() && normalized.pairs.len() <= MAX_ENTRIES * MAX_ENTRIES);
        assert!(normalized.pairs.iter().all(|(key, value)| key.len().max(value.len()) <= body.len()));
        Some(format!("{check:?}"))
    };
    let Some(request) = meaning(bytes) else { return };
    assert_eq!(meaning(&[b" ", bytes, b"\n"].concat()), Some(request));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_and_values_are_replaced_and_not_rejected() {
        let long = "x".repeat(9_000);
        for body in [
            format!(r#"{{"domain":"d","attributes":{{"a{long}":"b{long}"}}}}"#),
            format!(r#"{{"domain":"d","descriptors":[{{"entries":[["a{long}","b{long}"]]}}]}}"#),
            format!(
                r#"{{"domain":"d","descriptors":[{{"entries":[{{"key":"a{long}","value":"b{long}"}}]}}]}}"#
            ),
        ] {
            let request = decoded(body.as_bytes()).unwrap_or_else(|problem| panic!("{}", problem.detail));
            let normalized = request.normalize(None).unwrap_or_else(|problem| panic!("{}", problem.detail));
            let [(name, value)] = normalized.pairs[..] else { panic!("one attribute") };
            assert_eq!(name, value::bounded(format!("a{long}").into()));
            assert_eq!(value, value::bounded(format!("b{long}").into()));
        }
    }
}
