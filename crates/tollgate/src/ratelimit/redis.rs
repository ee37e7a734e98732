//! Redis settings from the environment: one server, sentinels or a cluster, for all limits or for those per second.

use super::environment::{Environment, InvalidValue, SHARED_KEYS};
use super::variables::JITTER;
use std::path::PathBuf;
use tollgate_store::{RedisConfig, RedisTls, ServerNameCheck, SettingNames};

/// Name of the store for limits per second.
pub(super) const PER_SECOND_STORE: &str = "per-second";

/// The variables of one Redis.
pub(super) struct Names {
    socket_type: &'static str,
    kind: &'static str,
    url: &'static str,
    auth: &'static str,
    sentinel_auth: &'static str,
    tls: &'static str,
    timeout: &'static str,
    /// What to do about a wrong password.
    correction: &'static str,
    /// What to do about a wrong password of the sentinels.
    sentinel_correction: &'static str,
}

pub(super) const DEFAULT: Names = Names {
    socket_type: "REDIS_SOCKET_TYPE",
    kind: "REDIS_TYPE",
    url: "REDIS_URL",
    auth: "REDIS_AUTH",
    sentinel_auth: "REDIS_SENTINEL_AUTH",
    tls: "REDIS_TLS",
    timeout: "REDIS_TIMEOUT",
    correction: "correct REDIS_AUTH and start again",
    sentinel_correction: "correct REDIS_SENTINEL_AUTH and start again",
};

pub(super) const PER_SECOND: Names = Names {
    socket_type: "REDIS_PERSECOND_SOCKET_TYPE",
    kind: "REDIS_PERSECOND_TYPE",
    url: "REDIS_PERSECOND_URL",
    auth: "REDIS_PERSECOND_AUTH",
    sentinel_auth: "REDIS_PERSECOND_SENTINEL_AUTH",
    tls: "REDIS_PERSECOND_TLS",
    timeout: "REDIS_PERSECOND_TIMEOUT",
    correction: "correct REDIS_PERSECOND_AUTH and start again",
    sentinel_correction: "correct REDIS_PERSECOND_SENTINEL_AUTH and start again",
};

/// Returns the jitter of keys that are shared with that service; `None` if they are not.
pub(super) fn shared_keys(environment: &Environment) -> Result<Option<u64>, InvalidValue> {
    match environment.shared_keys() {
        None => Ok(None),
        Some("envoy") => environment.number(JITTER).map(Some),
        Some(other) => {
            Err(InvalidValue::new(SHARED_KEYS, format!("`{other}` is not a form of keys; write envoy")))
        }
    }
}

/// Reads the settings. Errors never contain a password.
pub(super) fn read(environment: &Environment, names: &Names) -> Result<RedisConfig, InvalidValue> {
    let wrong = |error: &dyn std::fmt::Display| InvalidValue::new(names.url, error.to_string());
    let url = environment.text(names.url);
    let kind = environment.text(names.kind).to_ascii_lowercase();
    let config = match kind.as_str() {
        "single" => single(environment, names, url)?,
        "cluster" => {
            let List { tls, credentials, hosts } = List::read(names, url)?;
            let address = format!("redis{tls}+cluster://{credentials}{hosts}");
            RedisConfig::parse(&address).map_err(|error| wrong(&error))?
        }
        "sentinel" => {
            let (primary, sentinels) = url.split_once(',').ok_or_else(|| {
                wrong(&"write the name of the primary and its sentinels: name,host:port,host:port")
            })?;
            let List { tls, credentials, hosts } = List::read(names, sentinels)?;
            let address = format!("redis{tls}+sentinel://{hosts}/{primary}");
            // Those in the address of a sentinel are for the sentinel.
            let own = RedisConfig::parse(&format!("redis://{credentials}localhost"));
            let config = RedisConfig::parse(&address).map_err(|error| wrong(&error))?;
            config.with_sentinel_credentials_of(&own.map_err(|error| wrong(&error))?)
        }
        _ => {
            let reason = format!("`{kind}` is not a type of Redis; write SINGLE, CLUSTER or SENTINEL");
            return Err(InvalidValue::new(names.kind, reason));
        }
    };
    let (user, password) = credentials(environment.some_text(names.auth));
    let mut config = config.with_credentials(user, password);
    if let Some(text) = environment.some_text(names.sentinel_auth) {
        let (user, password) = credentials(Some(text));
        config = config.with_sentinel_credentials(user, password);
    }
    config = config.with_key_prefix(environment.text("CACHE_KEY_PREFIX")).with_setting_names(SettingNames {
        address: names.url,
        password: names.auth,
        correction: names.correction,
        sentinel_password: names.sentinel_auth,
        sentinel_correction: names.sentinel_correction,
        deadline: "TOLLGATE_STORE_DEADLINE_MS",
    });
    if environment.is_set(names.timeout) {
        config.connect_timeout = environment.duration(names.timeout);
    }
    if environment.flag(names.tls) {
        config = config
            .with_tls(tls(environment)?)
            .map_err(|error| InvalidValue::new(names.tls, error.to_string()))?;
    }
    Ok(config)
}

/// Reads the address of one server: `host:port`, a URL, or the path of a socket.
fn single(environment: &Environment, names: &Names, url: &str) -> Result<RedisConfig, InvalidValue> {
    let wrong = |error: &dyn std::fmt::Display| InvalidValue::new(names.url, error.to_string());
    let address = match environment.text(names.socket_type) {
        "unix" => format!("redis+unix://{url}"),
        "tcp" | "tcp4" | "tcp6" if url.contains("://") => url.to_owned(),
        "tcp" | "tcp4" | "tcp6" => format!("redis://{url}"),
        other => {
            let reason = format!("`{other}` is not a type of socket; write tcp or unix");
            return Err(InvalidValue::new(names.socket_type, reason));
        }
    };
    RedisConfig::parse(&address).map_err(|error| wrong(&error))
}

/// A list of servers, each `host:port` or a URL.
struct List {
    /// `s` if any of them has TLS: a connection in plain text would show the password.
    tls: &'static str,
    /// `user:password@`, or nothing.
    credentials: String,
    hosts: String,
}

impl List {
    /// Reads a list. One connection setup is for all servers, so that they cannot differ in it.
    fn read(names: &Names, list: &str) -> Result<Self, InvalidValue> {
        let wrong = |reason: &str| InvalidValue::new(names.url, reason);
        let (mut tls, mut known, mut hosts) = ("", None, Vec::new());
        for item in list.split(',').map(str::trim) {
            let rest = match item.split_once("://") {
                Some(("rediss", rest)) => {
                    tls = "s";
                    rest
                }
                Some(("redis", rest)) => rest,
                Some(_) => return Err(wrong("write each server as host:port, redis://… or rediss://…")),
                None => item,
            };
            let (own, host) = rest.rsplit_once('@').map_or((None, rest), |(own, host)| (Some(own), host));
            if own.is_some() && own != *known.get_or_insert(own) {
                return Err(wrong("the servers have different credentials; write the same for all of them"));
            }
            match host.split_once('/') {
                None => hosts.push(host),
                Some((host, "" | "0")) => hosts.push(host),
                Some(_) => return Err(wrong("only database 0 can be used with several servers")),
            }
        }
        let credentials = known.flatten().map(|own| format!("{own}@")).unwrap_or_default();
        Ok(Self { tls, credentials, hosts: hosts.join(",") })
    }
}

/// Splits `password`, `user:password` or `:password`.
fn credentials(text: Option<String>) -> (Option<String>, Option<String>) {
    match text {
        None => (None, None),
        Some(text) => match text.split_once(':') {
            Some((user, password)) => {
                (Some(user.to_owned()).filter(|user| !user.is_empty()), Some(password.to_owned()))
            }
            None => (None, Some(text)),
        },
    }
}

fn tls(environment: &Environment) -> Result<RedisTls, InvalidValue> {
    let file = |name: &'static str| environment.some_text(name).map(PathBuf::from);
    let client = match (file("REDIS_TLS_CLIENT_CERT"), file("REDIS_TLS_CLIENT_KEY")) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => {
            let reason = "REDIS_TLS_CLIENT_CERT and REDIS_TLS_CLIENT_KEY must be set together";
            return Err(InvalidValue::new("REDIS_TLS_CLIENT_CERT", reason));
        }
    };
    let server_name = match environment.flag("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION") {
        true => ServerNameCheck::Skipped,
        false => ServerNameCheck::Required,
    };
    Ok(RedisTls { authority: file("REDIS_TLS_CACERT"), client, server_name })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(values: &[(&str, &str)]) -> Result<String, InvalidValue> {
        let find =
            |name: &str| values.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        let environment = Environment::read(find).expect("types");
        read(&environment, &DEFAULT).map(|config| config.address_for_display())
    }

    #[test]
    fn an_empty_user_is_none() {
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(credentials(text(":pw")), (None, text("pw")));
        assert_eq!(credentials(text("pw")), (None, text("pw")));
        assert_eq!(credentials(text("u:p:w")), (text("u"), text("p:w")));
    }

    #[test]
    fn addresses_are_written_as_the_service_takes_them() {
        let tcp = ("REDIS_SOCKET_TYPE", "tcp");
        for (values, shown) in [
            (vec![tcp, ("REDIS_URL", "redis:6379")], "redis://redis:6379"),
            (vec![tcp, ("REDIS_URL", "redis://u:p@h:7000")], "redis://h:7000"),
            (vec![("REDIS_URL", "/run/redis.sock")], "redis:///run/redis.sock"),
            (vec![tcp, ("REDIS_TYPE", "Cluster"), ("REDIS_URL", "a:1,b:2")], "redis+cluster://a:1,b:2"),
            (
                vec![tcp, ("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "main,a:1,b:2")],
                "redis+sentinel://a:1,b:2/main",
            ),
            (
                vec![tcp, ("REDIS_TYPE", "CLUSTER"), ("REDIS_URL", "redis://u:p@a:1,redis://u:p@b:2/0")],
                "redis+cluster://a:1,b:2",
            ),
            (
                vec![tcp, ("REDIS_TYPE", "CLUSTER"), ("REDIS_URL", "a:1, rediss://b:2")],
                "rediss+cluster://a:1,b:2",
            ),
            (
                vec![tcp, ("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "main,rediss://:p@a:1")],
                "rediss+sentinel://a:1/main",
            ),
        ] {
            assert_eq!(address(&values).as_deref(), Ok(shown), "{values:?}");
        }
        for wrong in [
            vec![tcp, ("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "main")],
            vec![tcp, ("REDIS_TYPE", "MANY")],
            vec![("REDIS_SOCKET_TYPE", "udp")],
            vec![tcp, ("REDIS_URL", "redis://u:secret@h:port")],
            vec![tcp, ("REDIS_TYPE", "CLUSTER"), ("REDIS_URL", "redis://u:secret@a:1,redis://u:secret2@b:2")],
            vec![tcp, ("REDIS_TYPE", "CLUSTER"), ("REDIS_URL", "http://a:1")],
        ] {
            let error = address(&wrong).expect_err("wrong").to_string();
            assert!(error.starts_with("REDIS_") && !error.contains("secret"), "{error}");
        }
    }
}
