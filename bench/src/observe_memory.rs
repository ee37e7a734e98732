//! Memory with every telemetry output failing: a server with a full disk for its decision log, a collector that accepts
//! connections and never responds, and 200 event subscribers that never read, serves very many callers, most of them denied
//! and all of them traced. Its memory is sampled every second and printed at every twelfth of the run.

use crate::process::{Server, free_port, median, tollgate_binary};
use crate::report::{at_most, heading, note};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use tollgate_core::conformance::SplitMix64;

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Short,
}

/// Time after which bounded buffers are full: the longest hold five minutes (impact preview, callers near a limit).
const FILLED: Duration = Duration::from_secs(360);
/// Maximum number of requests per second.
const MAX_PER_SECOND: u64 = 200_000;

const RULES: &str = "{domain: d, descriptors: [{key: api_key, name: per-key, limit: 1/hour}]}";
const CALLERS: u64 = 300_000;
/// Number of requests sent together.
const TOGETHER: usize = 64;
const THREADS: u64 = 2;
const SUBSCRIBERS: usize = 200;
const CHANGES: u64 = 5_000;

pub(crate) fn run(length: Length) -> io::Result<()> {
    let duration = Duration::from_secs(match length {
        Length::Full => 1_080,
        Length::Short => 60,
    });
    let folder = std::env::temp_dir().join(format!("tollgate-observe-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let ran = measure(duration, &folder);
    std::fs::remove_dir_all(&folder)?;
    ran
}

fn measure(duration: Duration, folder: &Path) -> io::Result<()> {
    let rules = folder.join("rules.yaml");
    std::fs::write(&rules, RULES)?;
    let collector = TcpListener::bind("127.0.0.1:0")?;
    let otlp = format!("http://{}", collector.local_addr()?);
    // Accepts and holds connections, and never responds.
    std::thread::spawn(move || collector.incoming().collect::<Vec<_>>());
    let program = tollgate_binary(&std::env::current_exe()?).map_err(io::Error::other)?;
    let admin = format!("127.0.0.1:{}", free_port().map_err(io::Error::other)?);
    let (rules, db) = (rules.display().to_string(), format!("sqlite:{}", folder.join("t.db").display()));
    let flags = ["serve", "--rules", &rules, "--http", "127.0.0.1:0", "--admin", &admin, "--db", &db];
    let sinks = [
        "--grpc",
        "127.0.0.1:0",
        "--resp",
        "off",
        "--memory",
        "64MiB",
        "--decision-log",
        "/dev/full",
        "--otlp",
        &otlp,
    ];
    let server = Server::start_anywhere(&program, &[&flags[..], &sinks[..]].concat(), "http")
        .map_err(io::Error::other)?;
    let subscribers: Vec<TcpStream> = (0..SUBSCRIBERS).map(|_| listen(&admin)).collect::<Result<_, _>>()?;
    heading(&format!(
        "{CALLERS} callers, {SUBSCRIBERS} subscribers that do not read, a full disk, a collector that does not respond"
    ));

    // Changes produce more events than one tick per second, so the subscribers' connections fill up. They end before memory is
    // measured, since a database caches what it has written.
    (0..CHANGES).try_for_each(|n| change(&admin, n))?;
    let (sent, max) = (AtomicU64::new(0), MAX_PER_SECOND * duration.as_secs());
    let mut resident = Vec::new();
    note(&format!("at the start: {} KiB", server.resident_kib()));
    #[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
    let started = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..THREADS)
            .map(|n| {
                let (server, sent) = (&server, &sent);
                let more = move || {
                    sent.fetch_add(TOGETHER as u64, Ordering::Relaxed) < max && started.elapsed() < duration
                };
                scope.spawn(move || send_checks(&server.address, n, more))
            })
            .collect();
        let twelfth = (duration.as_secs() / 12).max(1) as usize;
        while !clients.iter().any(ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_secs(1));
            resident.push(server.resident_kib() as f64);
            if resident.len() % twelfth == 0 {
                let (done, last) = (sent.load(Ordering::Relaxed) as f64 / 1e6, resident[resident.len() - 1]);
                note(&format!("{} s, {done:.1} million decisions: {last} KiB", resident.len()));
            }
        }
        clients
            .into_iter()
            .try_for_each(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    drop(subscribers);
    for name in ["ratelimit_decisions_total", "ratelimit_decision_log_", "ratelimit_trace_spans"] {
        metrics(&admin, name)?.iter().for_each(|line| note(line));
    }
    // A short run only shows that memory does not run away.
    let full = resident.split_off(resident.len().min(FILLED.min(duration / 2).as_secs() as usize));
    let (early, late) = full.split_at(full.len() / 2);
    if early.is_empty() {
        return Err(io::Error::other("the run was too short"));
    }
    at_most(
        &format!("median memory in the last {} s ÷ the {} s before", late.len(), early.len()),
        median(late.to_vec()) / median(early.to_vec()),
        1.05,
    );
    Ok(())
}

/// Opens an event stream and does not read it.
fn listen(admin: &str) -> io::Result<TcpStream> {
    let mut page = TcpStream::connect(admin)?;
    page.write_all(format!("GET /admin/v1/events HTTP/1.1\r\nhost: {admin}\r\n\r\n").as_bytes())?;
    Ok(page)
}

/// Sends checks of random callers in batches, each in a sampled trace.
fn send_checks(http: &str, seed: u64, more: impl Fn() -> bool) -> io::Result<()> {
    let mut server = TcpStream::connect(http)?;
    server.set_read_timeout(Some(Duration::from_secs(30)))?;
    let (mut random, mut requests, mut responses) = (SplitMix64::new(seed), Vec::new(), vec![0; 1 << 16]);
    while more() {
        requests.clear();
        for _ in 0..TOGETHER {
            let (caller, trace) = (random.below(CALLERS), random.next_u64() | 1);
            let body =
                format!("{{\"domain\":\"d\",\"attributes\":{{\"api_key\":\"sk_live_{caller:016}\"}}}}");
            let head = format!(
                "POST /v1/check HTTP/1.1\r\nhost: {http}\r\ncontent-type: application/json\r\ntraceparent: 00-{trace:032x}-{trace:016x}-01\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            requests.extend_from_slice(head.as_bytes());
            requests.extend_from_slice(body.as_bytes());
        }
        server.write_all(&requests)?;
        let mut left = TOGETHER;
        // The end of a head may be split between two reads.
        let mut ending = 0;
        while left > 0 {
            let read = server.read(&mut responses)?;
            if read == 0 {
                return Err(io::Error::other("the server closed the connection"));
            }
            for byte in &responses[..read] {
                ending = match (byte, ending) {
                    (b'\r', 0 | 2) | (b'\n', 1) => ending + 1,
                    (b'\n', 3) => {
                        left = left.saturating_sub(1);
                        0
                    }
                    (b'\r', _) => 1,
                    _ => 0,
                };
            }
        }
    }
    Ok(())
}

/// Changes a quota.
fn change(admin: &str, n: u64) -> io::Result<()> {
    let own = format!("{{\"descriptor\":\"default\",\"requests_per_unit\":{},\"unit\":\"hour\"}}", 5 + n % 2);
    let body = format!("{{\"overrides\":[{own}],\"reason\":\"bench\"}}");
    let head = format!(
        "PUT /admin/v1/quotas/somebody HTTP/1.1\r\nhost: {admin}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = exchange(admin, &head)?;
    if !answer.starts_with("HTTP/1.1 200") {
        return Err(io::Error::other(format!("a change failed: {answer}")));
    }
    Ok(())
}

fn metrics(admin: &str, name: &str) -> io::Result<Vec<String>> {
    let text =
        exchange(admin, &format!("GET /metrics HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n"))?;
    Ok(text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect())
}

fn exchange(address: &str, request: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
