//! Caller in a request path: `/{api_key}` contains the key itself; `/by-id/{id}` contains the id that lists show in
//! its place.
//!
//! An id is the installation's keyed hash of the key. For callers that this node lists or has in its decision log,
//! the node has the key, so every operation works. Other callers are found by their quota in the database, on any
//! node, and support every operation that needs no counter.

use crate::error::{ApiError, control_problem};
use crate::path::segment;
use crate::{AdminState, query};
use axum::extract::{FromRequestParts, MatchedPath};
use http::StatusCode;
use http::request::Parts;
use std::sync::Arc;
use tollgate_control::{CallerRef, KeyHash};
use tollgate_http::problem::Problem;

pub(crate) enum CallerPath {
    /// An API key from the request.
    Key(String),
    /// The API key of a caller id, known to this node and not to the client.
    Listed(String),
    /// A caller id whose API key this node does not know.
    Id(KeyHash),
}

impl FromRequestParts<Arc<AdminState>> for CallerPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        let by_id =
            parts.extensions.get::<MatchedPath>().is_some_and(|path| path.as_str().contains("/by-id/"));
        let found = if by_id {
            Self::by_id(admin, segment(parts, "id")).await
        } else {
            query::api_key(segment(parts, "api_key")).map(Self::Key)
        };
        Ok(found?)
    }
}

impl CallerPath {
    async fn by_id(admin: &AdminState, id: &str) -> Result<Self, Problem> {
        let hash = KeyHash::parse(id);
        let short_id = Some(id).filter(|id| id.len() == 16).and_then(|id| u64::from_str_radix(id, 16).ok());
        let invalid = || {
            let detail = "must be the 64 hexadecimal digits of an `id` from a quota list, or the 16 of a `key_id` from a caller list";
            Problem::bad(detail).in_field("id")
        };
        let short_id = hash.map(|hash| hash.short_id()).or(short_id).ok_or_else(invalid)?;
        if let Some(key) = admin.status.telemetry().and_then(|observe| observe.api_key(short_id)) {
            return Ok(Self::Listed(key));
        }
        let known = match (hash, &admin.control) {
            (Some(hash), _) => Some(hash),
            (None, Some(control)) => control.quota_id(short_id).await.map_err(control_problem)?,
            (None, None) => None,
        };
        let detail = "no quota has this id, and this node has no caller with it in its lists or log; send the request to the \
                      node that lists the caller, or use the full key";
        known.map(Self::Id).ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not found", detail))
    }

    /// Returns the caller for data stored under the key's hash.
    pub(crate) fn caller(&self) -> CallerRef<'_> {
        match self {
            Self::Key(key) | Self::Listed(key) => CallerRef::Key(key),
            Self::Id(id) => CallerRef::Id(*id),
        }
    }

    /// Returns the API key, for data stored under the key.
    pub(crate) fn key(&self) -> Result<&str, Problem> {
        match self {
            Self::Key(key) | Self::Listed(key) => Ok(key),
            Self::Id(_) => {
                let detail = "counters are stored by API key, and this node has not seen the caller recently; send the request to \
                              the node that lists the caller, or use the full key";
                Err(Problem::new(StatusCode::NOT_FOUND, "Not found", detail))
            }
        }
    }

    /// Returns the API key, only if the request contained it.
    pub(crate) fn sent(&self) -> Option<&str> {
        match self {
            Self::Key(key) => Some(key),
            Self::Listed(_) | Self::Id(_) => None,
        }
    }
}
