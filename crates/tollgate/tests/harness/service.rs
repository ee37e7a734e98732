//! The service behind a proxy: says `hello`, counts how often, and remembers the last request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    served: u64,
    last: String,
}

impl Service {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let service = Self { address: listener.local_addr().expect("an address"), seen: Arc::default() };
        let own = service.clone();
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let own = own.clone();
                std::thread::spawn(move || own.serve(&stream));
            }
        });
        service
    }

    pub(crate) fn served(&self) -> u64 {
        self.seen.lock().expect("seen").served
    }

    /// A header of the last request.
    pub(crate) fn last_header(&self, name: &str) -> Option<String> {
        let last = self.seen.lock().expect("seen").last.clone();
        let mut headers = last.lines().filter_map(|line| line.split_once(':'));
        headers.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
    }

    fn serve(&self, mut stream: &TcpStream) {
        let mut reader = BufReader::new(stream);
        loop {
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                if reader.read_line(&mut head).unwrap_or(0) == 0 {
                    return;
                }
            }
            let length = head.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<u64>().ok())?
            });
            if std::io::copy(&mut (&mut reader).take(length.unwrap_or(0)), &mut std::io::sink()).is_err() {
                return;
            }
            {
                let mut seen = self.seen.lock().expect("seen");
                seen.served += 1;
                seen.last = head;
            }
            if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").is_err() {
                return;
            }
        }
    }
}
