//! Redis settings: addresses, credentials, timeouts. Passwords never show in `Debug` or errors.

use super::envoy_keys::EnvoyKeys;
use super::key_encoding::Hashing;
use super::server_error::SettingNames;
use super::tls::RedisTls;
use crate::breaker::BreakerConfig;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tollgate_core::TimeDelta;

/// Deployment kind of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One Redis at a fixed address.
    Single,
    /// A primary behind sentinels.
    Sentinel,
    /// A cluster.
    Cluster,
}

/// Address, credentials and timeouts of Redis.
///
/// ```
/// use tollgate_store::RedisConfig;
/// let config = RedisConfig::parse("redis+cluster://gate:secret@a:7000,b:7001")?;
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), tollgate_store::RedisConfigError>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    /// Longest time that a check waits for its reply.
    pub deadline: Duration,
    /// Longest time to open a connection, or five times the deadline if that is longer: connections are opened in the
    /// background, and a link that needs a long deadline needs time to connect.
    pub connect_timeout: Duration,
    /// Number of connections to each server.
    pub connections: usize,
    /// Circuit breaker settings per server.
    pub breaker: BreakerConfig,
    /// Longest time that counters which a server may have lost count as exhausted, for charges with
    /// [`LossPolicy::AssumeExhausted`](tollgate_core::LossPolicy::AssumeExhausted); `None`: until they would have
    /// recovered by themselves.
    pub loss_window: Option<TimeDelta>,
    /// Bytes of keys that may be in flight on one connection, late ones included; further requests wait, and fail when
    /// the queue is full.
    pub(super) in_flight_bytes: usize,
    pub(super) kind: Kind,
    pub(super) hosts: Vec<(String, u16)>,
    /// Name of the primary at the sentinels.
    pub(super) primary: String,
    tls: bool,
    /// Certificates and authorities of its own, with TLS.
    tls_files: Option<RedisTls>,
    user: Option<String>,
    password: Option<String>,
    /// User and password of the sentinels.
    sentinel_user: Option<String>,
    sentinel_password: Option<String>,
    /// The password is in this file; the value is the one last read.
    password_file: Option<Arc<PasswordFile>>,
    database: i64,
    /// How values that may be secrets are hashed in counter names.
    pub(super) hashing: Hashing,
    /// Whether counters are kept as envoyproxy/ratelimit keeps them.
    pub(super) envoy_keys: Option<EnvoyKeys>,
    /// What messages call the settings.
    pub(super) names: SettingNames,
}

/// A file with the password, which may change while the process runs.
struct PasswordFile {
    path: PathBuf,
    value: Mutex<String>,
}

/// Reads a password, without its trailing line break.
fn read_password(file: &std::path::Path) -> std::io::Result<String> {
    Ok(std::fs::read_to_string(file)?.trim_end_matches(['\r', '\n']).to_owned())
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RedisConfigError {
    /// Unknown URL scheme.
    #[error(
        "`{0}` is not a Redis scheme; write redis, rediss, redis+unix, redis+sentinel or redis+cluster (or rediss+…)"
    )]
    Scheme(String),
    /// Invalid host.
    #[error("`{0}` is not a host; write `name`, `name:port` or `[v6]:port`")]
    Host(String),
    /// Invalid database number.
    #[error("`{0}` is not a database number")]
    Database(String),
    /// Sentinels without the name of their primary.
    #[error("missing name of the primary; write redis+sentinel://h1,h2,h3/name")]
    NoPrimary,
    /// Unreadable or invalid certificates.
    #[error("{0}")]
    Tls(String),
    /// Unreadable password file.
    #[error("cannot read the password from {file}: {reason}")]
    Password {
        /// Path of the file.
        file: String,
        /// Reason of the failure.
        reason: String,
    },
}

impl RedisConfig {
    /// Reads `redis://[user:password@]host[:port][/db]`, `rediss://…`, `redis+unix:///path/of/socket`,
    /// `redis+sentinel://h1,h2,h3/name` or `redis+cluster://h1,h2,h3`.
    ///
    /// # Errors
    /// Returns a [`RedisConfigError`], which never contains the password.
    pub fn parse(url: &str) -> Result<Self, RedisConfigError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| RedisConfigError::Scheme(String::new()))?;
        let (tls, kind) = match scheme {
            "redis" => (false, Kind::Single),
            "rediss" => (true, Kind::Single),
            "redis+sentinel" => (false, Kind::Sentinel),
            "rediss+sentinel" => (true, Kind::Sentinel),
            "redis+cluster" => (false, Kind::Cluster),
            "rediss+cluster" => (true, Kind::Cluster),
            "redis+unix" if rest.starts_with('/') => {
                return Ok(Self::at(Kind::Single, vec![(rest.to_owned(), 0)]));
            }
            "redis+unix" => return Err(RedisConfigError::Host(rest.to_owned())),
            other => return Err(RedisConfigError::Scheme(other.to_owned())),
        };
        let (credentials, rest) =
            rest.rsplit_once('@').map_or((None, rest), |(userinfo, rest)| (Some(userinfo), rest));
        let (user, password) =
            match credentials.map(|userinfo| userinfo.split_once(':').unwrap_or((userinfo, ""))) {
                Some((user, password)) => (unescape(user), unescape(password)),
                None => (None, None),
            };
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let port = if kind == Kind::Sentinel { 26_379 } else { 6_379 };
        let hosts = hosts.split(',').map(|one| host(one, port)).collect::<Result<_, _>>()?;
        let (primary, database) = match kind {
            Kind::Sentinel if path.is_empty() => return Err(RedisConfigError::NoPrimary),
            Kind::Sentinel => path.split_once('/').unwrap_or((path, "")),
            _ => ("", path),
        };
        let database = match database {
            "" => 0,
            number => number.parse().map_err(|_| RedisConfigError::Database(number.to_owned()))?,
        };
        let primary = primary.to_owned();
        Ok(Self { primary, tls, user, password, database, ..Self::at(kind, hosts) })
    }

    fn at(kind: Kind, hosts: Vec<(String, u16)>) -> Self {
        Self {
            deadline: Duration::from_millis(10),
            connect_timeout: Duration::from_secs(1),
            connections: 2,
            breaker: BreakerConfig::default(),
            loss_window: None,
            in_flight_bytes: 8 << 20,
            kind,
            hosts,
            primary: String::new(),
            tls: false,
            tls_files: None,
            user: None,
            password: None,
            sentinel_user: None,
            sentinel_password: None,
            password_file: None,
            database: 0,
            hashing: Hashing::default(),
            envoy_keys: None,
            names: SettingNames::default(),
        }
    }

    /// Keeps the counters of `profile: envoy` under the keys of envoyproxy/ratelimit, so that both share counts. A key
    /// expires up to `jitter` seconds after its window. Values that may be secrets are then readable in keys, as there.
    #[must_use]
    pub fn with_envoy_keys(mut self, jitter: u64) -> Self {
        self.envoy_keys = Some(EnvoyKeys { jitter });
        self
    }

    /// Sets what messages call the settings.
    #[must_use]
    pub const fn with_setting_names(mut self, names: SettingNames) -> Self {
        self.names = names;
        self
    }

    /// Uses TLS, with certificates and authorities from these files.
    ///
    /// # Errors
    /// Returns [`RedisConfigError::Tls`] if one of the files cannot be used.
    pub fn with_tls(mut self, files: RedisTls) -> Result<Self, RedisConfigError> {
        files.check().map_err(RedisConfigError::Tls)?;
        self.tls = true;
        self.tls_files = (files != RedisTls::default()).then_some(files);
        Ok(self)
    }

    /// Sets the user and password of the sentinels, which have none by default.
    #[must_use]
    pub fn with_sentinel_credentials(mut self, user: Option<String>, password: Option<String>) -> Self {
        (self.sentinel_user, self.sentinel_password) = (user, password);
        self
    }

    /// Gives the sentinels the user and password of another configuration.
    #[must_use]
    pub fn with_sentinel_credentials_of(mut self, other: &Self) -> Self {
        (self.sentinel_user, self.sentinel_password) = (other.user.clone(), other.password.clone());
        self
    }

    /// Puts this text before every key, as it is.
    #[must_use]
    pub fn with_key_prefix(mut self, prefix: &str) -> Self {
        self.hashing = self.hashing.with_prefix(prefix);
        self
    }

    /// Sets the user and password, from the environment or another source.
    #[must_use]
    pub fn with_credentials(mut self, user: Option<String>, password: Option<String>) -> Self {
        self.user = user.or(self.user);
        self.password = password.or(self.password);
        self
    }

    /// Sets the secret with which API keys and other values that may be secrets are hashed before they become part of a
    /// counter's name, so that a reader of the names cannot test guesses. It must be the same on every node, or nodes
    /// do not share those counters.
    #[must_use]
    pub fn with_key_secret(mut self, secret: &[u8]) -> Self {
        self.hashing = self.hashing.with_secret(secret);
        self
    }

    /// Sets the bytes of keys that may be in flight on one connection, at least 64 KiB.
    #[must_use]
    pub fn with_in_flight_bytes(mut self, bytes: usize) -> Self {
        self.in_flight_bytes = bytes.max(64 << 10);
        self
    }

    /// Sets the password from this file, without its trailing line break.
    ///
    /// # Errors
    /// Returns [`RedisConfigError::Password`] if the file cannot be read.
    pub fn with_password_file(mut self, file: &std::path::Path) -> Result<Self, RedisConfigError> {
        let password = read_password(file).map_err(|error| RedisConfigError::Password {
            file: file.display().to_string(),
            reason: error.to_string(),
        })?;
        let value = Mutex::new(password);
        self.password_file = Some(Arc::new(PasswordFile { path: file.to_owned(), value }));
        Ok(self)
    }

    /// Reads the password file again. Returns whether the password is another one; all clones use it then.
    pub(super) fn reread_password(&self) -> bool {
        let Some(file) = &self.password_file else { return false };
        let password = match read_password(&file.path) {
            Ok(password) => password,
            Err(error) => {
                tracing::warn!(file = %file.path.display(), %error, "cannot read the store's password again");
                return false;
            }
        };
        let mut value = file.value.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *value != password;
        if changed {
            tracing::info!(file = %file.path.display(), "store's password read again");
            *value = password;
        }
        changed
    }

    fn password(&self) -> Option<String> {
        let from_file =
            |file: &Arc<PasswordFile>| file.value.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.password_file.as_ref().map(from_file).or_else(|| self.password.clone())
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout.max(5 * self.deadline)
    }

    /// Returns whether the servers are a cluster, whose counters lie in slots.
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        self.kind == Kind::Cluster
    }

    /// Returns how to connect to a server of this configuration.
    pub(super) fn connection_info(&self, host: &str, port: u16) -> redis::RedisResult<ConnectionInfo> {
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name().set_db(self.database);
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = self.password() {
            settings = settings.set_password(password);
        }
        Ok(self
            .address(host, port)?
            .into_connection_info()?
            .set_redis_settings(settings)
            .set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true)))
    }

    /// Returns how to connect to a sentinel: without the primary's credentials.
    pub(super) fn sentinel_info(&self, host: &str, port: u16) -> redis::RedisResult<ConnectionInfo> {
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        if let Some(user) = &self.sentinel_user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.sentinel_password {
            settings = settings.set_password(password);
        }
        Ok(self.address(host, port)?.into_connection_info()?.set_redis_settings(settings))
    }

    /// Returns whether connections use TLS.
    pub(super) const fn uses_tls(&self) -> bool {
        self.tls
    }

    fn address(&self, host: &str, port: u16) -> redis::RedisResult<ConnectionAddr> {
        // Only the path of a socket begins so.
        if host.starts_with('/') {
            return Ok(ConnectionAddr::Unix(PathBuf::from(host)));
        }
        if !self.tls {
            return Ok(ConnectionAddr::Tcp(host.to_owned(), port));
        }
        // Only the first provider installed in a process counts: an embedding application may have chosen another.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let files = self.tls_files.clone().unwrap_or_default();
        match files == RedisTls::default() {
            true => {
                Ok(ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None })
            }
            false => files.address(host, port),
        }
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("kind", &self.kind)
            .field("hosts", &self.hosts)
            .field("tls", &self.tls)
            .field("user", &self.user)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

fn host(text: &str, port: u16) -> Result<(String, u16), RedisConfigError> {
    let wrong = || RedisConfigError::Host(text.to_owned());
    let (name, given) = match text.strip_prefix('[') {
        Some(v6) => {
            let (name, rest) = v6.split_once(']').ok_or_else(wrong)?;
            (name, rest.strip_prefix(':'))
        }
        None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
    };
    let port = given.map_or(Ok(port), str::parse).map_err(|_| wrong())?;
    if name.is_empty() { Err(wrong()) } else { Ok((name.to_owned(), port)) }
}

/// Decodes percent escapes. Returns `None` for an empty text.
fn unescape(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_carry_hosts_and_credentials() {
        let config = RedisConfig::parse("rediss://:p%40ss@cache.example:7000/3").expect("a url");
        assert_eq!(config.hosts, [("cache.example".to_owned(), 7000)]);
        assert_eq!((config.password.as_deref(), config.user.as_deref()), (Some("p@ss"), None));
        assert!(config.tls && config.database == 3);
        let sentinels = RedisConfig::parse("redis+sentinel://a,b:1,[::1]:2/main").expect("a url");
        assert_eq!(sentinels.hosts, [("a".into(), 26_379), ("b".into(), 1), ("::1".into(), 2)]);
        assert_eq!(sentinels.primary, "main");
    }

    #[test]
    fn a_password_is_in_no_message() {
        for url in ["redis://u:secret@host:port", "redis+sentinel://u:secret@h", "redis://u:secret@h/x"] {
            let error = RedisConfig::parse(url).expect_err(url);
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let config = RedisConfig::parse("redis://u:secret@h").expect("a url");
        assert!(!format!("{config:?}").contains("secret"));
    }
}
