//! The Redis protocol compared with its peers: `CL.THROTTLE` of Tollgate, `GET` of redis-server, `THROTTLE` of
//! throttlecrab-server, and a bare tokio server that responds +OK to everything.
//!
//! Server on one core, `redis-benchmark` with 50 connections on the other, 100,000 keys. Contestants take turns in every
//! round; medians are compared. The server's CPU time per command is reported with the rate: where the client is the
//! bottleneck, only that distinguishes servers.

use crate::process::{CLIENT_CORE, Server, free_port, median, tollgate_binary, tool};
use crate::report;
use std::path::Path;
use std::process::Command;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const KEYS: &str = "100000";
const PIPELINES: [u32; 3] = [1, 16, 64];

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

struct Contestant {
    name: &'static str,
    server: Server,
    command: &'static [&'static str],
    /// Requests per run for each of `PIPELINES`, in thousands.
    thousands: [u32; 3],
}

/// Result of one run.
#[derive(Clone, Copy)]
struct Run {
    rate: f64,
    /// Nanoseconds of the server's CPU time per command.
    nanos: f64,
}

/// Runs the comparison; needs the server's binary, redis-server and redis-benchmark, and optionally throttlecrab-server.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let rounds = match length {
        Length::Short => 3,
        Length::Full => 7,
    };
    let contestants = contestants()?;
    let names: Vec<&str> = contestants.iter().map(|contestant| contestant.name).collect();
    println!(
        "thousand commands/s (and ns of the server's CPU time per command), 50 connections, server on one"
    );
    println!("core, median of {rounds} rounds");
    println!("{:<10} {}", "pipeline", names.iter().map(|name| format!("{name:>24}")).collect::<String>());
    let mut medians = Vec::new();
    for (at, pipeline) in PIPELINES.into_iter().enumerate() {
        let mut runs: Vec<Vec<Run>> = vec![Vec::new(); contestants.len()];
        for _ in 0..rounds {
            for (contestant, runs) in contestants.iter().zip(&mut runs) {
                runs.push(contestant.run(pipeline, contestant.thousands[at] * 1_000)?);
            }
        }
        let middle: Vec<Run> = runs
            .iter()
            .map(|runs| Run {
                rate: median(runs.iter().map(|run| run.rate).collect()),
                nanos: median(runs.iter().map(|run| run.nanos).collect()),
            })
            .collect();
        let shown: String = middle
            .iter()
            .map(|run| format!("{:>24}", format!("{:.0} ({:.0})", run.rate / 1_000.0, run.nanos)))
            .collect();
        println!("{pipeline:<10} {shown}");
        medians.push(middle);
    }
    let of = |name: &str| names.iter().position(|known| *known == name);
    let (Some(own), Some(redis)) = (of("tollgate"), of("redis GET")) else { return Ok(()) };
    println!();
    for (at, pipeline) in PIPELINES.into_iter().enumerate() {
        let ratio = medians[at][own].rate / medians[at][0].rate;
        report::note(&format!("- pipeline {pipeline}: {ratio:.2} of the bare server"));
    }
    for (at, pipeline) in PIPELINES.into_iter().enumerate().skip(1) {
        let ratio = medians[at][own].rate / medians[at][redis].rate;
        report::at_least(&format!("pipeline {pipeline}: tollgate ÷ redis-server's GET"), ratio, 1.0);
    }
    if let Some(crab) = of("throttlecrab") {
        let ratio = medians[2][own].rate / medians[2][crab].rate;
        report::at_least("pipeline 64: tollgate ÷ throttlecrab-server", ratio, 10.0);
    }
    Ok(())
}

fn contestants() -> Result<Vec<Contestant>, String> {
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let fast = [150, 1_000, 2_000];
    let mut all = vec![Contestant {
        name: "bare +OK",
        server: Server::start(&myself, &["bare-resp"], "resp")?,
        command: &["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"],
        thousands: fast,
    }];
    let port = free_port()?;
    let flags = ["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    let redis = Contestant {
        name: "redis GET",
        server: Server::start_at(Path::new("redis-server"), &flags, &format!("127.0.0.1:{port}"))?,
        command: &["GET", "key:__rand_int__"],
        thousands: fast,
    };
    load(&redis.server.address, 64, 500_000, &["SET", "key:__rand_int__", "xxx"])?;
    all.push(redis);
    if let Some(program) = tool("throttlecrab-server") {
        let port = free_port()?;
        let flags = ["--redis", "--redis-host", "127.0.0.1", "--redis-port", &port, "--log-level", "error"];
        all.push(Contestant {
            name: "throttlecrab",
            server: Server::start_at(&program, &flags, &format!("127.0.0.1:{port}"))?,
            command: &["THROTTLE", "key:__rand_int__", "15", "30", "60"],
            thousands: [50, 20, 60],
        });
    } else {
        report::note("throttlecrab-server not found, skipped; run make .tools/bin/throttlecrab-server");
    }
    let local = "127.0.0.1:0";
    let flags = ["serve", "--http", local, "--grpc", local, "--resp", local];
    all.push(Contestant {
        name: "tollgate",
        server: Server::start(&tollgate_binary(&myself)?, &flags, "resp")?,
        command: &["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"],
        thousands: fast,
    });
    Ok(all)
}

impl Contestant {
    fn run(&self, pipeline: u32, requests: u32) -> Result<Run, String> {
        let before = self.server.ticks();
        let rate = load(&self.server.address, pipeline, requests, self.command)?;
        let ticks = self.server.ticks() - before;
        Ok(Run { rate, nanos: ticks as f64 * 1e7 / f64::from(requests) })
    }
}

fn load(address: &str, pipeline: u32, requests: u32, command: &[&str]) -> Result<f64, String> {
    let port = address.rsplit(':').next().unwrap_or(address);
    let output = Command::new("taskset")
        .args(["-c", CLIENT_CORE, "redis-benchmark", "--csv", "-c", "50", "-r", KEYS, "-p", port])
        .args(["-P", &pipeline.to_string(), "-n", &requests.to_string()])
        .args(command)
        .output()
        .map_err(|error| format!("cannot run redis-benchmark (package redis-tools): {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // "name","rate","average latency",…
    let line = text.lines().last().unwrap_or_default();
    let rate = line.split("\",\"").nth(1).and_then(|rate| rate.parse().ok());
    rate.ok_or_else(|| {
        format!("redis-benchmark printed no rate:\n{text}{}", String::from_utf8_lossy(&output.stderr))
    })
}

/// The floor: reads and writes, and only counts command starts in between.
pub(crate) fn bare() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("resp {}", listener.local_addr()?);
        loop {
            let (mut stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            tokio::spawn(async move {
                let (mut input, mut out) = (vec![0; 64 * 1024], Vec::new());
                while let Ok(read @ 1..) = stream.read(&mut input).await {
                    out.clear();
                    for _ in input[..read].iter().filter(|byte| **byte == b'*') {
                        out.extend_from_slice(b"+OK\r\n");
                    }
                    if stream.write_all(&out).await.is_err() {
                        return;
                    }
                }
            });
        }
    })
}
