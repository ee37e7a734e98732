//! Four nodes as processes on one core, started together: their results, and statistics of Redis.

use crate::process::{CLIENT_CORE, median};
use crate::redis::server::Redis;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

const NODES: usize = 4;

/// Load on the nodes.
pub(super) struct Load {
    pub(super) mode: &'static str,
    /// Seconds of warm-up, and of measurement.
    pub(super) warm: u64,
    pub(super) seconds: u64,
    /// The limit: units per period, and burst.
    pub(super) count: u64,
    pub(super) burst: u64,
    pub(super) keys: u64,
    /// Concurrent checks on each node.
    pub(super) tasks: usize,
    /// Period of the limit.
    pub(super) period: &'static str,
}

/// Results of all nodes together.
pub(super) struct Sum {
    pub(super) checks: f64,
    pub(super) admitted: f64,
    /// Decided without Redis.
    pub(super) local: f64,
    /// Seconds from the first node's start to the last one's end.
    pub(super) span: f64,
    /// Nanoseconds, median over the nodes.
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// Script calls in Redis.
    pub(super) calls: f64,
    /// Share of the time in which Redis was busy.
    pub(super) busy: f64,
}

impl Sum {
    pub(super) fn rate(&self) -> f64 {
        self.checks / self.span
    }
}

/// A node process, killed on drop.
struct Node {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Node {
    fn start(redis: &Redis, load: &Load) -> Result<Self, String> {
        let myself = std::env::current_exe().map_err(|error| error.to_string())?;
        let numbers = [load.warm, load.seconds, load.count, load.burst, load.keys, load.tasks as u64];
        let mut child = Command::new("taskset")
            .args(["-c", CLIENT_CORE])
            .arg(myself)
            .args(["lease-node", &redis.url(), load.mode, load.period])
            .args(numbers.map(|number| number.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start a node: {error}"))?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        Ok(Self { child, output })
    }

    fn start_load(&mut self) -> Result<(), String> {
        let input = self.child.stdin.as_mut().ok_or("no input")?;
        input.write_all(b"go\n").map_err(|error| error.to_string())
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(1..) => Ok(line),
            Ok(0) => Err("a node exited early".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Runs four nodes.
pub(super) fn run(redis: &Redis, load: &Load) -> Result<Sum, String> {
    let mut nodes: Vec<Node> = (0..NODES).map(|_| Node::start(redis, load)).collect::<Result<_, _>>()?;
    for node in &mut nodes {
        node.line()?;
    }
    for node in &mut nodes {
        node.start_load()?;
    }
    // All nodes have warmed up.
    for node in &mut nodes {
        node.line()?;
    }
    redis.query::<()>(redis::cmd("CONFIG").arg("RESETSTAT"))?;
    let cpu = redis.cpu_micros()?;
    let mut results: Vec<Vec<f64>> = Vec::new();
    for node in &mut nodes {
        let line = node.line()?;
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if numbers.len() != 7 {
            return Err(format!("unexpected output of a node: {line}"));
        }
        results.push(numbers);
    }
    let sum = |at: usize| results.iter().map(|node| node[at]).sum::<f64>();
    let middle = |at: usize| median(results.iter().map(|node| node[at]).collect());
    let start = results.iter().map(|node| node[3]).fold(f64::INFINITY, f64::min);
    let end = results.iter().map(|node| node[4]).fold(0.0, f64::max);
    let span = (end - start) / 1e6;
    Ok(Sum {
        checks: sum(0),
        admitted: sum(1),
        local: sum(2),
        span,
        p50: middle(5),
        p99: middle(6),
        calls: redis.script_calls()?,
        busy: (redis.cpu_micros()? - cpu) / 1e6 / span,
    })
}
