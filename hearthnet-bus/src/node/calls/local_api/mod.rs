//! The local API, for apps on this machine: a plain WebSocket on the loopback interface.
//!
//! An app reads where it is from [`ENDPOINT_FILE`] and shows the token from
//! [`TOKEN_FILE`], both in the node's data directory. Whoever can read the token is
//! this user, so a call through it is a call of this node. Web pages cannot use it:
//! they cannot read the token, and a browser says where a page came from.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use subtle::ConstantTimeEq as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode, header};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use zeroize::Zeroizing;

use super::Cancel;
use super::frame::{BUS_PATH, MAX_MESSAGE_BYTES};
use super::server::{CallServer, Origin};
use super::wire::Wire;
use crate::identity::whole_file;

/// Holds the token, readable by the owner only; made anew at each start.
pub const TOKEN_FILE: &str = "bus.token";
/// Holds the address, `ws://127.0.0.1:PORT/bus/v1`, while the node runs.
pub const ENDPOINT_FILE: &str = "bus.endpoint";

/// Connections at once: apps of one machine. As many may be on their upgrade request: for one more the
/// one that has been for longest is closed, so that other users of the machine, who have no token,
/// keep nobody out.
const MAX_CONNECTIONS: usize = 32;
/// For the upgrade request.
const UPGRADE_DEADLINE: Duration = Duration::from_secs(5);

/// Why the local API could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalApiError {
    /// The system gives no port.
    #[error("cannot listen for apps at 127.0.0.1: {0}")]
    Listen(#[source] io::Error),
    /// A file of the local API could not be written.
    #[error("cannot write {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system gave no randomness for a token.
    #[error("the operating system gave no randomness for a token")]
    Randomness,
}

/// An open local API. Closed, and its files removed, by [`LocalApi::close`] or when dropped.
pub struct LocalApi {
    addr: SocketAddr,
    files: Option<Files>,
    stop: Cancel,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl std::fmt::Debug for LocalApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalApi")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl LocalApi {
    /// Listens on a free port of 127.0.0.1, for apps that can read `data_dir`.
    ///
    /// # Errors
    /// [`LocalApiError`].
    pub async fn open(data_dir: &Path, server: Arc<CallServer>) -> Result<Self, LocalApiError> {
        // Loopback only: there is no TLS.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(LocalApiError::Listen)?;
        let addr = listener.local_addr().map_err(LocalApiError::Listen)?;
        let token = new_token()?;
        let files = Files::write(data_dir, &token, &format!("ws://{addr}{BUS_PATH}"))?;
        let stop = Cancel::default();
        let task = tokio::spawn(accept(listener, token, server, stop.clone()));
        Ok(Self {
            addr,
            files: Some(files),
            stop,
            task: Some(task),
        })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes the listener and every connection, and removes its files.
    pub async fn close(mut self) {
        self.stop.cancel();
        drop(self.files.take());
        if let Some(task) = self.task.take() {
            let _ = task.await;
        }
    }
}

impl Drop for LocalApi {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn new_token() -> Result<Zeroizing<String>, LocalApiError> {
    let mut bytes = Zeroizing::new([0; 32]);
    getrandom::fill(bytes.as_mut_slice()).map_err(|_| LocalApiError::Randomness)?;
    Ok(Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_slice())))
}

/// The local API's files, removed when dropped unless another node has replaced them.
struct Files([(PathBuf, Zeroizing<String>); 2]);

impl Files {
    fn write(data_dir: &Path, token: &str, endpoint: &str) -> Result<Self, LocalApiError> {
        let line = |text: &str| Zeroizing::new(format!("{text}\n"));
        // The token first: who finds the endpoint finds the token that belongs to it.
        let files = Self([
            (data_dir.join(TOKEN_FILE), line(token)),
            (data_dir.join(ENDPOINT_FILE), line(endpoint)),
        ]);
        for (path, content) in &files.0 {
            whole_file::replace(path, content.as_bytes(), 0o600).map_err(|source| {
                LocalApiError::File {
                    path: path.clone(),
                    source,
                }
            })?;
        }
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for (path, content) in &self.0 {
            if fs::read(path).is_ok_and(|found| found == content.as_bytes()) {
                // Nothing can be done about a failure here.
                let _ = fs::remove_file(path);
            }
        }
    }
}

async fn accept(
    listener: TcpListener,
    token: Zeroizing<String>,
    server: Arc<CallServer>,
    stop: Cancel,
) {
    let expected = Arc::new(Zeroizing::new(format!("Bearer {}", token.as_str())));
    // Dropped, they end every connection.
    let (mut entering, mut open) = (JoinSet::new(), JoinSet::new());
    let mut oldest = VecDeque::<AbortHandle>::new();
    loop {
        tokio::select! {
            (stream, _) = hearthnet_transport::accept(&listener) => {
                oldest.retain(|one| !one.is_finished());
                if oldest.len() >= MAX_CONNECTIONS
                    && let Some(one) = oldest.pop_front()
                {
                    one.abort();
                }
                oldest.push_back(entering.spawn(enter(stream, Arc::clone(&expected))));
            }
            Some(entered) = entering.join_next(), if !entering.is_empty() => {
                // One too many is closed.
                if let (Ok(Some(wire)), true) = (entered, open.len() < MAX_CONNECTIONS) {
                    let server = Arc::clone(&server);
                    open.spawn(async move { server.serve_wire(wire, Origin::Local).await });
                }
            }
            Some(_) = open.join_next(), if !open.is_empty() => {}
            () = stop.cancelled() => return,
        }
    }
}

/// An app that shows the token.
async fn enter(stream: TcpStream, expected: Arc<Zeroizing<String>>) -> Option<Wire> {
    // Small messages matter more than full packets.
    let _ = stream.set_nodelay(true);
    let config = WebSocketConfig::default()
        .read_buffer_size(16 * 1024)
        .write_buffer_size(16 * 1024)
        .max_write_buffer_size(16 * 1024 + 2 * (MAX_MESSAGE_BYTES + 64))
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    #[expect(clippy::result_large_err, reason = "the library's own type")]
    let check = |request: &Request, response: Response| may_enter(request, &expected, response);
    let upgrade = accept_hdr_async_with_config(stream, check, Some(config));
    match timeout(UPGRADE_DEADLINE, upgrade).await {
        Ok(Ok(socket)) => return Some(Wire::websocket(socket)),
        Ok(Err(error)) => tracing::info!(%error, "an app was not let in"),
        Err(_) => tracing::info!("an app's upgrade request took too long"),
    }
    None
}

#[expect(clippy::result_large_err, reason = "the library's own type")]
fn may_enter(
    request: &Request,
    expected: &str,
    response: Response,
) -> Result<Response, ErrorResponse> {
    let refuse = |status: StatusCode, why: &str| {
        let mut refusal = ErrorResponse::new(Some(why.to_owned()));
        *refusal.status_mut() = status;
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            refusal
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        Err(refusal)
    };
    if request.headers().contains_key(header::ORIGIN) {
        return refuse(StatusCode::FORBIDDEN, "web pages are not served here\n");
    }
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.map_or(&[][..], HeaderValue::as_bytes);
    if !bool::from(given.ct_eq(expected.as_bytes())) {
        return refuse(
            StatusCode::UNAUTHORIZED,
            "send \"Authorization: Bearer TOKEN\" with the token from the file bus.token\n",
        );
    }
    if request.uri().path() != BUS_PATH || request.uri().query().is_some() {
        return refuse(StatusCode::NOT_FOUND, "the only path here is /bus/v1\n");
    }
    Ok(response)
}

#[cfg(test)]
mod tests;
