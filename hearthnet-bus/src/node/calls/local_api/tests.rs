use std::os::unix::fs::PermissionsExt as _;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};

use super::super::client::Client;
use super::super::server::OneLevel;
use super::*;
use crate::Capability;
use crate::community::log::Level;
use crate::testing::id;

fn server() -> Arc<CallServer> {
    let anchor = OneLevel(Some(Level::Anchor));
    Arc::new(CallServer::new(id(1), Arc::default(), Arc::new(anchor)))
}

/// A folder with an open local API.
async fn opened() -> (tempfile::TempDir, LocalApi) {
    let dir = tempfile::tempdir().unwrap();
    let api = open(dir.path()).await;
    (dir, api)
}

async fn open(dir: &Path) -> LocalApi {
    LocalApi::open(dir, server()).await.unwrap()
}

/// Address of the port in `dir`, and the header with its token.
fn port(dir: &Path) -> (String, String) {
    let bearer = format!("Bearer {}", read(dir, TOKEN_FILE));
    (read(dir, ENDPOINT_FILE), bearer)
}

fn read(dir: &Path, name: &str) -> String {
    let text = fs::read_to_string(dir.join(name)).unwrap();
    text.strip_suffix('\n').unwrap().to_owned()
}

/// Connects with these headers. Returns the HTTP status of a refusal.
async fn enter(url: &str, headers: &[(&'static str, &str)]) -> Result<Wire, u16> {
    let addr = url.split('/').nth(2).unwrap();
    enter_over(TcpStream::connect(addr).await.unwrap(), url, headers).await
}

async fn enter_over(
    stream: impl Io + 'static,
    url: &str,
    headers: &[(&'static str, &str)],
) -> Result<Wire, u16> {
    let mut request = url.into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    let stream: Box<dyn Io> = Box::new(stream);
    match client_async(request, stream).await {
        Ok((socket, _)) => Ok(socket.into()),
        Err(WsError::Http(refusal)) => Err(refusal.status().as_u16()),
        Err(other) => panic!("{other}"),
    }
}

/// True if a call succeeds.
async fn answers(client: &Client) -> bool {
    match client.call(&Capability::bus_describe(), &json!({})) {
        Ok(call) => call.result().await.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test]
async fn an_app_with_the_token_calls_as_this_node() {
    let (dir, api) = opened().await;
    let (url, bearer) = port(dir.path());
    let wire = enter(&url, &[("authorization", &bearer)]).await.unwrap();
    let client = Client::local(wire);
    let call = client.call(&Capability::bus_describe(), &json!({}));
    let end = call.unwrap().result().await.unwrap();
    assert_eq!(end["capabilities"][0]["capability"], "bus.describe@1.0");
    // Open connections are closed as well.
    api.close().await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !client.is_lost() {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn without_the_token_or_from_a_web_page_access_is_refused() {
    let (dir, _api) = opened().await;
    let (url, good) = port(dir.path());
    let token = read(dir.path(), TOKEN_FILE);
    let shorter = &good[..good.len() - 1];
    let (elsewhere, in_query) = (
        url.replace("/bus/", "/sync/"),
        format!("{url}?token={token}"),
    );
    let auth = |value| ("authorization", value);
    for (url, headers, status) in [
        (&url, vec![], 401),
        (&url, vec![auth("")], 401),
        (&url, vec![auth(&token)], 401),
        (&url, vec![auth(shorter)], 401),
        (&url, vec![auth("Bearer AAAA")], 401),
        (&url, vec![auth(&good), ("origin", "http://127.0.0.1")], 403),
        (&url, vec![auth(&good), ("origin", "null")], 403),
        (&elsewhere, vec![auth(&good)], 404),
        (&in_query, vec![], 401),
    ] {
        let refused = enter(url, &headers).await.err();
        assert_eq!(refused, Some(status), "{url} {headers:?}");
    }
}

#[tokio::test]
async fn the_files_are_private_new_at_each_start_and_gone_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    // Existing files are replaced, whatever their mode.
    fs::write(dir.path().join(TOKEN_FILE), "open to all").unwrap();
    let api = open(dir.path()).await;
    let first = read(dir.path(), TOKEN_FILE);
    assert_eq!(first.len(), 43);
    // No other machine reaches it.
    let url = format!("ws://127.0.0.1:{}/bus/v1", api.addr().port());
    assert_eq!(read(dir.path(), ENDPOINT_FILE), url);
    assert!(api.addr().ip().is_loopback());
    for name in [TOKEN_FILE, ENDPOINT_FILE, SOCKET_FILE] {
        let found = fs::metadata(dir.path().join(name)).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o600, "{name}");
    }
    let second = open(dir.path()).await;
    assert_ne!(read(dir.path(), TOKEN_FILE), first);
    // Closing the first API leaves the second one's files in place.
    api.close().await;
    assert!(read(dir.path(), ENDPOINT_FILE).contains(&second.addr().to_string()));
    let socket = UnixStream::connect(dir.path().join(SOCKET_FILE)).await;
    socket.unwrap();
    drop(second);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_folder_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let opened = LocalApi::open(&dir.path().join("none"), server()).await;
    let refused = opened.unwrap_err();
    assert!(refused.to_string().contains("bus.token"), "{refused}");
}

#[tokio::test]
async fn a_program_of_this_machine_finds_the_local_api_by_the_data_directory() {
    let dir = tempfile::tempdir().unwrap();
    let nobody = Client::connect_local(dir.path()).await.unwrap_err();
    assert_eq!(nobody.code().as_str(), "not_found");
    let api = open(dir.path()).await;
    let client = Client::connect_local(dir.path()).await.unwrap();
    assert!(answers(&client).await);
    // Without a socket, the port is used.
    fs::remove_file(dir.path().join(SOCKET_FILE)).unwrap();
    let client = Client::connect_local(dir.path()).await.unwrap();
    assert!(answers(&client).await);
    // The token is sent only to this machine, even if the endpoint file names another.
    fs::write(dir.path().join(ENDPOINT_FILE), "ws://192.0.2.1:9/bus/v1\n").unwrap();
    let elsewhere = Client::connect_local(dir.path()).await.unwrap_err();
    assert_eq!(elsewhere.code().as_str(), "unreachable");
    api.close().await;
}

#[tokio::test]
async fn a_program_of_this_user_comes_in_through_the_socket_without_a_token() {
    let (dir, api) = opened().await;
    for name in [TOKEN_FILE, ENDPOINT_FILE] {
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    let client = Client::connect_local(dir.path()).await.unwrap();
    assert!(answers(&client).await);
    for (url, headers, status) in [
        ("ws://localhost/bus/v1", vec![("origin", "null")], 403),
        ("ws://localhost/sync/v1", vec![], 404),
    ] {
        let stream = UnixStream::connect(dir.path().join(SOCKET_FILE)).await;
        let refused = enter_over(stream.unwrap(), url, &headers).await;
        assert_eq!(refused.err(), Some(status), "{url} {headers:?}");
    }
    api.close().await;
    assert!(!dir.path().join(SOCKET_FILE).exists());
}

#[tokio::test]
async fn a_binary_message_of_a_program_is_frame_unknown() {
    let (dir, api) = opened().await;
    let stream = UnixStream::connect(dir.path().join(SOCKET_FILE)).await;
    let joined = client_async("ws://localhost/bus/v1", stream.unwrap()).await;
    let (mut socket, _) = joined.unwrap();
    socket.send(Message::binary(vec![1, 2, 3])).await.unwrap();
    let Some(Ok(Message::Close(Some(close)))) = socket.next().await else {
        panic!("no close frame with a code");
    };
    assert_eq!(u16::from(close.code), 1008);
    assert_eq!(close.reason.as_str(), "frame_unknown");
    api.close().await;
}

#[tokio::test]
async fn the_socket_has_places_that_a_crowd_at_the_port_does_not_take() {
    let (dir, api) = opened().await;
    let (url, bearer) = port(dir.path());
    let mut crowd = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let wire = enter(&url, &[("authorization", &bearer)]).await;
        let client = Client::local(wire.unwrap());
        assert!(answers(&client).await);
        crowd.push(client);
    }
    let wire = enter(&url, &[("authorization", &bearer)]).await;
    assert!(!answers(&Client::local(wire.unwrap())).await);
    let owner = Client::connect_local(dir.path()).await.unwrap();
    assert!(answers(&owner).await);
    api.close().await;
}

#[tokio::test]
async fn a_socket_that_a_killed_node_left_behind_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SOCKET_FILE);
    drop(UnixListener::bind(&path).unwrap());
    assert!(UnixStream::connect(&path).await.is_err());
    let api = open(dir.path()).await;
    let stream = UnixStream::connect(&path).await.unwrap();
    let wire = enter_over(stream, "ws://localhost/bus/v1", &[]).await;
    assert!(answers(&Client::local(wire.unwrap())).await);
    api.close().await;
}

#[tokio::test]
async fn where_the_path_is_too_long_for_a_socket_programs_come_through_the_port() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("a-name-of-some-length/".repeat(6));
    fs::create_dir_all(&deep).unwrap();
    let why = OwnFile::bind(deep.join(SOCKET_FILE)).err().unwrap();
    assert!(why.to_string().contains("longer than"), "{why}");
    let api = open(&deep).await;
    let client = Client::connect_local(&deep).await.unwrap();
    assert!(answers(&client).await);
    api.close().await;
}

/// Runs `then` in a thread of another user. `None` if this process may not change its user, as only
/// root may.
#[cfg(target_os = "linux")]
fn as_nobody<T: Send + 'static>(then: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    // Linux changes the user of the thread only; the rest of the process keeps its user.
    let become_nobody = || rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534));
    let thread = std::thread::spawn(move || become_nobody().ok().map(|()| then()));
    thread.join().unwrap()
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn another_user_does_not_come_in_through_the_socket() {
    use std::os::unix::net::UnixStream as Blocking;
    let (dir, api) = opened().await;
    let path = dir.path().join(SOCKET_FILE);
    let open_to_all = |path: &Path| {
        let all = fs::Permissions::from_mode(0o777);
        fs::set_permissions(path, all).unwrap();
    };
    // The mode of the socket refuses users who can enter the folder.
    open_to_all(dir.path());
    let at = path.clone();
    let Some(refused) = as_nobody(move || Blocking::connect(at).err()) else {
        eprintln!("skipped: only root may become another user");
        return;
    };
    let refused = refused.map(|error| error.kind());
    assert_eq!(refused, Some(io::ErrorKind::PermissionDenied));
    // Without that mode, the peer credentials refuse them; more connect than there are slots.
    open_to_all(&path);
    let connect = move || -> io::Result<Vec<Blocking>> {
        let all = (0..2 * MAX_CONNECTIONS).map(|_| Blocking::connect(&path));
        all.collect()
    };
    let crowd = as_nobody(connect).unwrap().unwrap();
    let owner = Client::connect_local(dir.path()).await.unwrap();
    assert!(answers(&owner).await);
    for one in crowd {
        one.set_nonblocking(true).unwrap();
        let mut one = UnixStream::from_std(one).unwrap();
        assert_eq!(one.read(&mut [0; 1]).await.unwrap(), 0);
    }
    assert!(answers(&owner).await);
    api.close().await;
}
