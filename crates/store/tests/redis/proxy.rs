//! A line between a store and its server that fails on command. It passes every byte on once and in order, or not at all.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// What the line does to what comes along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Passes it on.
    None,
    /// Ends every connection, and each new one at once.
    Cut,
    /// Passes answers on so much later.
    Delay(Duration),
    /// Ends the connection when an answer comes: what was asked has been done.
    CutAnswers,
    /// Passes on half of an answer, then ends the connection.
    HalveThenCut,
    /// Passes on half of an answer, and the rest when the fault is over.
    HalveThenStall,
    /// Keeps answers until the fault is over.
    StallAnswers,
    /// Keeps requests until the fault is over: the server has not heard of them.
    StallRequests,
}

#[derive(Default)]
struct Line {
    fault: Mutex<Option<Fault>>,
    changed: Condvar,
    open: Mutex<Vec<TcpStream>>,
}

impl Line {
    fn fault(&self) -> Fault {
        self.fault.lock().expect("a fault").unwrap_or(Fault::None)
    }

    /// Waits until the line is no longer in this state.
    fn wait_out(&self, stalled: Fault) {
        let fault = self.fault.lock().expect("a fault");
        let _over = self.changed.wait_while(fault, |now| *now == Some(stalled)).expect("a change");
    }
}

/// The line. Its threads end with their connections, which end with it.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    line: Arc<Line>,
}

impl Proxy {
    pub(crate) fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let line = Arc::new(Line::default());
        let weak = Arc::downgrade(&line);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Some(line), Ok(client)) = (weak.upgrade(), client) else { return };
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                if line.fault() != Fault::Cut {
                    connect(&line, client, server);
                }
            }
        });
        Self { port, line }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.line.fault.lock().expect("a fault") = Some(fault);
        self.line.changed.notify_all();
        if fault == Fault::Cut {
            self.cut();
        }
    }

    fn cut(&self) {
        for stream in self.line.open.lock().expect("streams").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(Fault::Cut);
        // The listener reads the flag again after a connection.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn connect(line: &Arc<Line>, client: TcpStream, server: TcpStream) {
    let copy = |stream: &TcpStream| stream.try_clone().expect("a handle");
    line.open.lock().expect("streams").extend([copy(&client), copy(&server)]);
    for (from, to, is_answer) in [(copy(&client), copy(&server), false), (server, client, true)] {
        let line = Arc::clone(line);
        std::thread::spawn(move || carry(&line, from, to, is_answer));
    }
}

fn carry(line: &Line, mut from: TcpStream, mut to: TcpStream, is_answer: bool) {
    let _ = to.set_nodelay(true);
    let mut buffer = [0; 64 << 10];
    while let Ok(count) = from.read(&mut buffer)
        && count > 0
    {
        let fault = line.fault();
        let (first, rest) = buffer[..count].split_at(count / 2);
        let passed = match (fault, is_answer) {
            (Fault::CutAnswers, true) | (Fault::Cut, _) => false,
            (Fault::HalveThenCut, true) => to.write_all(first).is_err(),
            (Fault::HalveThenStall, true) => {
                let half = to.write_all(first).is_ok();
                line.wait_out(fault);
                half && to.write_all(rest).is_ok()
            }
            (Fault::StallAnswers, true) | (Fault::StallRequests, false) => {
                line.wait_out(fault);
                to.write_all(&buffer[..count]).is_ok()
            }
            (Fault::Delay(time), true) => {
                std::thread::sleep(time);
                to.write_all(&buffer[..count]).is_ok()
            }
            _ => to.write_all(&buffer[..count]).is_ok(),
        };
        if !passed {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
