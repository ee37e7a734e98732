//! Load with `wrk` on the client core, and its results: rate, p99 latency, and the server's CPU time.

use crate::process::{CLIENT_CORE, Server, median};
use std::process::Command;

/// Result of one run.
#[derive(Clone, Copy, Default)]
pub(crate) struct Run {
    pub(crate) rate: f64,
    /// Milliseconds.
    pub(crate) p99: f64,
    /// Microseconds of the server's CPU time per request.
    pub(crate) micros: f64,
    /// Number of responses other than 2xx and 3xx.
    pub(crate) refused: u64,
}

/// Returns the medians of some runs.
pub(crate) fn middle(runs: &[Run]) -> Run {
    let of = |field: fn(&Run) -> f64| median(runs.iter().map(field).collect());
    let refused = runs.iter().map(|run| run.refused).sum();
    Run { rate: of(|run| run.rate), p99: of(|run| run.p99), micros: of(|run| run.micros), refused }
}

/// Sends requests for `seconds` over 64 connections; `more` are further arguments of `wrk`.
pub(crate) fn load(server: &Server, path: &str, seconds: u32, more: &[&str]) -> Result<Run, String> {
    let before = server.ticks();
    let output = Command::new("taskset")
        .args(["-c", CLIENT_CORE, "wrk", "-t1", "-c64", "--latency"])
        .args(more)
        .arg(format!("-d{seconds}s"))
        .arg(format!("http://{}{path}", server.address))
        .output()
        .map_err(|error| format!("cannot run wrk (package wrk): {error}"))?;
    let ticks = server.ticks() - before;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |part: &str| text.lines().map(str::trim).find(|line| line.contains(part));
    let word = |part: &str, at: usize| {
        let word = line(part).and_then(|line| line.split_whitespace().nth(at));
        word.ok_or_else(|| {
            format!("wrk printed no `{part}`:\n{text}{}", String::from_utf8_lossy(&output.stderr))
        })
    };
    let number = |text: &str| text.parse::<f64>().map_err(|error| format!("`{text}`: {error}"));
    let rate = number(word("Requests/sec:", 1)?)?;
    let requests = number(word("requests in", 0)?)?;
    let p99 = word("99%", 1)?;
    let p99 = match (p99.strip_suffix("us"), p99.strip_suffix("ms"), p99.strip_suffix('s')) {
        (Some(micros), ..) => number(micros)? / 1_000.0,
        (_, Some(millis), _) => number(millis)?,
        (.., Some(seconds)) => number(seconds)? * 1_000.0,
        _ => return Err(format!("no p99 in\n{text}")),
    };
    let refused = line("Non-2xx").and_then(|line| line.split_whitespace().last()?.parse().ok()).unwrap_or(0);
    Ok(Run { rate, p99, micros: ticks as f64 * 10_000.0 / requests.max(1.0), refused })
}
