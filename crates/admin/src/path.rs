//! Path segment extractors, without percent-decoding. Rejected: axum's extractor, because it accepts invalid
//! percent-encoding.

use crate::error::ApiError;
use axum::extract::{FromRequestParts, MatchedPath};
use http::request::Parts;
use tollgate_http::problem::Problem;

/// Returns the raw segment at `{name}`; empty if the route has no such name.
pub(crate) fn segment<'p>(parts: &'p Parts, name: &str) -> &'p str {
    let Some(route) = parts.extensions.get::<MatchedPath>() else { return "" };
    let both = route.as_str().split('/').zip(parts.uri.path().split('/'));
    both.filter(|(expected, _)| {
        expected.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')) == Some(name)
    })
    .map(|(_, found)| found)
    .next()
    .unwrap_or_default()
}

/// Extractor for the segment `{id}`.
pub(crate) struct Id(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Ok(Self(segment(parts, "id").to_owned()))
    }
}

/// Extractor for the last segment.
pub(crate) struct LastSegment(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for LastSegment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Ok(Self(parts.uri.path().rsplit('/').next().unwrap_or_default().to_owned()))
    }
}

/// Extractor for a rule revision number in `{rev}`.
pub(crate) struct Rev(pub(crate) i64);

impl<S: Sync> FromRequestParts<S> for Rev {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let rev = revision(segment(parts, "rev")).ok_or_else(|| Problem::bad(REVISION).in_field("rev"))?;
        Ok(Self(rev))
    }
}

/// Error message for an invalid revision number.
pub(crate) const REVISION: &str = "must be a revision number, such as 3";

pub(crate) fn revision(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number| (1..i64::MAX).contains(number))
}
