//! The exchange in memory: each of three cells is charged 50,000 counters a second, each once, over links of 80 ms.
//!
//! What it takes of a core is the CPU time of a node with peers less that of a node without, at the same traffic: the ledger
//! on the request path included. Bytes are counted on the links, in both directions, acknowledgments included. Lag is what
//! the metric says, read twenty times a second.

use super::super::Length;
use super::super::far_link::FarLink;
use super::super::nodes::Nodes;
use super::super::tollgate;
use crate::process::Server;
use crate::report::{at_most, heading, note};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tollgate_testing::wait::Stopwatch;

/// Counters that a cell is charged in a second.
const COUNTERS: u64 = 50_000;
/// Commands that are written together.
const TOGETHER: u64 = 250;
const TRIP: Duration = Duration::from_millis(80);
/// Time until the exchange is even.
const WARM: Duration = Duration::from_secs(2);
/// Bars: part of a core, bytes per counter and tick, milliseconds of lag beyond the round trip.
const CORE: f64 = 0.1;
const BYTES: f64 = 48.0;
const LAG_MS: f64 = 300.0;

/// What was measured of three nodes.
struct Found {
    /// Part of a core that each node takes.
    cores: Vec<f64>,
    /// Bytes on all links.
    bytes: u64,
    /// Counters that all nodes received.
    counters: f64,
    lags: Vec<f64>,
}

pub(super) fn run(length: Length) -> Result<(), String> {
    let span = Duration::from_secs(if length == Length::Full { 30 } else { 8 });
    let rules = tollgate::rule("shared", "{count: 600, period: 1m}");
    let alone = measure(&tollgate::start_alone(&rules)?, span)?;
    let mut cells = measure(&tollgate::start(&rules, TRIP)?, span)?;
    heading(&format!(
        "The exchange of {COUNTERS} counters charged a second in each of three cells, in memory"
    ));
    println!("| | eu | us | ap |");
    println!("|---|---:|---:|---:|");
    let row = |name: &str, cores: &[f64]| {
        let shown: Vec<String> = cores.iter().map(|part| format!("{:.1}%", 100.0 * part)).collect();
        println!("| {name} | {} |", shown.join(" | "));
    };
    row("of a core, without peers", &alone.cores);
    row("of a core, with peers", &cells.cores);
    let added: Vec<f64> =
        cells.cores.iter().zip(&alone.cores).map(|(with, without)| with - without).collect();
    row("the exchange", &added);
    println!();
    cells.lags.sort_by(f64::total_cmp);
    let at = |part: usize| cells.lags.get(cells.lags.len() * part / 100).copied().unwrap_or(f64::INFINITY);
    let received = cells.counters / (span + WARM).as_secs_f64() / 3.0;
    note(&format!("(each cell received {received:.0} counters a second; lag p50 {:.0} ms)", at(50)));
    at_most("part of a core that the exchange takes", added.into_iter().fold(0.0, f64::max), CORE);
    at_most("bytes per counter and tick on a link", cells.bytes as f64 / cells.counters.max(1.0), BYTES);
    at_most("lag p99 less the round trip, ms", at(99) - TRIP.as_secs_f64() * 1e3, LAG_MS);
    Ok(())
}

fn measure(nodes: &Nodes, span: Duration) -> Result<Found, String> {
    let commands = commands();
    let (stop, replies, lags) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::new(Vec::new()));
    let mut found = Err("no measurement".to_owned());
    let began = Stopwatch::start();
    let sent = std::thread::scope(|scope| {
        let senders: Vec<_> = nodes
            .servers
            .iter()
            .map(|node| scope.spawn(|| send(&node.address, &commands, &stop, &replies)))
            .collect();
        found = watch(nodes, span, &lags);
        stop.store(true, Ordering::Relaxed);
        let ends =
            senders.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
        ends.sum::<Result<u64, String>>()
    })?;
    let wanted = COUNTERS as f64 * 3.0 * began.elapsed().as_secs_f64();
    if (sent as f64) < 0.95 * wanted {
        note(&format!(
            "(the clients sent {:.0}% of the traffic: the machine is too busy)",
            100.0 * sent as f64 / wanted
        ));
    }
    found.map(|cores| Found {
        cores,
        bytes: nodes.links.iter().map(FarLink::carried).sum(),
        counters: (0..3)
            .flat_map(|node| nodes.metric(node, "ratelimit_region_counters_received_total"))
            .sum(),
        lags: lags.into_inner().unwrap_or_default(),
    })
}

/// Returns the part of a core that each node takes, and reads their lags.
fn watch(nodes: &Nodes, span: Duration, lags: &Mutex<Vec<f64>>) -> Result<Vec<f64>, String> {
    std::thread::sleep(WARM);
    let ticks = || nodes.servers.iter().map(Server::ticks).collect::<Vec<u64>>();
    let (before, watched) = (ticks(), Stopwatch::start());
    let mut node = 0;
    while watched.elapsed() < span {
        let seconds = nodes.metric(node % 3, "ratelimit_region_lag_seconds");
        super::super::load::lock(lags).extend(seconds.into_iter().map(|seconds| 1e3 * seconds));
        node += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    let seconds = watched.elapsed().as_secs_f64();
    Ok(ticks().iter().zip(&before).map(|(after, before)| (after - before) as f64 / 100.0 / seconds).collect())
}

/// Returns the commands of a second, each of another counter, with keys of 16 characters.
fn commands() -> Vec<Vec<u8>> {
    let one = |key: u64| {
        let key = crate::traffic::mix(key);
        format!("*4\r\n$8\r\nTG.CHECK\r\n$1\r\nd\r\n$1\r\nk\r\n$16\r\n{key:016x}\r\n")
    };
    let some = |first: u64| (first * TOGETHER..(first + 1) * TOGETHER).flat_map(|key| one(key).into_bytes());
    (0..COUNTERS / TOGETHER).map(|first| some(first).collect()).collect()
}

/// Sends the commands in each second until `stop` is set; returns how many replies came.
fn send(address: &str, commands: &[Vec<u8>], stop: &AtomicBool, replies: &AtomicU64) -> Result<u64, String> {
    let open = || {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok((socket.try_clone()?, socket))
    };
    let (mut reading, mut writing) = open().map_err(|error: std::io::Error| format!("{address}: {error}"))?;
    let gap = Duration::from_micros(1_000_000 * TOGETHER / COUNTERS);
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let (mut buffer, mut count) = (vec![0; 256 << 10], 0);
            while let Ok(read @ 1..) = reading.read(&mut buffer) {
                let lists = buffer[..read].iter().filter(|byte| **byte == b'*').count() as u64;
                replies.fetch_add(lists, Ordering::Relaxed);
                count += lists;
            }
            count
        });
        let (start, mut turn) = (Stopwatch::start(), 0_u32);
        while !stop.load(Ordering::Relaxed) {
            let written = writing.write_all(&commands[turn as usize % commands.len()]);
            written.map_err(|error| error.to_string())?;
            turn += 1;
            std::thread::sleep((gap * turn).saturating_sub(start.elapsed()));
        }
        writing.shutdown(std::net::Shutdown::Write).map_err(|error| error.to_string())?;
        reader.join().map_err(|_| "a thread panicked".to_owned())
    })
}
