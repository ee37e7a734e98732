//! An upstream for the gateway to stand before: plain threads, HTTP/1.1 by hand, and a record of every byte of a head
//! that reached it.
//!
//! | path | answers |
//! |---|---|
//! | `/head…` | the head that it got |
//! | `/echo…` | the body that it got, in chunks, as it comes; trailers too |
//! | `/hold…` | once the test lets it |
//! | `/cut…` | nothing: closes |
//! | `/early…` | 413 before it has read the body, and reads none of it |
//! | `/part…` | half of what it announces, then closes |
//! | `/status/503` | that status |
//! | `/drip…` | a chunk each time the test lets it |
//! | any other | 200, `hello` |

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// An upstream that runs until the test's process ends.
#[derive(Debug)]
pub struct Origin {
    /// Where it listens.
    pub address: SocketAddr,
    seen: Arc<OriginLog>,
}

#[derive(Debug, Default)]
struct OriginLog {
    heads: Mutex<Vec<String>>,
    connections: AtomicUsize,
    lost: AtomicUsize,
    /// How many that hold may go on.
    passes: Mutex<usize>,
    passed: Condvar,
}

impl Origin {
    /// On a free port of loopback.
    #[must_use]
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::new(OriginLog::default());
        let shared = Arc::clone(&seen);
        // Ends with the test's process.
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

    /// Heads that came, in order.
    pub fn heads(&self) -> Vec<String> {
        self.seen.heads.lock().expect("heads").clone()
    }

    /// How many heads came.
    pub fn requests(&self) -> usize {
        self.seen.heads.lock().expect("heads").len()
    }

    /// Connections that were made to it.
    pub fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// Callers that went away while `/hold` held them.
    pub fn lost(&self) -> usize {
        self.seen.lost.load(Ordering::SeqCst)
    }

    /// Lets so many of those that hold go on.
    pub fn release(&self, count: usize) {
        *self.seen.passes.lock().expect("passes") += count;
        self.seen.passed.notify_all();
    }
}

impl OriginLog {
    /// Waits for a pass; whether the other side is still there.
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
        let answer = format!(
            "HTTP/1.1 {status} Whatever\r\ncontent-length: {}\r\nconnection: x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n\r\n",
            text.len()
        );
        writer.write_all(answer.as_bytes())?;
        if !path.starts_with("/status/204") && !path.starts_with("/status/304") && !answer.is_empty() {
            writer.write_all(text.as_bytes())?;
        }
    }
}

/// Passes a body back as it comes.
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
            let most = piece.len().min(usize::try_from(left).expect("small"));
            let read = reader.read(&mut piece[..most])?;
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

/// Reads a body over; how long it was.
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
