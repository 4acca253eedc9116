use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Error as WsError;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use super::super::client::Client;
use super::super::descriptor::Trust;
use super::super::registry::Registry;
use super::super::server::{Authority, Research};
use super::*;
use crate::{NodeId, NodeKey};

struct Home;

impl Authority for Home {
    fn trust(&self, _: &NodeId) -> Trust {
        Trust::Anchor
    }

    fn research(&self) -> Research {
        Research::On
    }
}

fn server() -> Arc<CallServer> {
    let own = NodeKey::from_secret(&[1; 32]).id();
    Arc::new(CallServer::new(
        own,
        Arc::new(Registry::new()),
        Arc::new(Home),
    ))
}

async fn open(dir: &Path) -> LocalApi {
    LocalApi::open(dir, server()).await.unwrap()
}

fn read(dir: &Path, name: &str) -> String {
    let text = fs::read_to_string(dir.join(name)).unwrap();
    text.strip_suffix('\n').unwrap().to_owned()
}

/// Connects with these headers; the status of a refusal.
async fn enter(url: &str, headers: &[(&'static str, &str)]) -> Result<Wire, u16> {
    let mut request = url.into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    let addr = request.uri().authority().unwrap().to_string();
    let stream = TcpStream::connect(addr).await.unwrap();
    match client_async(request, stream).await {
        Ok((socket, _)) => Ok(Wire::websocket(socket)),
        Err(WsError::Http(refusal)) => Err(refusal.status().as_u16()),
        Err(other) => panic!("{other}"),
    }
}

#[tokio::test]
async fn an_app_with_the_token_calls_as_this_node() {
    let dir = tempfile::tempdir().unwrap();
    let api = open(dir.path()).await;
    let bearer = format!("Bearer {}", read(dir.path(), TOKEN_FILE));
    let wire = enter(
        &read(dir.path(), ENDPOINT_FILE),
        &[("authorization", &bearer)],
    )
    .await
    .unwrap();
    let client = Client::local(wire);
    let describe = "bus.describe@1.0".parse().unwrap();
    let end = client
        .call(&describe, &json!({}))
        .unwrap()
        .result()
        .await
        .unwrap();
    assert_eq!(end["capabilities"][0]["capability"], "bus.describe@1.0");
    // Whoever is connected is cut off, too.
    api.close().await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !client.is_lost() {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn without_the_token_or_from_a_web_page_nobody_enters() {
    let dir = tempfile::tempdir().unwrap();
    let _api = open(dir.path()).await;
    let url = read(dir.path(), ENDPOINT_FILE);
    let token = read(dir.path(), TOKEN_FILE);
    let good = format!("Bearer {token}");
    let shorter = &good[..good.len() - 1];
    for (url, headers, status) in [
        (url.clone(), vec![], 401),
        (url.clone(), vec![("authorization", "")], 401),
        (url.clone(), vec![("authorization", token.as_str())], 401),
        (url.clone(), vec![("authorization", shorter)], 401),
        (url.clone(), vec![("authorization", "Bearer AAAA")], 401),
        (
            url.clone(),
            vec![("authorization", &good), ("origin", "http://127.0.0.1")],
            403,
        ),
        (
            url.clone(),
            vec![("authorization", &good), ("origin", "null")],
            403,
        ),
        (
            url.replace("/bus/", "/sync/"),
            vec![("authorization", &good)],
            404,
        ),
        (format!("{url}?token={token}"), vec![], 401),
    ] {
        assert_eq!(
            enter(&url, &headers).await.err(),
            Some(status),
            "{url} {headers:?}"
        );
    }
}

#[tokio::test]
async fn the_files_are_private_new_at_each_start_and_gone_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    // Whatever lay there, with whatever rights, is replaced.
    fs::write(dir.path().join(TOKEN_FILE), "open to all").unwrap();
    let api = open(dir.path()).await;
    let first = read(dir.path(), TOKEN_FILE);
    assert_eq!(first.len(), 43);
    assert_eq!(
        read(dir.path(), ENDPOINT_FILE),
        format!("ws://127.0.0.1:{}/bus/v1", api.addr().port())
    );
    for name in [TOKEN_FILE, ENDPOINT_FILE] {
        let mode = fs::metadata(dir.path().join(name))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let second = open(dir.path()).await;
    assert_ne!(read(dir.path(), TOKEN_FILE), first);
    // The first one leaves the second one's files alone.
    api.close().await;
    assert!(read(dir.path(), ENDPOINT_FILE).contains(&second.addr().to_string()));
    drop(second);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn the_local_api_is_where_no_other_machine_can_reach_it() {
    let dir = tempfile::tempdir().unwrap();
    let api = open(dir.path()).await;
    assert!(api.addr().ip().is_loopback());
    api.close().await;
}

#[tokio::test]
async fn a_folder_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let refused = LocalApi::open(&dir.path().join("none"), server())
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("bus.token"), "{refused}");
}

#[tokio::test]
async fn a_program_of_this_machine_finds_the_local_api_by_the_data_directory() {
    let dir = tempfile::tempdir().unwrap();
    let nobody = Client::connect_local(dir.path()).await.unwrap_err();
    assert_eq!(nobody.code().as_str(), "not_found");
    let api = open(dir.path()).await;
    let client = Client::connect_local(dir.path()).await.unwrap();
    let describe = "bus.describe@1.0".parse().unwrap();
    let end = client.call(&describe, &json!({})).unwrap().result().await;
    assert!(end.is_ok());
    // A token is shown to this machine only, whatever the file says.
    fs::write(dir.path().join(ENDPOINT_FILE), "ws://192.0.2.1:9/bus/v1\n").unwrap();
    let elsewhere = Client::connect_local(dir.path()).await.unwrap_err();
    assert_eq!(elsewhere.code().as_str(), "unreachable");
    api.close().await;
}
