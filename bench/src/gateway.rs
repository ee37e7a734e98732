//! The gateway compared with nginx and `limit_req`: the same core, the same upstream, keep-alive on both sides.
//!
//! The proxy runs on one core; `wrk` and the upstream (nginx with a fixed response) on the other. Contestants take turns in
//! every round, so that a slow period of the machine affects both; medians are compared. The other core limits the rates as
//! well, so the proxy's CPU time per request is reported with them.

use crate::process::{CLIENT_CORE, Server, tollgate_binary};
use crate::report;
use crate::wrk::{self, Run, middle};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
    /// This many requests through the gateway alone, to observe its memory.
    Memory(f64),
}

/// Requests after which memory is compared: in full and in short runs.
pub(crate) const MANY: f64 = 10e6;
pub(crate) const SOME: f64 = 300e3;

const RULES: &str = "domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 1000000000/second}
  - {key: path, value: /denied, name: denied, limit: 1/day}
";

/// Runs the comparison; needs the server's binary, nginx and wrk.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (rounds, seconds) = match length {
        Length::Short => (3, 3),
        Length::Full => (7, 10),
        Length::Memory(_) => (0, 0),
    };
    let folder = std::env::temp_dir().join(format!("tollgate-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let upstream = upstream(&folder)?;
    let (own, nginx) = (gateway(&folder, &upstream.address)?, nginx(&folder, &upstream.address)?);
    // The first request to each is allowed; all later ones are denied.
    for server in [&nginx, &own] {
        load(server, "/denied", 1)?;
    }
    if let Length::Memory(requests) = length {
        memory(&own, requests)?;
        return std::fs::remove_dir_all(&folder).map_err(|error| error.to_string());
    }
    println!(
        "requests/s, p99 in ms, and µs of the proxy's CPU time per request: 64 connections, proxy on one core,"
    );
    println!("wrk and the upstream on the other, median of {rounds} rounds of {seconds} s");
    println!("{:<10} {:>28} {:>28} {:>8}", "", "nginx", "tollgate", "ratio");
    let mut table = Vec::new();
    for path in ["/allowed", "/denied"] {
        let mut runs = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (server, runs) in [&nginx, &own].into_iter().zip(&mut runs) {
                runs.push(load(server, path, seconds)?);
            }
        }
        let [theirs, ours] = runs.map(|runs| middle(&runs));
        let shown = |run: Run| format!("{:.0}  {:.2}  {:.1}", run.rate, run.p99, run.micros);
        println!("{path:<10} {:>28} {:>28} {:>8.2}", shown(theirs), shown(ours), ours.rate / theirs.rate);
        table.push((theirs, ours));
    }
    let [(theirs, ours), (_, denied)] = table[..] else { return Ok(()) };
    println!();
    report::at_least("allowed, rate ÷ nginx", ours.rate / theirs.rate, 1.0);
    report::at_least("allowed, nginx CPU time ÷ gateway", theirs.micros / ours.micros, 1.0);
    report::at_most("allowed, p99 ÷ nginx", ours.p99 / theirs.p99, 1.0);
    report::at_most("denial, µs of CPU time", denied.micros, 10.0);
    report::at_least("denials per second ÷ allowed requests", denied.rate / ours.rate, 3.0);
    if let Length::Short = length {
        memory(&own, SOME)?;
    }
    drop((own, nginx, upstream));
    std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())
}

/// Compares the gateway's memory before and after `total` requests.
fn memory(gateway: &Server, total: f64) -> Result<(), String> {
    let step = if total >= MANY { 20 } else { 3 };
    load(gateway, "/allowed", 5)?;
    let before = gateway.resident_kib();
    println!("memory, resident, before: {before} KiB");
    let (mut requests, mut largest) = (0.0, before);
    while requests < total {
        requests += load(gateway, "/allowed", step)?.rate * f64::from(step);
        largest = largest.max(gateway.resident_kib());
        println!("{:.2} million requests: {} KiB", requests / 1e6, gateway.resident_kib());
    }
    // With so little memory, a few connections more or less are a tenth of it.
    let max = if total >= MANY { 1.05 } else { 1.10 };
    let name = format!("memory after {:.1} million requests ÷ before", total / 1e6);
    report::at_most(&name, largest as f64 / before as f64, max);
    Ok(())
}

fn free() -> Result<String, String> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
    free.map(|address| address.to_string()).map_err(|error| error.to_string())
}

fn nginx_binary() -> Result<PathBuf, String> {
    let found = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"].map(PathBuf::from);
    found
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| "nginx not found; install the package nginx-light".to_owned())
}

/// Writes a configuration with a single process, so that its CPU time is all of nginx's.
fn nginx_config(folder: &Path, name: &str, inside: &str) -> Result<String, String> {
    let root = folder.display();
    let temp_paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {root}/{name}-{kind};"))
        .concat();
    let text = format!(
        "daemon off; master_process off; pid {root}/{name}.pid; error_log /dev/null crit; events {{ worker_connections 4096; }} http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 1h; {temp_paths} {inside} }}"
    );
    let path = folder.join(format!("{name}.conf"));
    std::fs::write(&path, text).map_err(|error| error.to_string())?;
    Ok(path.display().to_string())
}

fn upstream(folder: &Path) -> Result<Server, String> {
    let address = free()?;
    let inside = format!("server {{ listen {address} backlog=4096; location / {{ return 200 'hello'; }} }}");
    let config = nginx_config(folder, "upstream", &inside)?;
    let nginx = nginx_binary()?.display().to_string();
    let (program, folder) = (Path::new("taskset"), folder.display().to_string());
    Server::start_at(program, &["-c", CLIENT_CORE, &nginx, "-p", &folder, "-c", &config], &address)
}

fn nginx(folder: &Path, upstream: &str) -> Result<Server, String> {
    let address = free()?;
    let pass = "proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; proxy_set_header X-Forwarded-Proto $scheme; proxy_set_header X-Forwarded-Host $host;";
    let inside = format!(
        "limit_req_zone $http_x_api_key zone=a:10m rate=1000000r/s; limit_req_zone $http_x_api_key zone=d:10m rate=1r/m; upstream up {{ server {upstream}; keepalive 256; keepalive_requests 1000000000; }} server {{ listen {address} backlog=4096; location / {{ limit_req zone=a burst=1000000 nodelay; {pass} }} location /denied {{ limit_req zone=d; limit_req_status 429; {pass} }} }}"
    );
    let config = nginx_config(folder, "nginx", &inside)?;
    Server::start_at(&nginx_binary()?, &["-p", &folder.display().to_string(), "-c", &config], &address)
}

fn gateway(folder: &Path, upstream: &str) -> Result<Server, String> {
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let address = free()?;
    let config = format!(
        "rules: [rules.yaml]\nmemory: 64MiB\ngateway:\n  listeners: [{{address: \"{address}\"}}]\n  upstreams: {{up: {{addresses: [\"{upstream}\"]}}}}\n  routes: [{{path: \"/{{*rest}}\", upstream: up, domain: d}}]\n"
    );
    let path = folder.join("gateway.yaml");
    std::fs::write(folder.join("rules.yaml"), RULES).map_err(|error| error.to_string())?;
    std::fs::write(&path, config).map_err(|error| error.to_string())?;
    let path = path.display().to_string();
    Server::start_at(&tollgate_binary(&myself)?, &["gateway", "--config", &path], &address)
}

fn load(server: &Server, path: &str, seconds: u32) -> Result<Run, String> {
    let run = wrk::load(server, path, seconds, &["-H", "x-api-key: k"])?;
    if path == "/allowed" && run.refused > 0 {
        return Err(format!("{} requests were denied", run.refused));
    }
    Ok(run)
}
