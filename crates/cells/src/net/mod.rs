//! Links between cells over TCP, with TLS off loopback.
//!
//! Each cell dials each peer and sends its own requests on that link; replies come back on it, in any order. So the
//! state of a link shows whether a peer answers, in both directions at once. HTTP/2 was rejected: of its features only
//! the multiplexing would be used, which is an id in each message.
//!
//! | module | contents |
//! |---|---|
//! | `frames` | messages on a stream of bytes |
//! | `links` | requests in flight on each link, late answers |
//! | `dial` | connecting to peers, and the exchange of consumption |
//! | `handshakes` | connections whose first message has not come, a bounded number |
//! | `listen` | requests of other cells |
//! | `repeated` | messages about what goes on for long |
//! | `tenure` | the record of since when a cell knows its counters |
//! | `tls` | certificates, read again when they change |

mod dial;
mod frames;
mod handshakes;
mod links;
mod listen;
mod repeated;
mod tenure;
mod tls;

pub use dial::{PeerUrl, run_links, run_ticks};
pub use links::Links;
pub use listen::{port_limits, serve};
pub use tenure::run_tenure;
pub use tls::CellTls;

use crate::regional::RegionalStore;
use std::sync::Arc;

/// A regional store whose cells are linked over the network.
pub type LinkedStore<S, C> = RegionalStore<S, Arc<Links>, C>;
