//! Strict parser for HTTP/1 request and response heads: it rejects whatever two parsers could read in two ways.
//!
//! Request smuggling depends on leniency: a line that ends with a bare LF, a space before a colon, a folded line, a
//! length that occurs twice or next to `Transfer-Encoding`. The parser repairs none of these. It does no I/O: bytes in,
//! a head out. Rejected: a general-purpose parser, because those accept several of these forms for the sake of old
//! clients.

pub use super::error::{HeadError, HeadLimits};
use super::scan::{
    DuplicateLength, Field, FramingFields, HeadHeaders, HeaderIndex, ScannedHead, scan_fields,
};
use super::target::{absolute_target, check_host, check_origin_form, without_query};
pub use super::target::{check_path, is_host};
use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode, Uri, Version};

/// How the end of a message's body is determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// The message has no body.
    None,
    /// The length in bytes.
    Length(u64),
    /// Chunked transfer coding.
    Chunked,
    /// The body ends with the connection; responses only.
    UntilClose,
}

impl Framing {
    /// Returns the length of the body in bytes, if known.
    #[must_use]
    pub const fn length(self) -> Option<u64> {
        match self {
            Self::None => Some(0),
            Self::Length(length) => Some(length),
            Self::Chunked | Self::UntilClose => None,
        }
    }
}

/// A valid request head. It stores positions only; its methods take the bytes of the head.
#[derive(Debug)]
pub struct RequestHead {
    /// The method.
    pub method: Method,
    /// The target as a URI, if it is not in origin form (path and query).
    absolute: Option<Uri>,
    /// All other parts. `keep_alive` is set for HTTP/1.1 clients only.
    pub scan: ScannedHead,
}

/// A valid response head. It stores positions only; its methods take the bytes of the head.
#[derive(Debug)]
pub struct ResponseHead {
    /// The status.
    pub status: StatusCode,
    /// The framing of the body.
    pub framing: Framing,
    /// The connection can be reused.
    pub keep_alive: bool,
    fields: HeaderIndex,
}

impl ResponseHead {
    /// Returns the fields, borrowed from `head`.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> HeadHeaders<'h> {
        HeadHeaders { head, index: &self.fields }
    }

    /// Returns the fields as an owned map.
    ///
    /// # Errors
    /// [`HeadError`] for a field that a map cannot contain; the parser has rejected all of those.
    pub fn headers(&self, head: &Bytes) -> Result<HeaderMap, HeadError> {
        header_map(head, &self.fields)
    }
}

/// Returns the position after the head in `bytes`, if the head is complete. `seen` is the number of bytes scanned so
/// far.
///
/// # Errors
/// [`HeadError`] at the first malformed line, without waiting for the rest of the head.
pub fn end_of_head(bytes: &[u8], seen: &mut usize, limits: &HeadLimits) -> Result<Option<usize>, HeadError> {
    for feed in memchr::memchr_iter(b'\n', &bytes[*seen..]) {
        let feed = *seen + feed;
        if feed == 0 || bytes[feed - 1] != b'\r' {
            return Err(HeadError::LineEnding);
        }
        if feed >= 3 && bytes[feed - 2] == b'\n' {
            if feed >= limits.bytes {
                return Err(HeadError::TooLarge);
            }
            return Ok(Some(feed + 1));
        }
    }
    *seen = bytes.len();
    if bytes.len() >= limits.bytes { Err(HeadError::TooLarge) } else { Ok(None) }
}

/// Parses a complete request head including its final empty line. Besides what [`ScannedHead`] rejects, it rejects what
/// a proxy must not forward: targets that could resolve to another path, and invalid hosts.
///
/// # Errors
/// [`HeadError`] for input that is malformed or ambiguous.
pub fn request(head: &[u8], limits: &HeadLimits) -> Result<RequestHead, HeadError> {
    let mut scan = ScannedHead::new(head, limits)?;
    let method = Method::from_bytes(scan.method(head)).map_err(|_| HeadError::RequestLine)?;
    if method == Method::CONNECT {
        return Err(HeadError::Method);
    }
    let target = scan.target(head);
    let absolute = if target.starts_with('/') {
        check_origin_form(target)?;
        None
    } else {
        Some(absolute_target(target, &method)?)
    };
    check_host(scan.host.map(|host| host.locate(head)), absolute.as_ref(), scan.version)?;
    scan.keep_alive &= scan.version == Version::HTTP_11;
    Ok(RequestHead { method, absolute, scan })
}

impl AsRef<ScannedHead> for RequestHead {
    fn as_ref(&self) -> &ScannedHead {
        &self.scan
    }
}

impl RequestHead {
    /// Returns the fields, borrowed from `head`.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> HeadHeaders<'h> {
        self.scan.fields(head)
    }

    /// Returns the path of the target.
    #[must_use]
    pub fn path<'h>(&'h self, head: &'h [u8]) -> &'h str {
        match &self.absolute {
            Some(uri) => uri.path(),
            None => without_query(self.scan.target(head)),
        }
    }

    /// Returns the path and query of the target.
    #[must_use]
    pub fn path_and_query<'h>(&'h self, head: &'h [u8]) -> &'h str {
        match &self.absolute {
            Some(uri) => uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str),
            None => self.scan.target(head),
        }
    }

    /// Returns the authority of a target in absolute form.
    #[must_use]
    pub fn authority(&self) -> Option<&str> {
        self.absolute.as_ref()?.authority().map(http::uri::Authority::as_str)
    }

    /// Returns the method, the target and the fields as owned values.
    ///
    /// # Errors
    /// [`HeadError`] for a field that a map cannot contain; the parser has rejected all of those.
    pub fn into_parts(self, head: &[u8]) -> Result<(Method, Uri, HeaderMap), HeadError> {
        let head = Bytes::copy_from_slice(head);
        let headers = header_map(&head, &self.scan.fields)?;
        let uri = match self.absolute {
            Some(uri) => uri,
            None => {
                Uri::from_maybe_shared(head.slice(self.scan.target.range())).map_err(|_| HeadError::Target)?
            }
        };
        Ok((self.method, uri, headers))
    }
}

/// Parses a complete response head. `method` is the method of its request.
///
/// # Errors
/// [`HeadError`] for input that is malformed or ambiguous.
pub fn response(head: &[u8], limits: &HeadLimits, method: &Method) -> Result<ResponseHead, HeadError> {
    let line = line_at(head, 0)?;
    let version = match head.get(..9) {
        Some(b"HTTP/1.1 ") => Version::HTTP_11,
        Some(b"HTTP/1.0 ") => Version::HTTP_10,
        _ => return Err(HeadError::StatusLine),
    };
    let digits = head.get(9..12).ok_or(HeadError::StatusLine)?;
    // Some servers omit the space before an empty reason phrase.
    if line < 12 || (line > 12 && head[12] != b' ') || !are_values(&head[12..line]) {
        return Err(HeadError::StatusLine);
    }
    let status = StatusCode::from_bytes(digits).map_err(|_| HeadError::StatusLine)?;
    let mut marks = FramingFields::new(DuplicateLength::AllowedIfEqual);
    let fields = scan_fields(head, line + 2, limits, &mut marks)?;
    let bodiless = method == Method::HEAD
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED;
    let framing = match (marks.length, marks.chunked) {
        (Some(_), true) => return Err(HeadError::TwoLengths),
        _ if bodiless => Framing::None,
        (None, true) => Framing::Chunked,
        (Some(0), false) => Framing::None,
        (Some(length), false) => Framing::Length(length),
        (None, false) => Framing::UntilClose,
    };
    // Some servers send the body of such a response all the same, and it would be read as the next response.
    let may_follow =
        bodiless && (method == Method::HEAD || marks.chunked || marks.length.is_some_and(|n| n > 0));
    let keep_alive =
        !marks.close && version == Version::HTTP_11 && framing != Framing::UntilClose && !may_follow;
    Ok(ResponseHead { status, framing, keep_alive, fields })
}

/// Parses the fields from `at` to the empty line that ends `head`.
///
/// # Errors
/// [`HeadError`] for a line that is not a field.
pub fn fields(head: &Bytes, at: usize, limits: &HeadLimits) -> Result<HeaderMap, HeadError> {
    // Framing fields have no meaning in a trailer section: they are parsed here, and the caller removes them.
    let fields = scan_fields(head, at, limits, &mut ())?;
    header_map(head, &fields)
}

fn header_map(head: &Bytes, fields: &[Field]) -> Result<HeaderMap, HeadError> {
    let mut headers = HeaderMap::with_capacity(fields.len().max(12));
    for field in fields {
        let name = HeaderName::from_bytes(field.name.locate(head)).map_err(|_| HeadError::FieldName)?;
        let value = HeaderValue::from_maybe_shared(head.slice(field.value.range()));
        headers.append(name, value.map_err(|_| HeadError::FieldValue)?);
    }
    Ok(headers)
}

/// Returns the position of the CR LF that ends the line at `at`.
pub(super) fn line_at(head: &[u8], at: usize) -> Result<usize, HeadError> {
    let rest = head.get(at..).ok_or(HeadError::LineEnding)?;
    let end = memchr::memchr2(b'\r', b'\n', rest).ok_or(HeadError::LineEnding)?;
    if rest[end] == b'\r' && rest.get(end + 1) == Some(&b'\n') {
        Ok(at + end)
    } else {
        Err(HeadError::LineEnding)
    }
}

/// Returns whether `byte` is a token character, as in field names.
pub(super) const fn is_token(byte: u8) -> bool {
    const TOKENS: [bool; 256] = {
        let mut table = [false; 256];
        let mut at = 0;
        while at < 256 {
            let byte = at as u8;
            table[at] = byte.is_ascii_alphanumeric();
            at += 1;
        }
        let others = b"!#$%&'*+-.^_`|~";
        let mut at = 0;
        while at < others.len() {
            table[others[at] as usize] = true;
            at += 1;
        }
        table
    };
    TOKENS[byte as usize]
}

/// Returns whether `value` is a valid field value. It does not stop at the first bad byte, so that the loop vectorizes.
#[must_use]
pub fn are_values(value: &[u8]) -> bool {
    !value.iter().fold(false, |is_bad, byte| is_bad | !is_value(*byte))
}

/// Accepts no control character except the tab.
const fn is_value(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}
