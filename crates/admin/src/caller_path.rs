//! Which caller a path means: `/{api_key}` has the key itself; `/by-id/{id}` what stands for it, which is all that lists tell.
//!
//! An id is the installation's keyed hash of the key. Whoever this node lists, or has in its decision log, is known to it by key,
//! and everything can be done; somebody else is known where something is agreed with them in the database: then all that needs no
//! counter can be done, at any node.

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
    /// Whoever asks knows the key.
    Key(String),
    /// This node knows it; whoever asks does not.
    Listed(String),
    /// Nobody here does.
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
        let whole = KeyHash::parse(id);
        let word = Some(id).filter(|id| id.len() == 16).and_then(|id| u64::from_str_radix(id, 16).ok());
        let wrong = || {
            let detail = "an id is 64 hexadecimal digits, as lists of quotas have it, or 16, as lists of callers do (`key_id`)";
            Problem::bad(detail).in_field("id")
        };
        let word = whole.map(|whole| whole.short_id()).or(word).ok_or_else(wrong)?;
        if let Some(key) = admin.status.telemetry().and_then(|observe| observe.api_key(word)) {
            return Ok(Self::Listed(key));
        }
        let known = match (whole, &admin.control) {
            (Some(whole), _) => Some(whole),
            (None, Some(control)) => control.quota_id(word).await.map_err(control_problem)?,
            (None, None) => None,
        };
        let detail = "this node neither lists a caller with this id and an API key nor has one in its log, and nothing is agreed \
                      with one: ask the node that lists it, or write the whole key";
        known.map(Self::Id).ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not found", detail))
    }

    /// For what is kept under the hash.
    pub(crate) fn caller(&self) -> CallerRef<'_> {
        match self {
            Self::Key(key) | Self::Listed(key) => CallerRef::Key(key),
            Self::Id(id) => CallerRef::Id(*id),
        }
    }

    /// For what is kept under the key.
    pub(crate) fn key(&self) -> Result<&str, Problem> {
        match self {
            Self::Key(key) | Self::Listed(key) => Ok(key),
            Self::Id(_) => {
                let detail = "counters are found by the key, and this node has not seen the caller lately: ask the node that \
                              lists it, or write the whole key";
                Err(Problem::new(StatusCode::NOT_FOUND, "Not found", detail))
            }
        }
    }

    /// The key is told to those alone who have sent it.
    pub(crate) fn sent(&self) -> Option<&str> {
        match self {
            Self::Key(key) => Some(key),
            Self::Listed(_) | Self::Id(_) => None,
        }
    }
}
