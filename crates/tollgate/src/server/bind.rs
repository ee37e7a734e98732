//! Binding listeners.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::net::TcpListener;

/// Number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Listens on an address. All interfaces of IPv6 include those of IPv4, whatever the system's default is; where there is
/// no IPv6, they are those of IPv4.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    match bind_as(address) {
        Err(error) if is_any_ipv6(address) && is_without_ipv6(&error) => {
            tracing::info!("there is no IPv6 here; listening on IPv4 instead of {address}");
            bind_as((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        bound => bound,
    }
}

fn bind_as(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    if is_any_ipv6(address) {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn is_any_ipv6(address: SocketAddr) -> bool {
    address.is_ipv6() && address.ip().is_unspecified()
}

fn is_without_ipv6(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With IPv6 or without, callers by IPv4 are served.
    #[tokio::test]
    async fn all_interfaces_include_those_of_ipv4() {
        let listener = bind("[::]:0".parse().expect("an address")).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.expect("a connection");
    }
}
