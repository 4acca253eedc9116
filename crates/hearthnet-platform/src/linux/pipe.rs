//! Connection between two processes of this program. Besides bytes it carries open files and other
//! connections, so that a process can use what it could not open itself.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{fcntl_dupfd_cloexec, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// An end of a connection that has no name, so that no other process can open it.
#[derive(Debug)]
pub struct Pipe(UnixStream);

impl Pipe {
    /// Both ends of a new connection.
    ///
    /// # Errors
    /// The system's error.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self(one), Self(other)))
    }

    /// The end that the parent process passed as standard input.
    ///
    /// # Errors
    /// The system's error.
    pub fn from_stdin() -> io::Result<Self> {
        let fd = fcntl_dupfd_cloexec(io::stdin(), 3)?;
        Ok(Self(fd.into()))
    }

    /// Sends an open file.
    ///
    /// # Errors
    /// The system's error.
    pub fn send_file(&self, file: &File) -> io::Result<()> {
        self.send(file)
    }

    /// Sends an end of another connection.
    ///
    /// # Errors
    /// The system's error.
    pub fn send_pipe(&self, pipe: &Self) -> io::Result<()> {
        self.send(&pipe.0)
    }

    /// Receives an open file; `None` at the end of the connection.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the peer sent something else; otherwise the system's error.
    pub fn receive_file(&self) -> io::Result<Option<File>> {
        Ok(self.receive()?.map(File::from))
    }

    /// Receives an end of another connection; `None` at the end of this one.
    ///
    /// # Errors
    /// As [`Self::receive_file`].
    pub fn receive_pipe(&self) -> io::Result<Option<Self>> {
        Ok(self.receive()?.map(|fd| Self(fd.into())))
    }

    /// Whether the peer is there and has sent nothing that was not read.
    pub fn is_quiet(&self) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // A closed connection is readable, too.
        let waiting = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now));
        waiting == Ok(0)
    }

    fn send(&self, what: impl AsFd) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let what = [what.as_fd()];
        // The space is of the right size.
        let _ = control.push(SendAncillaryMessage::ScmRights(&what));
        // It travels with a byte.
        let byte = [IoSlice::new(&[0])];
        retry_on_intr(|| sendmsg(&self.0, &byte, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    fn receive(&self) -> io::Result<Option<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut byte, flags) = ([0], RecvFlags::CMSG_CLOEXEC);
        let byte = &mut [IoSliceMut::new(&mut byte)];
        if retry_on_intr(|| recvmsg(&self.0, byte, &mut control, flags))?.bytes == 0 {
            return Ok(None);
        }
        let sent = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut sent) => sent.next(),
            _ => None,
        });
        let nothing =
            || io::Error::new(io::ErrorKind::InvalidData, "no file came with the message");
        sent.map(Some).ok_or_else(nothing)
    }
}

impl Read for &Pipe {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&self.0).read(buf)
    }
}

impl Write for &Pipe {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&self.0).write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<Pipe> for Stdio {
    fn from(pipe: Pipe) -> Self {
        OwnedFd::from(pipe.0).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_a_connection_arrive_with_the_bytes_around_them() {
        let (one, other) = Pipe::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"weights").unwrap();
        one.send_file(&file).unwrap();
        (&one).write_all(b"and more").unwrap();
        let (near, far) = Pipe::pair().unwrap();
        one.send_pipe(&far).unwrap();
        drop((file, far, one));

        let mut file = other.receive_file().unwrap().unwrap();
        let mut read = [0; 8];
        std::io::Seek::rewind(&mut file).unwrap();
        assert_eq!(file.read(&mut read).unwrap(), 7);
        (&other).read_exact(&mut read).unwrap();
        assert_eq!(&read, b"and more");
        let far = other.receive_pipe().unwrap().unwrap();
        assert!(other.receive_file().unwrap().is_none());

        assert!(near.is_quiet());
        (&far).write_all(b"x").unwrap();
        assert!(!near.is_quiet());
        (&near).read_exact(&mut read[..1]).unwrap();
        assert!(near.is_quiet());
        drop(far);
        assert!(!near.is_quiet());
    }

    #[test]
    fn a_byte_without_a_file_is_refused() {
        let (one, other) = Pipe::pair().unwrap();
        (&one).write_all(b"x").unwrap();
        let refused = other.receive_file().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
