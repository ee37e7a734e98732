//! Caller in a request path: `/{api_key}` contains the key itself, or with `?key=user_id` the value of that attribute;
//! `/by-id/{id}` contains the id that lists show in its place.
//!
//! An id is the installation's keyed hash of the key. For callers that this node lists or has in its decision log,
//! the node has the key, so every operation works. Other callers are found by their quota in the database, on any
//! node, and support every operation that needs no counter.
//!
//! What is spelled like an id is never silently taken for an API key: in the place of a key it must be the id of a
//! known caller, or a key that this node has seen or that has a quota. Otherwise it is rejected, unless the request
//! says `?key=api_key`. Rejected: taking ids by `by-id` alone, because an id that is pasted in the place of a key
//! would then change a quota that no caller uses, and report success.

use crate::error::{ApiError, control_problem};
use crate::path::segment;
use crate::{AdminState, query};
use axum::extract::{FromRequestParts, MatchedPath};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{StatusCode, Uri};
use serde::Serialize;
use std::sync::Arc;
use tollgate_control::{CallerRef, KeyHash};
use tollgate_http::problem::Problem;
use tollgate_rules::CALLER_KEY;
use utoipa::ToSchema;

pub(crate) enum CallerPath {
    /// An API key from the request.
    Key(String),
    /// The API key of a caller id, known to this node and not to the client.
    Listed(String),
    /// A caller id whose API key this node does not know.
    Id(KeyHash),
    /// The value of another attribute, from the request (`?key=user_id`).
    Value { key: String, value: String },
}

impl FromRequestParts<Arc<AdminState>> for CallerPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        let by_id =
            parts.extensions.get::<MatchedPath>().is_some_and(|path| path.as_str().contains("/by-id/"));
        if by_id {
            return Ok(Self::by_id(admin, segment(parts, "id")).await?);
        }
        let spelled = take_key_parameter(parts)?;
        Ok(Self::by_key(admin, query::api_key(segment(parts, "api_key"))?, spelled).await?)
    }
}

/// Maximum length of an attribute's name, in bytes.
const MAX_NAME: usize = 128;

/// What is wrong with the name of an attribute.
pub(crate) const KEY_EXPECTED: &str = "must be the attribute that the value in the path is of, such as user_id: 1 to 128 bytes, no control characters";

/// What a value in the place of an API key may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Spelled {
    /// An API key, or the id of a known caller.
    #[default]
    KeyOrId,
    /// An API key, however it is spelled (`?key=api_key`).
    Key,
    /// A value of another attribute (`?key=user_id`).
    Attribute(String),
}

impl Spelled {
    /// Parses the name of the attribute that a value is of.
    pub(crate) fn parse(key: &str) -> Option<Self> {
        let is_name = (1..=MAX_NAME).contains(&key.len()) && !key.chars().any(char::is_control);
        is_name.then(|| match key {
            CALLER_KEY => Self::Key,
            other => Self::Attribute(other.to_owned()),
        })
    }
}

/// Removes the parameter `key` from the query: the other extractors are strict.
fn take_key_parameter(parts: &mut Parts) -> Result<Spelled, Problem> {
    let query = parts.uri.query().unwrap_or_default();
    let (named, rest): (Vec<&str>, Vec<&str>) =
        query.split('&').filter(|pair| !pair.is_empty()).partition(|pair| pair.starts_with("key="));
    let spelled = match named[..] {
        [] | ["key="] => Spelled::KeyOrId,
        [one] => {
            let name = query::decode(&one["key=".len()..].replace('+', " "));
            let wrong = || Problem::bad(KEY_EXPECTED).in_field("key");
            name.and_then(|name| Spelled::parse(&name)).ok_or_else(wrong)?
        }
        _ => {
            return Err(
                Problem::bad("must occur once; a caller is identified by one attribute").in_field("key")
            );
        }
    };
    if named.is_empty() {
        return Ok(spelled);
    }
    let mark = if rest.is_empty() { "" } else { "?" };
    let target = format!("{}{mark}{}", parts.uri.path(), rest.join("&"));
    let mut uri = parts.uri.clone().into_parts();
    uri.path_and_query = PathAndQuery::try_from(target).ok();
    if let Ok(uri) = Uri::from_parts(uri) {
        parts.uri = uri;
    }
    Ok(spelled)
}

/// What identifies the caller of a response.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(crate) struct SentCaller<'a> {
    /// The API key, only if the request contained it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    api_key: Option<&'a str>,
    /// The value of the attribute `key`, if that is not `api_key`; only if the request contained it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    value: Option<&'a str>,
}

/// An id from a list: all of its 64 digits, or the first 16.
#[derive(Clone, Copy)]
struct ListedId {
    short: u64,
    hash: Option<KeyHash>,
}

impl ListedId {
    fn parse(text: &str) -> Option<Self> {
        if let Some(hash) = KeyHash::parse(text) {
            return Some(Self { short: hash.short_id(), hash: Some(hash) });
        }
        let is_short = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let short = u64::from_str_radix(text, 16).ok().filter(|_| is_short)?;
        Some(Self { short, hash: None })
    }

    /// Finds the caller with this id; `None` if none is known. A caller that cannot be acted on is an error.
    async fn find(self, admin: &AdminState) -> Result<Option<CallerPath>, Problem> {
        let telemetry = admin.status.telemetry();
        if let Some(key) = telemetry.and_then(|observe| observe.api_key(self.short)) {
            // The first digits may be those of another id.
            let full = |hash| admin.control.as_ref().is_some_and(|control| control.key_hash(&key) == hash);
            if self.hash.is_none_or(full) {
                return Ok(Some(CallerPath::Listed(key)));
            }
        }
        // A stored quota whose id is this hash belongs to another caller.
        if telemetry.is_some_and(|observe| observe.is_listed_without_key(self.short)) {
            let detail = "this caller has no API key, or one of 256 bytes or more; quotas, usage and measures by id are for API \
                          keys (to block an address, tenant or endpoint, create a measure for it)";
            return Err(Problem::new(StatusCode::CONFLICT, "No API key", detail).in_field("id"));
        }
        let Some(control) = &admin.control else { return Ok(None) };
        let stored = match self.hash {
            Some(hash) => control.quota(hash).await.map_err(control_problem)?.map(|_| hash),
            None => control.quota_id(self.short).await.map_err(control_problem)?,
        };
        Ok(stored.map(CallerPath::Id))
    }
}

/// Returns whether an API key that is spelled like an id has a quota, or is in this node's lists or log.
async fn is_known_key(admin: &AdminState, key: &str) -> Result<bool, Problem> {
    let Some(control) = &admin.control else { return Ok(false) };
    let seen = admin.status.telemetry().and_then(|observe| observe.api_key(control.key_id(key)));
    if seen.as_deref() == Some(key) {
        return Ok(true);
    }
    Ok(control.quota(CallerRef::Key(key)).await.map_err(control_problem)?.is_some())
}

impl CallerPath {
    /// Returns the caller with this API key. An id from a list in its place means that caller.
    ///
    /// # Errors
    /// A key as lists show it, masked, or the id of a caller that is not known: they identify no caller.
    pub(crate) async fn by_key(admin: &AdminState, key: String, spelled: Spelled) -> Result<Self, Problem> {
        if key.contains('…') {
            let detail = "this is a masked key, as lists show it; use the caller's `key_id`, or the full key";
            return Err(Problem::bad(detail).in_field("api_key"));
        }
        if let Spelled::Attribute(name) = spelled {
            return Ok(Self::Value { key: name, value: key });
        }
        let Some(id) = ListedId::parse(&key).filter(|_| spelled == Spelled::KeyOrId) else {
            return Ok(Self::Key(key));
        };
        if let Some(caller) = id.find(admin).await? {
            return Ok(caller);
        }
        if is_known_key(admin, &key).await? {
            return Ok(Self::Key(key));
        }
        let detail = "this is spelled like a caller's id, and no caller with this id or API key is known: this node has \
                      it in no list or log, and no quota belongs to it; use the full API key or, if this is one, \
                      say so with `?key=api_key` (on the command line `--key api_key`)";
        Err(Problem::new(StatusCode::NOT_FOUND, "Unknown caller id", detail).in_field("api_key"))
    }

    async fn by_id(admin: &AdminState, id: &str) -> Result<Self, Problem> {
        let id = ListedId::parse(id).ok_or_else(|| {
            let detail = "must be the 64 hexadecimal digits of an `id` from a quota list, or the 16 of a `key_id` from a caller list";
            Problem::bad(detail).in_field("id")
        })?;
        let detail = "no quota has this id, and this node has no caller with it in its lists or log; send the request to the \
                      node that lists the caller, or use the full key";
        let found = id.find(admin).await?;
        found.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not found", detail))
    }

    /// Returns the caller for data stored under the key's hash.
    pub(crate) fn caller(&self) -> CallerRef<'_> {
        match self {
            Self::Key(key) | Self::Listed(key) => CallerRef::Key(key),
            Self::Id(id) => CallerRef::Id(*id),
            Self::Value { key, value } => CallerRef::of(key, value),
        }
    }

    /// Returns the attribute that identifies the caller, and its value, for data stored under the value.
    pub(crate) fn attribute(&self) -> Result<(&str, &str), Problem> {
        match self {
            Self::Key(key) | Self::Listed(key) => Ok((CALLER_KEY, key)),
            Self::Value { key, value } => Ok((key, value)),
            Self::Id(_) => {
                let detail = "counters are stored by what identifies the caller, and this node has not seen it recently; send the request to \
                              the node that lists the caller, or use the full key";
                Err(Problem::new(StatusCode::NOT_FOUND, "Not found", detail))
            }
        }
    }

    /// Returns what identifies the caller, as responses repeat it: only if the request contained it.
    pub(crate) fn sent(&self) -> SentCaller<'_> {
        match self {
            Self::Key(key) => SentCaller { api_key: Some(key), value: None },
            Self::Value { value, .. } => SentCaller { api_key: None, value: Some(value) },
            Self::Listed(_) | Self::Id(_) => SentCaller { api_key: None, value: None },
        }
    }
}
