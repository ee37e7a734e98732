//! A test upstream: plain threads, hand-written HTTP/1.1, and a record of every request head that it received.
//!
//! | path | response |
//! |---|---|
//! | `/head…` | the received head |
//! | `/echo…` | the received body, in chunks as it arrives, with its trailers |
//! | `/hold…` | when the test releases it |
//! | `/cut…` | none: closes the connection |
//! | `/early…` | 413 before it has read the body, of which it reads nothing |
//! | `/part…` | half of the declared length, then closes the connection |
//! | `/status/503` | that status |
//! | `/drip…` | one chunk each time the test releases it |
//! | any other | 200, `hello` |

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// An upstream that runs until the test process ends.
#[derive(Debug)]
pub struct Origin {
    /// Address it listens on.
    pub address: SocketAddr,
    seen: Arc<OriginLog>,
}

#[derive(Debug, Default)]
struct OriginLog {
    heads: Mutex<Vec<String>>,
    connections: AtomicUsize,
    lost: AtomicUsize,
    /// Number of waiting requests that may proceed.
    passes: Mutex<usize>,
    passed: Condvar,
}

impl Origin {
    /// Starts an upstream on a free loopback port.
    #[must_use]
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::new(OriginLog::default());
        let shared = Arc::clone(&seen);
        // Ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let seen = Arc::clone(&shared);
                seen.connections.fetch_add(1, Ordering::SeqCst);
                std::thread::spawn(move || {
                    let _ = serve(&stream, &seen);
                });
            }
        });
        Self { address, seen }
    }

    /// Returns the received heads in order.
    pub fn heads(&self) -> Vec<String> {
        self.seen.heads.lock().expect("heads").clone()
    }

    /// Returns the number of received heads.
    pub fn requests(&self) -> usize {
        self.seen.heads.lock().expect("heads").len()
    }

    /// Returns the number of accepted connections.
    pub fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// Returns the number of clients that disconnected while their request was waiting.
    pub fn lost(&self) -> usize {
        self.seen.lost.load(Ordering::SeqCst)
    }

    /// Releases `count` waiting requests.
    pub fn release(&self, count: usize) {
        *self.seen.passes.lock().expect("passes") += count;
        self.seen.passed.notify_all();
    }
}

impl OriginLog {
    /// Waits for a release; returns false if the client disconnects first.
    fn wait(&self, stream: &TcpStream) -> bool {
        let mut passes = self.passes.lock().expect("passes");
        loop {
            if *passes > 0 {
                *passes -= 1;
                return true;
            }
            let tick = std::time::Duration::from_millis(20);
            passes = self.passed.wait_timeout(passes, tick).expect("passes").0;
            if has_ended(stream) {
                self.lost.fetch_add(1, Ordering::SeqCst);
                return false;
            }
        }
    }
}

fn has_ended(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let ended = matches!(stream.peek(&mut [0]), Ok(0));
    stream.set_nonblocking(false).expect("a socket");
    ended
}

fn serve(stream: &TcpStream, seen: &OriginLog) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    loop {
        let mut head = String::new();
        loop {
            let before = head.len();
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
            if &head[before..] == "\r\n" {
                break;
            }
        }
        seen.heads.lock().expect("heads").push(head.clone());
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let field = |name: &str| {
            head.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
        };
        let length: u64 = field("content-length:").map_or(0, |length| length.parse().expect("a length"));
        let chunked = field("transfer-encoding:").is_some();
        if path.starts_with("/cut") {
            return Ok(());
        }
        if path.starts_with("/early") {
            writer.write_all(b"HTTP/1.1 413 Whatever\r\ncontent-length: 5\r\n\r\nearly")?;
            seen.wait(stream);
            return Ok(());
        }
        if path.starts_with("/echo") {
            writer.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
            echo(&mut reader, writer, length, chunked)?;
            continue;
        }
        let body = swallow(&mut reader, length, chunked)?;
        if path.starts_with("/hold") && !seen.wait(stream) {
            return Ok(());
        }
        if path.starts_with("/part") {
            return writer.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello");
        }
        if path.starts_with("/drip") {
            writer.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
            while seen.wait(stream) {
                writer.write_all(b"4\r\ndrip\r\n")?;
            }
            return Ok(());
        }
        let status = path.strip_prefix("/status/").unwrap_or("200");
        let text = if path.starts_with("/head") { head } else { format!("hello {body}") };
        let head_text = format!(
            "HTTP/1.1 {status} Whatever\r\ncontent-length: {}\r\nconnection: x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n\r\n",
            text.len()
        );
        writer.write_all(head_text.as_bytes())?;
        if !path.starts_with("/status/204") && !path.starts_with("/status/304") && !head_text.is_empty() {
            writer.write_all(text.as_bytes())?;
        }
    }
}

/// Sends a body back as it arrives.
fn echo(
    reader: &mut impl BufRead,
    mut writer: &TcpStream,
    length: u64,
    chunked: bool,
) -> std::io::Result<()> {
    if !chunked {
        let mut left = length;
        let mut piece = vec![0; 16 * 1024];
        while left > 0 {
            let max = piece.len().min(usize::try_from(left).expect("small"));
            let read = reader.read(&mut piece[..max])?;
            if read == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            left -= read as u64;
            writer.write_all(format!("{read:x}\r\n").as_bytes())?;
            writer.write_all(&piece[..read])?;
            writer.write_all(b"\r\n")?;
        }
        return writer.write_all(b"0\r\n\r\n");
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        writer.write_all(line.as_bytes())?;
        let size = u64::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
        if size == 0 {
            break;
        }
        let mut data = vec![0; usize::try_from(size).expect("small") + 2];
        reader.read_exact(&mut data)?;
        writer.write_all(&data)?;
    }
    // Trailers, up to the empty line.
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        writer.write_all(line.as_bytes())?;
        if line == "\r\n" {
            return Ok(());
        }
    }
}

/// Discards a body and returns its length.
fn swallow(reader: &mut impl BufRead, length: u64, chunked: bool) -> std::io::Result<u64> {
    if !chunked {
        return std::io::copy(&mut reader.take(length), &mut std::io::sink());
    }
    let mut whole = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let size = u64::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
        std::io::copy(&mut reader.take(size + 2), &mut std::io::sink())?;
        whole += size;
        if size == 0 {
            return Ok(whole);
        }
    }
}
