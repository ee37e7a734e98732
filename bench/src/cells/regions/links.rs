//! Long links between the nodes of regions. In front of each node is a proxy, whose address the others have.
//!
//! The proxy asks the kernel which node has opened a connection, so one address serves all, and each pair of nodes has a link
//! of its own. Between regions each message arrives after a time of its own, so later ones overtake it; a cut link carries
//! nothing, and breaks in the middle of the message that is sent next; a link that is lost in one direction loses what is
//! sent there and carries the other. Of a protocol whose messages this proxy does not know, pieces keep their order and wait
//! where they would be lost.

use super::super::load::lock;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tollgate_cells::message::{self, PREFIX};
use tollgate_core::conformance::SplitMix64;
use tollgate_testing::wait::Stopwatch;

/// What a link carries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Messages between cells, each on its own.
    Messages,
    /// Bytes, in their order.
    Bytes,
}

/// What arrives together: when, the number in its direction, and the bytes.
type Piece = (u64, u64, Vec<u8>);

/// The links between all nodes.
#[derive(Clone)]
pub(super) struct Links(Arc<Shared>);

struct Shared {
    content: Content,
    /// Least and most microseconds of one way.
    way: (u64, u64),
    /// Region of each node.
    regions: Vec<usize>,
    /// Whether what a node sends to another is lost, by their numbers.
    lost: Vec<Vec<AtomicBool>>,
    /// The processes of the nodes.
    processes: Mutex<HashMap<u32, usize>>,
    /// Connections that were opened while both directions were lost.
    unanswered: Mutex<Vec<TcpStream>>,
    clock: Stopwatch,
    counts: Counts,
}

/// What has happened to messages.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) overtaken: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) halved: AtomicU64,
}

impl Links {
    pub(super) fn new(content: Content, regions: Vec<usize>, trip_ms: (u64, u64)) -> Self {
        let lost = regions.iter().map(|_| regions.iter().map(|_| AtomicBool::new(false)).collect()).collect();
        Self(Arc::new(Shared {
            content,
            way: (trip_ms.0 * 500, trip_ms.1 * 500),
            regions,
            lost,
            processes: Mutex::default(),
            unanswered: Mutex::default(),
            clock: Stopwatch::start(),
            counts: Counts::default(),
        }))
    }

    /// Returns an address through which the others reach a node that listens on a port of loopback.
    pub(super) fn lead_to(&self, node: usize, port: u16) -> Result<SocketAddr, String> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        let shared = Arc::clone(&self.0);
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.connect(near, address.port(), (node, port)));
            }
        });
        Ok(address)
    }

    /// Names the process of a node; a process that is not named reaches no one.
    pub(super) fn identify(&self, process: u32, node: usize) {
        lock(&self.0.processes).insert(process, node);
    }

    /// Loses, or carries again, what the nodes of one region send to those of another.
    pub(super) fn set_lost(&self, from: usize, to: usize, is_lost: bool) {
        for (node, row) in self.0.lost.iter().enumerate().filter(|(node, _)| self.0.regions[*node] == from) {
            let others =
                row.iter().enumerate().filter(|(other, _)| self.0.regions[*other] == to && *other != node);
            others.for_each(|(_, lost)| lost.store(is_lost, Ordering::Relaxed));
        }
        if !is_lost {
            lock(&self.0.unanswered).clear();
        }
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.0.counts
    }
}

impl Shared {
    fn is_lost(&self, from: usize, to: usize) -> bool {
        self.lost[from][to].load(Ordering::Relaxed)
    }

    fn connect(self: Arc<Self>, near: TcpStream, port: u16, (node, target): (usize, u16)) {
        let Some(from) = self.dialer(&near, port) else { return };
        if self.is_lost(from, node) && self.is_lost(node, from) {
            // As behind a firewall that drops packets.
            lock(&self.unanswered).push(near);
            return;
        }
        let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else { return };
        let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else { return };
        self.carry(near_too, far_too, (from, node));
        self.carry(far, near, (node, from));
    }

    /// Returns the node whose process has opened this connection, once it has been named.
    fn dialer(&self, near: &TcpStream, port: u16) -> Option<usize> {
        let own = near.peer_addr().ok()?.port();
        let waited = Stopwatch::start();
        while waited.elapsed() < Duration::from_secs(10) {
            let known: Vec<(u32, usize)> =
                lock(&self.processes).iter().map(|(id, node)| (*id, *node)).collect();
            let socket = format!("socket:[{}]", inode(own, port)?);
            let has_it = |process: u32| {
                let files = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
                files.flatten().any(|file| std::fs::read_link(file.path()).is_ok_and(|to| *to == *socket))
            };
            if let Some((_, node)) = known.into_iter().find(|(process, _)| has_it(*process)) {
                return Some(node);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    fn carry(self: &Arc<Self>, mut from: TcpStream, to: TcpStream, ends: (usize, usize)) {
        let is_far = self.regions[ends.0] != self.regions[ends.1];
        let way = if is_far { self.way } else { (0, 0) };
        let (sender, pieces) = channel();
        let shared = Arc::clone(self);
        std::thread::spawn(move || shared.deliver(to, &pieces, ends));
        let (content, clock) = (self.content, self.clock);
        std::thread::spawn(move || {
            let mut rng = SplitMix64::new(0x11_4b5 ^ (ends.0 as u64) << 8 ^ ends.1 as u64);
            let (mut order, mut last) = (0, 0);
            while let Some(bytes) = read(content, &mut from) {
                let due = micros(clock.elapsed()) + rng.between(way.0, way.1);
                last = if content == Content::Bytes { due.max(last) } else { due };
                order += 1;
                if sender.send(Reverse((last, order, bytes))).is_err() {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Read);
        });
    }

    fn deliver(&self, mut to: TcpStream, pieces: &Receiver<Reverse<Piece>>, (from, node): (usize, usize)) {
        let _ = to.set_nodelay(true);
        let (mut waiting, mut newest, mut is_open) = (BinaryHeap::<Reverse<Piece>>::new(), 0, true);
        while is_open || !waiting.is_empty() {
            let now = micros(self.clock.elapsed());
            let pause = waiting.peek().map_or(60_000_000, |Reverse((due, ..))| due.saturating_sub(now));
            if is_open && pause > 0 {
                match pieces.recv_timeout(Duration::from_micros(pause)) {
                    Ok(piece) => waiting.push(piece),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => is_open = false,
                }
                continue;
            }
            std::thread::sleep(Duration::from_micros(if waiting.is_empty() { 0 } else { pause }));
            let Some(Reverse((_, order, bytes))) = waiting.pop() else { continue };
            if self.is_lost(from, node) && self.is_lost(node, from) {
                let _ = to.write_all(&bytes[..bytes.len() / 2]);
                self.counts.halved.fetch_add(1, Ordering::Relaxed);
                break;
            }
            if self.is_lost(from, node) && self.content == Content::Messages {
                self.counts.lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            while self.is_lost(from, node) {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.counts.overtaken.fetch_add(u64::from(order < newest), Ordering::Relaxed);
            newest = newest.max(order);
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }
}

/// Returns the number of the socket of loopback that is connected from one port to another.
fn inode(own: u16, port: u16) -> Option<u64> {
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    let (own, port) = (format!("0100007F:{own:04X}"), format!("0100007F:{port:04X}"));
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_it = fields.get(1) == Some(&own.as_str()) && fields.get(2) == Some(&port.as_str());
        if is_it { fields.get(9)?.parse().ok() } else { None }
    })
}

/// Reads what is delivered together.
fn read(content: Content, from: &mut TcpStream) -> Option<Vec<u8>> {
    if content == Content::Bytes {
        let mut bytes = vec![0; 64 << 10];
        let count = from.read(&mut bytes).ok().filter(|count| *count > 0)?;
        bytes.truncate(count);
        return Some(bytes);
    }
    let mut prefix = [0; PREFIX];
    from.read_exact(&mut prefix).ok()?;
    let mut bytes = prefix.to_vec();
    bytes.resize(PREFIX + message::length(prefix).ok()?, 0);
    from.read_exact(&mut bytes[PREFIX..]).ok()?;
    Some(bytes)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
