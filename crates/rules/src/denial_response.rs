//! The response to a denial, where a rule or its file sets one: a status, and a body with what the decision knows filled in.
//!
//! A body is parsed when rules are loaded, and each mistake is found there: a field that does not exist, and JSON that would be
//! none. Only numbers and what operators have written are filled in, nothing of a request: a caller cannot put anything into a
//! page that others see. Rejected: a template engine. A denial is written for each request of a flood, so that it must be
//! cheap and bounded.

use crate::reader::{Reader, scalar};
use crate::yaml::{Position, YamlNode};
use std::fmt;
use std::io::Write;
use std::sync::Arc;

/// The response to a denial by a rule's limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DenialResponse {
    /// The status; the integration's if absent.
    pub status: Option<u16>,
    /// The body; the integration's if absent.
    pub body: Option<Arc<BodyTemplate>>,
}

/// A body in which fields are filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyTemplate {
    /// Literal text, and the field that follows it.
    parts: Vec<(String, Option<BodyField>)>,
    media_type: MediaType,
}

/// What can be filled into a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyField {
    /// Name of the rule that denied.
    Rule,
    /// Units per window of the limit that denied.
    Limit,
    /// Its window, such as `1m`.
    Window,
    /// Units that remain of it.
    Remaining,
    /// Seconds until its next unit.
    Reset,
    /// Seconds until the same request would pass; `null` if it never would.
    RetryAfter,
    /// The decision ID.
    DecisionId,
}

impl BodyField {
    const ALL: [(&'static str, Self); 7] = [
        ("rule", Self::Rule),
        ("limit", Self::Limit),
        ("window", Self::Window),
        ("remaining", Self::Remaining),
        ("reset", Self::Reset),
        ("retry_after", Self::RetryAfter),
        ("decision_id", Self::DecisionId),
    ];
}

/// The media type of a body, which determines how text is escaped in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MediaType(&'static str);

impl MediaType {
    const ALL: [Self; 6] = [
        Self("application/json"),
        Self("application/problem+json"),
        Self("application/vnd.api+json"),
        Self("application/xml"),
        Self("text/html"),
        Self("text/plain"),
    ];

    fn is_json(self) -> bool {
        self.0.ends_with("json")
    }

    /// Appends text in a form that ends no string and no element.
    fn escape(self, text: &str, out: &mut Vec<u8>) {
        if self.is_json() {
            let mut quoted = Vec::with_capacity(text.len() + 2);
            // Writing to memory cannot fail.
            let _ = serde_json::to_writer(&mut quoted, text);
            out.extend_from_slice(&quoted[1..quoted.len() - 1]);
            return;
        }
        let is_plain = self.0 == "text/plain";
        for byte in text.bytes() {
            match byte {
                b'<' if !is_plain => out.extend_from_slice(b"&lt;"),
                b'>' if !is_plain => out.extend_from_slice(b"&gt;"),
                b'&' if !is_plain => out.extend_from_slice(b"&amp;"),
                b'"' if !is_plain => out.extend_from_slice(b"&quot;"),
                b'\'' if !is_plain => out.extend_from_slice(b"&#39;"),
                _ => out.push(byte),
            }
        }
    }
}

/// The value of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldValue<'v> {
    /// Text, which is escaped.
    Text(std::borrow::Cow<'v, str>),
    /// A number.
    Number(u64),
    /// Nothing is known: `null`.
    Unknown,
}

impl BodyTemplate {
    /// Maximum number of fields; the text of a file's value is bounded by the reader.
    const MAX_FIELDS: usize = 32;

    /// Returns the media type.
    #[must_use]
    pub const fn media_type(&self) -> &'static str {
        self.media_type.0
    }

    /// Appends the body with the values of its fields.
    pub fn render<'v>(&self, value: impl Fn(BodyField) -> FieldValue<'v>, out: &mut Vec<u8>) {
        for (text, field) in &self.parts {
            out.extend_from_slice(text.as_bytes());
            match field.map(&value) {
                Some(FieldValue::Text(text)) => self.media_type.escape(&text, out),
                // Writing to memory cannot fail.
                Some(FieldValue::Number(number)) => drop(write!(out, "{number}")),
                Some(FieldValue::Unknown) => out.extend_from_slice(b"null"),
                None => {}
            }
        }
    }

    /// Parses a body; reports fields that do not exist.
    fn parse(reader: &mut Reader<'_>, at: Position, text: &str, media_type: MediaType) -> Option<Self> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, field)) = rest.split_once("{{") {
            let Some((name, after)) = field.split_once("}}") else {
                reader.error_help(at, "`{{` without `}}` in `body`", "write a field as in `{{retry_after}}`");
                return None;
            };
            let Some((_, field)) = BodyField::ALL.iter().find(|(known, _)| *known == name.trim()) else {
                reader.unknown_value(
                    at,
                    "field of `body`",
                    name.trim(),
                    &BodyField::ALL.map(|(name, _)| name),
                );
                return None;
            };
            parts.push((before.to_owned(), Some(*field)));
            if parts.len() > Self::MAX_FIELDS {
                reader.error(at, format!("`body` has more than {} fields", Self::MAX_FIELDS));
                return None;
            }
            rest = after;
        }
        parts.push((rest.to_owned(), None));
        Some(Self { parts, media_type })
    }

    /// Reports a body that would be no JSON.
    fn check(&self, reader: &mut Reader<'_>, at: Position) {
        if !self.media_type.is_json() {
            return;
        }
        let mut sample = Vec::new();
        let value = |field| match field {
            BodyField::Rule | BodyField::Window | BodyField::DecisionId => FieldValue::Text("a".into()),
            _ => FieldValue::Number(1),
        };
        self.render(value, &mut sample);
        if let Err(error) = serde_json::from_slice::<serde_json::Value>(&sample) {
            reader.error_help(
                at,
                format!("`body` is not JSON once its fields are filled in: {error}"),
                "put text fields in quotes, as in `{\"rule\": \"{{rule}}\", \"retry_after\": {{retry_after}}}`, or give another `content_type`",
            );
        }
    }
}

impl DenialResponse {
    const EXAMPLE: &'static str = "{status: 403, body: '{\"error\": \"{{rule}}\"}'}";

    /// Reads a `response`.
    pub(crate) fn read(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Self {
        let mut response = Self::default();
        let (mut body, mut media_type) = (None, None);
        let Some(pairs) = reader.mapping(node, "response", Self::EXAMPLE) else { return response };
        for (key, node) in pairs {
            match scalar(key) {
                "status" => {
                    let status = reader.number(node, "status", (400, 599), "403");
                    response.status = status.and_then(|status| u16::try_from(status.value).ok());
                }
                "body" => body = reader.text(node, "body", "'{\"error\": \"{{rule}}\"}'"),
                "content_type" => media_type = reader.text(node, "content_type", "application/json"),
                _ => reader.unknown_key(key, "`response`", &["status", "body", "content_type"]),
            }
        }
        let kind = match &media_type {
            None => Some(MediaType::ALL[0]),
            Some(given) => {
                let known = MediaType::ALL.into_iter().find(|known| known.0 == given.value);
                if known.is_none() {
                    let all = MediaType::ALL.map(|known| known.0);
                    reader.unknown_value(given.at, "content_type", &given.value, &all);
                }
                known
            }
        };
        match (body, kind, media_type) {
            (Some(body), Some(kind), _) => {
                let template = BodyTemplate::parse(reader, body.at, &body.value, kind);
                template.iter().for_each(|template| template.check(reader, body.at));
                response.body = template.map(Arc::new);
            }
            (None, _, Some(given)) => {
                reader.error_help(given.at, "`content_type` without a `body`", "write `body` beside it");
            }
            (Some(_), None, _) | (None, _, None) => {}
        }
        response
    }

    /// Takes from the level above what is not set here.
    pub(crate) fn inherit(&mut self, from: &Self) {
        self.status = self.status.or(from.status);
        if self.body.is_none() {
            self.body.clone_from(&from.body);
        }
    }

    /// Returns whether nothing is set.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.status.is_none() && self.body.is_none()
    }
}

impl fmt::Display for DenialResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(status) = self.status {
            write!(f, "{status}")?;
        }
        if let Some(body) = &self.body {
            let gap = if self.status.is_some() { " " } else { "" };
            write!(f, "{gap}{} ", body.media_type())?;
            for (text, field) in &body.parts {
                f.write_str(text)?;
                if let Some((name, _)) = BodyField::ALL.iter().find(|(_, known)| Some(*known) == *field) {
                    write!(f, "{{{{{name}}}}}")?;
                }
            }
        }
        Ok(())
    }
}
