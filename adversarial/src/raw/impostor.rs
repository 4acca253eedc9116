//! Somebody who listens where somebody else is expected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::{Credentials, Failed, acceptor};
use crate::HarnessError;

/// What an impostor does with those who come.
pub(crate) enum Trick {
    /// Answers with a certificate, signing with a key.
    Answer(Box<Credentials>),
    /// Hands everything on to where it belongs, and back, as anybody on the way can.
    Relay(SocketAddr),
}

/// What an impostor has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Connections that came.
    pub(crate) connections: AtomicU64,
    /// Of these: went through a TLS handshake with it.
    pub(crate) handshakes: AtomicU64,
    /// Bytes that it could read after that.
    pub(crate) bytes: AtomicU64,
}

/// An impostor at work. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Impostor {
    /// Where it listens.
    pub(crate) addr: SocketAddr,
    /// What it has seen.
    pub(crate) seen: Arc<Seen>,
    task: AbortHandle,
}

impl Impostor {
    /// Begins to listen.
    ///
    /// # Errors
    /// If the system gives no port, or the credentials are of no use.
    pub(crate) async fn listen(trick: Trick) -> Result<Impostor, HarnessError> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let seen = Arc::new(Seen::default());
        let noted = Arc::clone(&seen);
        let trick = match trick {
            Trick::Answer(credentials) => {
                Ok(acceptor(&credentials).map_err(|error| Failed(error.to_string()))?)
            }
            Trick::Relay(to) => Err(to),
        };
        let task = tokio::spawn(async move {
            while let Ok((mut came, _)) = listener.accept().await {
                noted.connections.fetch_add(1, Ordering::Relaxed);
                match &trick {
                    Err(to) => {
                        if let Ok(mut there) = TcpStream::connect(to).await {
                            // It ends when either side does.
                            let _ = copy_bidirectional(&mut came, &mut there).await;
                        }
                    }
                    Ok(acceptor) => {
                        let Ok(mut stream) = acceptor.accept(came).await else {
                            continue;
                        };
                        noted.handshakes.fetch_add(1, Ordering::Relaxed);
                        let mut buffer = [0; 4096];
                        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                            noted.bytes.fetch_add(read as u64, Ordering::Relaxed);
                        }
                    }
                }
            }
        });
        Ok(Impostor {
            addr,
            seen,
            task: task.abort_handle(),
        })
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.task.abort();
    }
}
