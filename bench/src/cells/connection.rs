//! HTTP/1.1 over one connection that is kept open.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

pub(super) struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub(super) fn open(address: &str) -> Result<Self, String> {
        let stream = TcpStream::connect(address).map_err(|error| format!("{address}: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(|error| error.to_string())?;
        Ok(Self { reader: BufReader::new(stream) })
    }

    /// Returns the status and the body of the response to `GET path`.
    pub(super) fn get(&mut self, path: &str) -> Result<(u16, String), String> {
        self.exchange(&format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"))
    }

    /// Returns the status and the body of the response to a JSON body.
    pub(super) fn post(&mut self, path: &str, body: &str) -> Result<(u16, String), String> {
        let length = body.len();
        self.exchange(&format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
    }

    fn exchange(&mut self, request: &str) -> Result<(u16, String), String> {
        self.try_exchange(request).map_err(|error| error.to_string())
    }

    fn try_exchange(&mut self, request: &str) -> std::io::Result<(u16, String)> {
        self.reader.get_mut().write_all(request.as_bytes())?;
        let (mut status, mut length) = (0, 0);
        let mut line = String::new();
        loop {
            line.clear();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let text = line.trim_end().to_ascii_lowercase();
            if text.is_empty() {
                break;
            }
            if status == 0 {
                status = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(1);
            } else if let Some(value) = text.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        self.reader.read_exact(&mut body)?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }
}
