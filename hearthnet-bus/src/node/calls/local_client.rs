//! Client of the local API: a program of this machine that calls its node.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use hearthnet_platform::local_socket::LocalStream;
use hearthnet_platform::regular_file;
use hearthnet_transport::{Code, Io};
use tokio::net::TcpStream;
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
        let wire = match LocalStream::connect(data_dir.join(SOCKET_FILE)).await {
            // The system names the peer of a Unix socket; the host name in the URL is ignored.
            Ok(stream) => {
                let url = format!("ws://localhost{BUS_PATH}");
                within_deadline(upgrade(stream, &url, None)).await
            }
            Err(_) => connect_port(data_dir).await,
        };
        Ok(Self::local(wire?))
    }
}

/// Connects to the port of the node that uses `data_dir`, with its token.
async fn connect_port(data_dir: &Path) -> Result<Wire, CallError> {
    let read = |name: &str| regular_file::read_text(&data_dir.join(name), MAX_FILE_BYTES);
    let (Ok(endpoint), Ok(token)) = (read(ENDPOINT_FILE), read(TOKEN_FILE)) else {
        let error = CallError::new(Code::NOT_FOUND, "no node runs on this machine");
        return Err(error.with_hint("start one with `hearthnet up`"));
    };
    let (endpoint, token) = (endpoint.trim(), token.trim());
    within_deadline(async {
        // Loopback only: the token must not leave the machine, even if the file names another
        // address.
        let address: SocketAddr = endpoint
            .strip_prefix("ws://")
            .and_then(|rest| rest.strip_suffix(BUS_PATH))
            .and_then(|address| address.parse().ok())
            .filter(|address: &SocketAddr| address.ip().is_loopback())
            .ok_or_else(|| format!("{ENDPOINT_FILE} holds no address of this machine"))?;
        let stream = TcpStream::connect(address).await;
        let stream = stream.map_err(|e| e.to_string())?;
        // Send small messages without delay.
        let _ = stream.set_nodelay(true);
        let mut bearer: HeaderValue = format!("Bearer {token}")
            .parse()
            .map_err(|_| format!("{TOKEN_FILE} holds no token"))?;
        bearer.set_sensitive(true);
        upgrade(stream, endpoint, Some(bearer)).await
    })
    .await
}

async fn upgrade(
    stream: impl Io + 'static,
    url: &str,
    bearer: Option<HeaderValue>,
) -> Result<Wire, String> {
    let mut request = url.into_client_request().map_err(|e| e.to_string())?;
    if let Some(bearer) = bearer {
        request.headers_mut().insert(AUTHORIZATION, bearer);
    }
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    let stream: Box<dyn Io> = Box::new(stream);
    let (socket, _) = client_async_with_config(request, stream, Some(config))
        .await
        .map_err(|e| e.to_string())?;
    Ok(socket.into())
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
    .with_hint("is it still running? `hearthnet up` starts it")
}
