//! Sockets between programs of one user on this machine: Unix sockets. The system names the user of
//! the peer.

use std::io;
use std::path::Path;
use std::task::{Context, Poll};

use rustix::process::{Uid, geteuid};
use tokio::net::{UnixListener, UnixStream};

/// An open connection.
pub type LocalStream = UnixStream;

/// A socket for the user that bound it.
#[derive(Debug)]
pub struct LocalListener {
    listener: UnixListener,
    own: Uid,
}

impl LocalListener {
    /// Binds a socket at `path`, which must not exist. Its permissions depend on the umask.
    ///
    /// # Errors
    /// The system's error; [`io::ErrorKind::InvalidInput`] if the path is too long for a socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => io::Error::new(
                error.kind(),
                "its path is longer than the system allows for a socket",
            ),
            _ => error,
        })?;
        Ok(Self {
            listener,
            own: geteuid(),
        })
    }

    /// Accepts a connection of any user.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<LocalStream>> {
        let accepted = self.listener.poll_accept(cx);
        accepted.map_ok(|(stream, _)| stream)
    }

    /// True for peers of this user, and of root, which could read this user's files anyway.
    pub fn admits(&self, stream: &LocalStream) -> bool {
        let peer = stream.peer_cred().map(|peer| peer.uid());
        peer.is_ok_and(|uid| uid == self.own.as_raw() || uid == Uid::ROOT.as_raw())
    }
}
