//! Configuration of `serve` and `gateway`: flags over environment over file over defaults, merged once.

pub(crate) mod connections;
mod deprecated_keys;
pub(crate) mod file_guard;
pub(crate) mod gateway_reload;
pub(crate) mod last_good;
pub(crate) mod reload;
pub(crate) mod rule_files;
pub(crate) mod rule_sources;
mod stores;

use crate::cli::{
    BillingSection, DAY, GuardrailSection, Listen, MAX_DEADLINE, MAX_FAILURES, ProfileName, RulesFromName,
    ServeFlags, UnknownDomainName, parse_size,
};
use crate::server::billing::{self, BillingSettings};
use crate::server::logging::Stdout;
use crate::server::otlp::{self, Otlp};
use crate::server::telemetry::{DecisionLog, decision_log};
use crate::yaml_file::{self, Millis, Whole};
use anyhow::Context;
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tollgate_control::{Guardrails, Role, RulesFrom};
use tollgate_core::TimeDelta;
use tollgate_gateway::{GatewayConfig, GatewaySection};
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_rules::{Options, PermitRelease, Profile};
use tollgate_server::http::ForwardAuthConfig;
use tollgate_server::resp::RespConfig;
use tollgate_store::{LeaseConfig, RedisConfig};

/// Complete configuration of a server.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The file of `--config`.
    path: Option<PathBuf>,
    pub(crate) rules: Vec<PathBuf>,
    pub(crate) store: StoreChoice,
    /// Other stores by name.
    pub(crate) stores: Vec<(String, RedisConfig)>,
    pub(crate) nodes: Option<u32>,
    pub(crate) leases: LeaseConfig,
    pub(crate) memory: usize,
    /// Listeners of the protocol servers; `None` means the default address, or off with `gateway`.
    pub(crate) grpc: Option<Listen>,
    pub(crate) http: Option<Listen>,
    pub(crate) resp: Option<Listen>,
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
    /// Name of this node.
    pub(crate) node: Option<String>,
    /// Region of this node.
    pub(crate) region: Option<String>,
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

/// TLS settings of the admin listener.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdminTlsSettings {
    /// Certificate and private key files.
    pub(crate) own: Option<(PathBuf, PathBuf)>,
    /// CA bundle of operators' certificates.
    pub(crate) client_ca: Option<PathBuf>,
    /// Role of each name in those certificates.
    pub(crate) roles: BTreeMap<String, Role>,
}

/// Role as written in the configuration file.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
struct RoleName(Role);

impl TryFrom<String> for RoleName {
    type Error = String;
    fn try_from(word: String) -> Result<Self, String> {
        word.parse().map(Self)
    }
}

fn admin_tls(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<AdminTlsSettings> {
    let pick = |flag: &Option<PathBuf>, file: &Option<PathBuf>| flag.clone().or(file.clone());
    let certificate = pick(&flags.admin_tls_cert, &file.admin_tls_cert);
    let key = pick(&flags.admin_tls_key, &file.admin_tls_key);
    let client_ca = pick(&flags.admin_client_ca, &file.admin_client_ca);
    let own = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => anyhow::bail!("--admin-tls-cert and --admin-tls-key must be set together"),
    };
    anyhow::ensure!(
        client_ca.is_none() || own.is_some(),
        "--admin-client-ca requires --admin-tls-cert and --admin-tls-key"
    );
    let roles: BTreeMap<_, _> = file.admin_roles.iter().map(|(name, role)| (name.clone(), role.0)).collect();
    anyhow::ensure!(
        client_ca.is_some() != roles.is_empty(),
        "--admin-client-ca and `admin_roles` in the file of --config must be set together: the CA of operators' \
         certificates and the roles of their names, such as `admin_roles: {{otto: operator}}`"
    );
    Ok(AdminTlsSettings { own, client_ca, roles })
}

/// Choice of counter store.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in a process, and it is rarely moved")]
pub(crate) enum StoreChoice {
    Memory,
    Redis(RedisConfig),
}

/// The file of `--config`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    #[serde(default, deserialize_with = "one_or_more")]
    rules: Vec<PathBuf>,
    store: Option<String>,
    store_password_file: Option<PathBuf>,
    #[serde(default)]
    stores: BTreeMap<String, stores::NamedStore>,
    store_deadline_ms: Option<Millis<MAX_DEADLINE>>,
    store_breaker_failures: Option<Whole<1, MAX_FAILURES>>,
    store_breaker_window_ms: Option<Millis<DAY>>,
    store_breaker_silence_ms: Option<Millis<DAY>>,
    store_breaker_open_ms: Option<Millis<DAY>>,
    store_caution_ms: Option<u64>,
    nodes: Option<Whole<1, MAX_NODES>>,
    #[serde(default)]
    leases: LeaseSection,
    memory: Option<MemorySize>,
    grpc: Option<Listen>,
    http: Option<Listen>,
    resp: Option<Listen>,
    resp_password_file: Option<PathBuf>,
    #[serde(default)]
    connections: connections::ConnectionSection,
    db: Option<String>,
    history_days: Option<Whole<0, MAX_HISTORY_DAYS>>,
    admin: Option<Listen>,
    rules_from: Option<RulesFromName>,
    #[serde(default)]
    guardrails: GuardrailSection,
    snapshot: Option<PathBuf>,
    #[serde(default)]
    billing: BillingSection,
    admin_tls_cert: Option<PathBuf>,
    admin_tls_key: Option<PathBuf>,
    admin_client_ca: Option<PathBuf>,
    #[serde(default)]
    admin_roles: BTreeMap<String, RoleName>,
    profile: Option<ProfileName>,
    global_shadow: Option<bool>,
    unknown_domain: Option<UnknownDomainName>,
    #[serde(default, alias = "answers")]
    responses: ResponseConfig,
    #[serde(default, alias = "who")]
    identity: IdentityConfig,
    #[serde(default)]
    forward_auth: ForwardAuthConfig,
    gateway: Option<GatewaySection>,
    node: Option<String>,
    region: Option<String>,
    otlp: Option<String>,
    #[serde(default)]
    decision_log: DecisionLog,
}

/// `leases` in the file of `--config`; what is left out is as in `docs/leases.md`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeaseSection {
    share: Option<f64>,
    ttl_ms: Option<Millis<HOUR>>,
    horizon_ms: Option<Millis<HOUR>>,
    idle_ms: Option<Millis<HOUR>>,
    #[serde(alias = "most")]
    max_keys: Option<Whole<1, MAX_LEASED_KEYS>>,
    hot_per_second: Option<u64>,
    cool_ms: Option<Millis<HOUR>>,
}

/// `memory` in the file of `--config`, in bytes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
struct MemorySize(usize);

impl TryFrom<String> for MemorySize {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        parse_size(&text).map(Self)
    }
}

impl ConfigFile {
    /// Reads the file at `path`. Relative paths in it are relative to its directory.
    fn read(path: &Path) -> anyhow::Result<Self> {
        let (mut file, text): (Self, String) = yaml_file::read(path, &deprecated_keys::RENAMED)?;
        for (old, new) in deprecated_keys::find(&text) {
            tracing::warn!("{}: `{old}` is deprecated; use `{new}`", path.display());
        }
        file.resolve(path.parent().unwrap_or(Path::new(""))).with_context(|| path.display().to_string())?;
        Ok(file)
    }

    /// Resolves relative paths against `base`, the directory of the file. Every field is listed, so that one added later
    /// cannot be forgotten here.
    fn resolve(&mut self, base: &Path) -> anyhow::Result<()> {
        let Self {
            rules,
            store_password_file,
            stores,
            resp_password_file,
            db,
            snapshot,
            admin_tls_cert,
            admin_tls_key,
            admin_client_ca,
            identity,
            gateway,
            decision_log,
            billing,
            // Without paths.
            store: _,
            store_deadline_ms: _,
            store_breaker_failures: _,
            store_breaker_window_ms: _,
            store_breaker_silence_ms: _,
            store_breaker_open_ms: _,
            store_caution_ms: _,
            nodes: _,
            leases: _,
            memory: _,
            grpc: _,
            http: _,
            resp: _,
            history_days: _,
            admin: _,
            rules_from: _,
            guardrails: _,
            admin_roles: _,
            profile: _,
            global_shadow: _,
            responses: _,
            connections: _,
            unknown_domain: _,
            forward_auth: _,
            node: _,
            region: _,
            otlp: _,
        } = self;
        let files = [
            store_password_file,
            resp_password_file,
            admin_tls_cert,
            admin_tls_key,
            admin_client_ca,
            &mut billing.webhook_secret_file,
        ];
        let snapshot = snapshot.iter_mut().filter(|path| path.as_os_str() != "off");
        let stores = stores.values_mut().filter_map(|store| store.password_file.as_mut());
        for path in files.into_iter().flatten().chain(snapshot).chain(rules).chain(stores) {
            *path = base.join(&*path);
        }
        if let Some(address) = db {
            *address = resolve_db(address, base)?;
        }
        identity.resolve(base);
        decision_log.resolve(base);
        if let Some(gateway) = gateway {
            gateway.resolve(base);
        }
        Ok(())
    }
}

/// Returns the address of a database with the path of an SQLite file resolved against `base`. Earlier releases resolved
/// it against the working directory; a database that is still there is an error, because the server would start with an
/// empty one.
fn resolve_db(address: &str, base: &Path) -> anyhow::Result<String> {
    let Some(written) = address.strip_prefix("sqlite:").filter(|path| !path.is_empty()) else {
        return Ok(address.to_owned());
    };
    let resolved = base.join(written);
    anyhow::ensure!(
        resolved.exists() || !Path::new(written).exists(),
        "`db`: {written} is relative to the directory of this file, but the database is in the working directory; \
         move it to {}, or write its absolute path",
        resolved.display()
    );
    Ok(format!("sqlite:{}", resolved.display()))
}

impl Config {
    pub(crate) fn new(flags: &ServeFlags) -> anyhow::Result<Self> {
        let file = flags.config.as_deref().map(ConfigFile::read).transpose()?.unwrap_or_default();
        let db = flags.db.clone().or(file.db.clone());
        let admin = flags.admin.or(file.admin);
        Ok(Self {
            path: flags.config.clone(),
            snapshot: flags.publishing.snapshot(file.snapshot.clone(), db.as_deref()),
            billing: billing::read(&flags.billing, &file.billing, db.is_some())?,
            db: db.map(DbAddress),
            history_days: flags.history_days.or(file.history_days.map(|days| days.0 as u32)).unwrap_or(30),
            admin,
            store: store(flags, &file)?,
            stores: stores::read(flags, &file)?,
            admin_tls: admin_tls(flags, &file)?,
            resp: flags.resp.or(file.resp),
            resp_config: RespConfig { password: resp_password(flags, &file)?, ..RespConfig::default() },
            connections: file.connections.limits()?,
            rules: if flags.rules.is_empty() { file.rules } else { flags.rules.clone() },
            nodes: flags.nodes.or(file.nodes.map(|nodes| nodes.0 as u32)),
            leases: leases(flags, &file.leases)?,
            memory: flags.memory.or(file.memory.map(|size| size.0)).unwrap_or(512 << 20),
            grpc: flags.grpc.or(file.grpc),
            http: flags.http.or(file.http),
            guardrails: flags.publishing.guardrails(file.guardrails)?,
            guard_files: flags.publishing.guard_files || file.guardrails.files.unwrap_or(false),
            rules_from: flags
                .publishing
                .rules_from
                .or(file.rules_from)
                .map_or_else(RulesFrom::default, RulesFrom::from),
            profile: flags.profile.or(file.profile),
            global_shadow: flags.global_shadow.or(file.global_shadow).unwrap_or(false),
            unknown_domain: flags.unknown_domain.or(file.unknown_domain).unwrap_or_default(),
            node: named("--node", flags.node.clone().or(file.node))?,
            region: named("--region", flags.region.clone().or(file.region))?,
            decision_log: decision_log(flags, file.decision_log)?,
            otlp: otlp::read(flags, file.otlp)?,
            responses: file.responses,
            identity: file.identity,
            forward_auth: file.forward_auth,
            gateway: file.gateway,
        })
    }

    /// Returns the settings that require a restart, with their values, which are compared and never shown.
    pub(crate) fn restart_only(&self) -> [(&'static str, String); 19] {
        [
            ("rules", format!("{:?}", self.rules)),
            ("store", format!("{:?}", self.store)),
            ("stores", format!("{:?}", self.stores)),
            ("nodes", format!("{:?}", self.nodes)),
            ("leases", format!("{:?}", self.leases)),
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
            ("profile", format!("{:?}", self.profile)),
            ("global_shadow", self.global_shadow.to_string()),
            ("unknown_domain", format!("{:?}", self.unknown_domain)),
            ("identity.api_key.secret_file", format!("{:?}", self.identity.api_key.secret_file)),
        ]
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
            StoreChoice::Memory => format!("  store memory  ({} MiB, this node only)", self.memory >> 20),
            StoreChoice::Redis(redis) => format!("  store {}", redis.address_for_display()),
        }
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

    pub(crate) fn rule_options(&self) -> Options {
        let lease_shared = matches!(self.store, StoreChoice::Redis(_));
        let cluster = matches!(&self.store, StoreChoice::Redis(redis) if redis.is_cluster())
            || self.stores.iter().any(|(_, redis)| redis.is_cluster());
        let stores = Some(self.stores.iter().map(|(name, _)| name.clone()).collect());
        let permits = if self.gateway.is_some() { PermitRelease::Released } else { PermitRelease::Expire };
        Options {
            nodes: self.nodes,
            lease_shared,
            cluster: Some(cluster),
            permits,
            stores,
            ..options(self.profile)
        }
    }
}

/// Returns the configured store. Errors do not repeat its address, which may contain a password.
fn store(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<StoreChoice> {
    let Some(address) = flags.store.as_ref().or(file.store.as_ref()).filter(|store| *store != "memory")
    else {
        anyhow::ensure!(
            flags.store_password_file.is_none() && file.store_password_file.is_none(),
            "--store-password-file: counters in memory have no password; set --store to the address of Redis"
        );
        return Ok(StoreChoice::Memory);
    };
    if !address.contains("://") {
        anyhow::bail!("--store: must be `memory` or an address such as redis://127.0.0.1:6379");
    }
    let mut redis = RedisConfig::parse(address).context("--store")?;
    if let Ok(password) = std::env::var("TOLLGATE_STORE_PASSWORD") {
        redis = redis.with_credentials(None, Some(password));
    }
    if let Some(path) = flags.store_password_file.as_ref().or(file.store_password_file.as_ref()) {
        redis = redis.with_password_file(path).context("--store-password-file")?;
    }
    Ok(StoreChoice::Redis(with_limits(redis, flags, file)?))
}

/// Returns a store with the deadline and the breaker settings, which all stores share.
fn with_limits(mut redis: RedisConfig, flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<RedisConfig> {
    if let Some(deadline) = flags.store_deadline_ms.or(file.store_deadline_ms.map(|time| time.0)) {
        redis.deadline = Duration::from_millis(deadline);
    }
    if let Some(failures) = flags.store_breaker_failures.or(file.store_breaker_failures.map(|count| count.0))
    {
        redis.breaker.failures = usize::try_from(failures)?;
    }
    if let Some(window) = flags.store_breaker_window_ms.or(file.store_breaker_window_ms.map(|time| time.0)) {
        redis.breaker.window = TimeDelta::from_millis(window);
    }
    if let Some(silence) = flags.store_breaker_silence_ms.or(file.store_breaker_silence_ms.map(|time| time.0))
    {
        redis.breaker.silence = TimeDelta::from_millis(silence);
    }
    if let Some(open) = flags.store_breaker_open_ms.or(file.store_breaker_open_ms.map(|time| time.0)) {
        redis.breaker.cooldown = TimeDelta::from_millis(open);
    }
    let caution = flags.store_caution_ms.or(file.store_caution_ms);
    redis.loss_window = caution.map(|most| TimeDelta::from_micros(most.saturating_mul(1_000)));
    Ok(redis)
}

fn leases(flags: &ServeFlags, file: &LeaseSection) -> anyhow::Result<LeaseConfig> {
    let mut leases = LeaseConfig::default();
    if let Some(share) = flags.lease_share.or(file.share) {
        anyhow::ensure!(
            share > 0.0 && share <= 1.0,
            "--lease-share: must be between 0.01 and 1, got {share}"
        );
        leases.share = share;
    }
    let times = [
        (file.ttl_ms, &mut leases.ttl),
        (file.horizon_ms, &mut leases.horizon),
        (file.idle_ms, &mut leases.idle),
        (file.cool_ms, &mut leases.cool),
    ];
    for (given, setting) in times {
        if let Some(time) = given {
            *setting = TimeDelta::from_millis(time.0);
        }
    }
    if let Some(most) = file.max_keys {
        leases.max_keys = usize::try_from(most.0)?;
    }
    if let Some(hot) = flags.hot_per_second.or(file.hot_per_second) {
        leases.hot = (hot > 0).then_some(hot);
    }
    Ok(leases)
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

/// An hour, in milliseconds.
const HOUR: u64 = 3_600_000;
/// Maximum number of nodes that share a store.
const MAX_NODES: u64 = 100_000;
/// Days that the history may be kept: ten years.
const MAX_HISTORY_DAYS: u64 = 3_650;
/// Maximum number of leased keys.
const MAX_LEASED_KEYS: u64 = 1 << 24;

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

/// Deserializes one path or a list of paths.
fn one_or_more<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
    struct Paths;
    impl<'de> Visitor<'de> for Paths {
        type Value = Vec<PathBuf>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a file or directory with rules, or a list of them such as `rules: [rules.yaml]`")
        }
        fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<Self::Value, E> {
            Ok(vec![PathBuf::from(path)])
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut paths = Vec::new();
            while let Some(path) = list.next_element()? {
                paths.push(path);
            }
            Ok(paths)
        }
    }
    from.deserialize_any(Paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One rule for every path in the file: what a user writes is found beside the file, wherever the server starts.
    #[test]
    fn every_path_is_relative_to_the_file() {
        let text = "rules: r.yaml\nstore_password_file: a\nstores: {eu: {address: redis://h, password_file: l}}\nresp_password_file: b\ndb: sqlite:state/c.db\n\
            snapshot: d\nadmin_tls_cert: e\nadmin_tls_key: f\nadmin_client_ca: g\n\
            identity: {jwt: {jwks: h}, api_key: {secret_file: i}}\n\
            decision_log: {output: j}\n\
            gateway: {listeners: [], upstreams: {}, routes: [], access_log: k}\n";
        let mut file: ConfigFile = serde_saphyr::from_str(text).expect("valid");
        file.resolve(Path::new("/etc/tollgate")).expect("resolved");
        let shown = format!("{file:?}");
        for name in ["r.yaml", "a", "b", "state/c.db", "d", "e", "f", "g", "h", "i", "j", "k", "l"] {
            assert!(shown.contains(&format!("/etc/tollgate/{name}\"")), "{name} in {shown}");
        }
    }

    #[test]
    fn words_and_absolute_paths_stay() {
        let text = "db: sqlite:/var/lib/c.db\nsnapshot: off\ndecision_log: {output: stdout}\n";
        let mut file: ConfigFile = serde_saphyr::from_str(text).expect("valid");
        file.resolve(Path::new("/etc/tollgate")).expect("resolved");
        assert!(!format!("{file:?}").contains("/etc/tollgate"), "{file:?}");
        assert_eq!(resolve_db("postgres://h/d", Path::new("/etc")).expect("as it is"), "postgres://h/d");
    }

    /// Otherwise an upgraded server would start with an empty database, without tokens and quotas.
    #[test]
    fn a_database_in_the_working_directory_is_not_left_behind() {
        // Tests run in the crate's directory.
        let error = resolve_db("sqlite:Cargo.toml", Path::new("/nowhere")).expect_err("still in place");
        assert!(error.to_string().contains("move it to /nowhere/Cargo.toml"), "{error}");
    }
}
