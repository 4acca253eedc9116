//! The example app in `examples/`, against a node's local API: it prints the service's answer.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use hearthnet_bus::calls::{Authority, CallServer, LocalApi, Registry, Research};
use hearthnet_bus::log::Level;
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_engine::{Engine, Head};
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_orchestrator::backend::Backend;
use hearthnet_orchestrator::chat::{
    AnswerOptions, ChatRequest, Frame, Prompt, TextModel, TurnOptions,
};
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::local::SharedEngine;
use hearthnet_orchestrator::service::{ServedModel, Service, ServiceSettings};
use hearthnet_orchestrator::{Cancel, ChatError, bus};
use hearthnet_testkit::{TinyLlama, one_thread};
use hearthnet_tokens::{ChatMessage, ChatTemplate, Tokenizer};
use parking_lot::Mutex;
use tokio::runtime::Handle;

/// Node that is a member; the experiment is on or off.
struct Home(Mutex<Research>);

impl Authority for Home {
    fn level(&self, _: &NodeId) -> Option<Level> {
        Some(Level::Member)
    }

    fn research(&self) -> Research {
        *self.0.lock()
    }
}

fn tiny() -> ServedModel {
    let file = Arc::new(TinyLlama::default().file());
    let engine = Engine::load(&file, 0..2, &one_thread(), &mut |_, _| {}).expect("an engine");
    let head = Head::beside(&file, &engine).expect("a head");
    let engine = SharedEngine::new(engine, "tiny", 1 << 30);
    let opener = move |_: Exact, _: &Cancel| -> Result<Box<dyn Backend>, ChatError> {
        Ok(Box::new(engine.open()?))
    };
    ServedModel {
        id: "tiny".into(),
        weights: file.manifest(&mut |_, _| {}).weights_id(),
        text: TextModel {
            tokenizer: Tokenizer::from_gguf(file.gguf()).expect("a tokenizer"),
            template: Some(ChatTemplate::from_gguf(file.gguf()).expect("a template")),
            head: head.into(),
            context: file.spec().context,
            pooling: file.pooling(),
            sampling: SamplingChoice::GREEDY,
        },
        hosted: 0..file.spec().layers,
        file,
        open: Box::new(opener),
        exact: Exact::default(),
    }
}

async fn app(data_dir: &Path, args: &[&str]) -> Output {
    let python = std::env::var_os("HEARTHNET_TEST_PYTHON").unwrap_or_else(|| {
        panic!(
            "run tests/run, or set HEARTHNET_TEST_PYTHON to a Python with the package websockets"
        )
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/chat_app.py");
    tokio::process::Command::new(python)
        .arg("-B")
        .arg(script)
        .arg("--data-dir")
        .arg(data_dir)
        .args(args)
        .env("PYTHONIOENCODING", "utf-8")
        .output()
        .await
        .expect("Python starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_app_prints_what_the_community_answers() {
    let dir = tempfile::tempdir().expect("a folder");
    let output = app(dir.path(), &["Hi"]).await;
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("hearthnet serve"), "{said}");

    let service = Service::new(Handle::current(), vec![tiny()], ServiceSettings::default());
    let registry = Arc::new(Registry::new());
    let handler = Arc::new(bus::ChatHandler(service.clone()));
    registry
        .register(bus::descriptor(8), handler)
        .expect("a free name");
    let home = Arc::new(Home(Mutex::new(Research::On)));
    let own = NodeKey::from_secret(&[1; 32]).id();
    let authority = Arc::clone(&home) as Arc<dyn Authority>;
    let server = Arc::new(CallServer::new(own, registry, authority));
    let api = LocalApi::open(dir.path(), server).await.expect("an API");

    // More tokens than the window has slots, which tests acknowledgements too.
    let request = ChatRequest {
        prompt: Prompt::Messages(vec![ChatMessage::user("Hi")]),
        sampling: SamplerConfig {
            temperature: 1.5,
            seed: Some(7),
            ..SamplerConfig::default()
        },
        max_tokens: Some(100),
        stop: Vec::new(),
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    };
    let mut answer = service.ask("somebody", "tiny", request).expect("a turn");
    let (mut text, mut tokens) = (String::new(), 0);
    while let Some(frame) = answer.next().await {
        match frame.expect("an answer") {
            Frame::TokenDelta { text: piece, .. } => text.push_str(&piece),
            Frame::Done(done) => tokens = done.usage.completion_tokens,
            _ => {}
        }
    }
    let how = ["Hi", "--seed", "7", "--temperature", "1.5"];
    let args = [&how[..], &["--max-tokens", "100"]].concat();
    let output = app(dir.path(), &args).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), text);
    assert!(
        said.contains(&format!("[{tokens} tokens, seed 7]")),
        "{said}"
    );

    // If the experiment is off, the error names the setting.
    *home.0.lock() = Research::OffHere;
    let output = app(dir.path(), &["Hi"]).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.contains("policy.research.enable"), "{said}");
    assert!(said.contains("experimental_disabled"), "{said}");
    api.close().await;
}
