//! The rate limit service over gRPC compared with a bare tonic server that always responds OK: the cost of deciding.
//!
//! Server on one core, `h2load` on the other: 8 connections with 16 streams each and one repeated message. Contestants take
//! turns in every round, so that a slow period of the machine affects all of them; medians are compared.

use crate::http2::grpc_message;
use crate::process::{CLIENT_CORE, Server, median, tollgate_binary};
use prost::Message as _;
use std::path::Path;
use std::process::Command;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

pub(crate) const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const RULES: &str = "domain: bench
descriptors:
  - {key: user, limit: 1000000000/second}
  - {key: api_key, limit: 1000000000/second}
  - {key: path, limit: 1000000000/minute}
  - {key: tenant, limit: 1000000000/hour}
";

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

/// Runs the comparison; needs the server's binary and `h2load`.
pub(crate) fn run(length: Length) -> Result<(), String> {
    let (requests, rounds) = match length {
        Length::Short => (100_000, 3),
        Length::Full => (400_000, 7),
    };
    let folder = std::env::temp_dir().join(format!("tollgate-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let rules = folder.join("rules.yaml");
    std::fs::write(&rules, RULES).map_err(|error| error.to_string())?;
    let payload = |name: &str, limits: usize| {
        let path = folder.join(name);
        std::fs::write(&path, message(limits)).map(|()| path).map_err(|error| error.to_string())
    };
    let (one, four) = (payload("one", 1)?, payload("four", 4)?);

    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let bare = Server::start(&myself, &["bare-tonic"], "grpc")?;
    let tollgate = tollgate_binary(&myself)?;
    let rules = rules.display().to_string();
    let flags =
        ["serve", "--rules", &rules, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--resp", "off"];
    let ours = Server::start(&tollgate, &flags, "grpc")?;

    let contests = [("one limit", &one, 1.1), ("four limits", &four, 1.1)];
    println!(
        "requests/s over gRPC: 8 connections x 16 streams, server on one core, median of {rounds} rounds"
    );
    println!("{:<14} {:>12} {:>12} {:>8} {:>6}", "", "bare tonic", "tollgate", "ratio", "bar");
    for (name, payload, bar) in contests {
        let (mut theirs, mut own) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.push(load(&bare.address, payload, requests)?);
            own.push(load(&ours.address, payload, requests)?);
        }
        let (theirs, own) = (median(theirs), median(own));
        println!("{name:<14} {theirs:>12.0} {own:>12.0} {:>8.2} {bar:>6.2}", own / theirs);
    }
    std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())
}

/// Returns a message with this many limits.
fn message(limits: usize) -> Vec<u8> {
    let entries = [
        ("user", "0123456789abcdef"),
        ("api_key", "k-0123456789"),
        ("path", "GET /orders"),
        ("tenant", "acme"),
    ];
    message_of(&entries[..limits])
}

/// Returns a message with one descriptor for each entry, in gRPC framing.
pub(crate) fn message_of(entries: &[(&str, &str)]) -> Vec<u8> {
    let descriptor = |(key, value): &(&str, &str)| RateLimitDescriptor {
        entries: vec![Entry { key: (*key).to_owned(), value: (*value).to_owned() }],
        ..RateLimitDescriptor::default()
    };
    let request = RateLimitRequest {
        domain: "bench".to_owned(),
        descriptors: entries.iter().map(descriptor).collect(),
        hits_addend: 0,
    };
    grpc_message(&request.encode_to_vec())
}

fn load(address: &str, payload: &Path, requests: u32) -> Result<f64, String> {
    let output = Command::new("taskset")
        .args(["-c", CLIENT_CORE, "h2load", "-c8", "-m16", "-t1", "-n", &requests.to_string()])
        .arg(format!("--data={}", payload.display()))
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers"])
        .arg(format!("http://{address}{METHOD}"))
        .output()
        .map_err(|error| format!("cannot run h2load (package nghttp2-client): {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let all = format!("{requests} succeeded");
    if !text.contains(&all) {
        return Err(format!("not all requests succeeded:\n{text}"));
    }
    let line = text.lines().find(|line| line.starts_with("finished in")).ok_or("h2load printed no result")?;
    let rate =
        line.split(", ").find_map(|part| part.strip_suffix(" req/s")).ok_or("h2load printed no rate")?;
    rate.parse().map_err(|_| format!("no rate in `{line}`"))
}

struct AlwaysOk;

#[tonic::async_trait]
impl RateLimitService for AlwaysOk {
    async fn should_rate_limit(
        &self,
        _: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        Ok(Response::new(RateLimitResponse { overall_code: 1, ..RateLimitResponse::default() }))
    }
}

/// The floor: the same messages and transport without decisions.
pub(crate) fn bare_tonic() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("grpc {}", listener.local_addr()?);
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let service = RateLimitServiceServer::new(AlwaysOk);
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await?;
        Ok(())
    })
}
