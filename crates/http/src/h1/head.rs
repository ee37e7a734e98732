//! The filter that every HTTP/1 request head passes: what two readers could read in two ways is refused.
//!
//! Request smuggling lives on leniency: a line ended by a bare LF, a space before a colon, a folded line, a length told
//! twice or beside `Transfer-Encoding`. None of these is repaired here. Written for this place rather than taken from a
//! general parser, because those accept several of them for the sake of old clients. Pure: bytes in, a head out.

pub use super::error::{HeadError, HeadLimits};
use super::scan::{
    DuplicateLength, Field, FramingFields, HeadHeaders, HeaderIndex, ScannedHead, scan_fields,
};
use super::target::{absolute_target, check_host, check_origin_form, without_query};
pub use super::target::{check_path, is_host};
use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode, Uri, Version};

/// How a message's body is told apart from what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// There is none.
    None,
    /// So many bytes.
    Length(u64),
    /// In chunks.
    Chunked,
    /// All that comes until the connection ends: answers only.
    UntilClose,
}

impl Framing {
    /// Bytes of the body, where that is known.
    #[must_use]
    pub const fn length(self) -> Option<u64> {
        match self {
            Self::None => Some(0),
            Self::Length(length) => Some(length),
            Self::Chunked | Self::UntilClose => None,
        }
    }
}

/// A request head that has passed. It knows where things lie: whoever asks brings the bytes again.
#[derive(Debug)]
pub struct RequestHead {
    /// The method.
    pub method: Method,
    /// The whole target, where the caller wrote more than a path and a query.
    absolute: Option<Uri>,
    /// Everything else. Only clients of HTTP/1.1 keep their connection.
    pub scan: ScannedHead,
}

/// An answer's head that has passed. It knows where things lie: whoever asks brings the bytes again.
#[derive(Debug)]
pub struct ResponseHead {
    /// The status.
    pub status: StatusCode,
    /// What follows.
    pub framing: Framing,
    /// Whether the connection can be used again.
    pub keep_alive: bool,
    fields: HeaderIndex,
}

impl ResponseHead {
    /// The fields where they lie.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> HeadHeaders<'h> {
        HeadHeaders { head, index: &self.fields }
    }

    /// The fields as a map, for who keeps them.
    ///
    /// # Errors
    /// [`HeadError`] for what no map can hold; the filter lets none of it through.
    pub fn headers(&self, head: &Bytes) -> Result<HeaderMap, HeadError> {
        header_map(head, &self.fields)
    }
}

/// Where the head in `bytes` ends, if it does; `seen` remembers what was looked at before.
///
/// # Errors
/// [`HeadError`] as soon as a line is wrong, so that nobody waits for the rest of what is refused anyway.
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

/// Reads a whole request head, its last empty line included, and whatever a proxy must refuse on top of what [`ScannedHead`]
/// does: targets that hide their path, and hosts that are none.
///
/// # Errors
/// [`HeadError`] for whatever could be read in two ways.
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
    /// The fields where they lie.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> HeadHeaders<'h> {
        self.scan.fields(head)
    }

    /// The target's path.
    #[must_use]
    pub fn path<'h>(&'h self, head: &'h [u8]) -> &'h str {
        match &self.absolute {
            Some(uri) => uri.path(),
            None => without_query(self.scan.target(head)),
        }
    }

    /// The target's path and query.
    #[must_use]
    pub fn path_and_query<'h>(&'h self, head: &'h [u8]) -> &'h str {
        match &self.absolute {
            Some(uri) => uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str),
            None => self.scan.target(head),
        }
    }

    /// The target's host, where it has one.
    #[must_use]
    pub fn authority(&self) -> Option<&str> {
        self.absolute.as_ref()?.authority().map(http::uri::Authority::as_str)
    }

    /// The method, the target and the fields as a map, for who keeps them.
    ///
    /// # Errors
    /// [`HeadError`] for what no map can hold; the filter lets none of it through.
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

/// Reads a whole answer's head. `asked` is the method that it answers.
///
/// # Errors
/// [`HeadError`] for whatever could be read in two ways.
pub fn response(head: &[u8], limits: &HeadLimits, asked: &Method) -> Result<ResponseHead, HeadError> {
    let line = line_at(head, 0)?;
    let version = match head.get(..9) {
        Some(b"HTTP/1.1 ") => Version::HTTP_11,
        Some(b"HTTP/1.0 ") => Version::HTTP_10,
        _ => return Err(HeadError::StatusLine),
    };
    let digits = head.get(9..12).ok_or(HeadError::StatusLine)?;
    // Some servers leave the space before an empty reason out.
    if line < 12 || (line > 12 && head[12] != b' ') || !are_values(&head[12..line]) {
        return Err(HeadError::StatusLine);
    }
    let status = StatusCode::from_bytes(digits).map_err(|_| HeadError::StatusLine)?;
    let mut marks = FramingFields::new(DuplicateLength::AllowedIfEqual);
    let fields = scan_fields(head, line + 2, limits, &mut marks)?;
    let bodiless = asked == Method::HEAD
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
    let keep_alive = !marks.close && version == Version::HTTP_11 && framing != Framing::UntilClose;
    Ok(ResponseHead { status, framing, keep_alive, fields })
}

/// The fields from `at` to the empty line that ends `head`.
///
/// # Errors
/// [`HeadError`] for a line that is no field.
pub fn fields(head: &Bytes, at: usize, limits: &HeadLimits) -> Result<HeaderMap, HeadError> {
    // What frames a message has no meaning behind one: it is read, and left out by who asks.
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

/// Where the line that starts at `at` ends: the place of its CR LF.
pub(super) fn line_at(head: &[u8], at: usize) -> Result<usize, HeadError> {
    let rest = head.get(at..).ok_or(HeadError::LineEnding)?;
    let end = memchr::memchr2(b'\r', b'\n', rest).ok_or(HeadError::LineEnding)?;
    if rest[end] == b'\r' && rest.get(end + 1) == Some(&b'\n') {
        Ok(at + end)
    } else {
        Err(HeadError::LineEnding)
    }
}

/// The characters of names.
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

/// Whether a field's value may be this. All of it is looked at, bad or not: so many bytes are compared at once.
#[must_use]
pub fn are_values(value: &[u8]) -> bool {
    !value.iter().fold(false, |is_bad, byte| is_bad | !is_value(*byte))
}

/// Of control characters, only the tab.
const fn is_value(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}
