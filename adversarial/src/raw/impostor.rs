//! Listener at an address where another node is expected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::{Credentials, Failed, acceptor};
use crate::HarnessError;

/// Reaction of an impostor to connections.
pub(crate) enum Trick {
    /// Completes TLS with a certificate that it signs with a key.
    Answer(Box<Credentials>),
    /// Relays all bytes to the real host and back, as any node on the path can.
    Relay(SocketAddr),
}

/// Counters of an impostor.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Accepted connections.
    pub(crate) connections: AtomicU64,
    /// Connections with a completed TLS handshake.
    pub(crate) handshakes: AtomicU64,
    /// Decrypted bytes received after the handshake.
    pub(crate) bytes: AtomicU64,
}

/// Running impostor. Stops when dropped.
#[derive(Debug)]
pub(crate) struct Impostor {
    pub(crate) addr: SocketAddr,
    pub(crate) seen: Arc<Seen>,
    task: AbortHandle,
}

impl Impostor {
    /// Starts listening.
    ///
    /// # Errors
    /// If no port is free or the credentials are invalid.
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
                            // Ends when either side ends.
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
