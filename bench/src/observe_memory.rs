//! Whether memory stays where it is when everything that watches is broken: a server whose decision log is a full disk, whose
//! collector takes connections and never answers, and to which 200 pages listen that never read, is asked by very many callers,
//! most of them denied and every one of them traced. What it holds is told at every tenth.

use crate::process::{Server, free_port, tollgate_binary};
use crate::report::{at_most, heading, note};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Decisions, in millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Short,
}

const RULES: &str = "{domain: d, descriptors: [{key: api_key, name: per-key, limit: 1/hour}]}";
const CALLERS: u64 = 300_000;
/// Requests that are sent together.
const TOGETHER: usize = 64;
const THREADS: u64 = 2;
const PAGES: usize = 200;
const CHANGES: u64 = 5_000;

pub(crate) fn run(length: Length) -> io::Result<()> {
    let total: u64 = match length {
        Length::Full => 40_000_000,
        Length::Short => 4_000_000,
    };
    let folder = std::env::temp_dir().join(format!("tollgate-observe-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let ran = measure(total, &folder);
    std::fs::remove_dir_all(&folder)?;
    ran
}

fn measure(total: u64, folder: &Path) -> io::Result<()> {
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
    let asked = AtomicU64::new(0);
    let mut tenths = vec![server.resident_kib()];
    note(&format!("at the start: {} KiB", tenths[0]));
    std::thread::scope(|scope| {
        let askers: Vec<_> = (0..THREADS)
            .map(|n| {
                scope.spawn({
                    let (server, asked) = (&server, &asked);
                    move || ask(&server.address, n, total, asked)
                })
            })
            .collect();
        while tenths.len() <= 10 && !askers.iter().any(ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(50));
            let done = asked.load(Ordering::Relaxed);
            if done * 10 >= total * tenths.len() as u64 {
                tenths.push(server.resident_kib());
                note(&format!(
                    "{:.1} million decisions: {} KiB",
                    done as f64 / 1e6,
                    tenths[tenths.len() - 1]
                ));
            }
        }
        askers
            .into_iter()
            .try_for_each(|asker| asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    tenths.push(server.resident_kib());
    note(&format!("at the end: {} KiB", tenths[tenths.len() - 1]));
    drop(pages);
    for name in ["ratelimit_decisions_total", "ratelimit_decision_log_", "ratelimit_trace_spans"] {
        figures(&admin, name)?.iter().for_each(|line| note(line));
    }
    // The rooms that are filled with use (counters, the log's 20,000 decisions, what waits for an output) are full by half time.
    let (early, late) = (tenths.iter().take(6).max(), tenths.iter().skip(6).max());
    let (early, late) = early.zip(late).ok_or_else(|| io::Error::other("the server was asked too little"))?;
    at_most(
        "the most memory of the second half beside the most of the first",
        *late as f64 / *early as f64,
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
fn ask(http: &str, seed: u64, total: u64, asked: &AtomicU64) -> io::Result<()> {
    let mut server = TcpStream::connect(http)?;
    server.set_read_timeout(Some(Duration::from_secs(30)))?;
    let (mut random, mut requests, mut answers) = (seed + 0x9e37_79b9, Vec::new(), vec![0; 1 << 16]);
    while asked.fetch_add(TOGETHER as u64, Ordering::Relaxed) < total {
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
