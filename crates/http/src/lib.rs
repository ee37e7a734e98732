//! HTTP for Tollgate: a strict HTTP/1 parser, caller identity, and the responses to decisions. Every protocol server,
//! tower layer and gateway that uses HTTP shares it. With the feature `server` it also has the HTTP/1 server that they
//! run on. It has no handlers and no store.
//!
//! | module | contents |
//! |---|---|
//! | [`response`] | the response to a decision: status, `RateLimit` fields, `Retry-After`, body |
//! | [`body`], [`problem`] | decoding of JSON bodies; problem details (RFC 9457) for errors |
//! | [`identity`] | the attributes of a request: address, API key, user, endpoint |
//! | [`headers`] | lookup of header fields, in a map or in the bytes of a head |
//! | [`h1`] | the HTTP/1 parser for heads and chunked bodies of untrusted clients |
//! | [`h2`] | HTTP/2 without I/O: frames, HPACK, streams and windows, for untrusted clients |
//! | [`same_site`] | requests that a browser sends on behalf of another site |
//! | [`date`] | the `Date` field |
//! | [`traceparent`] | W3C Trace Context |
//! | [`value`] | values of untrusted clients as text of bounded length |
//! | `server` | the HTTP/1 server: accept loop, connections, drain (feature `server`) |
//! | `tls` | server certificates with reload, trusted authorities (feature `tls`) |
//! | [`proxy_protocol`] | the PROXY protocol, versions 1 and 2 |

pub mod date;
pub mod h1;
pub mod h2;
pub mod headers;
mod hex;
pub mod identity;
pub mod json_request;
pub mod problem;
pub mod proxy_protocol;
pub mod response;
pub mod same_site;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "tls")]
pub mod tls;
pub mod traceparent;
pub mod value;
