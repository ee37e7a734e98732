//! Protocol servers: the listeners for gRPC, HTTP and the Redis protocol. `serve` and `gateway` have the same ones with
//! the same settings; they differ only in which are open by default.

use crate::cli::Listen;
use crate::config::Config;
use crate::config::connections::ConnectionLimits;
use crate::server::build::listen_if_free;
use crate::server::open_files;
use crate::server::store::Store;
use anyhow::Context;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate_engine::Limiter;
use tollgate_http::identity::JwtVerifier;
use tollgate_observe::ProcessStatus;
use tollgate_rules::Ruleset;
use tollgate_server::{http, resp, rls};

const GRPC: SocketAddr = local(8081);
const HTTP: SocketAddr = local(8080);
/// Optional by default: if the port is in use, the server starts without the Redis protocol.
const RESP: SocketAddr = local(6380);

/// Maximum duration of draining; after it the process ends with requests still in flight.
const DRAIN: Duration = Duration::from_secs(15);

const fn local(port: u16) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
}

/// State of the listeners that no setting configures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultListeners {
    /// Listening on their default addresses.
    Open,
    /// Not listening.
    Closed,
}

/// Bound listeners of the protocol servers, with their forward-auth settings.
pub(crate) struct ProtocolServers {
    grpc: Option<TcpListener>,
    http: Option<TcpListener>,
    resp: Option<TcpListener>,
    forward: http::ForwardAuth,
}

/// Tasks of the running protocol servers.
pub(crate) struct RunningServers {
    grpc: Option<JoinHandle<Result<(), Box<dyn std::error::Error + Send + Sync>>>>,
    others: Vec<JoinHandle<()>>,
}

impl ProtocolServers {
    pub(crate) async fn open(
        config: &Config,
        unsaid: DefaultListeners,
        rules: &Ruleset,
    ) -> anyhow::Result<Self> {
        let forward = http::ForwardAuth::new(&config.forward_auth, &config.identity);
        let forward = forward.with_context(|| config.place())?;
        forward.check_domain(rules).with_context(|| config.place())?;
        let usual =
            |address| if unsaid == DefaultListeners::Open { Listen::At(address) } else { Listen::Off };
        let grpc = listen(config.grpc.unwrap_or(usual(GRPC)), "--grpc").await?;
        let http = listen(config.http.unwrap_or(usual(HTTP)), "--http").await?;
        let resp = match (config.resp, unsaid) {
            (Some(said), _) => listen(said, "--resp").await?,
            (None, DefaultListeners::Open) => {
                listen_if_free(RESP, "the Redis protocol is off", "--resp").await
            }
            (None, DefaultListeners::Closed) => None,
        };
        Ok(Self { grpc, http, resp, forward })
    }

    /// Returns whether no listener is open.
    pub(crate) const fn is_empty(&self) -> bool {
        self.grpc.is_none() && self.http.is_none() && self.resp.is_none()
    }

    pub(crate) fn http(&self) -> Option<SocketAddr> {
        self.http.as_ref()?.local_addr().ok()
    }

    /// Returns the lines of the start banner, one per open listener.
    pub(crate) fn banner(&self) -> Vec<String> {
        let all = [
            ("http", &self.http, "probes, metrics, /v1/check"),
            ("grpc", &self.grpc, "envoy.service.ratelimit.v3"),
            ("resp", &self.resp, "CL.THROTTLE, TG.CHECK"),
        ];
        let line = |(name, listener, about): (&str, &Option<TcpListener>, &str)| {
            Some(format!("  {name}  {}  ({about})", listener.as_ref()?.local_addr().ok()?))
        };
        all.into_iter().filter_map(line).collect()
    }

    /// Returns the JWT verifier of the HTTP listener, for the task that reloads its keys.
    pub(crate) fn jwt(&self) -> Option<Arc<JwtVerifier>> {
        self.http.as_ref().and_then(|_| self.forward.tokens())
    }

    /// Starts serving requests on all listeners, until `drain` completes.
    pub(crate) fn start<D: Future<Output = ()> + Send + 'static>(
        self,
        config: &Config,
        limiter: &Arc<Limiter<Store>>,
        status: Arc<dyn ProcessStatus>,
        drain: impl Fn() -> D,
    ) -> RunningServers {
        let Self { grpc, http, resp, forward } = self;
        let responses = config.responses.clone();
        let ConnectionLimits { http: of_http, grpc: of_grpc, resp: of_resp, first_request } =
            config.connections;
        let (budget, guaranteed) = (open_files::budget(), open_files::guaranteed());
        let grpc = grpc.map(|listener| {
            let config = rls::RlsConfig {
                connections: of_grpc,
                guaranteed,
                budget: budget.clone(),
                first_request,
                responses: responses.clone(),
                ..rls::RlsConfig::default()
            };
            tokio::spawn(rls::serve(listener, Arc::clone(limiter), config, drain()))
        });
        let http = http.map(|listener| {
            let config = http::HttpConfig {
                connections: of_http,
                guaranteed,
                budget: budget.clone(),
                first_request,
                responses,
                forward_auth: forward,
                ..http::HttpConfig::default()
            };
            tokio::spawn(http::serve(listener, Arc::clone(limiter), status, config, drain()))
        });
        let resp = resp.map(|listener| {
            let config = resp::RespConfig {
                connections: of_resp,
                guaranteed,
                budget,
                first_request,
                ..config.resp_config.clone()
            };
            tokio::spawn(resp::serve(listener, Arc::clone(limiter), config, drain()))
        });
        RunningServers { grpc, others: http.into_iter().chain(resp).collect() }
    }
}

impl RunningServers {
    /// Waits for the requests in flight, for at most `DRAIN`.
    pub(crate) async fn shutdown(self) -> anyhow::Result<()> {
        let ended = async {
            for other in self.others {
                let _ = other.await;
            }
            match self.grpc {
                None => Ok(()),
                Some(grpc) => grpc.await.unwrap_or(Ok(())),
            }
        };
        let ended = tokio::time::timeout(DRAIN, ended).await;
        let ended =
            ended.with_context(|| format!("some requests did not end within {} s", DRAIN.as_secs()))?;
        ended.map_err(|error| anyhow::anyhow!("the gRPC server failed: {error}"))
    }
}

async fn listen(listen: Listen, flag: &str) -> anyhow::Result<Option<TcpListener>> {
    let Listen::At(address) = listen else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    let wrong = || format!("cannot listen on {address}; set {flag} to another, or to off");
    listener.with_context(wrong).map(Some)
}
