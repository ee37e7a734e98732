//! A long link to a server: every byte arrives later, in both directions, and what follows does not wait for it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use tollgate_testing::wait::Stopwatch;

pub(crate) struct FarLink {
    pub(crate) address: SocketAddr,
}

impl FarLink {
    /// A link to a port of loopback, so long that an answer takes `round_trip` more. Its threads end with the process.
    pub(crate) fn to(port: u16, round_trip: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let copy = |stream: &TcpStream| stream.try_clone().expect("a handle");
                for (from, to) in [(copy(&near), copy(&far)), (far, near)] {
                    carry(from, to, round_trip / 2);
                }
            }
        });
        Self { address }
    }
}

/// Reads at once, and writes each piece after its time.
fn carry(mut from: TcpStream, to: TcpStream, delay: Duration) {
    let (sender, pieces) = channel::<(Stopwatch, Vec<u8>)>();
    std::thread::spawn(move || deliver(to, &pieces, delay));
    std::thread::spawn(move || {
        let mut buffer = [0; 64 << 10];
        while let Ok(count) = from.read(&mut buffer)
            && count > 0
            && sender.send((Stopwatch::start(), buffer[..count].to_vec())).is_ok()
        {}
        let _ = from.shutdown(Shutdown::Read);
    });
}

fn deliver(mut to: TcpStream, pieces: &Receiver<(Stopwatch, Vec<u8>)>, delay: Duration) {
    let _ = to.set_nodelay(true);
    for (sent, piece) in pieces {
        std::thread::sleep(delay.saturating_sub(sent.elapsed()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
