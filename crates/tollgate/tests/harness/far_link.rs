//! A long link to a server: every byte arrives later, in both directions, and what follows does not wait for it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use tollgate_testing::wait::Stopwatch;

pub(crate) struct FarLink {
    pub(crate) address: SocketAddr,
    /// Microseconds of one way.
    way: Arc<AtomicU64>,
    /// Bytes carried, in both directions.
    carried: Arc<AtomicU64>,
}

impl FarLink {
    /// A link to a port of loopback, so long that an answer takes `round_trip` more. Its threads end with the process.
    pub(crate) fn to(port: u16, round_trip: Duration) -> Self {
        let way = Arc::new(AtomicU64::new(micros(round_trip / 2)));
        let carried = Arc::new(AtomicU64::new(0));
        let (one_way, bytes) = (Arc::clone(&way), Arc::clone(&carried));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let copy = |stream: &TcpStream| stream.try_clone().expect("a handle");
                for (from, to) in [(copy(&near), copy(&far)), (far, near)] {
                    carry(from, to, Arc::clone(&one_way), Arc::clone(&bytes));
                }
            }
        });
        Self { address, way, carried }
    }

    /// Returns the bytes that the link has carried, in both directions.
    pub(crate) fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    /// Makes the link longer or shorter, for what is sent from now on.
    pub(crate) fn set(&self, round_trip: Duration) {
        self.way.store(micros(round_trip / 2), Ordering::Relaxed);
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).expect("a short time")
}

/// Reads at once, and writes each piece after its time.
fn carry(mut from: TcpStream, to: TcpStream, way: Arc<AtomicU64>, carried: Arc<AtomicU64>) {
    let (sender, pieces) = channel::<(Stopwatch, Duration, Vec<u8>)>();
    std::thread::spawn(move || deliver(to, &pieces));
    std::thread::spawn(move || {
        let mut buffer = [0; 64 << 10];
        while let Ok(count) = from.read(&mut buffer)
            && count > 0
            && let delay = Duration::from_micros(way.load(Ordering::Relaxed))
            && sender.send((Stopwatch::start(), delay, buffer[..count].to_vec())).is_ok()
        {
            carried.fetch_add(count as u64, Ordering::Relaxed);
        }
        let _ = from.shutdown(Shutdown::Read);
    });
}

fn deliver(mut to: TcpStream, pieces: &Receiver<(Stopwatch, Duration, Vec<u8>)>) {
    let _ = to.set_nodelay(true);
    for (sent, delay, piece) in pieces {
        std::thread::sleep(delay.saturating_sub(sent.elapsed()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
