//! The server process of `serve` and `gateway`: assembly, listeners, background tasks, shutdown.

pub(crate) mod admin;
pub(crate) mod billing;
pub(crate) mod build;
pub(crate) mod gateway;
pub(crate) mod history;
pub(crate) mod http_post;
pub(crate) mod leases;
pub(crate) mod logging;
pub(crate) mod nodes;
pub(crate) mod open_files;
pub(crate) mod otlp;
pub(crate) mod protocols;
pub(crate) mod serve;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod telemetry;
