//! The real binary, started on free ports of loopback and ended by its own id; and what tests talk to it with.
//!
//! | file | what |
//! |---|---|
//! | `server` | a running `tollgate serve`, and commands that end by themselves |
//! | `admin` | one with a database, and its admin address |
//! | `operator` | a client of that address |
//! | `foreign` | third-party programs: gRPC's own client, redis-py, Envoy |
//! | `proxy` | those that stand in front of a service: nginx, Caddy, HAProxy, Traefik |
//! | `service` | the service behind them |
//! | `gateway` | a running `tollgate gateway` |
//! | `collector` | where its spans go |
//! | `prometheus` | a real Prometheus |
//! | `ratelimit` | a running `tollgate ratelimit`, and calls to it or to the service that it replaces |
//! | `redis` | a real Redis server that can die and come back |
//! | `far_link` | a long way to it |
//! | `cuttable` | a link that can be cut and healed |
//! | `folder` | a folder that is gone when the test is over |
//! | `xds` | a management server that sends rules, written with go-control-plane |
//! | `upstreams` | nginx and a WebSocket server, for the gateway to stand before |
//!
//! What needs no process (HTTP/1.1 by hand, an upstream, waiting) is in `tollgate-testing`.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

mod admin;
mod collector;
mod cuttable;
mod far_link;
mod folder;
mod foreign;
mod gateway;
mod operator;
mod prometheus;
mod proxy;
mod ratelimit;
mod redis;
mod server;
mod service;
mod upstreams;
mod xds;

pub(crate) use admin::Node;
pub(crate) use collector::Collector;
pub(crate) use cuttable::Cuttable;
pub(crate) use far_link::FarLink;
pub(crate) use folder::Folder;
pub(crate) use foreign::{Envoy, Foreign, ForeignServer, foreign_client, program, promtool};
pub(crate) use gateway::{Gateway, certificate, foreign, plain};
pub(crate) use operator::Operator;
pub(crate) use prometheus::Prometheus;
pub(crate) use proxy::Proxy;
pub(crate) use ratelimit::{Ratelimit, calls_at};
pub(crate) use redis::{Monitor, Redis};
pub(crate) use server::{Run, Server, run, run_with};
pub(crate) use service::Service;
pub(crate) use tollgate_testing::origin::Origin;
pub(crate) use tollgate_testing::wait::{LONG, Stopwatch, eventually, note};
pub(crate) use tollgate_testing::web::{WebConnection, WebResponse, exchange, exchange_from, request};
pub(crate) use upstreams::{Haproxy, Nginx, WebSockets};
pub(crate) use xds::{NODE, XdsServer};
