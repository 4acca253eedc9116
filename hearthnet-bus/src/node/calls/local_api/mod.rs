//! The local API for apps on this machine: a plain WebSocket, over either of two listeners.
//!
//! | listener | found by | access |
//! |---|---|---|
//! | a Unix socket | [`SOCKET_FILE`] | programs of this user and of root, by their peer credentials |
//! | a port of the loopback interface | [`ENDPOINT_FILE`] | programs that send the token from [`TOKEN_FILE`] |
//!
//! All three files are in the node's data directory. Only this user can read the token, so a call
//! over either listener counts as a call of this node. Web pages have no access: they cannot read
//! the token, and a browser sends the page's origin. Other users of the machine can connect to the
//! port but not to the socket, so they cannot use up its connections.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hearthnet_platform::local_socket::LocalListener;
use hearthnet_platform::whole_file::{self, Access};
use hearthnet_platform::{files, regular_file};
use hearthnet_transport::Io;
use subtle::ConstantTimeEq as _;
use tokio::net::TcpListener;
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

/// File of the token, readable by the owner only; new at each start.
pub const TOKEN_FILE: &str = "bus.token";
/// File of the address, `ws://127.0.0.1:PORT/bus/v1`, while the node runs.
pub const ENDPOINT_FILE: &str = "bus.endpoint";
/// The Unix socket, while the node runs.
pub const SOCKET_FILE: &str = "bus.socket";

/// Upper bound of open connections per listener, and of pending upgrades. One more upgrade closes
/// the longest pending one, so that users without a token cannot block the port.
const MAX_CONNECTIONS: usize = 32;
/// Time limit of the upgrade request.
const UPGRADE_DEADLINE: Duration = Duration::from_secs(5);

/// Why the local API could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalApiError {
    /// No port could be bound.
    #[error("cannot listen for apps at 127.0.0.1: {0}")]
    Listen(#[source] io::Error),
    /// A file of the local API could not be written.
    #[error("cannot write {}: {source}", path.display())]
    File {
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    #[error("the operating system gave no randomness for a token")]
    Randomness,
}

/// An open local API. [`LocalApi::close`] or dropping it closes it and removes its files.
pub struct LocalApi {
    addr: SocketAddr,
    /// Dropped before the tasks, which keep the socket open: see [`Mark::Number`].
    files: Vec<OwnFile>,
    stop: Cancel,
    tasks: JoinSet<()>,
}

impl std::fmt::Debug for LocalApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalApi")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl LocalApi {
    /// Listens on a free port of 127.0.0.1 and, where possible, on a Unix socket. The caller must
    /// hold the lock of `data_dir`: a socket file found there was left by a killed node, and is
    /// replaced.
    ///
    /// # Errors
    /// [`LocalApiError`].
    pub async fn open(data_dir: &Path, server: Arc<CallServer>) -> Result<Self, LocalApiError> {
        // Loopback only, because there is no TLS.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(LocalApiError::Listen)?;
        let addr = listener.local_addr().map_err(LocalApiError::Listen)?;
        let token = new_token()?;
        let url = format!("ws://{addr}{BUS_PATH}");
        // The token first: a program that finds the endpoint then finds the matching token.
        let mut files = vec![OwnFile::write(data_dir.join(TOKEN_FILE), &token)?];
        files.push(OwnFile::write(data_dir.join(ENDPOINT_FILE), &url)?);
        let bearer = Zeroizing::new(format!("Bearer {}", token.as_str()));
        let (stop, mut tasks) = (Cancel::default(), JoinSet::new());
        let port = AppListener::Port(listener, Arc::new(bearer));
        tasks.spawn(accept(port, Arc::clone(&server), stop.clone()));
        match OwnFile::bind(data_dir.join(SOCKET_FILE)) {
            Ok((listener, file)) => {
                tasks.spawn(accept(AppListener::Socket(listener), server, stop.clone()));
                files.push(file);
            }
            Err(error) => tracing::warn!(
                %error,
                "apps can only use the port: cannot create the socket {SOCKET_FILE} in {}",
                data_dir.display()
            ),
        }
        Ok(Self {
            addr,
            files,
            stop,
            tasks,
        })
    }

    /// Address of the loopback port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes both listeners and every connection, and removes the files.
    pub async fn close(mut self) {
        self.files.clear();
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

fn new_token() -> Result<Zeroizing<String>, LocalApiError> {
    let mut bytes = Zeroizing::new([0; 32]);
    getrandom::fill(bytes.as_mut_slice()).map_err(|_| LocalApiError::Randomness)?;
    Ok(Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_slice())))
}

/// A file of this API, removed on drop unless another node has replaced it.
struct OwnFile {
    path: PathBuf,
    mark: Mark,
}

/// Property by which a file is told from that of another node.
#[derive(PartialEq)]
enum Mark {
    Content(Zeroizing<Vec<u8>>),
    /// Device and inode number of the socket. No other file has them while it is open.
    Number((u64, u64)),
}

impl OwnFile {
    /// Writes a line that only this user can read.
    fn write(path: PathBuf, line: &str) -> Result<Self, LocalApiError> {
        let content = Zeroizing::new(format!("{line}\n").into_bytes());
        match whole_file::replace(&path, &content, Access::Owner) {
            Ok(()) => Ok(Self {
                path,
                mark: Mark::Content(content),
            }),
            Err(source) => Err(LocalApiError::File { path, source }),
        }
    }

    /// Binds a socket at `path`, replacing a file there.
    fn bind(path: PathBuf) -> io::Result<(LocalListener, Self)> {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = LocalListener::bind(&path)?;
        let mark = files::number(&path).map(Mark::Number)?;
        let file = Self { path, mark };
        // Until here the mode depends on the umask; connections made meanwhile are checked by
        // `admits`.
        files::close_file_to_others(&file.path)?;
        Ok((listener, file))
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        let found = match &self.mark {
            Mark::Content(own) => {
                let read = regular_file::read(&self.path, own.len() as u64);
                read.map(|bytes| Mark::Content(bytes.into()))
            }
            Mark::Number(_) => files::number(&self.path).map(Mark::Number),
        };
        if found.is_ok_and(|found| found == self.mark) {
            // Best effort.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A listener for apps.
enum AppListener {
    /// Any user of the machine may connect: the app must send this header.
    Port(TcpListener, Arc<Zeroizing<String>>),
    /// The system names the peer's user, which must be this one.
    Socket(LocalListener),
}

impl AppListener {
    /// The next app, with the header that it has to send.
    async fn next(&self) -> (Box<dyn Io>, Option<Arc<Zeroizing<String>>>) {
        match self {
            Self::Port(listener, bearer) => {
                let (stream, _) = hearthnet_transport::accept(|cx| listener.poll_accept(cx)).await;
                // Send small messages without delay.
                let _ = stream.set_nodelay(true);
                (Box::new(stream), Some(Arc::clone(bearer)))
            }
            Self::Socket(listener) => loop {
                let stream = hearthnet_transport::accept(|cx| listener.poll_accept(cx)).await;
                if listener.admits(&stream) {
                    return (Box::new(stream), None);
                }
                tracing::info!("a program of another user was refused");
            },
        }
    }
}

async fn accept(listener: AppListener, server: Arc<CallServer>, stop: Cancel) {
    // Dropping the sets aborts every connection.
    let (mut entering, mut open) = (JoinSet::new(), JoinSet::new());
    let mut oldest = VecDeque::<AbortHandle>::new();
    loop {
        tokio::select! {
            (stream, bearer) = listener.next() => {
                oldest.retain(|one| !one.is_finished());
                if oldest.len() >= MAX_CONNECTIONS
                    && let Some(one) = oldest.pop_front()
                {
                    one.abort();
                }
                oldest.push_back(entering.spawn(enter(stream, bearer)));
            }
            Some(entered) = entering.join_next(), if !entering.is_empty() => {
                // A connection above the bound is closed.
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

/// Upgrades a connection, if it sends the required header.
async fn enter(stream: Box<dyn Io>, bearer: Option<Arc<Zeroizing<String>>>) -> Option<Wire> {
    let config = WebSocketConfig::default()
        .read_buffer_size(16 * 1024)
        .write_buffer_size(16 * 1024)
        .max_write_buffer_size(16 * 1024 + 2 * (MAX_MESSAGE_BYTES + 64))
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    #[expect(clippy::result_large_err, reason = "the library's own type")]
    let check = |request: &Request, response: Response| {
        let bearer = bearer.as_ref().map(|bearer| bearer.as_str());
        may_enter(request, bearer, response)
    };
    let upgrade = accept_hdr_async_with_config(stream, check, Some(config));
    match timeout(UPGRADE_DEADLINE, upgrade).await {
        Ok(Ok(socket)) => return Some(socket.into()),
        Ok(Err(error)) => tracing::info!(%error, "an app was refused"),
        Err(_) => tracing::info!("an app's upgrade request took too long"),
    }
    None
}

#[expect(clippy::result_large_err, reason = "the library's own type")]
fn may_enter(
    request: &Request,
    bearer: Option<&str>,
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
    if bearer.is_some_and(|bearer| !bool::from(given.ct_eq(bearer.as_bytes()))) {
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
