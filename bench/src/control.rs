//! Control plane with many quotas: import and export time per million, the wait of other changes meanwhile, and the startup
//! of a node with all of them.
//!
//! One million quotas with `--short`, else ten. Uses the server's binary over SQLite; with `--postgres` over a PostgreSQL
//! that it starts, or over the database of `TOLLGATE_BENCH_DB`.

use crate::databases::Postgres;
use crate::process::{Server, children_ticks, free_port, tollgate_binary};
use crate::report;
use std::fmt::Write as _;
use std::io::{BufWriter, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Number of quotas.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

/// Database of the control plane.
#[derive(Clone, Copy)]
pub(crate) enum Database {
    Sqlite,
    Postgres,
}

const RULES: &str =
    "domain: d\ndescriptors:\n  - {key: api_key, limit: 100/minute, tiers: {pro: 1000/minute}}\n";

/// Interval of other changes during an import.
const OTHERS: Duration = Duration::from_millis(200);

/// A folder that is removed on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Times of one step in seconds.
struct Took {
    seconds: f64,
    /// CPU seconds of the node and of the command.
    node: f64,
    command: f64,
}

/// Runs the benchmark; needs the server's binary.
#[allow(clippy::disallowed_methods, reason = "it measures")]
pub(crate) fn run(length: Length, database: Database) -> Result<(), String> {
    let rows: u64 = match length {
        Length::Short => 1_000_000,
        Length::Full => 10_000_000,
    };
    let wrong = |error: std::io::Error| error.to_string();
    let myself = std::env::current_exe().map_err(wrong)?;
    let tollgate = tollgate_binary(&myself)?;
    let folder = Folder(std::env::temp_dir().join(format!("tollgate-bench-control-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).map_err(wrong)?;
    std::fs::write(folder.0.join("rules.yaml"), RULES).map_err(wrong)?;
    let (sent, got) = (folder.0.join("in.ndjson"), folder.0.join("out.ndjson"));
    write_lines(&sent, rows).map_err(wrong)?;
    let postgres = matches!(database, Database::Postgres).then(Postgres::start);
    let db = match (&postgres, std::env::var("TOLLGATE_BENCH_DB")) {
        (Some(server), _) => server.database("bench"),
        (None, Ok(db)) => db,
        (None, Err(_)) => format!("sqlite:{}", folder.0.join("quotas.db").display()),
    };
    let start = || start(&tollgate, &folder.0, &db);

    let kind = db.split(':').next().unwrap_or("");
    report::heading(&format!("{rows} quotas in {kind}"));
    let node = start()?;
    let url = format!("http://{}", node.address);
    let empty = node.resident_kib();
    let command = |args: &[&str]| -> Result<Took, String> {
        let (began, before) = (Instant::now(), (node.ticks(), children_ticks()));
        let done = Command::new(&tollgate).args(args).args(["--admin", &url]).output().map_err(wrong)?;
        if !done.status.success() {
            return Err(String::from_utf8_lossy(&done.stderr).into_owned());
        }
        let seconds = |ticks: u64| ticks as f64 / 100.0;
        Ok(Took {
            seconds: began.elapsed().as_secs_f64(),
            node: seconds(node.ticks() - before.0),
            command: seconds(children_ticks() - before.1),
        })
    };
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let millions = rows as f64 / 1e6;
    report::note("| | measured | bar | CPU s: node; command |\n|---|---:|---:|---:|");
    let print_times = |what: &str, took: &Took| {
        let times = format!("{:.1}; {:.1}", took.node, took.command);
        report::bar_row(what, took.seconds / millions, 60.0, &times);
    };
    let (imported, waits) = while_others_write(&node.address, || command(&["quota", "import", &path(&sent)]));
    print_times("import, s per million", &imported?);
    let (count, longest) = waits?;
    report::bar_row("longest wait of another change during the import, s", longest.as_secs_f64(), 5.0, "");
    report::bare_row("other changes during the import", &count.to_string());
    report::bare_row("peak resident MiB; before", &format!("{:.0}; {:.0}", mib(node.peak_kib()), mib(empty)));
    print_times("export, s per million", &command(&["quota", "export", "--file", &path(&got)])?);
    let lines = std::fs::read(&got).map_err(wrong)?.iter().filter(|byte| **byte == b'\n').count() as u64;
    // The imported quotas, and the one that the concurrent writer created.
    if lines != rows + 1 {
        return Err(format!("{lines} lines exported after {rows} were imported"));
    }
    drop(node);
    std::fs::remove_file(&got).map_err(wrong)?;
    let _ = std::fs::remove_file(folder.0.join("snapshot.quotas"));

    let began = Instant::now();
    let node = start()?;
    report::bare_row("startup: listening after, s", &format!("{:.1}", began.elapsed().as_secs_f64()));
    while !get(&node.address, "/readyz").starts_with("HTTP/1.1 200") {
        std::thread::sleep(Duration::from_millis(50));
    }
    let ready = began.elapsed().as_secs_f64();
    report::bare_row("ready after, s; CPU s", &format!("{ready:.1}; {:.1}", node.ticks() as f64 / 100.0));
    // Includes the caches of database connections and other memory of a node that has started working.
    let own = settled(&node).saturating_sub(empty) as f64 * 1_024.0;
    report::bar_row("memory, bytes per key", own / rows as f64, 64.0, "");
    if let Ok(quotas) = std::fs::metadata(folder.0.join("snapshot.quotas")) {
        report::bare_row("snapshot size, MiB", &format!("{:.0}", mib(quotas.len() / 1_024)));
    }
    drop(node);
    Ok(())
}

/// Returns the resident memory after temporary memory of the startup is freed: when it has not fallen for three seconds.
fn settled(node: &Server) -> u64 {
    let (mut least, mut same) = (node.resident_kib(), 0);
    while same < 30 {
        std::thread::sleep(Duration::from_millis(100));
        let now = node.resident_kib();
        same = if now + 1_024 < least { 0 } else { same + 1 };
        least = least.min(now);
    }
    least
}

/// Runs `work` while another client changes one quota repeatedly. Returns the result, the number of changes and the longest
/// time of one.
#[allow(clippy::disallowed_methods, reason = "it measures")]
fn while_others_write<T>(address: &str, work: impl FnOnce() -> T) -> (T, Result<(u64, Duration), String>) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (mut count, mut longest) = (0, Duration::ZERO);
            while !done.load(Ordering::Relaxed) {
                let began = Instant::now();
                let answer = request(address, "PUT /admin/v1/quotas/other", r#"{"tier":"free"}"#);
                if !answer.starts_with("HTTP/1.1 200") {
                    return Err(format!("another change failed: {answer}"));
                }
                (count, longest) = (count + 1, longest.max(began.elapsed()));
                std::thread::sleep(OTHERS);
            }
            Ok((count, longest))
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        (result, others.join().unwrap_or_else(|_| Err("the concurrent writer panicked".to_owned())))
    })
}

fn start(tollgate: &Path, folder: &Path, db: &str) -> Result<Server, String> {
    let (rules, snapshot) = (folder.join("rules.yaml"), folder.join("snapshot"));
    let admin = format!("127.0.0.1:{}", free_port()?);
    let other = "127.0.0.1:0";
    let args = [
        "--rules",
        &rules.to_string_lossy(),
        "--db",
        db,
        "--snapshot",
        &snapshot.to_string_lossy(),
        "--admin",
        &admin,
        "--http",
        other,
        "--grpc",
        other,
    ];
    let args = [&["serve", "--resp", "off", "--memory", "64MiB"], &args[..]].concat();
    Server::start_anywhere(tollgate, &args, "admin")
}

/// Writes quotas: all with a tier, and one in a hundred with an override.
fn write_lines(path: &Path, rows: u64) -> std::io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
    let mut line = String::new();
    for i in 0..rows {
        line.clear();
        let _ = write!(
            line,
            "{{\"api_key\":\"live_{:016x}{i:08x}\",\"tier\":\"pro\"",
            i.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        );
        if i % 100 == 0 {
            let own = i % 1_000;
            let _ = write!(
                line,
                ",\"overrides\":[{{\"descriptor\":\"default\",\"requests_per_unit\":{own},\"unit\":\"minute\"}}]"
            );
        }
        line.push_str(",\"reason\":\"plan\"}\n");
        out.write_all(line.as_bytes())?;
    }
    out.flush()
}

fn get(address: &str, path: &str) -> String {
    request(address, &format!("GET {path}"), "")
}

fn request(address: &str, what: &str, body: &str) -> String {
    let mut text = String::new();
    if let Ok(mut stream) = TcpStream::connect(address) {
        let length = body.len();
        let sent = write!(
            stream,
            "{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        if sent.is_ok() {
            let _ = stream.read_to_string(&mut text);
        }
    }
    text
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1_024.0
}
