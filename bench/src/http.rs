//! The HTTP server compared with a bare hyper server that responds 200 to everything: the cost of deciding.
//!
//! Server on one core, `wrk` with 64 connections on the other. `/v1/check` is posted as programs do, `/check` is requested
//! with the headers that proxies send. The bare server gets the same requests and reads none of them. Contestants take turns
//! in every round; medians are compared. The client's core limits the rates as well, so the server's CPU time per request is
//! reported with them.

use crate::process::{Server, tollgate_binary};
use crate::report;
use crate::wrk::{self, middle};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

const RULES: &str = "domain: bench
descriptors:
  - {key: api_key, name: per-key, limit: 1000000000/second}
";

const POST: &str = r#"wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"domain":"bench","attributes":{"api_key":"k-0123456789","method":"GET"}}'
"#;

const FIELDS: [&str; 8] = [
    "-H",
    "X-Api-Key: k-0123456789",
    "-H",
    "X-Forwarded-Method: GET",
    "-H",
    "X-Forwarded-Uri: /orders/17",
    "-H",
    "X-Forwarded-For: 203.0.113.9",
];

/// Runs the comparison; needs the server's binary and wrk.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (rounds, seconds) = match length {
        Length::Short => (5, 2),
        Length::Full => (9, 8),
    };
    let folder = std::env::temp_dir().join(format!("tollgate-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        let written = std::fs::write(&path, text).map(|()| path.display().to_string());
        written.map_err(|error| error.to_string())
    };
    let (rules, script) = (write("rules.yaml", RULES)?, write("post.lua", POST)?);
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let bare = Server::start(&myself, &["bare-http"], "http")?;
    let local = "127.0.0.1:0";
    let flags = ["serve", "--rules", &rules, "--http", local, "--grpc", local, "--resp", "off"];
    let own = Server::start(&tollgate_binary(&myself)?, &flags, "http")?;

    println!(
        "requests/s, p99 in ms, and µs of the server's CPU time per request: 64 connections, server on one"
    );
    println!("core, median of {rounds} rounds of {seconds} s");
    println!("{:<16} {:>24} {:>24} {:>8}", "", "bare hyper", "tollgate", "ratio");
    let contests = [("POST /v1/check", "/v1/check", &["-s", &script][..]), ("GET /check", "/check", &FIELDS)];
    let mut bars = Vec::new();
    for (name, path, options) in contests {
        let mut runs = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (server, runs) in [&bare, &own].into_iter().zip(&mut runs) {
                runs.push(wrk::load(server, path, seconds, options)?);
            }
        }
        let [theirs, ours] = runs.map(|runs| middle(&runs));
        if ours.refused + theirs.refused > 0 {
            return Err(format!("{name}: {} responses were not 200", ours.refused + theirs.refused));
        }
        let shown = |run: wrk::Run| format!("{:.0}  {:.2}  {:.1}", run.rate, run.p99, run.micros);
        println!("{name:<16} {:>24} {:>24} {:>8.2}", shown(theirs), shown(ours), ours.rate / theirs.rate);
        bars.push((name, ours.rate / theirs.rate, theirs.micros / ours.micros));
    }
    println!();
    for (name, by_rate, by_time) in bars {
        report::at_least(&format!("{name}, rate ÷ bare hyper"), by_rate, 0.85);
        report::note(&format!("- {name}, by CPU time: {by_time:.2}"));
    }
    drop((bare, own));
    std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())
}

async fn always(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"{\"allowed\":true}"))))
}

/// The floor: the same requests and transport, without reading or deciding.
pub(crate) fn bare() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("http {}", listener.local_addr()?);
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let service = hyper::service::service_fn(always);
            tokio::spawn(async move {
                let connection = hyper::server::conn::http1::Builder::new();
                let _ = connection.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    })
}
