//! An HTTP/1.1 client with one connection per request, which can send what no client library would.

use crate::wait::LONG;
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

/// A response.
#[derive(Clone, Debug)]
pub struct WebResponse {
    /// Status code.
    pub status: u16,
    /// Header names as received, and values.
    pub headers: Vec<(String, String)>,
    /// Body without its framing.
    pub body: Vec<u8>,
}

impl WebResponse {
    /// Returns the first value of a header, ignoring case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// Returns the body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }
}

/// Returns the bytes of a request with `Connection: close`.
pub fn request(method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// Sends raw bytes on a new connection and reads one response.
pub fn exchange(address: SocketAddr, bytes: &[u8]) -> std::io::Result<WebResponse> {
    let mut open = WebConnection::to(address)?;
    // The server may respond and close before reading everything; a failed write is not an error of the test.
    let _ = open.send(bytes);
    if bytes.starts_with(b"HEAD ") { open.head() } else { open.response() }
}

/// Does the same from another loopback address: for a server that trusts 127.0.0.1, an untrusted client.
pub fn exchange_from(source: &str, address: SocketAddr, bytes: &[u8]) -> std::io::Result<WebResponse> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(source.parse().expect("an address"), 0).into())?;
    socket.connect_timeout(&address.into(), LONG)?;
    let mut open = WebConnection::over(socket.into())?;
    let _ = open.send(bytes);
    open.response()
}

/// A connection, for tests that send a request in parts or keep it open.
#[derive(Debug)]
pub struct WebConnection(BufReader<TcpStream>);

impl WebConnection {
    /// Connects.
    pub fn to(address: SocketAddr) -> std::io::Result<Self> {
        Self::over(TcpStream::connect_timeout(&address, LONG)?)
    }

    fn over(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_read_timeout(Some(LONG))?;
        stream.set_write_timeout(Some(LONG))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Clones the connection, for sending while responses are read.
    pub fn again(&self) -> std::io::Result<Self> {
        self.0.get_ref().try_clone().map(|stream| Self(BufReader::new(stream)))
    }

    /// Sends raw bytes.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.get_mut().write_all(bytes)
    }

    /// Closes the sending side.
    pub fn finish_sending(&mut self) -> std::io::Result<()> {
        self.0.get_mut().shutdown(Shutdown::Write)
    }

    /// Returns whether the peer has closed the connection in order: no byte follows, and it was not reset. A byte that
    /// the peer sent instead is lost.
    pub fn is_at_end(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }

    /// Returns whether the peer has closed the connection, in order or by a reset. The kernel resets a connection that is
    /// closed with bytes unread, so a test that cannot know whether its bytes were read uses this one.
    pub fn is_closed(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(read) => read == 0,
            Err(error) => matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
        }
    }

    /// Reads up to and including these bytes.
    pub fn read_until(&mut self, end: &[u8]) -> std::io::Result<Vec<u8>> {
        let mut seen = Vec::new();
        let mut byte = [0];
        while !seen.ends_with(end) {
            self.0.read_exact(&mut byte)?;
            seen.push(byte[0]);
        }
        Ok(seen)
    }

    /// Reads a response without a body.
    pub fn head(&mut self) -> std::io::Result<WebResponse> {
        let status_line = self.line()?;
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| std::io::Error::other(format!("no status in `{status_line}`")))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                break;
            }
            let (key, value) = line.split_once(':').expect("a header");
            headers.push((key.to_owned(), value.trim().to_owned()));
        }
        Ok(WebResponse { status, headers, body: Vec::new() })
    }

    /// Reads a response.
    pub fn response(&mut self) -> std::io::Result<WebResponse> {
        let mut response = self.head()?;
        match response.header("content-length").map(|length| length.parse::<usize>().expect("a length")) {
            Some(length) => {
                response.body.resize(length, 0);
                self.0.read_exact(&mut response.body)?;
            }
            None if response.header("transfer-encoding") == Some("chunked") => loop {
                let length = usize::from_str_radix(&self.line()?, 16).map_err(std::io::Error::other)?;
                let start = response.body.len();
                response.body.resize(start + length, 0);
                self.0.read_exact(&mut response.body[start..])?;
                self.line()?;
                if length == 0 {
                    break;
                }
            },
            None => {
                self.0.read_to_end(&mut response.body)?;
            }
        }
        Ok(response)
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}
