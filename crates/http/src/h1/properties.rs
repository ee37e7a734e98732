//! Parser properties that hold for every input of an untrusted client. The fuzz targets and the property tests call
//! these functions, which panic if a property is violated.

use super::chunked::{Chunk, Chunks};
use super::head::{self, Framing, HeadLimits};
use super::scan::ScannedHead;
use crate::headers::HeaderLookup;
use bytes::BytesMut;
use http::Version;
use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING};

/// Asserts that an accepted head has only one reading. It examines the bytes without the parser's own functions.
///
/// # Panics
/// If the head is ambiguous.
pub fn request_head(bytes: &[u8]) {
    let limits = HeadLimits::default();
    let whole = head::end_of_head(bytes, &mut 0, &limits);
    // However the bytes are split, the result is the same: the same end, or the same error.
    let mut seen = 0;
    let mut pieces = Ok(None);
    for length in (0..bytes.len()).step_by(7).chain([bytes.len()]) {
        pieces = head::end_of_head(&bytes[..length], &mut seen, &limits);
        if !matches!(pieces, Ok(None)) {
            break;
        }
    }
    assert_eq!(whole, pieces, "the end depends on how the bytes are split");
    let Ok(Some(end)) = whole else { return };
    let text = &bytes[..end];
    let Ok(request) = head::request(text, &limits) else { return };
    // Every line ends with CR LF, and none is folded.
    let body = &text[..end - 4];
    let lines: Vec<&[u8]> = split_lines(body);
    assert!(lines.iter().all(|line| !line.contains(&b'\r') && !line.contains(&b'\n') && !line.contains(&0)));
    assert!(
        lines[1..].iter().all(|line| !line.starts_with(b" ") && !line.starts_with(b"\t") && !line.is_empty())
    );
    // Every field line is counted, and its name has no spaces.
    assert_eq!(request.fields(text).count(), lines.len() - 1);
    let named = |name: &str| {
        lines[1..]
            .iter()
            .filter(|line| {
                let colon = line.iter().position(|byte| *byte == b':').expect("a colon");
                line[..colon].eq_ignore_ascii_case(name.as_bytes())
            })
            .count()
    };
    let (lengths, encodings) = (named(CONTENT_LENGTH.as_str()), named(TRANSFER_ENCODING.as_str()));
    assert!(lengths <= 1 && encodings <= 1 && lengths + encodings <= 1, "two lengths");
    assert!(named(HOST.as_str()) == 1 || request.scan.version == Version::HTTP_10);
    match request.scan.framing {
        Framing::Chunked => assert_eq!((encodings, request.scan.version), (1, Version::HTTP_11)),
        Framing::Length(_) => assert_eq!(lengths, 1),
        Framing::None => assert_eq!(encodings, 0),
        Framing::UntilClose => panic!("a request never ends with its connection"),
    }
    // The path has no dot segments, and the map has every field.
    let path = request.path(text).to_ascii_lowercase().replace("%2e", ".");
    assert!(!path.split(['/', '\\']).any(|segment| segment == "." || segment == ".."), "{path}");
    let (_, _, headers) = request.into_parts(text).expect("a map takes every accepted field");
    assert_eq!(headers.len(), lines.len() - 1);
    // A lookup in place finds the same values as the map.
    let scan = ScannedHead::new(text, &limits).expect("an accepted head");
    for name in headers.keys() {
        let fields = scan.fields(text);
        assert!(fields.all(name).eq(headers.get_all(name).iter().map(http::HeaderValue::as_bytes)), "{name}");
    }
}

fn split_lines(text: &[u8]) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    let mut start = 0;
    for at in 0..text.len().saturating_sub(1) {
        if &text[at..at + 2] == b"\r\n" {
            lines.push(&text[start..at]);
            start = at + 2;
        }
    }
    lines.push(&text[start..]);
    lines
}

/// Asserts that chunks parse the same whether they arrive at once or byte by byte, and yield no more data than was
/// sent.
///
/// # Panics
/// If the results differ.
pub fn chunks(bytes: &[u8]) {
    let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut reader, mut buffer, mut data) = (Chunks::default(), BytesMut::new(), Vec::new());
        for piece in pieces {
            buffer.extend_from_slice(piece);
            loop {
                match reader.read(&mut buffer) {
                    Ok(Chunk::Data(more)) => data.extend_from_slice(&more),
                    Ok(Chunk::Incomplete) => break,
                    // The bytes after the end belong to the next request and must not be consumed.
                    Ok(Chunk::End(_)) => return Ok((data, true)),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((data, false))
    };
    let whole = read(&mut std::iter::once(bytes));
    let pieces = read(&mut bytes.chunks(1));
    assert_eq!(whole, pieces, "the result depends on how the bytes are split");
    if let Ok((data, _)) = whole {
        assert!(data.len() <= bytes.len());
    }
}
