//! Writes heads and bodies of HTTP/1 messages.

use crate::h1::chunked::drop_forbidden;
use crate::headers::HeaderAppend;
use bytes::{BufMut, Bytes, BytesMut};
use http::{Method, StatusCode, Version};
use http_body::{Body, Frame};

/// How a body is delimited when it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// No body.
    None,
    /// `Content-Length`, in bytes.
    Length(u64),
    /// Chunked transfer coding.
    Chunked,
    /// The body ends with the connection.
    UntilClose,
}

impl Frames {
    /// Returns the framing of a request's body. Some servers require `content-length: 0` for methods that usually have
    /// one.
    #[must_use]
    pub fn for_request(method: &Method, body: Option<&impl Body>) -> Self {
        match body {
            None if matches!(*method, Method::POST | Method::PUT | Method::PATCH) => Self::Length(0),
            None => Self::None,
            Some(body) => body.size_hint().exact().map_or(Self::Chunked, Self::Length),
        }
    }

    /// Returns the framing of a response's body of `length` bytes.
    #[must_use]
    pub fn for_response(status: StatusCode, head_only: bool, version: Version, length: Option<u64>) -> Self {
        let bodiless = head_only || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
        match length {
            _ if bodiless => Self::None,
            Some(length) => Self::Length(length),
            None if version == Version::HTTP_11 => Self::Chunked,
            None => Self::UntilClose,
        }
    }
}

/// Appends the request line. The fields and [`end_of_fields`] follow.
pub fn request_line(out: &mut BytesMut, method: &Method, target: &str) {
    out.reserve(512);
    out.put_slice(method.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(target.as_bytes());
    out.put_slice(b" HTTP/1.1\r\n");
}

/// Appends the status line. The fields and [`end_of_fields`] follow.
pub fn status_line(out: &mut BytesMut, status: StatusCode) {
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
}

/// Appends the framing fields and the end of the head.
pub fn end_of_fields(out: &mut BytesMut, frames: Frames) {
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

/// Like [`end_of_fields`], for a response. One that is sent without its body may state the body's length.
pub fn end_of_response_fields(out: &mut BytesMut, frames: Frames, stated_length: Option<u64>) {
    if let (Frames::None, Some(length)) = (frames, stated_length) {
        return end_of_fields(out, Frames::Length(length));
    }
    end_of_fields(out, frames);
}

/// Maximum size of data that is copied into the output buffer, in bytes; larger data is written without a copy.
pub const MAX_COPIED: usize = 8 * 1024;

/// Appends one frame to `out`. Large data is returned instead, to be written after `out`.
pub fn frame(out: &mut BytesMut, frame: Frame<Bytes>, frames: Frames) -> Bytes {
    let data = match frame.into_data() {
        Ok(data) => data,
        Err(frame) => {
            if let (Frames::Chunked, Ok(mut trailers)) = (frames, frame.into_trailers()) {
                drop_forbidden(&mut trailers);
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
    if data.len() <= MAX_COPIED {
        out.extend_from_slice(&data);
        return Bytes::new();
    }
    data
}

/// Appends the end of a chunked body without trailers.
pub fn last_chunk(out: &mut BytesMut) {
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
