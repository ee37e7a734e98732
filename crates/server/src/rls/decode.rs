//! Decodes a rate limit request into a check, with limits on everything that a client can send.

use super::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::fmt;
use tollgate_core::Cost;
use tollgate_http::value::{self, MAX_VALUE};
use tollgate_rules::{Descriptor, Unit};

/// Maximum number of descriptors of a request.
pub(super) const MAX_DESCRIPTORS: usize = 1024;
/// Maximum number of entries of a descriptor.
pub(super) const MAX_ENTRIES: usize = 64;

/// The reason a request is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRequest(pub String);

impl fmt::Display for BadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadRequest {}

fn bad<T>(message: impl Into<String>) -> Result<T, BadRequest> {
    Err(BadRequest(message.into()))
}

/// Reports a request of more than [`MAX_DESCRIPTORS`].
pub(super) fn too_many_descriptors() -> BadRequest {
    BadRequest(format!("descriptors: at most {MAX_DESCRIPTORS} per request"))
}

/// Reports a descriptor of more than [`MAX_ENTRIES`].
pub(super) fn too_many_entries(descriptor: usize) -> BadRequest {
    BadRequest(format!("descriptors[{descriptor}].entries: at most {MAX_ENTRIES} per descriptor"))
}

/// Returns the request with [bounded](value) keys and values. Only keys without a value and wildcards match such a value.
pub(crate) fn bounded(request: &RateLimitRequest) -> Cow<'_, RateLimitRequest> {
    let is_long = |text: &String| text.len() > MAX_VALUE;
    let mut entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
    if !entries.any(|entry| is_long(&entry.key) || is_long(&entry.value)) {
        return Cow::Borrowed(request);
    }
    let mut request = request.clone();
    for entry in request.descriptors.iter_mut().flat_map(|descriptor| &mut descriptor.entries) {
        for text in [&mut entry.key, &mut entry.value] {
            *text = value::bounded(std::mem::take(text).into()).into_owned();
        }
    }
    Cow::Owned(request)
}

type Entries<'a> = SmallVec<[(&'a str, &'a str); 8]>;

/// Returns the entries of all descriptors of a [`bounded`] request, one after another.
pub(crate) fn entries(request: &RateLimitRequest) -> Result<Entries<'_>, BadRequest> {
    if request.domain.is_empty() {
        return bad("rate limit domain must not be empty");
    }
    if request.descriptors.is_empty() {
        return bad("rate limit descriptor list must not be empty");
    }
    if request.descriptors.len() > MAX_DESCRIPTORS {
        return Err(too_many_descriptors());
    }
    let mut all = Entries::new();
    for (d, descriptor) in request.descriptors.iter().enumerate() {
        if descriptor.entries.len() > MAX_ENTRIES {
            return Err(too_many_entries(d));
        }
        all.extend(descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str())));
    }
    Ok(all)
}

/// Returns the descriptors, which borrow from the result of [`entries`].
pub(crate) fn descriptors<'a>(
    request: &RateLimitRequest,
    mut entries: &'a [(&'a str, &'a str)],
) -> Result<SmallVec<[Descriptor<'a>; 4]>, BadRequest> {
    let mut all = SmallVec::new();
    for (d, descriptor) in request.descriptors.iter().enumerate() {
        let (own, rest) = entries.split_at(descriptor.entries.len());
        entries = rest;
        let limit = match &descriptor.limit {
            None => None,
            Some(limit) => match unit(limit.unit) {
                Some(unit) => Some((limit.requests_per_unit, unit.length())),
                None => return bad(format!("descriptors[{d}].limit.unit: unknown unit {}", limit.unit)),
            },
        };
        let hits = descriptor.hits_addend;
        let hits = match (hits, descriptor.is_negative_hits) {
            (None, false) => None,
            (Some(units), false) => Some(Cost::new(units)),
            (units, true) => Some(Cost::refund(units.unwrap_or(hits_of(request)))),
        };
        all.push(Descriptor { entries: own, hits, limit });
    }
    Ok(all)
}

fn hits_of(request: &RateLimitRequest) -> u64 {
    u64::from(request.hits_addend.max(1))
}

/// Returns the `hits_addend` of the request; 0 counts as 1.
pub(crate) fn hits(request: &RateLimitRequest) -> Cost {
    Cost::new(hits_of(request))
}

/// Returns the unit of an inline limit. Envoy's enumeration ends with the year; a week has its number in responses, as
/// envoyproxy/ratelimit reads it.
fn unit(number: i32) -> Option<Unit> {
    Some(match number {
        1 => Unit::Second,
        2 => Unit::Minute,
        3 => Unit::Hour,
        4 => Unit::Day,
        5 => Unit::Month,
        6 => Unit::Year,
        7 => Unit::Week,
        _ => return None,
    })
}
