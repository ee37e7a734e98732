//! HTTP/1.1 by hand, a fresh connection for each request, so that a test can send what no client library would.

use crate::wait::LONG;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

/// What came back.
#[derive(Clone, Debug)]
pub struct WebResponse {
    /// The code of the status line.
    pub status: u16,
    /// Names as they were written, and values.
    pub headers: Vec<(String, String)>,
    /// All of it, without its framing.
    pub body: Vec<u8>,
}

impl WebResponse {
    /// The first value of a header, whatever its case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }
}

/// The bytes of a request whose connection is closed after it.
pub fn request(method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// Sends bytes as they are on a fresh connection and reads one answer.
pub fn exchange(address: SocketAddr, bytes: &[u8]) -> std::io::Result<WebResponse> {
    let mut open = WebConnection::to(address)?;
    // A server that has seen enough answers and closes: what it does not read is no error of the test.
    let _ = open.send(bytes);
    if bytes.starts_with(b"HEAD ") { open.head() } else { open.response() }
}

/// The same from another address of loopback: for a server that trusts 127.0.0.1, a caller from outside.
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

    /// The same connection once more, for sending while answers are read.
    pub fn again(&self) -> std::io::Result<Self> {
        self.0.get_ref().try_clone().map(|stream| Self(BufReader::new(stream)))
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.get_mut().write_all(bytes)
    }

    /// Sends no more, and goes on reading.
    pub fn finish_sending(&mut self) -> std::io::Result<()> {
        self.0.get_mut().shutdown(Shutdown::Write)
    }

    /// Whether the other side has closed: what it sends otherwise is lost.
    pub fn is_at_end(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }

    /// Reads up to and with these bytes.
    pub fn read_until(&mut self, end: &[u8]) -> std::io::Result<Vec<u8>> {
        let mut seen = Vec::new();
        let mut byte = [0];
        while !seen.ends_with(end) {
            self.0.read_exact(&mut byte)?;
            seen.push(byte[0]);
        }
        Ok(seen)
    }

    /// Reads one answer without a body.
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

    /// Reads one answer.
    pub fn response(&mut self) -> std::io::Result<WebResponse> {
        let mut answer = self.head()?;
        match answer.header("content-length").map(|length| length.parse::<usize>().expect("a length")) {
            Some(length) => {
                answer.body.resize(length, 0);
                self.0.read_exact(&mut answer.body)?;
            }
            None if answer.header("transfer-encoding") == Some("chunked") => loop {
                let length = usize::from_str_radix(&self.line()?, 16).map_err(std::io::Error::other)?;
                let start = answer.body.len();
                answer.body.resize(start + length, 0);
                self.0.read_exact(&mut answer.body[start..])?;
                self.line()?;
                if length == 0 {
                    break;
                }
            },
            None => {
                self.0.read_to_end(&mut answer.body)?;
            }
        }
        Ok(answer)
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}
