//! Sockets between programs on this machine: Unix sockets. The system names the user of the peer.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::task::{Context, Poll};

use rustix::process::{Uid, geteuid};
use tokio::net::{UnixListener, UnixStream};

use super::files::number;
use crate::peer::User;

/// An open connection.
pub type LocalStream = UnixStream;

/// Users that may connect to a socket, as permission bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(u32);

impl Default for SocketMode {
    /// Only its owner.
    fn default() -> Self {
        Self(0o600)
    }
}

impl FromStr for SocketMode {
    type Err = String;

    /// Parses permission bits in octal. The owner's bits are needed: without them, its own programs
    /// could not connect.
    fn from_str(text: &str) -> Result<Self, String> {
        let mode = u32::from_str_radix(text, 8).ok();
        let mode = mode.filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600);
        mode.map(Self).ok_or_else(|| {
            "must be permission bits in octal that let the owner read and write, for example \"600\" or \"660\"".to_owned()
        })
    }
}

/// Name of a bound socket. Dropping it removes the name, unless it is another socket's by then.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    number: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if number(&self.path).is_ok_and(|number| number == self.number) {
            // Best effort.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A socket of the user that bound it.
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

    /// Binds a socket that programs find at `path`. Replaces a socket whose program has ended. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`ErrorKind::AddrInUse`] if a program listens there, [`ErrorKind::AlreadyExists`] if something
    /// other than a socket is there; otherwise as [`bind`](Self::bind), or the file system's error.
    pub fn publish(path: &Path, mode: SocketMode) -> io::Result<(Self, SocketFile)> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                let why = "something that is no socket has this name; choose another one";
                return Err(io::Error::new(ErrorKind::AlreadyExists, why));
            }
            Ok(_) => refuse_living(path)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // The final name appears only with the final permissions.
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}", std::process::id()));
        let unnamed = PathBuf::from(name);
        match fs::remove_file(&unnamed) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = Self::bind(&unnamed)?;
        let named = fs::set_permissions(&unnamed, Permissions::from_mode(mode.0))
            .and_then(|()| number(&unnamed))
            .and_then(|number| fs::rename(&unnamed, path).map(|()| number));
        match named {
            Ok(number) => {
                let path = path.to_owned();
                Ok((listener, SocketFile { path, number }))
            }
            Err(error) => {
                let _ = fs::remove_file(&unnamed);
                Err(error)
            }
        }
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

    /// User of the peer, if the system tells. Root counts as the owner: it could read this user's
    /// files anyway.
    pub fn user(&self, stream: &LocalStream) -> Option<User> {
        let id = stream.peer_cred().ok()?.uid();
        Some(User {
            id,
            is_owner: self.admits(stream),
        })
    }
}

/// Fails if a program listens at a socket.
fn refuse_living(path: &Path) -> io::Result<()> {
    let stream = match std::os::unix::net::UnixStream::connect(path) {
        Ok(stream) => stream,
        // Left by a program that has ended.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(()),
        Err(error) => return Err(error),
    };
    stream.set_nonblocking(true)?;
    let process = UnixStream::from_std(stream)?.peer_cred()?.pid();
    let process = process.map_or_else(
        || "another program".to_owned(),
        |id| format!("process {id}"),
    );
    let why = format!("{process} listens there; stop it, or choose another path");
    Err(io::Error::new(ErrorKind::AddrInUse, why))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[tokio::test]
    async fn a_socket_of_a_dead_program_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        // Its file stays when a standard listener ends, as after a killed program.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let (listener, file) = LocalListener::publish(&path, "640".parse().unwrap()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        let client = UnixStream::connect(&path).await.unwrap();
        let accepted = std::future::poll_fn(|cx| listener.poll_accept(cx))
            .await
            .unwrap();
        let user = listener.user(&accepted).unwrap();
        assert!(user.is_owner && user.id == geteuid().as_raw());
        drop(client);

        let living = LocalListener::publish(&path, SocketMode::default()).unwrap_err();
        assert_eq!(living.kind(), ErrorKind::AddrInUse);
        let own = format!("process {}", std::process::id());
        assert!(living.to_string().contains(&own), "{living}");
        drop((listener, file));
        assert!(!path.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_socket_is_always_open_to_its_owner() {
        assert_eq!("600".parse(), Ok(SocketMode::default()));
        for wrong in ["", "77", "060", "1600", "rw", "0o600"] {
            assert!(wrong.parse::<SocketMode>().is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn what_is_no_socket_stays_and_a_replaced_name_is_left_to_its_new_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "letters").unwrap();
        let refused = LocalListener::publish(&path, SocketMode::default()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"letters");

        let path = dir.path().join("socket");
        let (listener, file) = LocalListener::publish(&path, SocketMode::default()).unwrap();
        drop(listener);
        let (_listener, _file) = LocalListener::publish(&path, SocketMode::default()).unwrap();
        drop(file);
        assert!(UnixStream::connect(&path).await.is_ok());
    }
}
