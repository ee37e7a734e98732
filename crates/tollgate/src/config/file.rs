//! The file of `--config`: its keys, and how relative paths in it are resolved.

use super::admin_tls::RoleName;
use super::leases::LeaseSection;
use super::{connections, deprecated_keys, stores, tls, xds};
use crate::cli::{
    BillingSection, CellSection, DAY, GuardrailSection, Listen, MAX_DEADLINE, MAX_FAILURES, ProfileName,
    PrometheusSection, RulesFromName, UnknownDomainName, parse_size,
};
use crate::server::telemetry::DecisionLog;
use crate::yaml_file::{self, Millis, Whole};
use anyhow::Context;
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use tollgate_gateway::GatewaySection;
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_server::http::ForwardAuthConfig;

/// Maximum number of nodes that share a store.
const MAX_NODES: u64 = 100_000;
/// Largest mean wait above which checks are shed, in milliseconds.
const MAX_SHED_WAIT: u64 = 60_000;
/// Days that the history may be kept: ten years.
const MAX_HISTORY_DAYS: u64 = 3_650;

/// The file of `--config`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConfigFile {
    #[serde(default, deserialize_with = "one_or_more")]
    pub(super) rules: Vec<PathBuf>,
    pub(super) store: Option<String>,
    pub(super) store_password_file: Option<PathBuf>,
    #[serde(default)]
    pub(super) stores: BTreeMap<String, stores::NamedStore>,
    pub(super) store_deadline_ms: Option<Millis<MAX_DEADLINE>>,
    pub(super) store_breaker_failures: Option<Whole<1, MAX_FAILURES>>,
    pub(super) store_breaker_window_ms: Option<Millis<DAY>>,
    pub(super) store_breaker_silence_ms: Option<Millis<DAY>>,
    pub(super) store_breaker_open_ms: Option<Millis<DAY>>,
    pub(super) store_caution_ms: Option<u64>,
    pub(super) nodes: Option<Whole<1, MAX_NODES>>,
    #[serde(default)]
    pub(super) leases: LeaseSection,
    pub(super) memory: Option<MemorySize>,
    pub(super) grpc: Option<Listen>,
    pub(super) http: Option<Listen>,
    pub(super) resp: Option<Listen>,
    pub(super) grpc_tls_cert: Option<PathBuf>,
    pub(super) grpc_tls_key: Option<PathBuf>,
    pub(super) grpc_client_ca: Option<PathBuf>,
    pub(super) grpc_client_name: Option<String>,
    pub(super) http_tls_cert: Option<PathBuf>,
    pub(super) http_tls_key: Option<PathBuf>,
    pub(super) http_client_ca: Option<PathBuf>,
    pub(super) http_client_name: Option<String>,
    pub(super) resp_password_file: Option<PathBuf>,
    #[serde(default)]
    pub(super) connections: connections::ConnectionSection,
    pub(super) db: Option<String>,
    pub(super) history_days: Option<Whole<0, MAX_HISTORY_DAYS>>,
    pub(super) admin: Option<Listen>,
    pub(super) rules_from: Option<RulesFromName>,
    #[serde(default)]
    pub(super) xds: xds::XdsSection,
    #[serde(default)]
    pub(super) guardrails: GuardrailSection,
    pub(super) snapshot: Option<PathBuf>,
    #[serde(default)]
    pub(super) billing: BillingSection,
    pub(super) admin_tls_cert: Option<PathBuf>,
    pub(super) admin_tls_key: Option<PathBuf>,
    pub(super) admin_client_ca: Option<PathBuf>,
    #[serde(default)]
    pub(super) admin_roles: BTreeMap<String, RoleName>,
    pub(super) profile: Option<ProfileName>,
    pub(super) global_shadow: Option<bool>,
    pub(super) unknown_domain: Option<UnknownDomainName>,
    #[serde(default, alias = "answers")]
    pub(super) responses: ResponseConfig,
    #[serde(default, alias = "who")]
    pub(super) identity: IdentityConfig,
    #[serde(default)]
    pub(super) forward_auth: ForwardAuthConfig,
    pub(super) gateway: Option<GatewaySection>,
    pub(super) node: Option<String>,
    pub(super) region: Option<String>,
    #[serde(default)]
    pub(super) cells: CellSection,
    pub(super) otlp: Option<String>,
    #[serde(default)]
    pub(super) prometheus: PrometheusSection,
    pub(super) shed_wait_ms: Option<Whole<0, MAX_SHED_WAIT>>,
    #[serde(default)]
    pub(super) decision_log: DecisionLog,
}

/// `memory` in the file of `--config`, in bytes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct MemorySize(pub(super) usize);

impl TryFrom<String> for MemorySize {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        parse_size(&text).map(Self)
    }
}

impl ConfigFile {
    pub(super) fn grpc_tls(&self) -> tls::ListenerTls {
        tls::ListenerTls {
            cert: self.grpc_tls_cert.clone(),
            key: self.grpc_tls_key.clone(),
            client_ca: self.grpc_client_ca.clone(),
            client_name: self.grpc_client_name.clone(),
        }
    }

    pub(super) fn http_tls(&self) -> tls::ListenerTls {
        tls::ListenerTls {
            cert: self.http_tls_cert.clone(),
            key: self.http_tls_key.clone(),
            client_ca: self.http_client_ca.clone(),
            client_name: self.http_client_name.clone(),
        }
    }

    /// Reads the file at `path`. Relative paths in it are relative to its directory.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let (file, text) = Self::read_again(path)?;
        for (old, new) in deprecated_keys::find(&text) {
            tracing::warn!("{}: `{old}` is deprecated; use `{new}`", path.display());
        }
        Ok(file)
    }

    /// Reads a file whose deprecated keys have been reported; also returns its text.
    pub(super) fn read_again(path: &Path) -> anyhow::Result<(Self, String)> {
        let (mut file, text): (Self, String) = yaml_file::read(path, &deprecated_keys::RENAMED)?;
        file.resolve(path.parent().unwrap_or(Path::new(""))).with_context(|| path.display().to_string())?;
        Ok((file, text))
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
            grpc_tls_cert,
            grpc_tls_key,
            grpc_client_ca,
            http_tls_cert,
            http_tls_key,
            http_client_ca,
            xds,
            cells,
            prometheus,
            // Without paths.
            grpc_client_name: _,
            http_client_name: _,
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
            shed_wait_ms: _,
        } = self;
        let files = [
            store_password_file,
            resp_password_file,
            admin_tls_cert,
            admin_tls_key,
            admin_client_ca,
            grpc_tls_cert,
            grpc_tls_key,
            grpc_client_ca,
            http_tls_cert,
            http_tls_key,
            http_client_ca,
            &mut billing.webhook_secret_file,
            &mut prometheus.token_file,
            &mut prometheus.ca,
            &mut xds.tls_cert,
            &mut xds.tls_key,
            &mut xds.tls_ca,
        ];
        let snapshot = snapshot.iter_mut().filter(|path| path.as_os_str() != "off");
        let stores = stores.values_mut().filter_map(|store| store.password_file.as_mut());
        for path in
            files.into_iter().flatten().chain(snapshot).chain(rules).chain(stores).chain(cells.files())
        {
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
        let text = "rules: r.yaml\nstore_password_file: a\nstores: {eu: {address: redis://h, password_file: l}}\ncells: {cert: m, key: n, ca: o}\nresp_password_file: b\ndb: sqlite:state/c.db\n\
            snapshot: d\nadmin_tls_cert: e\nadmin_tls_key: f\nadmin_client_ca: g\n\
            identity: {jwt: {jwks: h}, api_key: {secret_file: i}}\n\
            decision_log: {output: j}\n\
            gateway: {listeners: [], upstreams: {}, routes: [], access_log: k}\n\
            prometheus: {token_file: p, ca: q}\n\
            xds: {tls_cert: m, tls_key: n, tls_ca: o}\n";
        let mut file: ConfigFile = serde_saphyr::from_str(text).expect("valid");
        file.resolve(Path::new("/etc/tollgate")).expect("resolved");
        let shown = format!("{file:?}");
        for name in [
            "r.yaml",
            "a",
            "b",
            "state/c.db",
            "d",
            "e",
            "f",
            "g",
            "h",
            "i",
            "j",
            "k",
            "l",
            "m",
            "n",
            "o",
            "p",
            "q",
        ] {
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
