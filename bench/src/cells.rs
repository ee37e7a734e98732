//! Cells: three nodes with counters in memory and links of 0, 80 and 200 ms round trip keep one limit of 1,000 in 10 s, in
//! each mode of `region`.
//!
//! First three times the limit is spread evenly over the nodes for 30 s: what the worst window admits, as a part of the
//! limit, and what a request costs at the node that is not the owner. Then 1,000 requests reach each node at once. The limit
//! is a fixed window, so that windows of other limiters can be compared; the owner of `owner` and `leased` is the first node.
//! Nodes, links and clients share the machine: times are upper bounds.

#[path = "../../crates/tollgate/tests/harness/far_link.rs"]
#[allow(dead_code, reason = "shared with tests, which also change the length of a link")]
mod far_link;

use crate::process::{Server, free_port, median, tollgate_binary};
use crate::report::{at_most, heading, note};
use far_link::FarLink;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::time::Duration;
use tollgate_core::{Clock, SystemClock};
use tollgate_testing::wait::Stopwatch;

/// How long to measure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Full,
}

const LIMIT: u64 = 1_000;
const WINDOW_MS: u64 = 10_000;
const NODES: usize = 3;
const REGIONS: [&str; NODES] = ["eu", "us", "ap"];
/// Connections that a burst to one node is spread over.
const CONNECTIONS: usize = 100;

/// Runs all modes over all links.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (trips, windows): (&[u64], u64) = match length {
        Length::Short => (&[0, 80], 1),
        Length::Full => (&[0, 80, 200], 3),
    };
    heading("Three nodes with counters in memory, one key, 1,000 in 10 s");
    println!(
        "| region | round trip ms | steady: worst window ÷ limit | burst: admitted ÷ limit | p50 ms at a far node | lag ms |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    let mut worst = 0.0_f64;
    for mode in ["shared", "split", "owner", "leased"] {
        for trip in trips {
            let cluster = Cluster::start(mode, Duration::from_millis(*trip))?;
            let (steady, p50) = cluster.steady(windows)?;
            let burst = cluster.burst()?;
            let lag = cluster.lag_ms();
            println!("| {mode} | {trip} | {steady:.2} | {burst:.2} | {p50:.1} | {lag:.0} |");
            if mode != "shared" {
                worst = worst.max(steady).max(burst);
            }
        }
    }
    println!();
    at_most("admitted share of the limit, all modes but shared", worst, 1.0);
    note("(shared: at most 1 + 2 bursts in the worst case; `tollgate explain --bound` prints it)");
    Ok(())
}

struct Cluster {
    nodes: Vec<Server>,
    _rules: Scratch,
}

/// A file that is deleted on drop.
struct Scratch(std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Cluster {
    fn start(mode: &str, trip: Duration) -> Result<Self, String> {
        let myself = std::env::current_exe().map_err(|error| error.to_string())?;
        let binary = tollgate_binary(&myself)?;
        let region = match mode {
            "owner" | "leased" => format!("{{mode: {mode}, owner: eu}}"),
            mode => mode.to_owned(),
        };
        let rules = format!(
            "domain: d\ndescriptors:\n  - {{key: k, limit: {{count: {LIMIT}, period: 10s, algorithm: fixed_window}}, \
             on_error: closed, region: {region}}}\n"
        );
        let path = std::env::temp_dir().join(format!("tollgate-bench-cells-{}.yaml", std::process::id()));
        std::fs::write(&path, rules).map_err(|error| error.to_string())?;
        let scratch = Scratch(path);
        let ports: Vec<String> = (0..NODES).map(|_| free_port()).collect::<Result<_, _>>()?;
        let mut nodes = Vec::new();
        for (node, port) in ports.iter().enumerate() {
            let cell = format!("127.0.0.1:{port}");
            let mut flags: Vec<String> = [
                "serve",
                "--store",
                "memory",
                "--http",
                "127.0.0.1:0",
                "--grpc",
                "off",
                "--resp",
                "off",
                "--admin",
                "off",
                "--cell-deadline-ms",
                "2000",
                "--region",
                REGIONS[node],
                "--cell",
                &cell,
            ]
            .map(str::to_owned)
            .to_vec();
            flags.extend(["--rules".to_owned(), scratch.0.display().to_string()]);
            for (other, port) in ports.iter().enumerate().filter(|(other, _)| *other != node) {
                let port = port.parse().map_err(|_| "a port".to_owned())?;
                let link = FarLink::to(port, trip);
                flags.extend(["--peer".to_owned(), format!("{}=http://{}", REGIONS[other], link.address)]);
            }
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            nodes.push(Server::start_anywhere(&binary, &flags, "http")?);
        }
        let cluster = Self { nodes, _rules: scratch };
        cluster.wait_until_linked()?;
        Ok(cluster)
    }

    fn address(&self, node: usize) -> &str {
        self.nodes[node].address.trim_start_matches("http://")
    }

    fn metric(&self, node: usize, name: &str) -> Vec<f64> {
        let Ok(mut connection) = Connection::open(self.address(node)) else { return Vec::new() };
        let page = connection
            .exchange("GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .map_or_else(|_| String::new(), |(_, page)| page);
        let own = page.lines().filter(|line| line.starts_with(name));
        own.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect()
    }

    fn wait_until_linked(&self) -> Result<(), String> {
        for _ in 0..600 {
            let is_whole = |node| self.metric(node, "ratelimit_region_share ") == [1.0];
            if (0..NODES).all(is_whole) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err("the cells do not find each other".to_owned())
    }

    /// Returns the longest lag between two nodes.
    fn lag_ms(&self) -> f64 {
        let all = (0..NODES).flat_map(|node| self.metric(node, "ratelimit_region_lag_seconds"));
        1_000.0 * all.fold(0.0, f64::max)
    }

    /// Sends three times the limit, evenly. Returns what the worst window admits, and the median time at the last node.
    fn steady(&self, windows: u64) -> Result<(f64, f64), String> {
        const SENDERS: u64 = 25;
        let clock = SystemClock::new();
        wait_for_window(&clock);
        let begin = clock.now().as_micros() / 1_000 / WINDOW_MS;
        let (admitted, times) = (Mutex::new(vec![0_u64; windows as usize + 1]), Mutex::new(Vec::new()));
        // Each node gets the limit in a window, from several senders that take turns.
        let pause = Duration::from_micros(1_000 * WINDOW_MS * SENDERS / LIMIT);
        let failed = Mutex::new(None);
        std::thread::scope(|scope| {
            for node in 0..NODES {
                for sender in 0..SENDERS {
                    let (admitted, times, failed, clock) = (&admitted, &times, &failed, &clock);
                    scope.spawn(move || {
                        let sending = || -> Result<(), String> {
                            let mut connection = Connection::open(self.address(node))?;
                            std::thread::sleep(pause * u32::try_from(sender).unwrap_or(0) / SENDERS as u32);
                            loop {
                                let turn = Stopwatch::start();
                                let is_admitted = connection.check("steady")?;
                                let took = turn.elapsed();
                                let window = clock.now().as_micros() / 1_000 / WINDOW_MS - begin;
                                if window >= windows {
                                    return Ok(());
                                }
                                lock(admitted)[window as usize] += u64::from(is_admitted);
                                if node == NODES - 1 {
                                    lock(times).push(took.as_secs_f64() * 1e3);
                                }
                                std::thread::sleep(pause.saturating_sub(turn.elapsed()));
                            }
                        };
                        if let Err(error) = sending() {
                            *lock(failed) = Some(error);
                        }
                    });
                }
            }
        });
        if let Some(error) = lock(&failed).take() {
            return Err(error);
        }
        let most = lock(&admitted).iter().max().copied().unwrap_or(0);
        let times = std::mem::take(&mut *lock(&times));
        Ok((most as f64 / LIMIT as f64, if times.is_empty() { 0.0 } else { median(times) }))
    }

    /// Sends the limit to each node at once. Returns what all admit.
    fn burst(&self) -> Result<f64, String> {
        wait_for_window(&SystemClock::new());
        let (admitted, failed) = (Mutex::new(0_u64), Mutex::new(None));
        std::thread::scope(|scope| {
            for node in 0..NODES {
                for _ in 0..CONNECTIONS {
                    let (admitted, failed) = (&admitted, &failed);
                    scope.spawn(move || {
                        let sending = || -> Result<(), String> {
                            let mut connection = Connection::open(self.address(node))?;
                            for _ in 0..LIMIT as usize / CONNECTIONS {
                                let is_admitted = connection.check("burst")?;
                                *lock(admitted) += u64::from(is_admitted);
                            }
                            Ok(())
                        };
                        if let Err(error) = sending() {
                            *lock(failed) = Some(error);
                        }
                    });
                }
            }
        });
        if let Some(error) = lock(&failed).take() {
            return Err(error);
        }
        let admitted = *lock(&admitted);
        Ok(admitted as f64 / LIMIT as f64)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits until a window begins.
fn wait_for_window(clock: &SystemClock) {
    let into = clock.now().as_micros() / 1_000 % WINDOW_MS;
    std::thread::sleep(Duration::from_millis(WINDOW_MS - into + 20));
}

/// A connection that is kept open.
struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    fn open(address: &str) -> Result<Self, String> {
        let stream = TcpStream::connect(address).map_err(|error| format!("{address}: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(|error| error.to_string())?;
        Ok(Self { reader: BufReader::new(stream) })
    }

    /// Returns whether a request of this key is admitted.
    fn check(&mut self, key: &str) -> Result<bool, String> {
        let body = format!("{{\"domain\":\"d\",\"attributes\":{{\"k\":\"{key}\"}}}}");
        let head =
            format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
        let (status, _) = self.exchange(&format!("{head}{body}")).map_err(|error| error.to_string())?;
        Ok(status == 200)
    }

    fn exchange(&mut self, request: &str) -> std::io::Result<(u16, String)> {
        self.reader.get_mut().write_all(request.as_bytes())?;
        let (mut status, mut length) = (0, 0);
        let mut line = String::new();
        loop {
            line.clear();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let text = line.trim_end().to_ascii_lowercase();
            if text.is_empty() {
                break;
            }
            if status == 0 {
                status = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(1);
            } else if let Some(value) = text.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        self.reader.read_exact(&mut body)?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }
}
