//! HTTP/2 for servers: frames, HPACK and the state of a connection, without I/O. Bytes of a client go in, events and the
//! bytes to send come out, so that every rule of the protocol is tested without a socket. The gRPC server runs on it.
//!
//! What a client can make the server keep is bounded: open streams by [`Settings::max_streams`], a head by
//! [`Settings::max_head`], unread bodies by the window of their stream, responses that wait for the client's windows by a
//! maximum beyond which streams are refused, and those that are sent by the caller, which reads nothing more while
//! [`Connection::unsent`] is long. Frames that ask for a response and carry no request (pings, settings, resets) are
//! therefore answered as fast as the client reads, and no faster.
//!
//! Rejected: `h2`, which boxes and locks each stream and sends each response through a task of its own; small requests
//! cost several times their decision there.
//!
//! | file | contents |
//! |---|---|
//! | [`connection`](Connection) | the state of a connection: requests, other frames, responses, endings |
//! | `output` | the frames that are sent |
//! | `frame` | frame headers, types, flags and error codes |
//! | `stream` | the state of one stream, and what waits for its window |
//! | [`head`](Head) | the head of a request, validated |
//! | `hpack` | header compression: decoding with the dynamic table, encoding without |

mod connection;
mod frame;
mod head;
mod hpack;
mod output;
mod stream;

pub use connection::{Connection, Event, Settings, Step};
pub use frame::Reason;
pub use head::Head;
pub use hpack::encode_field;

/// The bytes that every client sends first.
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[cfg(test)]
mod tests;
