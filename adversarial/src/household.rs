//! Chat service over a small model with its local HTTP and socket interfaces, in this process, for
//! attacks by users who share the service with its owner.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::{CallServer, LocalApi, OneLevel, Registry};
use hearthnet_bus::log::Level;
use hearthnet_engine::{Engine, Head};
use hearthnet_files::sampling::SamplingChoice;
use hearthnet_http::{HttpServer, HttpSettings};
use hearthnet_orchestrator::bus::{ChatHandler, descriptor};
use hearthnet_orchestrator::chat::TextModel;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::local::SharedEngine;
use hearthnet_orchestrator::service::{ServedModel, ServiceSettings};
use hearthnet_orchestrator::{Service, http};
use hearthnet_testkit::{TinyLlama, one_thread};
use hearthnet_tokens::Tokenizer;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::bench::new_key;
use crate::{HarnessError, Result};

/// Id of the served model.
pub(crate) const MODEL: &str = "tiny-household";
/// Enough for an answer of a few tokens, and shorter than any timeout of the defences.
pub(crate) const SOON: Duration = Duration::from_secs(15);

/// Uid of another user of this machine.
const NOBODY: u32 = 65_534;

/// Chat service as a daemon runs it, with a context for long answers.
pub(crate) fn service() -> Result<Service> {
    service_of(MODEL)
}

/// Chat service whose model has another id.
pub(crate) fn service_of(name: &str) -> Result<Service> {
    let tiny = TinyLlama {
        context: 4096,
        ..TinyLlama::default()
    };
    let file = Arc::new(tiny.file());
    let engine = Engine::load(&file, 0..tiny.layers, &one_thread(), &mut |_, _| {})?;
    let head = Head::beside(&file, &engine)?;
    let engine = SharedEngine::new(engine, name, 1 << 30);
    let model = ServedModel {
        id: name.to_owned(),
        weights: file.manifest(&mut |_, _| {}).weights_id(),
        text: TextModel {
            tokenizer: Tokenizer::from_gguf(file.gguf())?,
            template: None,
            head: head.into(),
            context: file.spec().context,
            pooling: file.pooling(),
            sampling: SamplingChoice::GREEDY,
        },
        hosted: 0..file.spec().layers,
        file,
        open: Box::new(move |_, _| Ok(Box::new(engine.open()?))),
        exact: Exact::default(),
    };
    let settings = ServiceSettings::default();
    Ok(Service::new(Handle::current(), vec![model], settings))
}

/// Local API of a node and its folder, with an optional chat service behind it.
pub(crate) async fn local_api(service: Option<&Service>) -> Result<(TempDir, LocalApi)> {
    let (folder, registry) = (tempfile::tempdir()?, Arc::new(Registry::new()));
    if let Some(service) = service {
        let chats = Arc::new(ChatHandler(service.clone()));
        let registered = registry.register(descriptor(36), chats);
        registered?;
    }
    // Access control is not under test here.
    let anchor = OneLevel(Some(Level::Anchor));
    let server = CallServer::new(new_key()?.id(), registry, Arc::new(anchor));
    let api = LocalApi::open(folder.path(), Arc::new(server)).await;
    Ok((folder, api?))
}

/// Opens `count` connections as another user of this machine. `None` if this process may not change
/// its uid, which needs root.
pub(crate) async fn connect_as_nobody(
    at: SocketAddr,
    count: usize,
) -> Result<Option<Vec<TcpStream>>> {
    let connect = move || {
        // Linux sets the uid per thread: the other threads of this process keep theirs.
        let nobody = rustix::process::Uid::from_raw(NOBODY);
        if rustix::thread::set_thread_uid(nobody).is_err() {
            return Ok(None);
        }
        let connect = |_| {
            let stream = std::net::TcpStream::connect(at)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        let streams: std::io::Result<Vec<_>> = (0..count).map(connect).collect();
        streams.map(Some)
    };
    // A separate thread, because it keeps the changed uid until it ends. It is joined on the
    // blocking pool: the accepting task may need this runtime thread.
    let joined = move || std::thread::spawn(connect).join();
    let streams = tokio::task::spawn_blocking(joined).await?;
    let streams = streams.map_err(|_| HarnessError::attacker("no connection"))??;
    let streams = streams.map(|all| all.into_iter().map(TcpStream::from_std).collect());
    Ok(streams.transpose()?)
}

/// HTTP interface of a chat service, at a free port.
pub(crate) async fn interface(service: Service) -> Result<HttpServer> {
    let settings = HttpSettings {
        listen: "127.0.0.1:0".to_owned(),
        ..HttpSettings::default()
    };
    Ok(http::serve(service, None, Default::default(), &settings).await?)
}

/// Status and body of the answer to a request on a connection of its own.
pub(crate) async fn ask(
    at: impl ToSocketAddrs,
    target: &str,
    body: &str,
) -> Result<Option<(u16, String)>> {
    let mut client = TcpStream::connect(at).await?;
    send(&mut client, target, body).await?;
    Ok(answer(&mut client).await)
}

/// Sends an HTTP request; a request with a body is a POST.
pub(crate) async fn send(stream: &mut TcpStream, target: &str, body: &str) -> Result<()> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    Ok(stream.write_all(request.as_bytes()).await?)
}

/// Status and body of the answer. `None` if it is not complete within [`SOON`].
pub(crate) async fn answer(stream: &mut TcpStream) -> Option<(u16, String)> {
    let (status, _, body) = whole_answer(stream).await?;
    Some((status, body))
}

/// Status, head and body of the answer.
pub(crate) async fn whole_answer(stream: &mut TcpStream) -> Option<(u16, String, String)> {
    let mut bytes = Vec::new();
    let reading = async {
        loop {
            let text = String::from_utf8_lossy(&bytes);
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    let is_it = name.eq_ignore_ascii_case("content-length");
                    is_it.then(|| value.trim().parse::<usize>().ok())?
                });
                let is_whole = match length {
                    Some(length) => body.len() >= length,
                    // Server-sent events, which have no length.
                    None => body.contains("[DONE]"),
                };
                if is_whole {
                    let status = head.split(' ').nth(1)?.parse().ok()?;
                    return Some((status, head.to_owned(), body.to_owned()));
                }
            }
            let mut some = [0; 4096];
            let read = stream.read(&mut some).await.ok().filter(|n| *n > 0)?;
            bytes.extend_from_slice(some.get(..read)?);
        }
    };
    timeout(SOON, reading).await.ok().flatten()
}
