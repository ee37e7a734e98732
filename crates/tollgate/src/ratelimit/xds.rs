//! Settings of the xDS client from the environment.

use super::environment::{Environment, InvalidValue};
use crate::xds::{BackoffSettings, FirstConfig, XdsSettings, XdsTls, header};
use std::path::PathBuf;

/// Reads the settings. What is not set has the client's own default: pauses are shorter than that service's, whose limits
/// arrive late after a restart of the management server.
pub(super) fn read(environment: &Environment) -> Result<XdsSettings, InvalidValue> {
    const SERVER: &str = "CONFIG_GRPC_XDS_SERVER_URL";
    const METADATA: &str = "CONFIG_GRPC_XDS_NODE_METADATA";
    const HEADERS: &str = "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS";
    const MAX_MESSAGE: &str = "XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES";
    let server = environment.text(SERVER).parse();
    let mut settings = XdsSettings::new(server.map_err(|error: String| InvalidValue::new(SERVER, error))?);
    if let Some(id) = environment.some_text("CONFIG_GRPC_XDS_NODE_ID") {
        settings.node_id = id;
    }
    let pairs = environment.text(METADATA).split(',').map(str::trim).filter(|pair| !pair.is_empty());
    for pair in pairs {
        let wrong = || InvalidValue::new(METADATA, "not a list such as key=value,other=value");
        let (key, value) = pair.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or_else(wrong)?;
        settings.node_metadata.insert(key.trim().to_owned(), value.trim().to_owned());
    }
    settings.tls = tls(environment)?;
    for (name, value) in environment.map(HEADERS) {
        let header = header(name.trim(), value.trim());
        settings.headers.push(header.map_err(|error| InvalidValue::new(HEADERS, error))?);
    }
    settings.backoff = backoff(environment);
    settings.max_message = environment.number(MAX_MESSAGE)?;
    if settings.max_message == 0 {
        return Err(InvalidValue::new(MAX_MESSAGE, "must be more than 0"));
    }
    if environment.flag("FORCE_START_WITHOUT_INITIAL_CONFIG") {
        settings.first_config = FirstConfig::StartWithout;
    }
    Ok(settings)
}

fn tls(environment: &Environment) -> Result<Option<XdsTls>, InvalidValue> {
    const CERTIFICATE: &str = "CONFIG_GRPC_XDS_CLIENT_TLS_CERT";
    const KEY: &str = "CONFIG_GRPC_XDS_CLIENT_TLS_KEY";
    if !environment.flag("CONFIG_GRPC_XDS_SERVER_USE_TLS") {
        return Ok(None);
    }
    let path = |name| environment.some_text(name).map(PathBuf::from);
    let own = match (path(CERTIFICATE), path(KEY)) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(InvalidValue::new(CERTIFICATE, format!("must be set together with {KEY}"))),
    };
    let ca = path("CONFIG_GRPC_XDS_SERVER_TLS_CACERT");
    Ok(Some(XdsTls { own, ca, server_name: environment.some_text("CONFIG_GRPC_XDS_SERVER_TLS_SAN") }))
}

fn backoff(environment: &Environment) -> BackoffSettings {
    const RANDOM: &str = "XDS_CLIENT_BACKOFF_RANDOM_FACTOR";
    let mut backoff = BackoffSettings::default();
    let positive = |name| {
        let pause = environment.is_set(name).then(|| environment.duration(name));
        pause.filter(|pause| !pause.is_zero())
    };
    let initial = positive("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL");
    let max = positive("XDS_CLIENT_BACKOFF_MAX_INTERVAL");
    backoff.initial = initial.or(max.map(|max| max.min(backoff.initial))).unwrap_or(backoff.initial);
    backoff.max = max.unwrap_or(backoff.max).max(backoff.initial);
    if environment.is_set(RANDOM) {
        let factor = environment.float(RANDOM);
        backoff.jitter = if factor.is_nan() { 0.0 } else { factor.clamp(0.0, 1.0) };
    }
    if !environment.flag("XDS_CLIENT_BACKOFF_JITTER") {
        backoff.jitter = 0.0;
    }
    backoff.after_dial = positive("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL");
    backoff
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::ServerAddress;
    use std::time::Duration;

    fn read(variables: &[(&str, &str)]) -> Result<XdsSettings, String> {
        let find =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let environment = Environment::read(find).map_err(|error| error.to_string())?;
        super::read(&environment).map_err(|error| error.to_string())
    }

    /// What Envoy Gateway sets.
    #[test]
    fn the_environment_of_envoy_gateway_is_understood() {
        let settings = read(&[
            ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
            ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:18001"),
            ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
            ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
            ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt"),
            ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "/certs/tls.key"),
            ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "/certs/ca.crt"),
            ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
        ])
        .expect("valid");
        assert_eq!(settings.server, ServerAddress::Tcp("envoy-gateway".to_owned(), 18_001));
        assert_eq!(settings.node_id, "envoy-ratelimit");
        let tls = settings.tls.expect("TLS");
        assert_eq!(tls.own, Some(("/certs/tls.crt".into(), "/certs/tls.key".into())));
        assert_eq!((tls.ca, tls.server_name), (Some("/certs/ca.crt".into()), None));
        assert_eq!(settings.first_config, FirstConfig::StartWithout);
        assert!(settings.backoff.initial < Duration::from_secs(5), "EG restarts: {:?}", settings.backoff);
    }

    #[test]
    fn defaults_and_the_other_variables() {
        let settings = read(&[]).expect("valid");
        assert_eq!(settings.server, ServerAddress::Tcp("localhost".to_owned(), 18_000));
        assert_eq!(
            (settings.node_id.as_str(), settings.tls, settings.max_message),
            ("default", None, 4 << 20)
        );
        assert_eq!(settings.first_config, FirstConfig::Wait);
        let settings = read(&[
            ("CONFIG_GRPC_XDS_NODE_METADATA", "a=b, c=d=e"),
            ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "authorization:Bearer x,k:w"),
            ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "10s"),
            ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "1m30s"),
            ("XDS_CLIENT_BACKOFF_JITTER", "f"),
            ("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "500ms"),
            ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "1048576"),
        ])
        .expect("valid");
        assert_eq!(settings.node_metadata.get("c").map(String::as_str), Some("d=e"));
        assert_eq!(settings.headers[1], header("k", "w").expect("valid"));
        let backoff = BackoffSettings {
            initial: Duration::from_secs(10),
            max: Duration::from_secs(90),
            jitter: 0.0,
            after_dial: Some(Duration::from_millis(500)),
        };
        assert_eq!((settings.backoff, settings.max_message), (backoff, 1 << 20));
    }

    #[test]
    fn a_wrong_value_names_its_variable() {
        for (name, value) in [
            ("CONFIG_GRPC_XDS_SERVER_URL", "http://x"),
            ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "yes"),
            ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "10"),
            ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "half"),
            ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "4MiB"),
            ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "secret"),
            ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "k:secret:secret"),
        ] {
            let error = read(&[(name, value)]).expect_err(name);
            assert!(error.starts_with(name), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let half = [("CONFIG_GRPC_XDS_SERVER_USE_TLS", "1"), ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "k")];
        assert!(read(&half).expect_err("half").contains("together"));
    }
}
