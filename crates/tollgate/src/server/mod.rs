//! The server process of `serve` and `gateway`: assembly, listeners, background tasks, shutdown.

pub(crate) mod admin;
mod audit_pace;
pub(crate) mod billing;
pub(crate) mod bind;
pub(crate) mod build;
pub(crate) mod cells;
pub(crate) mod durable;
pub(crate) mod gateway;
pub(crate) mod history;
pub(crate) mod http_post;
pub(crate) mod learn;
pub(crate) mod leases;
pub(crate) mod limiter_tasks;
pub(crate) mod logging;
pub(crate) mod nodes;
pub(crate) mod open_files;
pub(crate) mod otlp;
pub(crate) mod overload;
pub(crate) mod protocols;
pub(crate) mod running;
pub(crate) mod serve;
pub(crate) mod signals;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod telemetry;
