//! The documents in which a server hands its replicated state to a program that embeds the limiter, and which that program
//! writes to its snapshot.

use crate::grant_table::ReplicatedGrant;
use crate::key_hash::KeyHasher;
use crate::measure::ReplicatedMeasure;
use crate::quota_table::TableDigest;
use crate::terms::ReplicatedQuota;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use tollgate_rules::{Options, Profile, Source};

/// Version of [`ReplicaState`].
pub const STATE_VERSION: u32 = 1;

/// Maximum time that a process may be disconnected and still read only changes, in milliseconds: rows of deleted quotas
/// are kept for twice as long.
pub const MAX_STALENESS_MS: i64 = 7 * 86_400_000 / 2;

/// Everything that a server has replicated, but for its quotas.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaState {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// The installation whose key hashes these are.
    pub installation: String,
    /// The secret that API keys are hashed with, in base64.
    pub key_secret: String,
    /// Control revision up to which the server knows quotas.
    pub revision: i64,
    /// The server's quotas at about that revision.
    pub quotas: TableDigest,
    /// The server's active rules.
    pub rules: ReplicatedRules,
    /// The active measures; each has its own expiry.
    pub measures: Vec<ReplicatedMeasure>,
    /// Grants, by the table hash of the caller.
    pub grants: Vec<(u64, ReplicatedGrant)>,
}

/// The secret is left out, and whatever there may be many of.
impl std::fmt::Debug for ReplicaState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplicaState")
            .field("installation", &self.installation)
            .field("revision", &self.revision)
            .field("quotas", &self.quotas)
            .field("rules", &self.rules.revision)
            .field("measures", &self.measures.len())
            .field("grants", &self.grants.len())
            .finish_non_exhaustive()
    }
}

/// Rules with everything that decides what they mean.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicatedRules {
    /// Rules hash, as in decisions.
    pub revision: String,
    /// Number of the published revision; `None` if the server reads its rules from files or over xDS.
    pub rev: Option<i64>,
    /// The server's options that rules are compiled with.
    pub options: ReplicatedOptions,
    /// The rule files.
    pub files: Vec<ReplicatedRuleFile>,
}

/// A rule file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedRuleFile {
    /// File name, for diagnostics.
    pub name: String,
    /// Contents.
    pub text: String,
}

/// The options of [`Options`] that change what rules mean, wherever they are enforced. The others are about the server's
/// own store and cells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplicatedOptions {
    /// Whether every domain has the profile `envoy`.
    pub envoy_profile: Option<bool>,
    /// [`Options::merge_domains`].
    pub merge_domains: bool,
    /// [`Options::ratelimit_files`].
    pub ratelimit_files: bool,
    /// [`Options::quota_mode`].
    pub quota_mode: bool,
    /// [`Options::stop_when_over`].
    pub stop_when_over: bool,
    /// [`Options::readable_scopes`].
    pub readable_scopes: bool,
}

impl ReplicatedRules {
    /// Returns the rules of a server for replication.
    #[must_use]
    pub fn new(revision: &str, rev: Option<i64>, options: &Options, files: &[Source]) -> Self {
        let files =
            files.iter().map(|file| ReplicatedRuleFile { name: file.name.clone(), text: file.text.clone() });
        // Every option is named, so that a new one is decided upon here.
        let Options {
            profile,
            merge_domains,
            ratelimit_files,
            quota_mode,
            stop_when_over,
            readable_scopes,
            nodes: _,
            lease_shared: _,
            cluster: _,
            permits: _,
            stores: _,
            unverified: _,
            per_second_store: _,
            cells: _,
            required_domains: _,
        } = options;
        let options = ReplicatedOptions {
            envoy_profile: profile.map(|profile| profile == Profile::Envoy),
            merge_domains: *merge_domains,
            ratelimit_files: *ratelimit_files,
            quota_mode: *quota_mode,
            stop_when_over: *stop_when_over,
            readable_scopes: *readable_scopes,
        };
        Self { revision: revision.to_owned(), rev, options, files: files.collect() }
    }

    /// Returns the files as sources for the rule compiler.
    #[must_use]
    pub fn sources(&self) -> Vec<Source> {
        self.files.iter().map(|file| Source::new(file.name.clone(), file.text.clone())).collect()
    }

    /// Applies the server's options to those of this process.
    #[must_use]
    pub fn options(&self, own: Options) -> Options {
        let profile = |is_envoy| if is_envoy { Profile::Envoy } else { Profile::default() };
        let ReplicatedOptions {
            envoy_profile,
            merge_domains,
            ratelimit_files,
            quota_mode,
            stop_when_over,
            readable_scopes,
        } = self.options;
        Options {
            profile: envoy_profile.map(profile),
            merge_domains,
            ratelimit_files,
            quota_mode,
            stop_when_over,
            readable_scopes,
            ..own
        }
    }
}

/// Why a state cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateError {
    /// It is no state, or a part of it is missing.
    Malformed(String),
    /// It has another version.
    Version(u32),
}

impl std::fmt::Display for StateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Malformed(reason) => write!(f, "malformed state: {reason}"),
            Self::Version(version) => {
                write!(
                    f,
                    "the state has version {version}, this program reads {STATE_VERSION}; use versions that agree"
                )
            }
        }
    }
}

impl std::error::Error for StateError {}

impl ReplicaState {
    /// Reads a state.
    ///
    /// # Errors
    /// [`StateError`] if it cannot be used; nothing of it is secret in the message.
    pub fn parse(bytes: &[u8]) -> Result<Self, StateError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |error: serde_json::Error| {
            // The error's own text may quote a value.
            StateError::Malformed(format!("line {} column {}", error.line(), error.column()))
        };
        let Versioned { version } = serde_json::from_slice(bytes).map_err(malformed)?;
        if version != STATE_VERSION {
            return Err(StateError::Version(version));
        }
        let state: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        let secret = state.secret().ok_or_else(|| StateError::Malformed("key_secret".to_owned()))?;
        if KeyHasher::new(&secret).installation_id() != state.installation {
            return Err(StateError::Malformed("key_secret is not of this installation".to_owned()));
        }
        Ok(state)
    }

    /// Returns the secret that API keys are hashed with.
    #[must_use]
    pub fn secret(&self) -> Option<Vec<u8>> {
        STANDARD.decode(&self.key_secret).ok().filter(|secret| !secret.is_empty())
    }

    /// Encodes a secret for [`ReplicaState::key_secret`].
    #[must_use]
    pub fn encode_secret(secret: &[u8]) -> String {
        STANDARD.encode(secret)
    }
}

/// Changed quotas, in the order of their revisions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaChanges {
    /// Control revision up to which these are all changes.
    pub through: i64,
    /// Whether there are more after it.
    pub more: bool,
    /// The changes.
    pub quotas: Vec<ReplicatedQuota>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the server was told decides everywhere; what is about its own store does not travel.
    #[test]
    fn options_that_change_what_rules_mean_are_replicated() {
        let server = Options {
            profile: Some(Profile::Envoy),
            merge_domains: true,
            quota_mode: true,
            stop_when_over: true,
            readable_scopes: true,
            nodes: Some(3),
            ..Options::default()
        };
        let sent = serde_json::to_vec(&ReplicatedRules::new("r", None, &server, &[])).expect("JSON");
        let rules: ReplicatedRules = serde_json::from_slice(&sent).expect("rules");
        let own = Options { lease_shared: true, ..Options::default() };
        let expected = Options { nodes: None, lease_shared: true, ..server };
        assert_eq!(rules.options(own), expected);
        assert_eq!(
            ReplicatedRules { options: ReplicatedOptions::default(), ..rules }.options(expected).nodes,
            None
        );
    }

    #[test]
    fn the_secret_is_not_shown() {
        let state = ReplicaState {
            version: STATE_VERSION,
            installation: "i".to_owned(),
            key_secret: ReplicaState::encode_secret(b"very secret"),
            revision: 1,
            quotas: TableDigest::default(),
            rules: ReplicatedRules::new("r", None, &Options::default(), &[]),
            measures: Vec::new(),
            grants: Vec::new(),
        };
        assert!(!format!("{state:?}").contains(&state.key_secret));
    }
}
