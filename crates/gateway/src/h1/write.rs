//! Heads and bodies as they go into a connection.

use crate::headers::AddFields;
use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Method, StatusCode, Version};
use http_body::{Body, Frame};

/// How a body that is written is told apart from what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frames {
    /// None is written.
    None,
    /// So many bytes, as the head says.
    Length(u64),
    /// In chunks.
    Chunked,
    /// Until the connection ends.
    UntilClose,
}

impl Frames {
    /// How a request's body is sent. Some servers want to be told that there is none, where there could be.
    pub(crate) fn of_request(method: &Method, body: Option<&impl Body>) -> Self {
        match body {
            None if matches!(*method, Method::POST | Method::PUT | Method::PATCH) => Self::Length(0),
            None => Self::None,
            Some(body) => body.size_hint().exact().map_or(Self::Chunked, Self::Length),
        }
    }

    /// How an answer's body of `length` is sent.
    pub(crate) fn of_answer(
        status: StatusCode,
        asked_head: bool,
        version: Version,
        length: Option<u64>,
    ) -> Self {
        let bodiless = asked_head || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
        match length {
            _ if bodiless => Self::None,
            Some(length) => Self::Length(length),
            None if version == Version::HTTP_11 => Self::Chunked,
            None => Self::UntilClose,
        }
    }
}

/// Begins a request's head. Its fields follow, and [`end_of_fields`].
pub(crate) fn request_line(out: &mut BytesMut, method: &Method, target: &str) {
    out.reserve(512);
    out.put_slice(method.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(target.as_bytes());
    out.put_slice(b" HTTP/1.1\r\n");
}

/// Begins an answer's head. Its fields follow, and [`end_of_fields`].
pub(crate) fn status_line(out: &mut BytesMut, status: StatusCode, close: bool) {
    out.reserve(512);
    if status == StatusCode::OK {
        out.put_slice(b"HTTP/1.1 200 OK\r\n");
    } else {
        out.put_slice(b"HTTP/1.1 ");
        out.put_slice(status.as_str().as_bytes());
        out.put_u8(b' ');
        out.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
        out.put_slice(b"\r\n");
    }
    if close {
        out.put_slice(b"connection: close\r\n");
    }
}

/// Writes an answer's head. The length is written by `frames`, not by what the fields say.
pub(crate) fn response_head(
    out: &mut BytesMut,
    status: StatusCode,
    headers: &HeaderMap,
    frames: Frames,
    close: bool,
) {
    status_line(out, status, close);
    for (name, value) in headers {
        // An answer without a body may still tell the length of the one that it stands for.
        if name != CONTENT_LENGTH || frames == Frames::None {
            out.add(name.as_str().as_bytes(), value.as_bytes());
        }
    }
    end_of_fields(out, frames);
}

/// Ends a head, by what follows it.
pub(crate) fn end_of_fields(out: &mut BytesMut, frames: Frames) {
    match frames {
        Frames::None | Frames::UntilClose => {}
        Frames::Length(length) => {
            let mut digits = itoa::Buffer::new();
            out.add(b"content-length", digits.format(length).as_bytes());
        }
        Frames::Chunked => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
    }
    out.extend_from_slice(b"\r\n");
}

/// Data that is larger is not copied behind the head but written from where it lies.
pub(crate) const COPIED: usize = 8 * 1024;

/// Puts one frame behind what is in `out`. Large data is handed back, to be written after `out`; with chunks, its end
/// is in `tail`.
pub(crate) fn frame(out: &mut BytesMut, frame: Frame<Bytes>, frames: Frames) -> Bytes {
    let data = match frame.into_data() {
        Ok(data) => data,
        Err(frame) => {
            if let (Frames::Chunked, Ok(mut trailers)) = (frames, frame.into_trailers()) {
                tollgate_edge::h1::chunked::drop_forbidden(&mut trailers);
                out.put_slice(b"0\r\n");
                for (name, value) in &trailers {
                    out.add(name.as_str().as_bytes(), value.as_bytes());
                }
                out.put_slice(b"\r\n");
            }
            return Bytes::new();
        }
    };
    if data.is_empty() || frames == Frames::None {
        return Bytes::new();
    }
    if frames == Frames::Chunked {
        let mut digits = [0_u8; 16];
        out.put_slice(hex(data.len() as u64, &mut digits));
        out.put_slice(b"\r\n");
        // The end of the chunk must follow its data.
        out.reserve(data.len() + 2);
        out.put_slice(&data);
        out.put_slice(b"\r\n");
        return Bytes::new();
    }
    if data.len() <= COPIED {
        out.extend_from_slice(&data);
        return Bytes::new();
    }
    data
}

/// The end of a body in chunks that had no trailers.
pub(crate) fn last_chunk(out: &mut BytesMut) {
    out.put_slice(b"0\r\n\r\n");
}

fn hex(mut number: u64, digits: &mut [u8; 16]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b"0123456789abcdef"[(number & 15) as usize];
        number >>= 4;
        if number == 0 {
            return &digits[at..];
        }
    }
}
