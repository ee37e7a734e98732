//! The reverse proxy with the limiter inside: it decides on every request before a byte of its body is read, and passes
//! on what may pass. It knows routes and upstreams, and nothing of how counters are kept.
//!
//! | file | answers |
//! |---|---|
//! | `config` | what can be said in its file? |
//! | `proxy_state` | what do its settings come to, and what stays when they change? |
//! | `bound_listener`, `acceptor` | who is accepted, and what do they speak? |
//! | `h1`, `h2` | how are messages read and written? |
//! | `proxy` | what happens to a request, start to end? |
//! | `message`, `respond` | where do heads lie, and what is the response? |
//! | `route` | where does it go? |
//! | `headers` | what is taken out of it and added to it? |
//! | `upstream`, `pool`, `health` | who answers it, and who instead? |
//! | `tls`, `body`, `stall` | the means |
//! | `completion`, `access_log`, `request_span`, `problem` | what is said of it and to its caller? |

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
