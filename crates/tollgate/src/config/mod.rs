//! Configuration of `serve` and `gateway`: flags over environment over file over defaults, merged once.

mod admin_tls;
pub(crate) mod cells;
pub(crate) mod connections;
mod deprecated_keys;
mod file;
pub(crate) mod file_guard;
pub(crate) mod gateway_reload;
pub(crate) mod last_good;
mod leases;
pub(crate) mod reload;
pub(crate) mod rule_files;
pub(crate) mod rule_sources;
pub(crate) mod service_files;
mod store;
pub(crate) mod stores;
pub(crate) mod tls;
pub(crate) mod wording;
mod xds;

pub(crate) use admin_tls::AdminTlsSettings;
pub(crate) use store::StoreChoice;

use crate::cli::{Listen, ProfileName, ServeFlags, UnknownDomainName};
use crate::server::billing::{self, BillingSettings};
use crate::server::logging::Stdout;
use crate::server::otlp::{self, Otlp};
use crate::server::signals::{self, Prometheus};
use crate::server::telemetry::{DecisionLog, decision_log};
use crate::xds::XdsSettings;
use anyhow::Context;
use file::ConfigFile;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tollgate_control::{Guardrails, RulesFrom};
use tollgate_core::TimeDelta;
use tollgate_gateway::{GatewayConfig, GatewaySection};
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_http::tls::ServerTlsConfig;
use tollgate_rules::{Options, PermitRelease, Profile, StoreNames};
use tollgate_server::http::ForwardAuthConfig;
use tollgate_server::resp::RespConfig;
use tollgate_store::{LeaseConfig, RedisConfig};

/// Complete configuration of a server.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The file of `--config`.
    path: Option<PathBuf>,
    pub(crate) rules: Vec<PathBuf>,
    /// Rule files as envoyproxy/ratelimit finds them, in place of `rules`.
    pub(crate) service_files: Option<service_files::ServiceFiles>,
    /// How loading rules is reported.
    pub(crate) wording: wording::Wording,
    /// Settings that `tollgate ratelimit` needs besides those here.
    pub(crate) service: Option<Arc<crate::ratelimit::Service>>,
    /// Options for loading rules that no flag sets.
    pub(crate) more_rule_options: Options,
    pub(crate) store: StoreChoice,
    /// Other stores by name.
    pub(crate) stores: Vec<(String, RedisConfig)>,
    /// Their names, and those of stores that were added since the start. Clones share them.
    pub(crate) store_names: StoreNames,
    /// What the file of `path` is read with again; in a box, because most of it is not set.
    pub(crate) flags: Option<Reread>,
    pub(crate) nodes: Option<u32>,
    pub(crate) leases: LeaseConfig,
    pub(crate) memory: usize,
    /// Listeners of the protocol servers; `None` means the default address, or off with `gateway`.
    pub(crate) grpc: Option<Listen>,
    /// Unix socket of gRPC, in place of its address.
    pub(crate) grpc_socket: Option<PathBuf>,
    pub(crate) http: Option<Listen>,
    pub(crate) resp: Option<Listen>,
    /// TLS of the gRPC and HTTP listeners.
    pub(crate) grpc_tls: Option<ServerTlsConfig>,
    pub(crate) http_tls: Option<ServerTlsConfig>,
    /// Settings of the Redis protocol; contains the password, which `Debug` omits.
    pub(crate) resp_config: RespConfig,
    pub(crate) connections: connections::ConnectionLimits,
    /// Control-plane database.
    pub(crate) db: Option<DbAddress>,
    /// Days that the database keeps the history; 0 for none.
    pub(crate) history_days: u32,
    /// Admin listener. `None` means the default address; without a database, only if it is free.
    pub(crate) admin: Option<Listen>,
    /// Source of the active rules when some are published.
    pub(crate) rules_from: RulesFrom,
    /// Management server that rules come from, besides files.
    pub(crate) xds: Option<XdsSettings>,
    /// Control-plane snapshot file.
    pub(crate) snapshot: Option<PathBuf>,
    /// Guardrails: thresholds for publishing, and for rolling back.
    pub(crate) guardrails: Guardrails,
    /// How long consumption is kept, and where it is sent.
    pub(crate) billing: BillingSettings,
    /// Whether rule files that change pass the guardrails of publishing.
    pub(crate) guard_files: bool,
    /// TLS of the admin listener and operators' client certificates.
    pub(crate) admin_tls: AdminTlsSettings,
    pub(crate) profile: Option<ProfileName>,
    pub(crate) global_shadow: bool,
    /// Policy for requests whose domain has no rules.
    pub(crate) unknown_domain: UnknownDomainName,
    pub(crate) responses: ResponseConfig,
    pub(crate) identity: IdentityConfig,
    pub(crate) forward_auth: ForwardAuthConfig,
    /// Decision log settings.
    pub(crate) decision_log: DecisionLog,
    /// Collector that spans are sent to.
    pub(crate) otlp: Option<Otlp>,
    /// Prometheus that is asked for signals.
    pub(crate) prometheus: Option<Prometheus>,
    /// Mean wait for the store above which checks are shed; 0 for never.
    shed_wait_ms: Option<u64>,
    /// Name of this node.
    pub(crate) node: Option<String>,
    /// Region of this node.
    pub(crate) region: Option<String>,
    /// This cell and the others, if limits are shared between cells.
    pub(crate) cells: Option<cells::Cells>,
    /// Section for `tollgate gateway`.
    pub(crate) gateway: Option<GatewaySection>,
}

/// Address of the control-plane database. It may contain a password, so `Debug` omits it.
#[derive(Clone)]
pub(crate) struct DbAddress(pub(crate) String);

impl std::fmt::Debug for DbAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DbAddress")
    }
}

/// The flags that the file was read with. They may contain passwords, so `Debug` omits them.
#[derive(Clone)]
pub(crate) struct Reread(pub(crate) Box<ServeFlags>);

impl std::fmt::Debug for Reread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reread")
    }
}

/// Returns the HTTP listener that `serve` would open with these flags and this file, and its certificate; `None` means
/// the default address, and no TLS.
pub(crate) fn http_listener(
    flag: Option<Listen>,
    certificate: Option<PathBuf>,
    path: Option<&Path>,
) -> anyhow::Result<(Option<Listen>, Option<PathBuf>)> {
    let file = path.map(ConfigFile::read).transpose()?.unwrap_or_default();
    Ok((flag.or(file.http), certificate.or(file.http_tls_cert)))
}

impl Config {
    pub(crate) fn new(flags: &ServeFlags) -> anyhow::Result<Self> {
        let file = flags.config.as_deref().map(ConfigFile::read).transpose()?.unwrap_or_default();
        let db = flags.db.clone().or(file.db.clone());
        let admin = flags.admin.or(file.admin);
        let rules_from = flags.publishing.rules_from.or(file.rules_from);
        let rules_from = rules_from.map_or_else(RulesFrom::default, RulesFrom::from);
        let region = named("--region", flags.region.clone().or(file.region.clone()))?;
        let shares_store = matches!(store::read(flags, &file)?, StoreChoice::Redis(_));
        let has_db = db.is_some();
        let stores = stores::read(flags, &file)?;
        let has_secret = file.identity.api_key.secret_file.is_some();
        Ok(Self {
            path: flags.config.clone(),
            flags: flags.config.is_some().then(|| Reread(Box::new(flags.clone()))),
            store_names: stores.iter().map(|(name, _)| name.clone()).collect(),
            snapshot: flags.publishing.snapshot(file.snapshot.clone(), db.as_deref()),
            billing: billing::read(&flags.billing, &file.billing, db.is_some())?,
            db: db.map(DbAddress),
            history_days: flags.history_days.or(file.history_days.map(|days| days.0 as u32)).unwrap_or(30),
            admin,
            store: store::read(flags, &file)?,
            stores,
            admin_tls: admin_tls::read(flags, &file)?,
            resp: flags.resp.or(file.resp),
            resp_config: RespConfig { password: resp_password(flags, &file)?, ..RespConfig::default() },
            connections: file.connections.limits()?,
            grpc_tls: tls::read("grpc", &flags.listener_tls.grpc(), &file.grpc_tls())?,
            http_tls: tls::read("http", &flags.listener_tls.http(), &file.http_tls())?,
            service_files: None,
            grpc_socket: None,
            wording: wording::Wording::Own,
            service: None,
            more_rule_options: Options::default(),
            rules: if flags.rules.is_empty() { file.rules } else { flags.rules.clone() },
            nodes: flags.nodes.or(file.nodes.map(|nodes| nodes.0 as u32)),
            leases: leases::read(flags, &file.leases)?,
            memory: flags.memory.or(file.memory.map(|size| size.0)).unwrap_or(512 << 20),
            grpc: flags.grpc.or(file.grpc),
            http: flags.http.or(file.http),
            guardrails: flags.publishing.guardrails(file.guardrails)?,
            guard_files: flags.publishing.guard_files || file.guardrails.files.unwrap_or(false),
            rules_from,
            xds: xds::read(&flags.xds, &file.xds, rules_from)?,
            profile: flags.profile.or(file.profile),
            global_shadow: flags.global_shadow.or(file.global_shadow).unwrap_or(false),
            unknown_domain: flags.unknown_domain.or(file.unknown_domain).unwrap_or_default(),
            node: named("--node", flags.node.clone().or(file.node))?,
            cells: cells::read(flags, &file.cells, region.as_deref(), (has_secret, shares_store, has_db))?,
            region,
            decision_log: decision_log(flags, file.decision_log)?,
            otlp: otlp::read(flags, file.otlp)?,
            prometheus: signals::read(&flags.prometheus, &file.prometheus)?,
            shed_wait_ms: flags.shed_wait_ms.or(file.shed_wait_ms.map(|wait| wait.0)),
            responses: file.responses,
            identity: file.identity,
            forward_auth: file.forward_auth,
            gateway: file.gateway,
        })
    }

    /// Returns the settings that require a restart, with their values, which are compared and never shown.
    pub(crate) fn restart_only(&self) -> [(&'static str, String); 25] {
        [
            ("grpc_tls", format!("{:?}", self.grpc_tls)),
            ("http_tls", format!("{:?}", self.http_tls)),
            ("rules", format!("{:?}", self.rules)),
            ("xds", format!("{:?}", self.xds)),
            ("store", format!("{:?}", self.store)),
            ("nodes", format!("{:?}", self.nodes)),
            ("leases", format!("{:?}", self.leases)),
            ("region", format!("{:?}", self.region)),
            ("cells", format!("{:?}", self.cells)),
            ("memory", self.memory.to_string()),
            ("http", format!("{:?}", self.http)),
            ("grpc", format!("{:?}", self.grpc)),
            ("resp", format!("{:?}", self.resp)),
            ("connections", format!("{:?}", self.connections)),
            ("forward_auth", format!("{:?}", self.forward_auth)),
            ("db", self.db.as_ref().map(|db| db.0.clone()).unwrap_or_default()),
            ("admin", format!("{:?}", self.admin)),
            ("billing", format!("{:?}", self.billing)),
            ("otlp", format!("{:?}", self.otlp)),
            ("prometheus", format!("{:?}", self.prometheus)),
            ("shed_wait_ms", format!("{:?}", self.shed_wait_ms)),
            ("profile", format!("{:?}", self.profile)),
            ("global_shadow", self.global_shadow.to_string()),
            ("unknown_domain", format!("{:?}", self.unknown_domain)),
            ("identity.api_key.secret_file", format!("{:?}", self.identity.api_key.secret_file)),
        ]
    }

    /// Returns a store with the deadline and the breaker settings of the flags.
    pub(crate) fn with_store_limits(redis: RedisConfig, flags: &ServeFlags) -> anyhow::Result<RedisConfig> {
        store::with_limits(redis, flags, &ConfigFile::default())
    }

    /// Returns the mean wait above which checks are shed by class; `None` if they never are. Counters in memory are not waited
    /// for.
    pub(crate) fn shed_wait(&self) -> Option<TimeDelta> {
        let StoreChoice::Redis(redis) = &self.store else { return None };
        let half = TimeDelta::from(redis.deadline).as_micros() / 2;
        // Checks also wait for the cells that own their counters.
        let half = self.cells.as_ref().map_or(half, |cells| half.max(cells.config.deadline.as_micros() / 2));
        let wait = self.shed_wait_ms.map_or(TimeDelta::from_micros(half), TimeDelta::from_millis);
        Some(wait).filter(|wait| *wait > TimeDelta::ZERO)
    }

    /// Returns every Redis of the configuration.
    pub(crate) fn redis_stores(&self) -> Vec<RedisConfig> {
        let default = match &self.store {
            StoreChoice::Redis(redis) => Some(redis),
            StoreChoice::Memory => None,
        };
        default.into_iter().chain(self.stores.iter().map(|(_, redis)| redis)).cloned().collect()
    }

    /// Returns the configuration of `tollgate gateway`.
    pub(crate) fn gateway(&self) -> anyhow::Result<GatewayConfig> {
        let gateway = self.gateway.clone().context(
            "`tollgate gateway` requires --config FILE with a `gateway` section; see examples/gateway",
        )?;
        Ok(GatewayConfig { gateway, identity: self.identity.clone(), responses: self.responses.clone() })
    }

    /// Returns the line of the start banner that names the counter store, without credentials.
    pub(crate) fn store_banner(&self) -> String {
        match &self.store {
            StoreChoice::Memory if self.cells.is_some() => {
                format!("  store memory  ({} MiB)", self.memory >> 20)
            }
            StoreChoice::Memory => format!("  store memory  ({} MiB, this node only)", self.memory >> 20),
            StoreChoice::Redis(redis) => format!("  store {}", redis.address_for_display()),
        }
    }

    /// Returns the line of the start banner that names this cell and the others.
    pub(crate) fn cell_banner(&self) -> Option<String> {
        let cells = self.cells.as_ref()?;
        let peers: Vec<String> =
            cells.config.peers.iter().map(|peer| format!("{}={}", peer.region, peer.address)).collect();
        let peers = match peers.is_empty() {
            true if cells.config.learns_peers => "from the node list of the database".to_owned(),
            true => "none".to_owned(),
            false => peers.join(", "),
        };
        Some(format!("  cell {} on {}, peers {peers}", cells.config.cell, cells.listen))
    }

    /// Returns where settings of the file come from, as context of an error.
    pub(crate) fn place(&self) -> String {
        self.path.as_ref().map_or_else(|| "configuration".to_owned(), |path| path.display().to_string())
    }

    /// Returns the use of standard output.
    pub(crate) fn stdout(&self) -> Stdout {
        let access = self.gateway.as_ref().and_then(|gateway| gateway.access_log.as_ref());
        match self.decision_log.is_stdout() || access.is_some_and(|log| log.as_os_str() == "-") {
            true => Stdout::Data,
            false => Stdout::People,
        }
    }

    /// Returns the attributes that any client can invent, where this process derives them from requests.
    fn unverified(&self) -> Vec<String> {
        let reads_heads =
            self.gateway.is_some() || self.service.is_none() && !matches!(self.http, Some(Listen::Off));
        if reads_heads { self.identity.unverified() } else { Vec::new() }
    }

    pub(crate) fn rule_options(&self) -> Options {
        let lease_shared = matches!(self.store, StoreChoice::Redis(_));
        let cluster = matches!(&self.store, StoreChoice::Redis(redis) if redis.is_cluster())
            || self.stores.iter().any(|(_, redis)| redis.is_cluster());
        let permits = if self.gateway.is_some() { PermitRelease::Released } else { PermitRelease::Expire };
        Options {
            nodes: self.nodes,
            lease_shared,
            cluster: Some(cluster),
            permits,
            stores: Some(self.store_names.clone()),
            unverified: Some(self.unverified()),
            profile: self.profile.map(Profile::from),
            cells: Some(cells::place(self.cells.as_ref(), self.region.as_deref())),
            ..self.more_rule_options.clone()
        }
    }
}

/// Maximum length of a node or region name, in bytes.
const MAX_NAME: usize = 128;

/// Validates a name for logs, labels and lists.
fn named(flag: &str, name: Option<String>) -> anyhow::Result<Option<String>> {
    if let Some(name) = &name {
        let fits = (1..=MAX_NAME).contains(&name.len()) && !name.chars().any(char::is_control);
        anyhow::ensure!(fits, "{flag}: must have 1 to {MAX_NAME} characters on one line, such as eu-west-1");
    }
    Ok(name)
}

/// Returns the password of the Redis protocol, if set. Rejects an empty one: it would admit clients without a password.
fn resp_password(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<Option<String>> {
    let password = match flags.resp_password_file.as_ref().or(file.resp_password_file.as_ref()) {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("--resp-password-file: cannot read {}", path.display()))?;
            text.trim_end_matches(['\r', '\n']).to_owned()
        }
        None => match std::env::var("TOLLGATE_RESP_PASSWORD") {
            Ok(password) => password,
            Err(_) => return Ok(None),
        },
    };
    if password.is_empty() {
        anyhow::bail!("--resp-password-file: the password is empty");
    }
    Ok(Some(password))
}

/// Returns the options for loading rule files.
pub(crate) fn options(profile: Option<ProfileName>) -> Options {
    Options { profile: profile.map(Profile::from), ..Options::default() }
}
