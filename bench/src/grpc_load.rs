//! Load over gRPC whose requests differ: HTTP/2 frames written by hand over blocking sockets, one thread per connection.
//!
//! `h2load` repeats one message, so every request would charge the same counters. A client library would take more of the
//! core that it shares with Redis than the services do. Requests and responses are small and fit in one frame each, header
//! blocks are constant and not compressed, and those of responses are not read: a response counts if it has a message whose
//! code is OK.

#![allow(clippy::disallowed_methods, reason = "a stopwatch")]

use crate::grpc::METHOD;
use crate::http2::{Received, frame, greeting, grpc_headers, push};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Requests in flight per connection in a closed loop.
pub(crate) const DEPTH: u64 = 16;
/// Most requests in flight on a connection: servers refuse more than 200.
const MAX_IN_FLIGHT: u64 = 150;
/// Length of a key: hexadecimal digits.
const KEY: usize = 16;
/// What stands for the key in a message.
pub(crate) const PLACEHOLDER: &str = "0123456789abcdef";
/// Time after which a server that sends nothing is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Requests that differ in their key.
#[derive(Clone)]
pub(crate) struct Requests {
    /// A HEADERS and a DATA frame, with stream 0 and the placeholder.
    frames: Vec<u8>,
    /// Where the stream's number stands in them.
    streams: [usize; 2],
    /// Where the key stands in them.
    keys: Vec<usize>,
    /// Bytes of the DATA frame, which count for flow control.
    data: i64,
    /// Key of the request with this number.
    key: fn(u64) -> u64,
}

impl Requests {
    /// Takes a message in gRPC framing that contains [`PLACEHOLDER`] wherever the key belongs.
    pub(crate) fn new(message: &[u8], key: fn(u64) -> u64) -> Self {
        let mut frames = Vec::new();
        push(&mut frames, frame::HEADERS, frame::END_HEADERS, 0, &grpc_headers(METHOD));
        let second = frames.len() + 5;
        push(&mut frames, frame::DATA, frame::END_STREAM, 0, message);
        let is_key = |at: &usize| frames[*at..].starts_with(PLACEHOLDER.as_bytes());
        let keys = (0..frames.len()).filter(is_key).collect();
        Self { streams: [5, second], keys, data: message.len() as i64, frames, key }
    }

    /// Writes the request with this number.
    fn write(&self, number: u64, stream: u32, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.frames);
        let own = &mut out[start..];
        for at in self.streams {
            own[at..at + 4].copy_from_slice(&stream.to_be_bytes());
        }
        let key = (self.key)(number);
        for at in &self.keys {
            for (nibble, place) in own[*at..*at + KEY].iter_mut().rev().enumerate() {
                *place = b"0123456789abcdef"[(key >> (4 * nibble) & 15) as usize];
            }
        }
    }
}

/// One connection. One thread may write requests while another reads responses.
struct Connection {
    socket: TcpStream,
    writing: Mutex<()>,
    /// Bytes that the server takes before it must send an update.
    window: AtomicI64,
    sent: AtomicU64,
    done: AtomicU64,
}

impl Connection {
    fn open(address: &str) -> Result<Self, String> {
        let open = || {
            let socket = TcpStream::connect(address)?;
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            (&socket).write_all(&greeting())?;
            Ok(socket)
        };
        let socket = open().map_err(|error: std::io::Error| format!("{address}: {error}"))?;
        let [sent, done] = [AtomicU64::new(0), AtomicU64::new(0)];
        Ok(Self { socket, writing: Mutex::new(()), window: AtomicI64::new(65_535), sent, done })
    }

    fn write(&self, bytes: &[u8]) -> Result<(), String> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.socket).write_all(bytes).map_err(|error| error.to_string())
    }

    /// Returns how many requests may be sent now.
    fn room(&self, requests: &Requests, depth: u64) -> u64 {
        let in_flight = self.sent.load(Ordering::Relaxed) - self.done.load(Ordering::Acquire);
        let window = self.window.load(Ordering::Acquire).max(0) / requests.data;
        depth.saturating_sub(in_flight).min(window as u64)
    }

    /// Sends these requests.
    fn send(&self, requests: &Requests, numbers: Range<u64>, buffer: &mut Vec<u8>) -> Result<(), String> {
        buffer.clear();
        let count = numbers.end - numbers.start;
        let first = self.sent.fetch_add(count, Ordering::Relaxed);
        self.window.fetch_sub(count as i64 * requests.data, Ordering::AcqRel);
        for (at, number) in (first..).zip(numbers) {
            let stream = u32::try_from(2 * at + 1).map_err(|_| "too many requests on a connection")?;
            requests.write(number, stream, buffer);
        }
        self.write(buffer)
    }
}

/// Reads the frames of one connection.
struct Responses {
    received: Received,
    /// Messages with code OK, and ends of responses.
    ok: u64,
    ended: u64,
}

impl Responses {
    fn new() -> Self {
        Self { received: Received::new(), ok: 0, ended: 0 }
    }

    /// Waits for bytes, and calls `each` with the number of every request whose response is complete.
    fn read(&mut self, connection: &Connection, mut each: impl FnMut(u64)) -> Result<(), String> {
        let read = (&connection.socket).read(self.received.room());
        self.received.add(read.map_err(|error| format!("no response: {error}"))?)?;
        while let Some(frame) = self.received.next()? {
            if let Some(reply) = frame.reply()? {
                connection.write(&reply)?;
            }
            // gRPC's five bytes, then the first field: the overall code, OK.
            if frame.kind == frame::DATA {
                self.ok += u64::from(frame.payload.get(5..7) == Some(&[0x08, 1]));
            }
            if frame.kind == frame::WINDOW_UPDATE && frame.stream == 0 {
                let more = frame.payload.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
                connection.window.fetch_add(i64::from(more & 0x7fff_ffff), Ordering::AcqRel);
            }
            if frame.ends_stream() {
                self.ended += 1;
                each(u64::from(frame.stream / 2));
                connection.done.fetch_add(1, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Checks that every response was OK.
    fn check(&self) -> Result<(), String> {
        if self.ok == self.ended {
            return Ok(());
        }
        Err(format!("{} of {} responses were not OK", self.ended - self.ok.min(self.ended), self.ended))
    }
}

/// When a closed loop ends.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    Passed(Duration),
    Sent(u64),
}

/// Keeps [`DEPTH`] requests in flight on each connection; returns responses per second, and their number.
pub(crate) fn closed(
    address: &str,
    connections: u64,
    requests: &Requests,
    until: Until,
) -> Result<(f64, u64), String> {
    let opened = (0..connections).map(|_| Connection::open(address)).collect::<Result<Vec<_>, _>>()?;
    let (next, start) = (AtomicU64::new(0), Instant::now());
    let is_over = |number: u64| match until {
        Until::Passed(span) => start.elapsed() >= span,
        Until::Sent(most) => number >= most,
    };
    let work = &|connection: &Connection| {
        let (mut responses, mut buffer, mut is_ended) = (Responses::new(), Vec::new(), false);
        loop {
            let room = connection.room(requests, DEPTH);
            if !is_ended && room > 0 {
                let first = next.fetch_add(room, Ordering::Relaxed);
                is_ended = is_over(first);
                if !is_ended {
                    connection.send(requests, first..first + room, &mut buffer)?;
                }
            }
            if responses.ended == connection.sent.load(Ordering::Relaxed) {
                return responses.check().map(|()| responses.ended);
            }
            responses.read(connection, |_| {})?;
        }
    };
    let answered = std::thread::scope(|scope| {
        let threads: Vec<_> = opened.iter().map(|connection| scope.spawn(move || work(connection))).collect();
        let ends =
            threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
        ends.sum::<Result<u64, String>>()
    })?;
    Ok((answered as f64 / start.elapsed().as_secs_f64(), answered))
}

/// Sends requests at a steady rate, whatever the responses; returns sorted microseconds from when each was due.
pub(crate) fn paced(
    address: &str,
    connections: u64,
    requests: &Requests,
    rate: f64,
    span: Duration,
) -> Result<Vec<f64>, String> {
    let opened = (0..connections).map(|_| Connection::open(address)).collect::<Result<Vec<_>, _>>()?;
    let count = (rate * span.as_secs_f64()) as u64 / connections * connections;
    let gap = Duration::from_secs_f64(1.0 / rate);
    let (start, failed) = (Instant::now(), AtomicBool::new(false));
    let due = |number: u64| start + gap.mul_f64(number as f64);
    let receive = |(place, connection): (usize, &Connection)| {
        let mut micros = Vec::with_capacity((count / connections) as usize);
        let mut responses = Responses::new();
        while (micros.len() as u64) < count / connections {
            let read = responses.read(connection, |at| {
                let late = due(at * connections + place as u64).elapsed();
                micros.push(late.as_nanos() as f64 / 1e3);
            });
            if let Err(error) = read {
                failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        responses.check().map(|()| micros)
    };
    let receive = &receive;
    let mut micros = std::thread::scope(|scope| {
        let threads: Vec<_> =
            opened.iter().enumerate().map(|one| scope.spawn(move || receive(one))).collect();
        let mut buffer = Vec::new();
        for number in 0..count {
            let connection = &opened[(number % connections) as usize];
            std::thread::sleep(due(number).saturating_duration_since(Instant::now()));
            while connection.room(requests, MAX_IN_FLIGHT) == 0 && !failed.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(100));
            }
            if failed.load(Ordering::Relaxed) {
                break;
            }
            connection.send(requests, number..number + 1, &mut buffer)?;
        }
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().map_err(|_| "a thread panicked".to_owned())??);
        }
        Ok::<_, String>(all)
    })?;
    micros.sort_by(f64::total_cmp);
    Ok(micros)
}
