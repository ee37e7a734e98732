//! The head of a request: its fields in order, and the rules that a head must keep (RFC 9113, section 8). One value is
//! used for all requests of a connection, so that a head allocates nothing.

use super::hpack::FIELD_OVERHEAD;
use crate::headers::HeaderLookup;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use std::ops::Range;

/// How many times larger than it may be a head is read and decoded, only to keep the state of the connection for other requests.
pub(super) const FLOOD: usize = 4;

/// What a field's name says. A dynamic table keeps it with the name, so that a name is examined once, however often fields refer
/// to it: a reference takes two bytes, and a name up to four thousand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameKind {
    Method,
    Scheme,
    Authority,
    Path,
    ContentLength,
    Te,
    Other,
    /// No request may have it.
    Invalid,
}

impl NameKind {
    pub(super) fn of(name: &[u8]) -> Self {
        match name {
            b":method" => Self::Method,
            b":path" => Self::Path,
            b":scheme" => Self::Scheme,
            b":authority" => Self::Authority,
            // Fields of a connection, which HTTP/2 has others for.
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => {
                Self::Invalid
            }
            b"te" => Self::Te,
            b"content-length" => Self::ContentLength,
            _ if is_token(name) && !name.iter().any(u8::is_ascii_uppercase) => Self::Other,
            _ => Self::Invalid,
        }
    }
}

/// What a field means for a request; found once for each field of a dynamic table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    Method,
    Scheme,
    Authority,
    Path,
    ContentLength(u64),
    Other,
    /// No request may have it.
    Invalid,
}

impl Meaning {
    pub(super) fn of(name: NameKind, value: &[u8]) -> Self {
        if value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
            return Self::Invalid;
        }
        // Space around the value of an ordinary field is no part of it: some proxies pass a caller's on.
        if name != NameKind::Other && value != trimmed(value) {
            return Self::Invalid;
        }
        match name {
            NameKind::Method if is_token(value) => Self::Method,
            NameKind::Path if !value.is_empty() => Self::Path,
            NameKind::Scheme => Self::Scheme,
            NameKind::Authority => Self::Authority,
            NameKind::ContentLength => match std::str::from_utf8(value).ok().filter(|text| is_digits(text)) {
                Some(text) => text.parse().map_or(Self::Invalid, Self::ContentLength),
                None => Self::Invalid,
            },
            NameKind::Te if value == b"trailers" => Self::Other,
            NameKind::Other => Self::Other,
            _ => Self::Invalid,
        }
    }
}

/// Returns a value without the spaces and tabs around it.
fn trimmed(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Which bytes a `token` of RFC 9110 may have.
const TOKEN: [bool; 256] = {
    let mut may = [false; 256];
    let (marks, mut at) = (b"!#$%&'*+-.^_`|~", 0);
    while at < marks.len() {
        may[marks[at] as usize] = true;
        at += 1;
    }
    let mut byte = 0;
    while byte < 128 {
        may[byte] |= (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    may
};

fn is_token(text: &[u8]) -> bool {
    #[cfg(test)]
    EXAMINED.with(|examined| examined.set(examined.get() + text.len()));
    !text.is_empty() && text.iter().all(|byte| TOKEN[usize::from(*byte)])
}

/// The fields of a request's head.
#[derive(Debug, Default)]
pub struct Head {
    text: Vec<u8>,
    fields: Vec<(Range<usize>, Range<usize>)>,
    method: Option<Range<usize>>,
    scheme: Option<Range<usize>>,
    authority: Option<Range<usize>>,
    path: Option<Range<usize>>,
    content_length: Option<u64>,
    is_malformed: bool,
    /// What the fields count, also those that were not kept.
    size: usize,
    max_size: usize,
}

impl Head {
    /// Creates a head for fields of this size at most, as RFC 9113 counts it.
    pub(super) fn new(max_size: usize) -> Self {
        Self { max_size, ..Self::default() }
    }

    pub(super) fn clear(&mut self) {
        self.text.clear();
        self.fields.clear();
        (self.method, self.scheme, self.authority, self.path) = (None, None, None, None);
        (self.content_length, self.is_malformed, self.size) = (None, false, 0);
    }

    /// Frees memory that an earlier head has needed.
    pub(super) fn shrink(&mut self) {
        *self = Self::new(self.max_size);
    }

    /// Adds a field.
    pub(super) fn push(&mut self, meaning: Meaning, name: &[u8], value: &[u8]) {
        self.size = self.size.saturating_add(name.len() + value.len() + FIELD_OVERHEAD);
        if self.is_too_large() {
            return;
        }
        let begin = self.text.len();
        let pseudo = match meaning {
            Meaning::Method => &mut self.method,
            Meaning::Scheme => &mut self.scheme,
            Meaning::Authority => &mut self.authority,
            Meaning::Path => &mut self.path,
            Meaning::Invalid => return self.is_malformed = true,
            Meaning::ContentLength(_) | Meaning::Other => {
                if let Meaning::ContentLength(length) = meaning {
                    self.is_malformed |=
                        self.content_length.replace(length).is_some_and(|other| other != length);
                }
                self.text.extend_from_slice(name);
                self.text.extend_from_slice(trimmed(value));
                let middle = begin + name.len();
                return self.fields.push((begin..middle, middle..self.text.len()));
            }
        };
        self.text.extend_from_slice(value);
        // Before all other fields, and once.
        self.is_malformed |= pseudo.replace(begin..self.text.len()).is_some() || !self.fields.is_empty();
    }

    /// Returns whether the fields are larger than they may be.
    pub(super) const fn is_too_large(&self) -> bool {
        self.size > self.max_size
    }

    /// Returns whether they are so much larger that no more of them are to be decoded.
    pub(super) const fn is_flood(&self) -> bool {
        self.size / FLOOD > self.max_size
    }

    /// Returns whether this may be the head of a request. (`CONNECT`, which has no path, is nothing that we serve.)
    pub(super) const fn is_request(&self) -> bool {
        !self.is_malformed && self.method.is_some() && self.scheme.is_some() && self.path.is_some()
    }

    /// Returns whether these may be the trailers of a request.
    pub(super) const fn is_trailers(&self) -> bool {
        let has_pseudo = self.method.is_some() || self.scheme.is_some() || self.path.is_some();
        !(self.is_malformed || has_pseudo || self.authority.is_some())
    }

    pub(super) const fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    fn text(&self, range: Option<&Range<usize>>) -> &[u8] {
        range.map_or(&[], |range| &self.text[range.clone()])
    }

    /// Returns the method.
    #[must_use]
    pub fn method(&self) -> &[u8] {
        self.text(self.method.as_ref())
    }

    /// Returns the path, with its query.
    #[must_use]
    pub fn path(&self) -> &[u8] {
        self.text(self.path.as_ref())
    }

    /// Returns the authority; empty if there is none.
    #[must_use]
    pub fn authority(&self) -> &[u8] {
        self.text(self.authority.as_ref())
    }

    /// Returns the first value of a field, by its name in lower case.
    #[must_use]
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        let (_, value) = self.fields.iter().find(|(field, _)| &self.text[field.clone()] == name)?;
        Some(&self.text[value.clone()])
    }

    /// Returns the first values of these fields as a map. All fields are not to be kept: a reference of one byte can be to each of
    /// them, and takes a hundred bytes of a map.
    #[must_use]
    pub fn to_map_of(&self, names: &[&'static str]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for name in names {
            // A value may still be one that a map does not take.
            let value = self.get(name.as_bytes()).map(HeaderValue::from_bytes);
            if let Some(Ok(value)) = value {
                map.insert(HeaderName::from_static(name), value);
            }
        }
        map
    }
}

impl HeaderLookup for Head {
    fn all(&self, name: &HeaderName) -> impl DoubleEndedIterator<Item = &[u8]> {
        let named = self
            .fields
            .iter()
            .filter(move |(field, _)| &self.text[field.clone()] == name.as_str().as_bytes());
        named.map(|(_, value)| &self.text[value.clone()])
    }

    fn each(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.fields.iter().map(|(name, value)| (&self.text[name.clone()], &self.text[value.clone()]))
    }
}

#[cfg(test)]
thread_local! {
    /// Bytes of names that were examined.
    pub(super) static EXAMINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
