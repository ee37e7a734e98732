//! Reverse proxy with built-in rate limiting: decides on every request before it reads the body, and forwards those that
//! are allowed. Independent of how counters are stored.
//!
//! | module | contents |
//! |---|---|
//! | `config` | the configuration |
//! | `proxy_state` | what a configuration compiles to, and what survives a reload |
//! | `bound_listener`, `acceptor` | listeners; accepting connections and detecting their protocol |
//! | `h1`, `h2` | reading and writing messages |
//! | `proxy` | the life of a request |
//! | `message`, `respond` | heads of either protocol; responses |
//! | `route` | routing by host, path and method |
//! | `headers` | headers that are removed and added |
//! | `overload_lint` | warnings about overload settings that do nothing with these routes |
//! | `place` | places in flight, held while the gateway waits for the upstream |
//! | `upstream`, `pool`, `health` | attempts and retries, load balancing, health checks |
//! | `tls`, `body`, `stall` | TLS, bodies, detection of stalled HTTP/2 streams |
//! | `completion`, `access_log`, `request_span`, `problem` | access log, spans, error responses |

mod acceptor;
mod access_log;
mod body;
mod bound_listener;
mod completion;
mod config;
mod gateway;
mod h1;
mod h2;
mod headers;
mod health;
mod message;
mod overload_lint;
mod place;
mod pool;
mod problem;
mod proxy;
mod proxy_state;
mod request_span;
mod respond;
mod route;
mod stall;
mod tls;
mod upstream;

pub use config::{
    ClientLimits, ForwardedHeader, GatewayConfig, GatewaySection, HealthConfig, ListenerConfig,
    OutlierEjection, PoolConfig, RouteConfig, ServerTlsConfig, Size, Time, UpstreamProtocol,
    UpstreamTlsConfig,
};
pub use gateway::{Gateway, Handle};
