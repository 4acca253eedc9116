//! Listener at an address where another node is expected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::{Credentials, acceptor};
use crate::Result;

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
    _task: JoinSet<()>,
}

impl Impostor {
    /// Starts listening. Completes TLS with these credentials.
    ///
    /// # Errors
    /// If no port is free or the credentials are invalid.
    pub(crate) async fn listen(shown: &Credentials) -> Result<Impostor> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (addr, acceptor) = (listener.local_addr()?, acceptor(shown)?);
        let seen = Arc::new(Seen::default());
        let (noted, mut task) = (Arc::clone(&seen), JoinSet::new());
        task.spawn(async move {
            while let Ok((came, _)) = listener.accept().await {
                noted.connections.fetch_add(1, Ordering::Relaxed);
                let Ok(mut stream) = acceptor.accept(came).await else {
                    continue;
                };
                noted.handshakes.fetch_add(1, Ordering::Relaxed);
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    noted.bytes.fetch_add(read as u64, Ordering::Relaxed);
                }
            }
        });
        Ok(Impostor {
            addr,
            seen,
            _task: task,
        })
    }
}
