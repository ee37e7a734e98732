//! HTTP/1.1 parser for untrusted clients. It does no I/O: bytes in, messages out. The protocol servers and the gateway
//! share it, so that neither accepts what the other rejects.
//!
//! | file | contents |
//! |---|---|
//! | [`head`] | the parser for request and response heads; rejects ambiguous input |
//! | `target` | validation of request targets and hosts |
//! | `error` | the reasons a head is rejected, and the size limits |
//! | `scan` | a request head scanned in place, for servers that respond themselves |
//! | `response` | a response that is ready to be written |
//! | [`chunked`] | the parser for chunked bodies |
//! | [`properties`] | parser properties for the fuzz targets and property tests |

pub mod chunked;
mod error;
pub mod head;
pub mod properties;
mod response;
mod scan;
mod target;

pub use response::{ConnectionMode, RawResponse, ResponseBodyMode};
pub use scan::{HeadHeaders, ScannedHead};
