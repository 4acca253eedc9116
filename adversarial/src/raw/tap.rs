//! Passive tap on the wire: relays every byte and keeps a copy.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::Result;

/// Tap between callers and a host. Stops when dropped.
#[derive(Debug)]
pub(crate) struct Tap {
    pub(crate) addr: SocketAddr,
    shared: Arc<Shared>,
    _task: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Bytes of both directions. Connections follow each other as far as they did not overlap.
    copied: Mutex<Vec<u8>>,
    cut: AtomicBool,
}

impl Tap {
    /// Listens, and connects each caller to the host.
    pub(crate) async fn listen(host: SocketAddr) -> Result<Tap> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let (of, mut task) = (Arc::clone(&shared), JoinSet::new());
        task.spawn(async move {
            let mut copying = JoinSet::new();
            while let Ok((came, _)) = listener.accept().await {
                let Ok(there) = TcpStream::connect(host).await else {
                    continue;
                };
                let of = Arc::clone(&of);
                copying.spawn(async move {
                    let ((from_caller, to_caller), (from_host, to_host)) =
                        (came.into_split(), there.into_split());
                    // The end of one direction ends both.
                    tokio::select! {
                        () = copy(from_caller, to_host, &of) => {}
                        () = copy(from_host, to_caller, &of) => {}
                    }
                });
            }
        });
        Ok(Tap {
            addr,
            shared,
            _task: task,
        })
    }

    /// All bytes of both directions.
    pub(crate) fn copied(&self) -> Vec<u8> {
        self.shared.copied.lock().clone()
    }

    /// Ends each connection at the next byte on it.
    pub(crate) fn cut(&self) {
        self.shared.cut.store(true, Ordering::Relaxed);
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, of: &Shared) {
    let mut buffer = [0; 16_384];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let bytes = buffer.get(..read).unwrap_or_default();
        of.copied.lock().extend_from_slice(bytes);
        if of.cut.load(Ordering::Relaxed) || to.write_all(bytes).await.is_err() {
            return;
        }
    }
}
