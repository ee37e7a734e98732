//! HTTP/1.1 as it is read from strangers: heads strictly, bodies in pieces. Pure: bytes in, messages out; shared by the
//! fronts and the gateway, so that what one refuses the other does not let pass.
//!
//! | file | does |
//! |---|---|
//! | [`head`] | reads request and answer heads, refuses what is ambiguous |
//! | `target` | what a request asks for: paths and hosts that are what they seem |
//! | `error` | why a head is refused |
//! | `scan` | the same of a request, in place, for who answers by itself |
//! | `response` | an answer of our own, until it is written |
//! | [`chunked`] | reads bodies in chunks |
//! | [`properties`] | what must hold of any bytes: for fuzzers and property tests |

pub mod chunked;
mod error;
pub mod head;
pub mod properties;
mod response;
mod scan;
mod target;

pub use response::{ConnectionMode, RawResponse, ResponseBodyMode};
pub use scan::{HeadHeaders, ScannedHead};
