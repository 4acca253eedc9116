//! Client of the local API: a program of this machine that calls its node.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use hearthnet_transport::Code;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::http::header::AUTHORIZATION;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use super::client::Client;
use super::error::CallError;
use super::frame::{BUS_PATH, MAX_MESSAGE_BYTES};
use super::local_api::{ENDPOINT_FILE, SOCKET_FILE, TOKEN_FILE};
use super::wire::Wire;
use crate::identity::regular_file;

/// Time limit for connection and upgrade.
const DEADLINE: Duration = Duration::from_secs(5);
/// Longest token or endpoint file; longer files are not the node's.
const MAX_FILE_BYTES: u64 = 256;

impl Client {
    /// Connects to the node that uses `data_dir`, through the local API: its Unix socket, or the
    /// port with the token if the socket does not answer.
    ///
    /// # Errors
    /// `not_found` if no node runs there; `unreachable` if it does not answer or refuses the token.
    pub async fn connect_local(data_dir: &Path) -> Result<Self, CallError> {
        let wire = match UnixStream::connect(data_dir.join(SOCKET_FILE)).await {
            // The system names the peer of a Unix socket; the host name in the URL is ignored.
            Ok(stream) => {
                let url = format!("ws://localhost{BUS_PATH}");
                within_deadline(upgrade(stream, &url, None)).await
            }
            Err(_) => Port::of(data_dir)?.connect().await,
        };
        Ok(Self::local(wire?))
    }
}

/// Address of a node's port, and its token.
struct Port {
    endpoint: String,
    token: String,
}

impl Port {
    fn of(data_dir: &Path) -> Result<Self, CallError> {
        let read = |name: &str| {
            regular_file::read_text(&data_dir.join(name), MAX_FILE_BYTES)
                .ok()
                .map(|text| text.trim().to_owned())
        };
        let (Some(endpoint), Some(token)) = (read(ENDPOINT_FILE), read(TOKEN_FILE)) else {
            return Err(
                CallError::new(Code::NOT_FOUND, "no node runs on this machine")
                    .with_hint("start one with `hearthnet serve`"),
            );
        };
        Ok(Self { endpoint, token })
    }

    async fn connect(self) -> Result<Wire, CallError> {
        // Loopback only: the token must not leave the machine, even if the file names another
        // address.
        let address: SocketAddr = self
            .endpoint
            .strip_prefix("ws://")
            .and_then(|rest| rest.strip_suffix(BUS_PATH))
            .and_then(|address| address.parse().ok())
            .filter(|address: &SocketAddr| address.ip().is_loopback())
            .ok_or_else(|| {
                unreachable(format!("{ENDPOINT_FILE} holds no address of this machine"))
            })?;
        within_deadline(async {
            let stream = TcpStream::connect(address)
                .await
                .map_err(|e| e.to_string())?;
            // Send small messages without delay.
            let _ = stream.set_nodelay(true);
            let mut bearer: HeaderValue = format!("Bearer {}", self.token)
                .parse()
                .map_err(|_| format!("{TOKEN_FILE} holds no token"))?;
            bearer.set_sensitive(true);
            upgrade(stream, &self.endpoint, Some(bearer)).await
        })
        .await
    }
}

async fn upgrade<S>(stream: S, url: &str, bearer: Option<HeaderValue>) -> Result<Wire, String>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut request = url.into_client_request().map_err(|e| e.to_string())?;
    if let Some(bearer) = bearer {
        request.headers_mut().insert(AUTHORIZATION, bearer);
    }
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    let (socket, _) = client_async_with_config(request, stream, Some(config))
        .await
        .map_err(|e| e.to_string())?;
    Ok(Wire::websocket(socket))
}

async fn within_deadline(
    connecting: impl Future<Output = Result<Wire, String>>,
) -> Result<Wire, CallError> {
    match tokio::time::timeout(DEADLINE, connecting).await {
        Ok(connected) => connected.map_err(unreachable),
        Err(_) => Err(unreachable(format!(
            "nothing came for {} s",
            DEADLINE.as_secs()
        ))),
    }
}

fn unreachable(why: String) -> CallError {
    CallError::new(
        Code::UNREACHABLE,
        format!("the node on this machine does not answer: {why}"),
    )
    .with_hint("is it still running? `hearthnet serve` starts it")
}
