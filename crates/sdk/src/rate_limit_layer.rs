//! A tower layer with one rate and no rule file, keyed by address, header, route, or several of them together.
//!
//! It is a [`TollgateLayer`] with generated rules, so its responses have the same fields as those of every Tollgate
//! server.

use crate::check_request::{CheckRequest, Extracted};
use crate::in_process::InProcess;
use crate::layer::{TollgateLayer, TollgateService};
use http::request::Parts;
use http::{HeaderName, Method};
use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;
use tollgate_core::SystemClock;
use tollgate_http::identity::{PathError, PathRules};
use tollgate_rules::GLOBAL;
use tollgate_store::MemoryStore;
use tower_layer::Layer;

type Extract = Box<dyn Fn(&Parts) -> Extracted + Send + Sync>;
type Inner = TollgateLayer<InProcess<MemoryStore<SystemClock>>, Extract>;

/// Limits the requests to a service to a rate per address, header value or route.
///
/// ```
/// use tollgate_sdk::{RateLimitLayer, nonzero};
/// let by_address = RateLimitLayer::per_second(nonzero!(10)).by_ip();
/// let by_key = RateLimitLayer::per_minute(nonzero!(600)).by_header("x-api-key").by_route();
/// ```
///
/// Without any `by_…` all requests share one counter. Requests without the address or header share one counter too. All
/// clones of a layer share their counters.
pub struct RateLimitLayer {
    rate: Rate,
    keys: Vec<KeySource>,
    inner: Inner,
}

#[derive(Clone, Copy)]
struct Rate {
    count: NonZeroU32,
    unit: &'static str,
    burst: Option<NonZeroU32>,
}

/// The part of a request that identifies the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KeySource {
    Address,
    Header(HeaderName),
    Route,
}

impl RateLimitLayer {
    /// Allows `count` requests per second.
    #[must_use]
    pub fn per_second(count: NonZeroU32) -> Self {
        Self::new(Rate { count, unit: "second", burst: None }, Vec::new())
    }

    /// Allows `count` requests per minute.
    #[must_use]
    pub fn per_minute(count: NonZeroU32) -> Self {
        Self::new(Rate { count, unit: "minute", burst: None }, Vec::new())
    }

    /// Allows `count` requests per hour.
    #[must_use]
    pub fn per_hour(count: NonZeroU32) -> Self {
        Self::new(Rate { count, unit: "hour", burst: None }, Vec::new())
    }

    /// Sets the burst; by default it is one period's count.
    #[must_use]
    pub fn burst(self, units: NonZeroU32) -> Self {
        Self::new(Rate { burst: Some(units), ..self.rate }, self.keys)
    }

    /// Counts each client address separately, and IPv6 clients by their /64, because one client usually owns a whole
    /// /64.
    ///
    /// The address is the peer's, from the request's extensions: a `SocketAddr`, an `IpAddr`, or axum's `ConnectInfo`
    /// (feature `axum`; serve with `into_make_service_with_connect_info::<SocketAddr>()`). Behind a proxy every request
    /// has the proxy's address: use [`TollgateLayer`] with an identity that trusts that proxy.
    #[must_use]
    pub fn by_ip(self) -> Self {
        self.by(KeySource::Address)
    }

    /// Counts each value of a request header separately. Clients can send any value: for a header that identifies them,
    /// such as an API key, put authentication before this layer.
    ///
    /// # Panics
    /// If `name` is not a valid header name.
    #[must_use]
    pub fn by_header(self, name: &str) -> Self {
        match name.parse() {
            Ok(name) => self.by(KeySource::Header(name)),
            Err(_) => panic!("`{name}` is not a valid header name"),
        }
    }

    /// Counts each route separately: the method and the path, or with axum's router (feature `axum`) the route's
    /// pattern, such as `/users/{id}`. `HEAD` counts as `GET`, and a path that servers read differently, such as one with
    /// an escaped slash, is refused with 400.
    #[must_use]
    pub fn by_route(self) -> Self {
        self.by(KeySource::Route)
    }

    fn by(mut self, key: KeySource) -> Self {
        if !self.keys.contains(&key) {
            self.keys.push(key);
        }
        Self::new(self.rate, self.keys)
    }

    fn new(rate: Rate, keys: Vec<KeySource>) -> Self {
        let rules = rules(rate, &keys);
        let decider = match InProcess::from_rules(&rules, DOMAIN) {
            Ok(decider) => decider,
            // The rules are valid for every rate and key; only the allocation can fail.
            Err(error) => panic!("cannot build the layer: {error}"),
        };
        let sources = keys.clone();
        let extract: Extract = Box::new(move |head| {
            let pairs = sources.iter().map(|source| Ok((source.name(), source.value(head)?.into_owned())));
            match pairs.collect::<Result<Vec<_>, PathError>>() {
                Ok(pairs) => Extracted::Check(CheckRequest::attributes(pairs)),
                Err(error) => Extracted::Refused(error.into()),
            }
        });
        Self { rate, keys, inner: TollgateLayer::new(decider, extract) }
    }
}

const DOMAIN: &str = "rate-limit-layer";

/// Returns a rule set with one rule, whose keys are nested in order.
fn rules(rate: Rate, keys: &[KeySource]) -> String {
    let burst = rate.burst.map_or(String::new(), |burst| format!(", burst: {burst}"));
    let mut descriptor =
        format!("name: rate-limit, limit: {{count: {}, period: {}{burst}}}", rate.count, rate.unit);
    let names: Vec<String> = keys.iter().map(|key| key.name().into_owned()).collect();
    let names = if names.is_empty() { vec![GLOBAL.0.to_owned()] } else { names };
    for (i, name) in names.iter().rev().enumerate() {
        descriptor = match i {
            0 => format!("{{key: \"{name}\", {descriptor}}}"),
            _ => format!("{{key: \"{name}\", descriptors: [{descriptor}]}}"),
        };
    }
    format!("{{domain: {DOMAIN}, descriptors: [{descriptor}]}}")
}

impl KeySource {
    /// Returns the name of the attribute.
    fn name(&self) -> Cow<'static, str> {
        match self {
            Self::Address => Cow::Borrowed("remote_address"),
            Self::Header(name) => Cow::Owned(format!("header:{name}")),
            Self::Route => Cow::Borrowed("endpoint"),
        }
    }

    fn value<'r>(&self, head: &'r Parts) -> Result<Cow<'r, str>, PathError> {
        Ok(match self {
            Self::Address => peer(head).map_or(Cow::Borrowed(""), |address| Cow::Owned(network(address))),
            Self::Header(name) => {
                let value = head.headers.get(name).map(http::HeaderValue::as_bytes);
                value.map_or(Cow::Borrowed(""), String::from_utf8_lossy)
            }
            // Services run the same handler for both.
            Self::Route if head.method == Method::HEAD => Cow::Owned(format!("GET {}", route(head)?)),
            Self::Route => Cow::Owned(format!("{} {}", head.method, route(head)?)),
        })
    }
}

/// Returns the address of the peer, if it is in the request's extensions.
fn peer(head: &Parts) -> Option<IpAddr> {
    let known = head.extensions.get::<SocketAddr>().map(SocketAddr::ip);
    #[cfg(feature = "axum")]
    let known = known.or_else(|| {
        head.extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|connected| connected.0.ip())
    });
    known.or_else(|| head.extensions.get::<IpAddr>().copied())
}

/// Returns an IPv4 address, or the /64 of an IPv6 address.
fn network(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) >> 64 << 64).to_string(),
    }
}

fn route(head: &Parts) -> Result<Cow<'_, str>, PathError> {
    #[cfg(feature = "axum")]
    if let Some(matched) = head.extensions.get::<axum::extract::MatchedPath>() {
        return Ok(Cow::Borrowed(matched.as_str()));
    }
    PathRules::default().canonical(head.uri.path())
}

impl Clone for RateLimitLayer {
    fn clone(&self) -> Self {
        Self { rate: self.rate, keys: self.keys.clone(), inner: self.inner.clone() }
    }
}

impl fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = format!("{}/{}", self.rate.count, self.rate.unit);
        f.debug_struct("RateLimitLayer")
            .field("rate", &rate)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = TollgateService<S, InProcess<MemoryStore<SystemClock>>, Extract>;
    fn layer(&self, inner: S) -> Self::Service {
        self.inner.layer(inner)
    }
}
