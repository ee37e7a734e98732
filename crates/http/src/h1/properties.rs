//! What must hold of every byte string that a stranger can send: the fuzz targets and the property tests both call these.
//! They panic where a law is broken.

use super::chunked::{Chunk, Chunks};
use super::head::{self, Framing, HeadLimits};
use super::scan::ScannedHead;
use crate::headers::HeaderLookup;
use bytes::BytesMut;
use http::Version;
use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING};

/// A head that passes can be read in one way only: judged from its bytes, by other means than the filter's own.
///
/// # Panics
/// If it can be read in two.
pub fn request_head(bytes: &[u8]) {
    let limits = HeadLimits::default();
    let whole = head::end_of_head(bytes, &mut 0, &limits);
    // However the bytes are cut, the end is found in the same place, or the same is refused, at the latest at the end.
    let mut seen = 0;
    let mut pieces = Ok(None);
    for length in (0..bytes.len()).step_by(7).chain([bytes.len()]) {
        pieces = head::end_of_head(&bytes[..length], &mut seen, &limits);
        if !matches!(pieces, Ok(None)) {
            break;
        }
    }
    assert_eq!(whole, pieces, "the end depends on how the bytes are cut");
    let Ok(Some(end)) = whole else { return };
    let text = &bytes[..end];
    let Ok(request) = head::request(text, &limits) else { return };
    // No line ends in any other way than CR LF, and none is folded.
    let body = &text[..end - 4];
    let lines: Vec<&[u8]> = split_lines(body);
    assert!(lines.iter().all(|line| !line.contains(&b'\r') && !line.contains(&b'\n') && !line.contains(&0)));
    assert!(
        lines[1..].iter().all(|line| !line.starts_with(b" ") && !line.starts_with(b"\t") && !line.is_empty())
    );
    // Every field is in the map, under a name without spaces.
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
    // The path is what it seems, and the map holds every field.
    let path = request.path(text).to_ascii_lowercase().replace("%2e", ".");
    assert!(!path.split(['/', '\\']).any(|segment| segment == "." || segment == ".."), "{path}");
    let (_, _, headers) = request.into_parts(text).expect("a map takes what has passed");
    assert_eq!(headers.len(), lines.len() - 1);
    // Whoever looks a field up where it lies finds what the map has.
    let scan = ScannedHead::new(text, &limits).expect("it has passed");
    for name in headers.keys() {
        let lies = scan.fields(text);
        assert!(lies.all(name).eq(headers.get_all(name).iter().map(http::HeaderValue::as_bytes)), "{name}");
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

/// Chunks are read alike whether they come at once or byte by byte, and what is read is no more than was sent.
///
/// # Panics
/// If that does not hold.
pub fn chunks(bytes: &[u8]) {
    let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut reader, mut buffer, mut data) = (Chunks::default(), BytesMut::new(), Vec::new());
        for piece in pieces {
            buffer.extend_from_slice(piece);
            loop {
                match reader.read(&mut buffer) {
                    Ok(Chunk::Data(more)) => data.extend_from_slice(&more),
                    Ok(Chunk::Incomplete) => break,
                    // What follows the end is the next request's, and must not be eaten.
                    Ok(Chunk::End(_)) => return Ok((data, true)),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((data, false))
    };
    let whole = read(&mut std::iter::once(bytes));
    let pieces = read(&mut bytes.chunks(1));
    assert_eq!(whole, pieces, "what is read depends on how the bytes are cut");
    if let Ok((data, _)) = whole {
        assert!(data.len() <= bytes.len());
    }
}
