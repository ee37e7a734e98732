//! Whether memory stays where it is when everything that watches is broken: a server whose decision log is a full disk, whose
//! collector takes connections and never answers, and to which 200 pages listen that never read, is asked by very many callers,
//! most of them denied and every one of them traced. What it holds is looked at every second, and told at every twelfth.

use crate::process::{Server, free_port, median, tollgate_binary};
use crate::report::{at_most, heading, note};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// How long it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Short,
}

/// The rooms that fill with use are full: the longest ones hold five minutes (what rehearsals go over, who is near a limit).
const FILLED: Duration = Duration::from_secs(360);
/// At the most, a second: nobody is asked without end.
const MOST_A_SECOND: u64 = 200_000;

const RULES: &str = "{domain: d, descriptors: [{key: api_key, name: per-key, limit: 1/hour}]}";
const CALLERS: u64 = 300_000;
/// Requests that are sent together.
const TOGETHER: usize = 64;
const THREADS: u64 = 2;
const PAGES: usize = 200;
const CHANGES: u64 = 5_000;

pub(crate) fn run(length: Length) -> io::Result<()> {
    let lasts = Duration::from_secs(match length {
        Length::Full => 1_080,
        Length::Short => 60,
    });
    let folder = std::env::temp_dir().join(format!("tollgate-observe-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let ran = measure(lasts, &folder);
    std::fs::remove_dir_all(&folder)?;
    ran
}

fn measure(lasts: Duration, folder: &Path) -> io::Result<()> {
    let rules = folder.join("rules.yaml");
    std::fs::write(&rules, RULES)?;
    let collector = TcpListener::bind("127.0.0.1:0")?;
    let otlp = format!("http://{}", collector.local_addr()?);
    // It takes whoever comes, holds on to them, and says nothing.
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
    let pages: Vec<TcpStream> = (0..PAGES).map(|_| listen(&admin)).collect::<Result<_, _>>()?;
    heading(&format!(
        "{CALLERS} callers, {PAGES} pages that do not read, a full disk, a collector that does not answer"
    ));

    // Changes make more to tell than figures once a second: the pages' connections fill up. They are over before memory is looked
    // at, since a database holds in memory what it has written.
    (0..CHANGES).try_for_each(|n| change(&admin, n))?;
    let (asked, most) = (AtomicU64::new(0), MOST_A_SECOND * lasts.as_secs());
    let mut held = Vec::new();
    note(&format!("at the start: {} KiB", server.resident_kib()));
    #[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let askers: Vec<_> = (0..THREADS)
            .map(|n| {
                let (server, asked) = (&server, &asked);
                let more = move || {
                    asked.fetch_add(TOGETHER as u64, Ordering::Relaxed) < most && begun.elapsed() < lasts
                };
                scope.spawn(move || ask(&server.address, n, more))
            })
            .collect();
        let twelfth = (lasts.as_secs() / 12).max(1) as usize;
        while !askers.iter().any(ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_secs(1));
            held.push(server.resident_kib() as f64);
            if held.len() % twelfth == 0 {
                let (done, last) = (asked.load(Ordering::Relaxed) as f64 / 1e6, held[held.len() - 1]);
                note(&format!("{} s, {done:.1} million decisions: {last} KiB", held.len()));
            }
        }
        askers
            .into_iter()
            .try_for_each(|asker| asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    drop(pages);
    for name in ["ratelimit_decisions_total", "ratelimit_decision_log_", "ratelimit_trace_spans"] {
        figures(&admin, name)?.iter().for_each(|line| note(line));
    }
    // A short run sees no more than that nothing runs away.
    let full = held.split_off(held.len().min(FILLED.min(lasts / 2).as_secs() as usize));
    let (early, late) = full.split_at(full.len() / 2);
    if early.is_empty() {
        return Err(io::Error::other("the server was asked too little"));
    }
    at_most(
        &format!(
            "memory in the last {} s beside the {} s before, each in the middle",
            late.len(),
            early.len()
        ),
        median(late.to_vec()) / median(early.to_vec()),
        1.05,
    );
    Ok(())
}

/// A page that listens and does not read.
fn listen(admin: &str) -> io::Result<TcpStream> {
    let mut page = TcpStream::connect(admin)?;
    page.write_all(format!("GET /admin/v1/events HTTP/1.1\r\nhost: {admin}\r\n\r\n").as_bytes())?;
    Ok(page)
}

/// Asks as many callers in turn, at random, many requests at a time, each of them part of a sampled trace.
fn ask(http: &str, seed: u64, more: impl Fn() -> bool) -> io::Result<()> {
    let mut server = TcpStream::connect(http)?;
    server.set_read_timeout(Some(Duration::from_secs(30)))?;
    let (mut random, mut requests, mut answers) = (seed + 0x9e37_79b9, Vec::new(), vec![0; 1 << 16]);
    while more() {
        requests.clear();
        for _ in 0..TOGETHER {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let body = format!(
                "{{\"domain\":\"d\",\"attributes\":{{\"api_key\":\"sk_live_{:016}\"}}}}",
                random % CALLERS
            );
            let head = format!(
                "POST /v1/check HTTP/1.1\r\nhost: {http}\r\ncontent-type: application/json\r\ntraceparent: 00-{:032x}-{:016x}-01\r\ncontent-length: {}\r\n\r\n",
                random | 1,
                random | 1,
                body.len()
            );
            requests.extend_from_slice(head.as_bytes());
            requests.extend_from_slice(body.as_bytes());
        }
        server.write_all(&requests)?;
        let mut left = TOGETHER;
        // The end of a head may be split over two reads.
        let mut ending = 0;
        while left > 0 {
            let read = server.read(&mut answers)?;
            if read == 0 {
                return Err(io::Error::other("the server hung up"));
            }
            for byte in &answers[..read] {
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
        return Err(io::Error::other(format!("a change was refused: {answer}")));
    }
    Ok(())
}

fn figures(admin: &str, name: &str) -> io::Result<Vec<String>> {
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
