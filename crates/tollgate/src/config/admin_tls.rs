//! TLS of the admin listener, and the roles of operators' client certificates.

use super::file::ConfigFile;
use crate::cli::ServeFlags;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tollgate_control::Role;

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
pub(super) struct RoleName(Role);

impl TryFrom<String> for RoleName {
    type Error = String;
    fn try_from(word: String) -> Result<Self, String> {
        word.parse().map(Self)
    }
}

/// Returns the settings of flags and file.
pub(super) fn read(flags: &ServeFlags, file: &ConfigFile) -> anyhow::Result<AdminTlsSettings> {
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
