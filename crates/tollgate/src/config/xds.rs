//! Settings of the xDS client from flags and from `xds` in the file of `--config`.

use super::file::MemorySize;
use crate::cli::{MAX_PAUSE, XdsFlags};
use crate::xds::{FirstConfig, ServerAddress, XdsSettings, XdsTls, header};
use crate::yaml_file::Millis;
use anyhow::{Context, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use tollgate_control::RulesFrom;

/// `xds` in the file of `--config`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct XdsSection {
    server: Option<String>,
    node_id: Option<String>,
    #[serde(default)]
    node_metadata: BTreeMap<String, String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    tls: Option<bool>,
    pub(super) tls_ca: Option<PathBuf>,
    pub(super) tls_cert: Option<PathBuf>,
    pub(super) tls_key: Option<PathBuf>,
    tls_name: Option<String>,
    retry_ms: Option<Millis<MAX_PAUSE>>,
    max_retry_ms: Option<Millis<MAX_PAUSE>>,
    max_message: Option<MemorySize>,
    wait: Option<bool>,
}

/// The values of headers may be secret.
impl fmt::Debug for XdsSection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XdsSection")
            .field("server", &self.server)
            .field("tls_ca", &self.tls_ca)
            .field("tls_cert", &self.tls_cert)
            .field("tls_key", &self.tls_key)
            .finish_non_exhaustive()
    }
}

/// Merges flags over the file. Returns `None` if rules do not come from xDS.
pub(super) fn read(
    flags: &XdsFlags,
    file: &XdsSection,
    from: RulesFrom,
) -> anyhow::Result<Option<XdsSettings>> {
    let server = flags.xds_server.as_ref().or(file.server.as_ref());
    if from != RulesFrom::Xds {
        ensure!(server.is_none(), "--xds-server requires --rules-from xds");
        return Ok(None);
    }
    let server = server.context("--rules-from xds requires --xds-server, such as envoy-gateway:18001")?;
    let server: ServerAddress =
        server.parse().map_err(|error: String| anyhow::anyhow!("--xds-server: {error}"))?;
    let mut settings = XdsSettings::new(server);
    if let Some(id) = flags.xds_node_id.as_ref().or(file.node_id.as_ref()) {
        settings.node_id.clone_from(id);
    }
    settings.node_metadata.clone_from(&file.node_metadata);
    settings.node_metadata.extend(flags.xds_node_metadata.iter().cloned());
    let mut headers = file.headers.clone();
    // Not parsed with the other flags: those errors repeat what was written.
    for given in &flags.xds_header {
        let pair = given.split_once('=').context("--xds-header: not a header; write it as in NAME=VALUE")?;
        headers.insert(pair.0.to_owned(), pair.1.to_owned());
    }
    for (name, value) in &headers {
        let parsed = header(name, value).map_err(|error| anyhow::anyhow!("--xds-header: {error}"))?;
        settings.headers.push(parsed);
    }
    settings.tls = tls(flags, file)?;
    let pause = |flag: Option<u64>, file: Option<Millis<MAX_PAUSE>>| {
        flag.or(file.map(|time| time.0)).map(Duration::from_millis)
    };
    let backoff = &mut settings.backoff;
    let (first, longest) =
        (pause(flags.xds_retry_ms, file.retry_ms), pause(flags.xds_max_retry_ms, file.max_retry_ms));
    backoff.max = longest.unwrap_or_else(|| backoff.max.max(first.unwrap_or_default()));
    backoff.initial = first.unwrap_or_else(|| backoff.initial.min(backoff.max));
    ensure!(backoff.initial <= backoff.max, "--xds-retry-ms: must not exceed --xds-max-retry-ms");
    if let Some(size) = flags.xds_max_message.or(file.max_message.map(|size| size.0)) {
        ensure!(size > 0, "--xds-max-message: must be more than 0");
        settings.max_message = size;
    }
    if flags.xds_wait.or(file.wait) == Some(false) {
        settings.first_config = FirstConfig::StartWithout;
    }
    Ok(Some(settings))
}

fn tls(flags: &XdsFlags, file: &XdsSection) -> anyhow::Result<Option<XdsTls>> {
    let pick = |flag: &Option<PathBuf>, file: &Option<PathBuf>| flag.clone().or(file.clone());
    let ca = pick(&flags.xds_tls_ca, &file.tls_ca);
    let certificate = pick(&flags.xds_tls_cert, &file.tls_cert);
    let own = match (certificate, pick(&flags.xds_tls_key, &file.tls_key)) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => anyhow::bail!("--xds-tls-cert and --xds-tls-key must be set together"),
    };
    let server_name = flags.xds_tls_name.clone().or(file.tls_name.clone());
    let is_set = ca.is_some() || own.is_some() || server_name.is_some();
    match flags.xds_tls.or(file.tls) {
        Some(false) => {
            ensure!(!is_set, "--xds-tls: false, but certificates or a name are set; remove one or the other");
            Ok(None)
        }
        None if !is_set => Ok(None),
        Some(true) | None => Ok(Some(XdsTls { own, ca, server_name })),
    }
}
