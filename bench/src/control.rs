//! Many quotas: how long a million take in and out, and what a node needs that starts with all of them.
//!
//! `--short`: a million; else ten. Everything by the release binary over SQLite, or over the database of `TOLLGATE_BENCH_DB`.

use crate::process::{Server, free_port, tollgate_binary};
use crate::report;
use std::fmt::Write as _;
use std::io::{BufWriter, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How many.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

const RULES: &str =
    "domain: d\ndescriptors:\n  - {key: api_key, limit: 100/minute, tiers: {pro: 1000/minute}}\n";

/// Runs it; needs the release binary.
#[allow(clippy::disallowed_methods, reason = "it measures")]
pub(crate) fn run(length: Length) -> Result<(), String> {
    let rows: u64 = match length {
        Length::Short => 1_000_000,
        Length::Full => 10_000_000,
    };
    let wrong = |error: std::io::Error| error.to_string();
    let myself = std::env::current_exe().map_err(wrong)?;
    let tollgate = tollgate_binary(&myself)?;
    let folder = std::env::temp_dir().join(format!("tollgate-bench-control-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(wrong)?;
    std::fs::write(folder.join("rules.yaml"), RULES).map_err(wrong)?;
    let (sent, got) = (folder.join("in.ndjson"), folder.join("out.ndjson"));
    write_lines(&sent, rows).map_err(wrong)?;
    let db = std::env::var("TOLLGATE_BENCH_DB")
        .unwrap_or_else(|_| format!("sqlite:{}", folder.join("quotas.db").display()));
    let start = || start(&tollgate, &folder, &db);

    report::heading(&format!("{rows} quotas"));
    let node = start()?;
    let url = format!("http://{}", node.address);
    let empty = node.resident_kib();
    let command = |args: &[&str]| -> Result<Duration, String> {
        let began = Instant::now();
        let done = Command::new(&tollgate).args(args).args(["--admin", &url]).output().map_err(wrong)?;
        match done.status.success() {
            true => Ok(began.elapsed()),
            false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
        }
    };
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let millions = rows as f64 / 1e6;
    let took = command(&["quota", "import", &path(&sent)])?.as_secs_f64();
    report::at_most("import, s a million", took / millions, 60.0);
    report::note(&format!(
        "  {:.0} MiB resident afterwards, {} before",
        mib(node.resident_kib()),
        mib(empty)
    ));
    let took = command(&["quota", "export", "--file", &path(&got)])?.as_secs_f64();
    report::at_most("export, s a million", took / millions, 60.0);
    drop(node);

    let began = Instant::now();
    let node = start()?;
    report::note(&format!("- it listens after {:.1} s", began.elapsed().as_secs_f64()));
    while !get(&node.address, "/readyz").starts_with("HTTP/1.1 200") {
        std::thread::sleep(Duration::from_millis(50));
    }
    report::note(&format!("- it is ready after {:.1} s", began.elapsed().as_secs_f64()));
    let own = node.resident_kib().saturating_sub(empty) as f64 * 1_024.0;
    report::at_most("memory, bytes a key", own / rows as f64, 64.0);
    drop(node);
    std::fs::remove_dir_all(&folder).map_err(wrong)
}

fn start(tollgate: &Path, folder: &Path, db: &str) -> Result<Server, String> {
    let rules = folder.join("rules.yaml");
    let admin = format!("127.0.0.1:{}", free_port()?);
    let other = "127.0.0.1:0";
    let args = [
        "--rules",
        &rules.to_string_lossy(),
        "--db",
        db,
        "--admin",
        &admin,
        "--http",
        other,
        "--grpc",
        other,
    ];
    let args = [&["serve", "--resp", "off", "--memory", "64MiB"], &args[..]].concat();
    Server::start(tollgate, &args, "admin")
}

/// A few plans that most have, and one in a hundred with a limit of its own.
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
    let mut text = String::new();
    if let Ok(mut stream) = TcpStream::connect(address) {
        let asked = write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        if asked.is_ok() {
            let _ = stream.read_to_string(&mut text);
        }
    }
    text
}

fn mib(kib: u64) -> f64 {
    (kib / 1_024) as f64
}
