//! Where the gRPC server listens: at a TCP address, or at a Unix socket, which only programs of the same machine reach.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;
use tollgate_http::server::accept::{Listener, prepare};

/// A bound listener of the gRPC server.
#[derive(Debug)]
pub enum GrpcListener {
    /// At a TCP address.
    Tcp(TcpListener),
    /// At a Unix socket.
    Unix(UnixSocket),
}

/// A bound Unix socket, whose file is removed with it.
#[derive(Debug)]
pub struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
}

/// The stream of a connection.
pub(super) type Socket = Either<TcpStream, UnixStream>;

impl From<TcpListener> for GrpcListener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

impl GrpcListener {
    /// Listens at a Unix socket. The file that a process left which ended without removing it is replaced.
    ///
    /// # Errors
    /// Another process listens there, or the file cannot be created.
    pub fn unix(path: PathBuf) -> io::Result<Self> {
        let listener = match UnixListener::bind(&path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(&path) => {
                std::fs::remove_file(&path)?;
                UnixListener::bind(&path)?
            }
            bound => bound?,
        };
        Ok(Self::Unix(UnixSocket { listener, path }))
    }

    /// Returns the address or the path.
    #[must_use]
    pub fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string()),
            Self::Unix(socket) => socket.path.display().to_string(),
        }
    }
}

/// Returns whether a file is a socket without a listener. Connecting to any other file is refused as well.
fn is_abandoned(path: &std::path::Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    if !std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
        return false;
    }
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    std::os::unix::net::UnixStream::connect(path).is_err_and(refused)
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Listener for GrpcListener {
    type Stream = Socket;

    fn prepare(&self) {
        if let Self::Tcp(listener) = self {
            prepare(listener);
        }
    }

    async fn accept(&self) -> io::Result<(Socket, SocketAddr)> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, peer)| (Either::Left(stream), peer)),
            Self::Unix(socket) => {
                let (stream, _) = socket.listener.accept().await?;
                Ok((Either::Right(stream), (Ipv4Addr::LOCALHOST, 0).into()))
            }
        }
    }

    fn try_write(stream: &Socket, message: &[u8]) {
        match stream {
            Either::Left(stream) => drop(stream.try_write(message)),
            Either::Right(stream) => drop(stream.try_write(message)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a crash the service must start again, but never take the socket of a running one.
    #[tokio::test]
    async fn an_abandoned_socket_is_replaced_and_a_used_one_is_not() {
        let path = std::env::temp_dir().join(format!("tollgate-listener-{}.sock", std::process::id()));
        let left = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let taken = GrpcListener::unix(path.clone()).expect_err("a listener");
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        drop(left);
        let own = GrpcListener::unix(path.clone()).expect("no listener");
        assert_eq!(own.place(), path.display().to_string());
        drop(own);
        assert!(!path.exists(), "the file is removed");
        std::fs::write(&path, "no socket").expect("a file");
        GrpcListener::unix(path.clone()).expect_err("not a socket");
        assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "no socket");
        std::fs::remove_file(&path).expect("removed");
    }
}
