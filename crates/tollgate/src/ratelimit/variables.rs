//! Every environment variable of envoyproxy/ratelimit: its type, its default, and what becomes of it here. The list is
//! also the table of `docs/deployment/envoyproxy-ratelimit.md`, which a test compares with it.

/// Type of a variable's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Integer,
    Float,
    Boolean,
    Duration,
    Map,
    List,
}

/// What becomes of a variable that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// It is honored.
    Honored,
    /// It has no effect, and none is missing: why. Logged at `info`.
    NotNeeded(&'static str),
    /// It has no effect: why, and what to use instead. Logged at `warn`, unless it is set to its default.
    Unsupported(&'static str),
}

/// One variable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variable {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) default: &'static str,
    pub(super) effect: Effect,
}

const fn honored(name: &'static str, kind: Kind, default: &'static str) -> Variable {
    Variable { name, kind, default, effect: Effect::Honored }
}

const fn not_needed(name: &'static str, kind: Kind, default: &'static str, why: &'static str) -> Variable {
    Variable { name, kind, default, effect: Effect::NotNeeded(why) }
}

const fn no_effect(name: &'static str, kind: Kind, default: &'static str, why: &'static str) -> Variable {
    Variable { name, kind, default, effect: Effect::Unsupported(why) }
}

const POOL: &str = "requests share a few pipelined connections, which need no pool";
const MEMCACHE: &str = "counters in memcached are not supported; set BACKEND_TYPE=redis";
const DOG: &str =
    "metrics keep their names; let the agent turn parts of names into tags (dogstatsd_mapper_profiles)";
const STARTUP: &str =
    "the ports open at once, whether or not Redis answers; on_error of a rule says what happens meanwhile";
const TRACE_NAME: &str = "set OTEL_RESOURCE_ATTRIBUTES, such as service.namespace=NAME";

/// Honored where keys are shared.
pub(super) const JITTER: &str = "EXPIRATION_JITTER_MAX_SECONDS";

use Kind::{Boolean, Duration, Float, Integer, List, Map, Text};

/// All variables, in the order of the guide.
pub(super) const VARIABLES: &[Variable] = &[
    // Listeners.
    honored("HOST", Text, "0.0.0.0"),
    honored("PORT", Integer, "8080"),
    honored("GRPC_HOST", Text, "0.0.0.0"),
    honored("GRPC_PORT", Integer, "8081"),
    honored("GRPC_UDS", Text, ""),
    honored("DEBUG_HOST", Text, "0.0.0.0"),
    honored("DEBUG_PORT", Integer, "6070"),
    honored("GRPC_MAX_CONNECTION_AGE", Duration, "24h"),
    honored("GRPC_MAX_CONNECTION_AGE_GRACE", Duration, "1h"),
    honored("GRPC_SERVER_USE_TLS", Boolean, "false"),
    honored("GRPC_SERVER_TLS_CERT", Text, ""),
    honored("GRPC_SERVER_TLS_KEY", Text, ""),
    honored("GRPC_CLIENT_TLS_CACERT", Text, ""),
    honored("GRPC_CLIENT_TLS_SAN", Text, ""),
    not_needed(
        "GRPC_SERVER_TLS_CA_CERT",
        Text,
        "",
        "envoyproxy/ratelimit has no such variable, and clients need no certificate; to require one, set \
         GRPC_CLIENT_TLS_CACERT",
    ),
    // Where rules come from.
    honored("CONFIG_TYPE", Text, "FILE"),
    honored("CONFIG_GRPC_XDS_SERVER_URL", Text, "localhost:18000"),
    honored("CONFIG_GRPC_XDS_NODE_ID", Text, "default"),
    honored("CONFIG_GRPC_XDS_NODE_METADATA", Text, ""),
    honored("CONFIG_GRPC_XDS_SERVER_USE_TLS", Boolean, "false"),
    honored("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", Text, ""),
    honored("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", Text, ""),
    honored("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", Text, ""),
    honored("CONFIG_GRPC_XDS_SERVER_TLS_SAN", Text, ""),
    honored("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", Map, ""),
    honored("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", Duration, "3s"),
    honored("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", Duration, "10s"),
    honored("XDS_CLIENT_BACKOFF_MAX_INTERVAL", Duration, "60s"),
    honored("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", Float, "0.5"),
    honored("XDS_CLIENT_BACKOFF_JITTER", Boolean, "true"),
    honored("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", Integer, "4194304"),
    honored("FORCE_START_WITHOUT_INITIAL_CONFIG", Boolean, "false"),
    honored("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", Boolean, "false"),
    honored("RUNTIME_ROOT", Text, "/srv/runtime_data/current"),
    honored("RUNTIME_SUBDIRECTORY", Text, ""),
    honored("RUNTIME_APPDIRECTORY", Text, "config"),
    honored("RUNTIME_WATCH_ROOT", Boolean, "true"),
    honored("RUNTIME_IGNOREDOTFILES", Boolean, "false"),
    honored("MERGE_DOMAIN_CONFIG", Boolean, "false"),
    // Counters.
    honored("BACKEND_TYPE", Text, "redis"),
    honored("REDIS_SOCKET_TYPE", Text, "unix"),
    honored("REDIS_TYPE", Text, "SINGLE"),
    honored("REDIS_URL", Text, "/var/run/nutcracker/ratelimit.sock"),
    honored("REDIS_AUTH", Text, ""),
    honored("REDIS_SENTINEL_AUTH", Text, ""),
    honored("REDIS_TLS", Boolean, "false"),
    honored("REDIS_TLS_CLIENT_CERT", Text, ""),
    honored("REDIS_TLS_CLIENT_KEY", Text, ""),
    honored("REDIS_TLS_CACERT", Text, ""),
    honored("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", Boolean, "false"),
    honored("REDIS_TIMEOUT", Duration, "10s"),
    no_effect("REDIS_POOL_SIZE", Integer, "10", POOL),
    no_effect("REDIS_PIPELINE_WINDOW", Duration, "0", POOL),
    no_effect("REDIS_PIPELINE_LIMIT", Integer, "0", POOL),
    no_effect("REDIS_POOL_ON_EMPTY_BEHAVIOR", Text, "WAIT", POOL),
    no_effect("REDIS_CLUSTER_PIPELINE_PARALLELISM", Integer, "1", POOL),
    no_effect("REDIS_STARTUP_INITIAL_INTERVAL", Duration, "1s", STARTUP),
    no_effect("REDIS_STARTUP_MAX_INTERVAL", Duration, "30s", STARTUP),
    no_effect("REDIS_STARTUP_MAX_ELAPSED_TIME", Duration, "0", STARTUP),
    honored("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", Boolean, "false"),
    honored("REDIS_PERSECOND", Boolean, "false"),
    honored("REDIS_PERSECOND_SOCKET_TYPE", Text, "unix"),
    honored("REDIS_PERSECOND_TYPE", Text, "SINGLE"),
    honored("REDIS_PERSECOND_URL", Text, "/var/run/nutcracker/ratelimitpersecond.sock"),
    honored("REDIS_PERSECOND_AUTH", Text, ""),
    honored("REDIS_PERSECOND_SENTINEL_AUTH", Text, ""),
    honored("REDIS_PERSECOND_TLS", Boolean, "false"),
    honored("REDIS_PERSECOND_TIMEOUT", Duration, "10s"),
    no_effect("REDIS_PERSECOND_POOL_SIZE", Integer, "10", POOL),
    no_effect("REDIS_PERSECOND_PIPELINE_WINDOW", Duration, "0", POOL),
    no_effect("REDIS_PERSECOND_PIPELINE_LIMIT", Integer, "0", POOL),
    no_effect("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", Text, "WAIT", POOL),
    honored("CACHE_KEY_PREFIX", Text, ""),
    no_effect(
        JITTER,
        Integer,
        "300",
        "counters expire with their windows; it counts with TOLLGATE_SHARED_KEYS=envoy",
    ),
    no_effect(
        "LOCAL_CACHE_SIZE_IN_BYTES",
        Integer,
        "0",
        "denials are always cached, in memory of a fixed size; above 0, over_limit_with_local_cache is counted",
    ),
    honored("NEAR_LIMIT_RATIO", Float, "0.8"),
    honored("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", Boolean, "false"),
    no_effect("MEMCACHE_HOST_PORT", List, "", MEMCACHE),
    no_effect("MEMCACHE_MAX_IDLE_CONNS", Integer, "2", MEMCACHE),
    no_effect("MEMCACHE_SRV", Text, "", MEMCACHE),
    no_effect("MEMCACHE_SRV_REFRESH", Duration, "0", MEMCACHE),
    no_effect("MEMCACHE_TLS", Boolean, "false", MEMCACHE),
    no_effect("MEMCACHE_TLS_CLIENT_CERT", Text, "", MEMCACHE),
    no_effect("MEMCACHE_TLS_CLIENT_KEY", Text, "", MEMCACHE),
    no_effect("MEMCACHE_TLS_CACERT", Text, "", MEMCACHE),
    no_effect("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", Boolean, "false", MEMCACHE),
    // Responses.
    honored("LIMIT_RESPONSE_HEADERS_ENABLED", Boolean, "false"),
    honored("LIMIT_LIMIT_HEADER", Text, "RateLimit-Limit"),
    honored("LIMIT_REMAINING_HEADER", Text, "RateLimit-Remaining"),
    honored("LIMIT_RESET_HEADER", Text, "RateLimit-Reset"),
    honored("RESPONSE_DYNAMIC_METADATA", Boolean, "false"),
    honored("SHADOW_MODE", Boolean, "false"),
    honored("QUOTA_MODE", Boolean, "false"),
    // Metrics.
    honored("USE_STATSD", Boolean, "true"),
    honored("STATSD_HOST", Text, "localhost"),
    honored("STATSD_PORT", Integer, "8125"),
    honored("USE_DOG_STATSD", Boolean, "false"),
    no_effect("USE_DOG_STATSD_MOGRIFIERS", List, "", DOG),
    honored("USE_PROMETHEUS", Boolean, "false"),
    honored("PROMETHEUS_ADDR", Text, ":9090"),
    honored("PROMETHEUS_PATH", Text, "/metrics"),
    not_needed(
        "PROMETHEUS_MAPPER_YAML",
        Text,
        "",
        "names and labels are those of the built-in mapper of envoyproxy/ratelimit, which Envoy Gateway's repeats",
    ),
    no_effect(
        "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS",
        Boolean,
        "false",
        "ratelimit_service_response_time_seconds is in seconds",
    ),
    honored("STATS_FLUSH_INTERVAL", Duration, "10s"),
    honored("DISABLE_STATS", Boolean, "false"),
    honored("EXTRA_TAGS", Map, ""),
    // Logs and traces.
    honored("LOG_LEVEL", Text, "WARN"),
    honored("LOG_FORMAT", Text, "text"),
    honored("TRACING_ENABLED", Boolean, "false"),
    honored("TRACING_SERVICE_NAME", Text, "RateLimit"),
    honored("OTEL_EXPORTER_OTLP_ENDPOINT", Text, ""),
    no_effect("TRACING_SERVICE_NAMESPACE", Text, "", TRACE_NAME),
    no_effect("TRACING_SERVICE_INSTANCE_ID", Text, "", TRACE_NAME),
    no_effect(
        "TRACING_SAMPLING_RATE",
        Float,
        "1",
        "spans are recorded for requests whose client has sampled their trace; set the rate there",
    ),
    no_effect(
        "TRACING_EXPORTER_PROTOCOL",
        Text,
        "http",
        "spans are sent by OTLP over HTTP; let OTEL_EXPORTER_OTLP_ENDPOINT name the collector's HTTP port",
    ),
];

/// Variables that have no effect unless another is set.
pub(super) const NEEDS: &[(&str, &str)] = &[
    ("GRPC_CLIENT_TLS_CACERT", "GRPC_SERVER_USE_TLS"),
    ("GRPC_CLIENT_TLS_SAN", "GRPC_SERVER_USE_TLS"),
    ("GRPC_CLIENT_TLS_SAN", "GRPC_CLIENT_TLS_CACERT"),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "CONFIG_GRPC_XDS_SERVER_USE_TLS"),
    ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "CONFIG_GRPC_XDS_SERVER_USE_TLS"),
];

/// Returns the variable with this name.
pub(super) fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}
