//! Typed settings from the environment: the [`Config`] of the server and the [`Service`].

use super::environment::{Environment, InvalidValue};
use super::health::HealthPolicy;
use super::metrics::ServiceMetrics;
use super::service::{Service, Statsd, StatsdProtocol};
use super::{Examined, go_values, redis, xds};
use crate::cli::{Listen, LogFormat, ProfileName, ServeFlags};
use crate::config::service_files::ServiceFiles;
use crate::config::wording::Wording;
use crate::config::{Config, StoreChoice};
use anyhow::{Context, bail, ensure};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tollgate_http::tls::{ClientAuth, ServerTlsConfig};
use tollgate_rules::Options;
use tollgate_server::rls::LimitHeaders;
use tollgate_store::RedisConfig;

/// Source of rules: xDS, state of the world.
const XDS: &str = "GRPC_XDS_SOTW";

/// Sets the level and format of log messages. Tollgate's own variables win.
pub(super) fn log(environment: &Environment, flags: &mut ServeFlags) -> Result<(), InvalidValue> {
    if std::env::var_os("TOLLGATE_LOG").is_none() {
        let level = environment.text("LOG_LEVEL").to_ascii_lowercase();
        let level = match level.as_str() {
            "panic" | "fatal" | "error" => "error",
            "warn" | "warning" => "warn",
            "info" => "info",
            // The libraries' own messages would drown the others.
            "debug" => "info,tollgate=debug",
            "trace" => "info,tollgate=trace",
            _ => {
                let known = "panic, fatal, error, warn, info, debug or trace";
                return Err(InvalidValue::new(
                    "LOG_LEVEL",
                    format!("`{level}` is not a level; write {known}"),
                ));
            }
        };
        flags.log = level.parse().map_err(|error| InvalidValue::new("LOG_LEVEL", error))?;
    }
    if std::env::var_os("TOLLGATE_LOG_FORMAT").is_none() {
        let is_json = environment.text("LOG_FORMAT").eq_ignore_ascii_case("json");
        flags.log_format = if is_json { LogFormat::Json } else { LogFormat::Text };
    }
    Ok(())
}

/// Returns the configuration of the server.
pub(super) fn config(environment: &Environment, mut flags: ServeFlags) -> anyhow::Result<Config> {
    check_choices(environment)?;
    // Tollgate's own variable wins.
    let has_address = flags.grpc.is_some();
    flags.grpc = flags.grpc.or(Some(listen(environment, "GRPC_HOST", "GRPC_PORT")?));
    flags.http = flags.http.or(Some(listen(environment, "HOST", "PORT")?));
    flags.resp = flags.resp.or(Some(Listen::Off));
    flags.admin = flags.admin.or(Some(Listen::Off));
    flags.profile = flags.profile.or(Some(ProfileName::Envoy));
    flags.global_shadow = flags.global_shadow.or(Some(environment.flag("SHADOW_MODE")));
    if !environment.flag("TRACING_ENABLED") {
        flags.otlp = flags.otlp.or(Some("off".to_owned()));
    }
    // That service has no classes.
    flags.shed_wait_ms = flags.shed_wait_ms.or(Some(0));
    let (files, is_xds) = (files(environment), environment.text("CONFIG_TYPE") == XDS);
    // Files beside xDS are optional.
    let has_files = flags.rules.is_empty() && (!is_xds || files.directory.exists());
    if has_files {
        flags.rules = vec![files.directory.clone()];
    }
    let mut config = Config::new(&flags)?;
    config.service_files = has_files.then_some(files);
    if !has_address {
        config.grpc_socket = environment.some_text("GRPC_UDS").map(PathBuf::from);
    }
    if is_xds {
        config.xds = Some(xds::read(environment)?);
    }
    config.wording = Wording::RatelimitService;
    match &mut config.otlp {
        Some(otlp) => otlp.service = environment.text("TRACING_SERVICE_NAME").to_owned(),
        None if environment.flag("TRACING_ENABLED") => tracing::warn!(
            "TRACING_ENABLED has no effect: no collector is known; set OTEL_EXPORTER_OTLP_ENDPOINT to its HTTP address, such as \
             http://localhost:4318"
        ),
        None => {}
    }
    config.more_rule_options = rule_options(environment);
    let shared = redis::shared_keys(environment)?;
    if shared.is_some()
        && let Some(why) = no_shared_keys(&flags)
    {
        tracing::warn!(
            "TOLLGATE_SHARED_KEYS has no effect with {why}: nothing is shared with envoyproxy/ratelimit"
        );
    }
    if flags.store.is_none() {
        config.more_rule_options.readable_scopes = shared.is_some();
        if shared.is_some() && std::mem::take(&mut config.more_rule_options.stop_when_over) {
            tracing::warn!(
                "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT has no effect with TOLLGATE_SHARED_KEYS=envoy, whose counters are \
                 charged one by one; leave one of them out"
            );
        }
        let default = redis::read(environment, &redis::DEFAULT)?;
        let default = shared.into_iter().fold(default, RedisConfig::with_envoy_keys);
        config.store = StoreChoice::Redis(Config::with_store_limits(default, &flags)?);
        if environment.flag("REDIS_PERSECOND") {
            let other = redis::read(environment, &redis::PER_SECOND)?;
            config
                .stores
                .push((redis::PER_SECOND_STORE.to_owned(), Config::with_store_limits(other, &flags)?));
            config.store_names.add(redis::PER_SECOND_STORE.to_owned());
            config.more_rule_options.per_second_store = Some(redis::PER_SECOND_STORE.to_owned());
        }
    }
    if config.grpc_tls.is_none() {
        config.grpc_tls = grpc_tls(environment)?;
    }
    config.service = Some(Arc::new(service(environment)?));
    Ok(config)
}

/// Returns how rule files are read.
fn rule_options(environment: &Environment) -> Options {
    Options {
        ratelimit_files: true,
        merge_domains: environment.flag("MERGE_DOMAIN_CONFIG"),
        quota_mode: environment.flag("QUOTA_MODE"),
        stop_when_over: environment.flag("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT"),
        ..Options::default()
    }
}

/// Returns what an environment means, as far as that is known without the files and servers that it names.
///
/// # Errors
/// Why a start would end.
pub(super) fn examine(environment: &Environment) -> anyhow::Result<Examined> {
    check_choices(environment)?;
    let rules = match environment.text("CONFIG_TYPE") {
        XDS => {
            let xds = xds::read(environment)?;
            format!("rules come over xDS from {}, for the node `{}`", xds.server, xds.node_id)
        }
        _ => format!("rules are all files below {}", files(environment).directory.display()),
    };
    Ok(Examined { notices: environment.notices(), options: rule_options(environment), rules })
}

/// Returns the setting with which no counter has the keys of that service. Only its own arithmetic has windows like them.
fn no_shared_keys(flags: &ServeFlags) -> Option<&'static str> {
    match (flags.profile, &flags.store) {
        (_, Some(_)) => Some("TOLLGATE_STORE"),
        (Some(ProfileName::Native), None) => Some("TOLLGATE_PROFILE=native"),
        (Some(ProfileName::Envoy) | None, None) => None,
    }
}

/// Checks the variables that choose among words.
fn check_choices(environment: &Environment) -> anyhow::Result<()> {
    match environment.text("BACKEND_TYPE") {
        "redis" | "" => {}
        "memcache" => bail!("BACKEND_TYPE: counters in memcached are not supported; set BACKEND_TYPE=redis"),
        other => bail!("BACKEND_TYPE: `{other}` is not a backend; write redis"),
    }
    match environment.text("CONFIG_TYPE") {
        "FILE" | XDS => {}
        other => bail!("CONFIG_TYPE: `{other}` is not a source of rules; write FILE or GRPC_XDS_SOTW"),
    }
    let sinks = ["USE_STATSD", "USE_PROMETHEUS", "USE_DOG_STATSD"];
    ensure!(
        environment.flag("DISABLE_STATS") || sinks.iter().filter(|sink| environment.flag(sink)).count() <= 1,
        "unable to use more than one stats sink at the same time. Set one of USE_DOG_STATSD, USE_STATSD, USE_PROMETHEUS \
         (USE_STATSD is true unless it is set to false)"
    );
    Ok(())
}

fn files(environment: &Environment) -> ServiceFiles {
    let base = PathBuf::from(environment.text("RUNTIME_ROOT")).join(environment.text("RUNTIME_SUBDIRECTORY"));
    let directory = base.join(environment.text("RUNTIME_APPDIRECTORY"));
    let base = if environment.flag("RUNTIME_WATCH_ROOT") { base } else { directory.clone() };
    ServiceFiles { directory, base, ignores_hidden: environment.flag("RUNTIME_IGNOREDOTFILES") }
}

fn grpc_tls(environment: &Environment) -> anyhow::Result<Option<ServerTlsConfig>> {
    if !environment.flag("GRPC_SERVER_USE_TLS") {
        return Ok(None);
    }
    let file = |name: &'static str| environment.some_text(name).map(PathBuf::from);
    let need =
        |name: &'static str| file(name).with_context(|| format!("{name}: GRPC_SERVER_USE_TLS needs a file"));
    let clients = match file("GRPC_CLIENT_TLS_CACERT") {
        Some(authority) => {
            ClientAuth::Required { authority, name: environment.some_text("GRPC_CLIENT_TLS_SAN") }
        }
        None => ClientAuth::None,
    };
    let (certificate, key) = (need("GRPC_SERVER_TLS_CERT")?, need("GRPC_SERVER_TLS_KEY")?);
    Ok(Some(ServerTlsConfig { certificate, key, clients }))
}

fn service(environment: &Environment) -> anyhow::Result<Service> {
    let text = |name| environment.text(name).to_owned();
    let headers = environment.flag("LIMIT_RESPONSE_HEADERS_ENABLED").then(|| LimitHeaders {
        limit: text("LIMIT_LIMIT_HEADER"),
        remaining: text("LIMIT_REMAINING_HEADER"),
        reset: text("LIMIT_RESET_HEADER"),
    });
    let has_stats = !environment.flag("DISABLE_STATS");
    let protocol = match (environment.flag("USE_STATSD"), environment.flag("USE_DOG_STATSD")) {
        (true, _) => Some(StatsdProtocol::Statsd),
        (false, true) => Some(StatsdProtocol::DogStatsd),
        (false, false) => None,
    };
    let statsd = protocol.filter(|_| has_stats).map(|protocol| {
        Ok::<_, anyhow::Error>(Statsd {
            protocol,
            host: text("STATSD_HOST"),
            port: port_number(environment, "STATSD_PORT")?,
            interval: environment.duration("STATS_FLUSH_INTERVAL"),
        })
    });
    let prometheus = (has_stats && environment.flag("USE_PROMETHEUS")).then(|| {
        let (address, path) = (environment.text("PROMETHEUS_ADDR"), text("PROMETHEUS_PATH"));
        if !path.starts_with('/') {
            let reason = format!("`{path}` is not a path; write one such as /metrics");
            return Err(InvalidValue::new("PROMETHEUS_PATH", reason).into());
        }
        let (host, port) =
            address.rsplit_once(':').with_context(|| format!("PROMETHEUS_ADDR: `{address}` has no port"))?;
        let port = go_values::integer(port).ok().and_then(|port| u16::try_from(port).ok());
        let port = port.with_context(|| format!("PROMETHEUS_ADDR: `{address}` has no valid port"))?;
        Ok::<_, anyhow::Error>((resolve("PROMETHEUS_ADDR", host, port)?, path))
    });
    let ratio = environment.float("NEAR_LIMIT_RATIO");
    let has_local_cache = environment.number::<i64>("LOCAL_CACHE_SIZE_IN_BYTES")? > 0;
    Ok(Service {
        debug: address(environment, "DEBUG_HOST", "DEBUG_PORT").map_err(|error| error.to_string()),
        prometheus: prometheus.transpose()?,
        statsd: statsd.transpose()?,
        headers,
        dynamic_metadata: environment.flag("RESPONSE_DYNAMIC_METADATA"),
        health: HealthPolicy {
            needs_domain: environment.flag("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED"),
            needs_connection: environment.flag("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION"),
        },
        max_age: max_age(environment.duration("GRPC_MAX_CONNECTION_AGE"), crate::xds::random()),
        max_age_grace: Some(environment.duration("GRPC_MAX_CONNECTION_AGE_GRACE"))
            .filter(|grace| !grace.is_zero()),
        metrics: Arc::new(ServiceMetrics::new(ratio, has_local_cache, environment.map("EXTRA_TAGS"))),
    })
}

/// Returns the age at which connections are asked to end, a tenth more or less at random, as there: connections that
/// began together do not end together. Zero is no end. `random` is from 0 to 1.
fn max_age(age: Duration, random: f64) -> Option<Duration> {
    (!age.is_zero()).then(|| age.mul_f64(0.9 + 0.2 * random))
}

fn listen(environment: &Environment, host: &'static str, port: &'static str) -> anyhow::Result<Listen> {
    address(environment, host, port).map(Listen::At)
}

fn address(environment: &Environment, host: &'static str, port: &'static str) -> anyhow::Result<SocketAddr> {
    resolve(host, environment.text(host), port_number(environment, port)?)
}

/// Returns the number of a port. One out of range is no value of the wrong type: it ends that service as a port that is taken
/// does.
fn port_number(environment: &Environment, name: &'static str) -> anyhow::Result<u16> {
    environment.number(name).map_err(|error| anyhow::anyhow!("{error}"))
}

/// Returns the address of a host: an IP address with or without brackets, a name, or nothing for all interfaces. Those are
/// all interfaces of IPv4 and IPv6, however they are written, as Go listens.
fn resolve(variable: &str, host: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let ip = if bare.is_empty() { Ok(Ipv6Addr::UNSPECIFIED.into()) } else { bare.parse::<IpAddr>() };
    match ip {
        Ok(ip) if ip.is_unspecified() => return Ok((Ipv6Addr::UNSPECIFIED, port).into()),
        Ok(ip) => return Ok((ip, port).into()),
        Err(_) => {}
    }
    let found = (bare, port).to_socket_addrs().ok().and_then(|mut all| all.next());
    found.with_context(|| {
        format!("{variable}: `{host}` is neither an address nor a name that can be resolved")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node of an IPv6 cluster is otherwise never reached.
    #[test]
    fn all_interfaces_are_those_of_both_families() {
        for (host, expected) in [
            ("", "[::]:1"),
            ("0.0.0.0", "[::]:1"),
            ("::", "[::]:1"),
            ("[::]", "[::]:1"),
            ("127.0.0.1", "127.0.0.1:1"),
            ("::1", "[::1]:1"),
        ] {
            assert_eq!(resolve("HOST", host, 1).expect("an address").to_string(), expected, "{host}");
        }
    }

    /// An operator who sets both during a rollout has twice the limit.
    #[test]
    fn shared_keys_without_effect_are_named() {
        let usual = crate::cli::serve_flags();
        let flags = |profile, store: Option<&str>| ServeFlags {
            profile: Some(profile),
            store: store.map(str::to_owned),
            ..usual.clone()
        };
        assert_eq!(no_shared_keys(&flags(ProfileName::Envoy, None)), None);
        assert_eq!(no_shared_keys(&flags(ProfileName::Native, None)), Some("TOLLGATE_PROFILE=native"));
        assert_eq!(no_shared_keys(&flags(ProfileName::Envoy, Some("memory"))), Some("TOLLGATE_STORE"));
    }

    /// That service logs it and runs on.
    #[test]
    fn debug_pages_without_an_address_are_no_reason_to_end() {
        for (name, value) in [("DEBUG_HOST", ".."), ("DEBUG_PORT", "70000"), ("DEBUG_PORT", "-1")] {
            let find = |own: &str| (own == name).then(|| value.to_owned());
            let service = service(&Environment::read(find).expect("valid")).expect("settings");
            let error = service.debug.expect_err("no address");
            assert!(error.starts_with(name), "{error}");
        }
    }

    #[test]
    fn ages_differ_by_a_tenth_and_zero_is_no_end() {
        let day = Duration::from_secs(100_000);
        assert_eq!(max_age(day, 0.0), Some(Duration::from_secs(90_000)));
        assert_eq!(max_age(day, 1.0), Some(Duration::from_secs(110_000)));
        assert_eq!(max_age(Duration::ZERO, 0.5), None);
    }
}
