//! Frames of HTTP/2, as much as clients of a benchmark need: constant header blocks that no table keeps, and no more.

/// Kinds and flags of frames.
pub(crate) mod frame {
    pub(crate) const DATA: u8 = 0;
    pub(crate) const HEADERS: u8 = 1;
    pub(crate) const RESET: u8 = 3;
    pub(crate) const SETTINGS: u8 = 4;
    pub(crate) const PING: u8 = 6;
    pub(crate) const GOAWAY: u8 = 7;
    pub(crate) const WINDOW_UPDATE: u8 = 8;
    pub(crate) const END_STREAM: u8 = 1;
    pub(crate) const END_HEADERS: u8 = 4;
    pub(crate) const ACK: u8 = 1;
}

/// Length of a frame's header.
const HEAD: usize = 9;
/// Bytes that a server may send on the connection and on each stream: more than a run does.
const WINDOW: u32 = 0x7fff_0000;

/// One frame.
pub(crate) struct Frame<'a> {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: &'a [u8],
}

impl Frame<'_> {
    /// Returns whether a message or a response ends with it.
    pub(crate) const fn ends_stream(&self) -> bool {
        matches!(self.kind, frame::DATA | frame::HEADERS) && self.flags & frame::END_STREAM != 0
    }

    /// Returns what a client must send for it.
    ///
    /// # Errors
    /// The server ends the stream or the connection.
    pub(crate) fn reply(&self) -> Result<Option<Vec<u8>>, String> {
        match self.kind {
            frame::SETTINGS | frame::PING if self.flags & frame::ACK == 0 => {
                let payload = if self.kind == frame::PING { self.payload } else { &[] };
                let mut reply = Vec::new();
                push(&mut reply, self.kind, frame::ACK, 0, payload);
                Ok(Some(reply))
            }
            frame::RESET => Err(format!("the server reset stream {}", self.stream)),
            frame::GOAWAY => Err("the server asked the connection to end".to_owned()),
            _ => Ok(None),
        }
    }
}

/// Bytes that have been received.
pub(crate) struct Received {
    bytes: Vec<u8>,
    filled: usize,
    read: usize,
}

impl Received {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; 1 << 16], filled: 0, read: 0 }
    }

    /// Returns where to put what is received next.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.read..self.filled, 0);
        self.filled -= std::mem::take(&mut self.read);
        &mut self.bytes[self.filled..]
    }

    /// Records how much was put there.
    ///
    /// # Errors
    /// Nothing was: the connection has ended.
    pub(crate) fn add(&mut self, bytes: usize) -> Result<(), String> {
        self.filled += bytes;
        if bytes == 0 { Err("the server closed the connection".to_owned()) } else { Ok(()) }
    }

    /// Returns the next whole frame.
    pub(crate) fn next(&mut self) -> Result<Option<Frame<'_>>, String> {
        let rest = &self.bytes[self.read..self.filled];
        let Some(head) = rest.first_chunk::<HEAD>() else { return Ok(None) };
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        if HEAD + length > self.bytes.len() {
            return Err("a frame is too large".to_owned());
        }
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff;
        let Some(payload) = rest.get(HEAD..HEAD + length) else { return Ok(None) };
        self.read += HEAD + length;
        Ok(Some(Frame { kind: head[3], flags: head[4], stream, payload }))
    }
}

/// Returns what a client sends first.
pub(crate) fn greeting() -> Vec<u8> {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    let mut greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let settings = [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &WINDOW.to_be_bytes()].concat();
    push(&mut greeting, frame::SETTINGS, 0, 0, &settings);
    push(&mut greeting, frame::WINDOW_UPDATE, 0, 0, &WINDOW.to_be_bytes());
    greeting
}

/// Appends a frame.
pub(crate) fn push(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// Returns the header block of a gRPC call: fields of the static table, and literals that are not indexed.
pub(crate) fn grpc_headers(method: &str) -> Vec<u8> {
    const METHOD_POST: u8 = 0x83;
    const SCHEME_HTTP: u8 = 0x86;
    const PATH: u8 = 0x04;
    const AUTHORITY: u8 = 0x01;
    const CONTENT_TYPE: [u8; 2] = [0x0f, 0x10];
    const NEW_NAME: u8 = 0x00;
    let mut block = vec![METHOD_POST, SCHEME_HTTP];
    let mut field = |name: &[u8], texts: &[&str]| {
        block.extend_from_slice(name);
        for text in texts {
            // Below 127 bytes, a length is one byte.
            block.push(u8::try_from(text.len()).unwrap_or(0));
            block.extend_from_slice(text.as_bytes());
        }
    };
    field(&[PATH], &[method]);
    field(&[AUTHORITY], &["bench"]);
    field(&CONTENT_TYPE, &["application/grpc"]);
    field(&[NEW_NAME], &["te", "trailers"]);
    block
}

/// Returns a message in gRPC framing: no compression, length, bytes.
pub(crate) fn grpc_message(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[0], &length[..], bytes].concat()
}
