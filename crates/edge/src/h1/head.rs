//! The filter that every HTTP/1 request head passes: what two readers could read in two ways is refused.
//!
//! Request smuggling lives on leniency: a line ended by a bare LF, a space before a colon, a folded line, a length told
//! twice or beside `Transfer-Encoding`. None of these is repaired here. Written for this place rather than taken from a
//! general parser, because those accept several of them for the sake of old clients. Pure: bytes in, a head out.

use super::scan::{Field, FieldPlaces, FieldsOf, Marks, Scan, Twins, scan_fields};
use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode, Uri, Version};

/// How much of a head is read.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Bytes in all.
    pub bytes: usize,
    /// Bytes of the target: path and query.
    pub target: usize,
    /// Fields.
    pub fields: usize,
}

impl Default for HeadLimits {
    fn default() -> Self {
        Self { bytes: 32 * 1024, target: 8 * 1024, fields: 100 }
    }
}

/// Why a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// A line feed without its carriage return, or the other way round.
    #[error("every line must end with CR LF")]
    LineEnding,
    /// Not `METHOD target HTTP/1.1`.
    #[error("the request line must be: method, one space, target, one space, HTTP/1.1")]
    RequestLine,
    /// Not `HTTP/1.1 200 OK`.
    #[error("the status line must be: HTTP/1.1, one space, three digits")]
    StatusLine,
    /// Another version.
    #[error("only HTTP/1.1 and HTTP/1.0 are spoken here")]
    Version,
    /// A method that no route can have.
    #[error("this method is not passed on")]
    Method,
    /// A target that is not a path, or hides what path it is.
    #[error(
        "the target must be a path of visible characters, without `.` and `..` segments and without a fragment"
    )]
    Target,
    /// Longer than is read.
    #[error("the target is longer than is read here")]
    TargetTooLong,
    /// More bytes or fields than are read.
    #[error("the header section is larger than is read here")]
    TooLarge,
    /// Not a token before the colon, a space before it, or none.
    #[error("a field's name must be a token directly followed by a colon")]
    FieldName,
    /// A field continued on the next line.
    #[error("a field may not be continued on a second line")]
    Folded,
    /// A control character.
    #[error("a field's value may not have control characters")]
    FieldValue,
    /// None, two, or one that is no host.
    #[error("exactly one Host field with a host's name is needed")]
    Host,
    /// Two lengths, or no number.
    #[error("Content-Length must be one number, once")]
    ContentLength,
    /// The two ways to tell a length at once.
    #[error("Content-Length and Transfer-Encoding exclude each other")]
    TwoLengths,
    /// Another encoding than `chunked`, or one in HTTP/1.0.
    #[error("the only transfer encoding understood here is `chunked`, in HTTP/1.1")]
    TransferEncoding,
    /// Another expectation than `100-continue`.
    #[error("the only expectation understood here is `100-continue`")]
    Expect,
    /// `Connection` names a field that the message cannot do without.
    #[error("Connection may not name a field that frames or directs the message")]
    Connection,
}

impl HeadError {
    /// The answer to a caller who sent this.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Version => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
            Self::Method | Self::TransferEncoding => StatusCode::NOT_IMPLEMENTED,
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::TooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Expect => StatusCode::EXPECTATION_FAILED,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

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
    /// Whether another request may follow on this connection.
    pub keep_alive: bool,
    /// Everything else.
    pub scan: Scan,
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
    fields: FieldPlaces,
}

impl ResponseHead {
    /// The fields where they lie.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> FieldsOf<'h> {
        FieldsOf { head, places: &self.fields }
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

/// Reads a whole request head, its last empty line included, and whatever a proxy must refuse on top of what [`Scan`]
/// does: targets that hide their path, and hosts that are none.
///
/// # Errors
/// [`HeadError`] for whatever could be read in two ways.
pub fn request(head: &[u8], limits: &HeadLimits) -> Result<RequestHead, HeadError> {
    let scan = Scan::new(head, limits)?;
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
    check_host(scan.host.map(|host| host.of(head)), absolute.as_ref(), scan.version)?;
    let keep_alive = scan.keep_alive && scan.version == Version::HTTP_11;
    Ok(RequestHead { method, absolute, keep_alive, scan })
}

impl RequestHead {
    /// The fields where they lie.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> FieldsOf<'h> {
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
    let mut marks = Marks::new(Twins::MayAgree);
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
        let name = HeaderName::from_bytes(field.name.of(head)).map_err(|_| HeadError::FieldName)?;
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

fn without_query(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}

/// What the `http` crate takes for a URI.
const LONGEST_URI: usize = 65_534;

/// A path and a query of the characters that a URI has, or that the world writes into one all the same.
fn check_origin_form(target: &str) -> Result<(), HeadError> {
    if target.len() > LONGEST_URI {
        return Err(HeadError::TargetTooLong);
    }
    let path = without_query(target);
    let rest = &target.as_bytes()[path.len()..];
    if path.bytes().all(is_of_path) && rest.iter().all(|byte| is_of_query(*byte)) {
        check_path(path)
    } else {
        Err(HeadError::Target)
    }
}

/// The characters of paths: those of the `http` crate, which whoever takes a target as a URI relies on.
const fn is_of_path(byte: u8) -> bool {
    matches!(byte, 0x21..=0x22 | 0x24..=0x3b | 0x3d | 0x40..=0x5f | 0x61..=0x7e)
}

/// The characters of queries, and the mark before them.
const fn is_of_query(byte: u8) -> bool {
    matches!(byte, 0x21 | 0x24..=0x3b | 0x3d | 0x3f..=0x7e)
}

/// `http://host/path`, or the asterisk of `OPTIONS`.
fn absolute_target(target: &str, method: &Method) -> Result<Uri, HeadError> {
    let asterisk = target == "*";
    if asterisk && method != Method::OPTIONS {
        return Err(HeadError::Target);
    }
    let uri = Uri::try_from(target).map_err(|_| HeadError::Target)?;
    if !asterisk && !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(HeadError::Target);
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(HeadError::Target);
    }
    check_path(uri.path())?;
    Ok(uri)
}

/// A path with `.` and `..` segments is another path to the next reader than to the rules.
pub fn check_path(path: &str) -> Result<(), HeadError> {
    let path = path.as_bytes();
    // Nearly every path has neither a segment that begins with a dot nor an escape.
    let suspect = memchr::memchr3_iter(b'%', b'\\', b'.', path)
        .any(|at| path[at] != b'.' || at == 0 || matches!(path[at - 1], b'/' | b'.'));
    if !suspect {
        return Ok(());
    }
    if path.contains(&b'\\') {
        return Err(HeadError::Target);
    }
    let text = String::from_utf8_lossy(path).to_ascii_lowercase();
    let text = text.replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
    // `..;x` is `..` to some servers.
    let names = text.split('/').map(|segment| segment.split(';').next().unwrap_or(segment));
    let mut hidden = names.filter(|name| matches!(*name, "." | ".."));
    if text.contains("%00") || hidden.next().is_some() { Err(HeadError::Target) } else { Ok(()) }
}

/// Whether a host has the characters of one, and could be quoted.
#[must_use]
pub fn is_host(host: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]%".contains(byte);
    !host.is_empty() && host.iter().all(plain)
}

fn check_host(host: Option<&[u8]>, absolute: Option<&Uri>, version: Version) -> Result<(), HeadError> {
    let host = match host {
        Some(host) => host,
        None if version == Version::HTTP_10 => return Ok(()),
        None => return Err(HeadError::Host),
    };
    if !is_host(host) {
        return Err(HeadError::Host);
    }
    match absolute.and_then(Uri::authority) {
        Some(authority) if !authority.as_str().as_bytes().eq_ignore_ascii_case(host) => Err(HeadError::Host),
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A target that passes here and is no URI would be lost on the way to whoever needs one.
    #[test]
    fn targets_are_those_of_the_http_crate() {
        for byte in 0x21..0x7f_u8 {
            for target in [format!("/a{}b", byte as char), format!("/?a{}b", byte as char)] {
                let checked = check_origin_form(&target).is_ok();
                let known = target.parse::<Uri>().is_ok() && !matches!(byte, b'#' | b'\\');
                assert_eq!(checked || byte == b'\\', known || byte == b'\\', "{target}");
            }
        }
    }
}
