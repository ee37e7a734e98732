//! A link between two cells that can be cut and healed.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A proxy to a port of loopback. Its threads end with the process.
pub(crate) struct Cuttable {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    carried: Carried,
}

/// What a link has carried, both ways; the first megabytes of it.
type Carried = Arc<Mutex<Vec<u8>>>;

const MAX_CARRIED: usize = 4 << 20;

#[derive(Default)]
struct State {
    is_cut: bool,
    port: u16,
    streams: Vec<TcpStream>,
}

impl Cuttable {
    pub(crate) fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(Mutex::new(State { port, ..State::default() }));
        let (shared, carried) = (Arc::clone(&state), Carried::default());
        let record = Arc::clone(&carried);
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let mut state = shared.lock().expect("state");
                // A cut link accepts and says nothing, as a firewall that drops packets.
                if state.is_cut {
                    state.streams.push(near);
                    continue;
                }
                let Ok(far) = TcpStream::connect(("127.0.0.1", state.port)) else { continue };
                let copy = |stream: &TcpStream| stream.try_clone().expect("a handle");
                state.streams.extend([copy(&near), copy(&far)]);
                for (from, to) in [(copy(&near), copy(&far)), (far, near)] {
                    let _ = to.set_nodelay(true);
                    let record = Arc::clone(&record);
                    std::thread::spawn(move || carry(from, to, &record));
                }
            }
        });
        Self { address, state, carried }
    }

    /// Returns whether these bytes have passed.
    pub(crate) fn has_carried(&self, bytes: &[u8]) -> bool {
        self.carried.lock().expect("a record").windows(bytes.len()).any(|window| window == bytes)
    }

    /// Breaks what is connected, and carries nothing from now on.
    pub(crate) fn cut(&self) {
        self.set(true);
    }

    pub(crate) fn heal(&self) {
        self.set(false);
    }

    /// Leads to another port from the next connection on: a server that was started again.
    pub(crate) fn lead_to(&self, port: u16) {
        self.state.lock().expect("state").port = port;
    }

    fn set(&self, is_cut: bool) {
        let mut state = self.state.lock().expect("state");
        state.is_cut = is_cut;
        for stream in state.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, record: &Carried) {
    let mut buffer = [0; 64 << 10];
    while let Ok(count) = from.read(&mut buffer)
        && count > 0
        && to.write_all(&buffer[..count]).is_ok()
    {
        let mut record = record.lock().expect("a record");
        let room = MAX_CARRIED - record.len();
        record.extend_from_slice(&buffer[..count.min(room)]);
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
