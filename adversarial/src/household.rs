//! A chat service over a small model, with its doors to this machine, all in this process: for attacks
//! of those who share it with its owner.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::calls::{Authority, CallServer, LocalApi, Registry, Research, Trust};
use hearthnet_model::engine::{Engine, EngineOptions, Head};
use hearthnet_model::gguf::Gguf;
use hearthnet_model::sampler::SamplingChoice;
use hearthnet_model::{ModelFile, Tokenizer};
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::bus::{ChatHandler, descriptor};
use hearthnet_orchestrator::chat::TextModel;
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::local::SharedEngine;
use hearthnet_orchestrator::service::{ServedModel, ServiceSettings};
use hearthnet_testkit::TinyLlama;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::HarnessError;
use crate::bench::new_key;

/// What the service calls its model.
pub(crate) const MODEL: &str = "tiny-household";
/// Long for an answer of a few tokens, and shorter than anything that a defence gives up after.
pub(crate) const SOON: Duration = Duration::from_secs(15);

/// A user of the machine who is nobody else on it.
#[cfg(target_os = "linux")]
const NOBODY: u32 = 65_534;

/// A service as a daemon has it, for long answers.
pub(crate) fn service() -> Result<Service, HarnessError> {
    service_of(MODEL)
}

/// The same with another name for its model.
pub(crate) fn service_of(name: &str) -> Result<Service, HarnessError> {
    let tiny = TinyLlama {
        context: 4096,
        ..TinyLlama::default()
    };
    let file = Gguf::from_bytes(tiny.bytes()).map_err(HarnessError::victim)?;
    let file = ModelFile::from_gguf(file).map_err(HarnessError::victim)?;
    let options = EngineOptions {
        threads: 1,
        ..EngineOptions::default()
    };
    let engine = Engine::load(&file, 0..tiny.layers, &options, &mut |_, _| {});
    let engine = engine.map_err(HarnessError::victim)?;
    let head = Head::beside(&file, &engine).map_err(HarnessError::victim)?;
    let engine = SharedEngine::new(engine, name, 1 << 30);
    let model = ServedModel {
        id: name.to_owned(),
        weights: file.manifest(&mut |_, _| {}).weights_id(),
        text: TextModel {
            tokenizer: Tokenizer::from_gguf(file.gguf()).map_err(HarnessError::victim)?,
            template: None,
            head: head.into(),
            context: file.spec().context,
            sampling: SamplingChoice::GREEDY,
        },
        open: Box::new(move |_, _| Ok(Box::new(engine.open()?))),
        exact: Exact::default(),
    };
    let settings = ServiceSettings::default();
    Ok(Service::new(Handle::current(), vec![model], settings))
}

/// Everybody is an anchor: who may call is not what is asked here.
struct Everybody;

impl Authority for Everybody {
    fn trust(&self, _: &NodeId) -> Trust {
        Trust::Anchor
    }

    fn research(&self) -> Research {
        Research::On
    }
}

/// The local API of a node, and its folder; with a service behind it, if there is one.
pub(crate) async fn local_api(
    service: Option<&Service>,
) -> Result<(TempDir, LocalApi), HarnessError> {
    let (folder, registry) = (tempfile::tempdir()?, Arc::new(Registry::new()));
    if let Some(service) = service {
        let chats = Arc::new(ChatHandler(service.clone()));
        let registered = registry.register(descriptor(36), chats);
        registered.map_err(HarnessError::victim)?;
    }
    let server = CallServer::new(new_key()?.id(), registry, Arc::new(Everybody));
    let api = LocalApi::open(folder.path(), Arc::new(server)).await;
    Ok((folder, api.map_err(HarnessError::victim)?))
}

/// So many connections of another user of this machine; `None` where this process may not be somebody
/// else, as it may if it is root's.
pub(crate) async fn connect_as_nobody(
    at: SocketAddr,
    count: usize,
) -> Result<Option<Vec<TcpStream>>, HarnessError> {
    #[cfg(target_os = "linux")]
    {
        let connect = move || {
            // The system gives users to threads: the rest of this process stays who it is.
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
        // A thread of its own, that ends as whom it has become; whoever is to accept these connections may
        // be a task of the thread that waits here, so it waits elsewhere.
        let joined = move || std::thread::spawn(connect).join();
        let streams = tokio::task::spawn_blocking(joined).await;
        let streams = streams.map_err(HarnessError::attacker)?;
        let streams = streams.map_err(|_| HarnessError::attacker("no connection"))??;
        let streams = streams.map(|all| all.into_iter().map(TcpStream::from_std).collect());
        Ok(streams.transpose()?)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (at, count);
        Ok(None)
    }
}

/// Sends a request over HTTP: with a body, to the endpoint that goes on with a text.
pub(crate) async fn send(
    stream: &mut TcpStream,
    target: &str,
    body: &str,
) -> Result<(), HarnessError> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    Ok(stream.write_all(request.as_bytes()).await?)
}

/// The status and the body of an answer in one piece; nothing where none comes soon.
pub(crate) async fn answer(stream: &mut TcpStream) -> Option<(u16, String)> {
    let (status, _, body) = whole_answer(stream).await?;
    Some((status, body))
}

/// The same with its head.
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
                    // Events, which come one by one.
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
