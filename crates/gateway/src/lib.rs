//! The reverse proxy with the limiter inside: it decides on every request before a byte of its body is read, and passes
//! on what may pass. It knows routes and upstreams, and nothing of how counters are kept.
//!
//! | file | answers |
//! |---|---|
//! | `config` | what can be said in its file? |
//! | `state` | what do its settings come to, and what stays when they change? |
//! | `door`, `listener` | who is accepted, and what do they speak? |
//! | `h1`, `h2` | how are messages read and written? |
//! | `proxy` | what happens to a request, start to end? |
//! | `route` | where does it go? |
//! | `headers` | what is taken out of it and added to it? |
//! | `upstream`, `pool`, `health` | who answers it, and who instead? |
//! | `tls`, `body`, `flow` | the means |
//! | `finish`, `access_log`, `follow`, `problem` | what is said of it and to its caller? |

mod access_log;
mod body;
mod config;
mod door;
mod finish;
mod flow;
mod follow;
mod gateway;
mod h1;
mod h2;
mod headers;
mod health;
mod listener;
mod pool;
mod problem;
mod proxy;
mod route;
mod state;
mod tls;
mod upstream;

pub use config::{
    CallerLimits, Eject, Forward, GatewayConfig, GatewaySection, HealthConfig, ListenerConfig, PoolConfig,
    RouteConfig, ServerTlsConfig, Size, Time, UpstreamProtocol, UpstreamTlsConfig,
};
pub use gateway::{Gateway, Handle};
