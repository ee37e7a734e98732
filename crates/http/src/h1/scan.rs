//! A request head scanned in place: one pass over the bytes, without a map and without copies.
//!
//! A server that responds itself needs no more. The scan records the framing fields as it passes them, so that a length
//! that occurs twice or next to `Transfer-Encoding` is rejected even if nothing looks it up.

use super::head::{Framing, HeadError, HeadLimits, are_values, is_token, line_at};
use crate::headers::HeaderLookup;
use http::Version;
use http::header::HeaderName;
use smallvec::SmallVec;
use std::ops::Range;

/// Maximum length of a field name in bytes: longer than any name in use, and well below what `HeaderName` accepts.
const MAX_NAME: usize = 1024;

/// A byte range within a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ByteRange {
    start: u32,
    end: u32,
}

impl ByteRange {
    fn new(start: usize, end: usize) -> Self {
        // `HeadLimits` are far below `u32::MAX`.
        let short = |at| u32::try_from(at).unwrap_or(u32::MAX);
        Self { start: short(start), end: short(end) }
    }

    const fn len(self) -> usize {
        (self.end - self.start) as usize
    }

    pub(super) fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    pub(super) fn locate(self, head: &[u8]) -> &[u8] {
        &head[self.range()]
    }
}

/// The positions of a field's name and value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub(super) name: ByteRange,
    pub(super) value: ByteRange,
}

/// The positions of all fields of a head.
#[derive(Debug, Default)]
pub(super) struct HeaderIndex {
    all: SmallVec<[Field; 16]>,
    /// One bit per name length (modulo 64). Most lookups are for absent fields; this filter answers those without a
    /// scan.
    lengths: u64,
}

impl HeaderIndex {
    fn push(&mut self, field: Field) {
        self.lengths |= length_bit(field.name.len());
        self.all.push(field);
    }
}

impl std::ops::Deref for HeaderIndex {
    type Target = [Field];

    fn deref(&self) -> &[Field] {
        &self.all
    }
}

const fn length_bit(length: usize) -> u64 {
    1 << (length % 64)
}

/// A request head as the positions of its parts.
#[derive(Debug)]
pub struct ScannedHead {
    method: ByteRange,
    pub(super) target: ByteRange,
    pub(super) fields: HeaderIndex,
    pub(super) host: Option<ByteRange>,
    /// The method is `HEAD`.
    pub is_head: bool,
    /// The version: 1.0 or 1.1.
    pub version: Version,
    /// The framing of the body.
    pub framing: Framing,
    /// Another request may follow on this connection.
    pub keep_alive: bool,
    /// The client waits for `100 Continue` before it sends its body.
    pub expects_continue: bool,
}

impl AsRef<Self> for ScannedHead {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl ScannedHead {
    /// Parses a complete head including its final empty line.
    ///
    /// # Errors
    /// [`HeadError`] for input that is malformed or ambiguous.
    pub fn new(head: &[u8], limits: &HeadLimits) -> Result<Self, HeadError> {
        let line = line_at(head, 0)?;
        let mut words = head[..line].splitn(3, |byte| *byte == b' ');
        let (Some(method), Some(target), Some(version)) = (words.next(), words.next(), words.next()) else {
            return Err(HeadError::RequestLine);
        };
        let version = match version {
            b"HTTP/1.1" => Version::HTTP_11,
            b"HTTP/1.0" => Version::HTTP_10,
            other if other.starts_with(b"HTTP/") && !other.contains(&b' ') => return Err(HeadError::Version),
            _ => return Err(HeadError::RequestLine),
        };
        if method.is_empty() || !method.iter().all(|byte| is_token(*byte)) {
            return Err(HeadError::RequestLine);
        }
        if target.len() > limits.target {
            return Err(HeadError::TargetTooLong);
        }
        if target.is_empty() || !target.iter().all(|byte| (0x21..0x7f).contains(byte) && *byte != b'#') {
            return Err(HeadError::Target);
        }
        let mut marks = FramingFields::new(DuplicateLength::Rejected);
        let fields = scan_fields(head, line + 2, limits, &mut marks)?;
        let framing = match (marks.length, marks.chunked) {
            (Some(_), true) => return Err(HeadError::TwoLengths),
            (None, true) if version == Version::HTTP_10 => return Err(HeadError::TransferEncoding),
            (None, true) => Framing::Chunked,
            (Some(0) | None, false) => Framing::None,
            (Some(length), false) => Framing::Length(length),
        };
        let at = method.len();
        Ok(Self {
            method: ByteRange::new(0, at),
            target: ByteRange::new(at + 1, at + 1 + target.len()),
            fields,
            host: marks.host,
            is_head: method == b"HEAD",
            version,
            framing,
            keep_alive: !marks.close && (version == Version::HTTP_11 || marks.keep_alive),
            expects_continue: marks.expects && framing != Framing::None && version == Version::HTTP_11,
        })
    }

    /// Returns the method. `head` must be the bytes that were scanned.
    #[must_use]
    pub fn method<'h>(&self, head: &'h [u8]) -> &'h [u8] {
        self.method.locate(head)
    }

    /// Returns the target: visible ASCII without a fragment. `head` must be the bytes that were scanned.
    #[must_use]
    pub fn target<'h>(&self, head: &'h [u8]) -> &'h str {
        std::str::from_utf8(self.target.locate(head)).unwrap_or("/")
    }

    /// Returns the fields. `head` must be the bytes that were scanned.
    #[must_use]
    pub const fn fields<'h>(&'h self, head: &'h [u8]) -> HeadHeaders<'h> {
        HeadHeaders { head, index: &self.fields }
    }
}

/// The fields of a head, borrowed from its bytes.
#[derive(Clone, Copy, Debug)]
pub struct HeadHeaders<'h> {
    pub(super) head: &'h [u8],
    pub(super) index: &'h HeaderIndex,
}

impl HeadHeaders<'_> {
    /// Returns the number of fields.
    #[must_use]
    pub fn count(&self) -> usize {
        self.index.len()
    }
}

impl HeaderLookup for HeadHeaders<'_> {
    fn all(&self, name: &HeaderName) -> impl DoubleEndedIterator<Item = &[u8]> {
        let name = name.as_str().as_bytes();
        // Most names differ in length, which is compared first.
        let named = move |field: &&Field| {
            field.name.len() == name.len() && field.name.locate(self.head).eq_ignore_ascii_case(name)
        };
        let may_exist = self.index.lengths & length_bit(name.len()) != 0;
        let all: &[Field] = if may_exist { self.index } else { &[] };
        all.iter().filter(named).map(|field| field.value.locate(self.head))
    }

    fn each(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.index.iter().map(|field| (field.name.locate(self.head), field.value.locate(self.head)))
    }
}

/// How a repeated `Content-Length` is handled: rejected in requests even if both values are equal; allowed with equal
/// values in responses, because servers in the wild send those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DuplicateLength {
    Rejected,
    AllowedIfEqual,
}

/// Called for each field during a scan.
pub(super) trait FieldVisitor {
    fn visit(&mut self, field: Field, head: &[u8]) -> Result<(), HeadError>;
}

impl FieldVisitor for () {
    fn visit(&mut self, _: Field, _: &[u8]) -> Result<(), HeadError> {
        Ok(())
    }
}

/// The framing fields seen so far.
#[derive(Debug)]
pub(super) struct FramingFields {
    duplicate_length: DuplicateLength,
    pub(super) host: Option<ByteRange>,
    pub(super) length: Option<u64>,
    pub(super) chunked: bool,
    pub(super) close: bool,
    pub(super) keep_alive: bool,
    pub(super) expects: bool,
}

impl FramingFields {
    pub(super) const fn new(duplicate_length: DuplicateLength) -> Self {
        Self {
            duplicate_length,
            host: None,
            length: None,
            chunked: false,
            close: false,
            keep_alive: false,
            expects: false,
        }
    }

    fn connection(&mut self, value: &[u8]) -> Result<(), HeadError> {
        for option in value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
            self.close |= option.eq_ignore_ascii_case(b"close");
            self.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
            let framing = ["host", "content-length", "transfer-encoding"];
            if framing.iter().any(|name| option.eq_ignore_ascii_case(name.as_bytes())) {
                return Err(HeadError::Connection);
            }
        }
        Ok(())
    }

    fn content_length(&mut self, digits: &[u8]) -> Result<(), HeadError> {
        if digits.is_empty() || digits.len() > 18 || !digits.iter().all(u8::is_ascii_digit) {
            return Err(HeadError::ContentLength);
        }
        let length = digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
        match self.length.replace(length) {
            Some(other) if self.duplicate_length == DuplicateLength::Rejected || other != length => {
                Err(HeadError::ContentLength)
            }
            _ => Ok(()),
        }
    }
}

impl FieldVisitor for FramingFields {
    #[inline]
    fn visit(&mut self, field: Field, head: &[u8]) -> Result<(), HeadError> {
        let (name, value) = (field.name.locate(head), field.value.locate(head));
        let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        match name.len() {
            4 if is("host") && self.host.replace(field.value).is_some() => Err(HeadError::Host),
            6 if self.duplicate_length == DuplicateLength::Rejected && is("expect") => {
                let understood = !self.expects && value.eq_ignore_ascii_case(b"100-continue");
                self.expects = true;
                if understood { Ok(()) } else { Err(HeadError::Expect) }
            }
            10 if is("connection") => self.connection(value),
            14 if is("content-length") => self.content_length(value),
            17 if is("transfer-encoding") => {
                let understood = !self.chunked && value.eq_ignore_ascii_case(b"chunked");
                self.chunked = true;
                if understood { Ok(()) } else { Err(HeadError::TransferEncoding) }
            }
            _ => Ok(()),
        }
    }
}

/// Scans the fields from `at` to the empty line that ends `head`.
#[inline]
pub(super) fn scan_fields(
    head: &[u8],
    mut at: usize,
    limits: &HeadLimits,
    visitor: &mut impl FieldVisitor,
) -> Result<HeaderIndex, HeadError> {
    let mut fields = HeaderIndex::default();
    loop {
        let end = line_at(head, at)?;
        if end == at {
            return if end + 2 == head.len() { Ok(fields) } else { Err(HeadError::LineEnding) };
        }
        if matches!(head[at], b' ' | b'\t') {
            return Err(HeadError::Folded);
        }
        if fields.len() == limits.fields {
            return Err(HeadError::TooLarge);
        }
        let line = &head[at..end];
        let colon = line.iter().position(|byte| !is_token(*byte)).unwrap_or(line.len());
        if colon == 0 || line.get(colon) != Some(&b':') {
            return Err(HeadError::FieldName);
        }
        if colon > MAX_NAME {
            return Err(HeadError::TooLarge);
        }
        let (mut start, mut stop) = (colon + 1, line.len());
        while start < stop && matches!(line[start], b' ' | b'\t') {
            start += 1;
        }
        while stop > start && matches!(line[stop - 1], b' ' | b'\t') {
            stop -= 1;
        }
        if !are_values(&line[start..stop]) {
            return Err(HeadError::FieldValue);
        }
        let field =
            Field { name: ByteRange::new(at, at + colon), value: ByteRange::new(at + start, at + stop) };
        visitor.visit(field, head)?;
        fields.push(field);
        at = end + 2;
    }
}
