//! Caller in the test's own process over host processes, so that a host can be hit at an exact
//! token.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hearthnet_bus::NodeKey;
use hearthnet_engine::{Engine, Head};
use hearthnet_files::ModelFile;
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_orchestrator::chat::{
    AnswerOptions, ChatRequest, Conversation, Done, Frame, Prompt, TextModel, TurnOptions,
};
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::fallback::WithFallback;
use hearthnet_orchestrator::health::SharedHealth;
use hearthnet_orchestrator::hosts::{Choice, GRACE, HostSource, Patience, RoutedSpan, Search};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_orchestrator::local::{EngineOnDemand, LocalBackend, SharedEngine};
use hearthnet_orchestrator::private_layers::PrivateLayers;
use hearthnet_orchestrator::router::{PolicyName, Speeds};
use hearthnet_orchestrator::sharded::{ModelOnWire, PumpSettings, ShardedBackend};
use hearthnet_orchestrator::{Backend, Cancel, ChatError};
use hearthnet_testkit::{TinyLlama, one_thread};
use hearthnet_tokens::{ChatMessage, ChatTemplate, Tokenizer};
use parking_lot::RwLockReadGuard;
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};

use super::{Home, Host, PROCESSORS, layer_inputs, model};

/// Tokens of an answer.
pub(crate) const TOKENS: u32 = 48;

/// Caller in this process, which chats of several threads share.
pub(crate) struct Caller {
    pub(crate) runtime: Runtime,
    pub(crate) key: NodeKey,
    pub(crate) wire: ModelOnWire,
    health_timeout: Duration,
    text: TextModel,
    local: Arc<EngineOnDemand>,
    /// Engine for the hosts' layers, used when they have gone.
    between: Arc<EngineOnDemand>,
    private: PrivateLayers,
    /// File of the model, and the folder that it is in if it was made for this caller.
    model: String,
    _folder: Option<TempDir>,
    _processors: RwLockReadGuard<'static, ()>,
}

/// Fixed set of hosts with open sessions.
struct Connected {
    runtime: Handle,
    links: Vec<Arc<HostLink>>,
    choice: Choice,
}

impl HostSource for Connected {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let answers = self.links.iter().map(|link| link.answers(GRACE));
        let answers = self
            .runtime
            .block_on(search.cancel.run_until_cancelled(join_all(answers)));
        let answers = answers.ok_or(ChatError::Cancelled)?;
        let there = self.links.iter().zip(answers).filter(|(_, there)| *there);
        let there: Vec<Arc<HostLink>> = there.map(|(link, _)| Arc::clone(link)).collect();
        match self.choice.among(&there, search) {
            // If no other host can serve, a silent host may be back in a moment.
            Err(_) if search.patience != Patience::None && there.len() < self.links.len() => {
                self.choice.among(&self.links, search)
            }
            route => route,
        }
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }
}

/// Events of an answer.
#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) text: String,
    /// Codes of failures.
    pub(crate) degraded: Vec<String>,
    /// Codes of hosts that the caller waited for.
    pub(crate) waits: Vec<String>,
    /// Codes of recoveries, and their durations in milliseconds.
    pub(crate) recoveries: Vec<(String, f64)>,
    pub(crate) aborted: Vec<String>,
    pub(crate) local: bool,
    /// Longest pause: before the first token, or between two.
    pub(crate) longest: Duration,
    /// Called when the caller reports that it waits.
    pub(crate) on_wait: Option<Box<dyn FnMut() + Send>>,
}

/// Question with a sampling seed.
pub(crate) fn request(question: &str, seed: u64) -> ChatRequest {
    conversation(vec![ChatMessage::user(question)], seed)
}

/// Messages to be continued, with a sampling seed.
pub(crate) fn conversation(messages: Vec<ChatMessage>, seed: u64) -> ChatRequest {
    ChatRequest {
        prompt: Prompt::Messages(messages),
        sampling: SamplerConfig {
            temperature: 0.8,
            seed: Some(seed),
            ..SamplerConfig::default()
        },
        max_tokens: Some(TOKENS),
        stop: Vec::new(),
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    }
}

impl Caller {
    /// Caller whose conversations have at most `context` positions, and for which a host silent for
    /// `health_timeout` has stalled.
    pub(crate) fn new(context: u32, health_timeout: Duration) -> Self {
        // Default number of private layers.
        Self::with(context, health_timeout, (2, 0))
    }

    /// Caller that computes this many first and last layers itself.
    pub(crate) fn with(context: u32, health_timeout: Duration, private: (u32, u32)) -> Self {
        let model = (model(), "smollm2-135m-instruct");
        Self::of_model(model, context, health_timeout, private)
    }

    /// Such a caller with a small model of random weights. Every other one of its 30 layers is
    /// recurrent.
    pub(crate) fn recurrent(private: (u32, u32)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let model = TinyLlama {
            recurrent: true,
            layers: 30,
            context: 1024,
            ..TinyLlama::default()
        };
        let path = model.write(folder.path());
        let model = (path.to_str().expect("UTF-8"), "tiny-recurrent");
        let health_timeout = PumpSettings::default().health_timeout;
        Self {
            _folder: Some(folder),
            ..Self::of_model(model, u32::MAX, health_timeout, private)
        }
    }

    /// Such a caller with a small Gemma 4 of six layers that has per-layer embeddings.
    pub(crate) fn with_layer_inputs(private: (u32, u32)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = layer_inputs(folder.path());
        let model = (path.to_str().expect("UTF-8"), "tiny-layer-inputs");
        let health_timeout = PumpSettings::default().health_timeout;
        Self {
            _folder: Some(folder),
            ..Self::of_model(model, u32::MAX, health_timeout, private)
        }
    }

    fn of_model(
        (path, id): (&str, &str),
        context: u32,
        health_timeout: Duration,
        private: (u32, u32),
    ) -> Self {
        let processors = PROCESSORS.read();
        let file = Arc::new(ModelFile::open(path.as_ref()).expect("a model"));
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        let mut wire = ModelOnWire::new(id, weights, file.spec(), None);
        wire.context = wire.context.min(context);
        let private = PrivateLayers::load(&file, &wire.model_id, private, 16, &one_thread());
        let private = private.expect("private layers");
        wire.hosted = private.hosted();
        let on_demand = |layers: Range<u32>| {
            let (file, id) = (Arc::clone(&file), wire.model_id.clone());
            Arc::new(EngineOnDemand::new(Box::new(move || {
                let engine = Engine::load(&file, layers.clone(), &one_thread(), &mut |_, _| {})
                    .map_err(|e| ChatError::Engine(e.to_string()))?;
                Ok(SharedEngine::new(engine, &id, u64::MAX))
            })))
        };
        Self {
            runtime: Runtime::new().expect("a runtime"),
            key: NodeKey::generate().expect("a key"),
            text: TextModel {
                tokenizer: Tokenizer::from_gguf(file.gguf()).expect("a tokenizer"),
                template: Some(ChatTemplate::from_gguf(file.gguf()).expect("a template")),
                head: Head::load(&file, &one_thread()).expect("a head").into(),
                context: wire.context,
                pooling: file.pooling(),
                sampling: SamplingChoice::GREEDY,
            },
            health_timeout,
            local: on_demand(0..file.spec().layers),
            between: on_demand(private.hosted()),
            private,
            wire,
            model: path.to_owned(),
            _folder: None,
            _processors: processors,
        }
    }

    /// Host process for a range of layers that admits this caller.
    pub(crate) fn host(&self, layers: &str, extra: &[&str]) -> Host {
        let own = Home::new();
        Host::start(&own, &self.model, layers, &self.key.id().to_string(), extra)
    }

    /// Answer of this machine alone.
    pub(crate) fn alone(&self, request: &ChatRequest) -> Done {
        let backend: LocalBackend = self.local.open().expect("a backend");
        let mut conversation = Conversation::new(Box::new(backend));
        let (now, cancel) = (Instant::now(), Cancel::default());
        conversation
            .answer(&self.text, request, now, &cancel, &mut |_| {})
            .expect("an answer")
    }

    /// Opens a session with each host.
    pub(crate) fn connect(&self, hosts: &[String]) -> Vec<Arc<HostLink>> {
        let connect = |host: &String| {
            let addr: HostAddr = host.parse().expect("an address");
            let config = hearthnet_transport::Config::default();
            let link = HostLink::connect(&addr, &self.key, config);
            Arc::new(self.runtime.block_on(link).expect("a session"))
        };
        hosts.iter().map(connect).collect()
    }

    /// Host selection of these tests.
    pub(crate) fn choice(&self) -> Choice {
        Choice {
            model: self.wire.clone(),
            max_shards: 16,
            own_id: self.key.id(),
            allow_self: false,
            exact: Exact::Require,
            policy: PolicyName::default(),
            speeds: Speeds::new(),
            // Fresh for each conversation, because tests hit the same hosts repeatedly.
            health: SharedHealth::default(),
        }
    }

    /// Conversation over hosts, with optional local fallback.
    pub(crate) fn open(&self, links: &[Arc<HostLink>], fallback: bool) -> Conversation {
        let source = Connected {
            runtime: self.runtime.handle().clone(),
            links: links.to_vec(),
            choice: self.choice(),
        };
        self.open_over(Box::new(source), fallback).expect("a route")
    }

    /// Conversation over any source of hosts.
    pub(crate) fn open_over(
        &self,
        source: Box<dyn HostSource>,
        fallback: bool,
    ) -> Result<Conversation, ChatError> {
        let settings = PumpSettings {
            health_timeout: self.health_timeout,
            give_up_after: fallback.then_some(2),
            prefill_rows: 16,
            audit_share: 0.0,
            ..PumpSettings::default()
        };
        let (runtime, cancel) = (self.runtime.handle(), Cancel::default());
        let sharded = ShardedBackend::open(runtime.clone(), source, settings, &cancel)?;
        let hosts: Box<dyn Backend> = if fallback {
            let local = Arc::clone(&self.between);
            let load = Arc::new(move || Ok(Box::new(local.open()?) as Box<dyn Backend>));
            let (now, exact) = (tokio::time::Instant::now(), Exact::Require);
            let begun = WithFallback::begin(Ok(sharded), now, load, exact, runtime, &cancel);
            Box::new(begun?)
        } else {
            Box::new(sharded)
        };
        Ok(Conversation::new(self.private.around(hosts)?))
    }

    /// Asks, and calls `at` after each token (0: before the prompt is sent).
    ///
    /// `at` gets the hosts of the route in order, followed by the replacements so far.
    pub(crate) fn answer(
        &self,
        conversation: &mut Conversation,
        request: &ChatRequest,
        heard: &mut Heard,
        mut at: impl FnMut(u32, &[String]),
    ) -> Result<Done, ChatError> {
        let (mut tokens, mut route) = (0, Vec::new());
        let hosts = conversation.route().into_iter().filter_map(|hop| hop.host);
        let spans = hosts.count();
        let (now, cancel) = (Instant::now(), Cancel::default());
        let mut since = now;
        let mut hear = |frame: &Frame| match frame {
            Frame::ShardStatus { status, code, .. } if status == "degraded" => {
                let code = code.iter().map(ToString::to_string);
                heard.degraded.push(code.collect());
            }
            Frame::ShardStatus { status, code, .. } if status == "waiting" => {
                let code = code.iter().map(ToString::to_string);
                heard.waits.push(code.collect());
                heard.on_wait.iter_mut().for_each(|call| call());
            }
            Frame::ShardStatus { host, .. } => {
                route.extend(host.clone());
                if host.is_some() && route.len() == spans {
                    at(0, &route);
                }
            }
            Frame::ShardFailover {
                code,
                recovery_ms,
                replacements,
                ..
            } => {
                heard.recoveries.push((code.to_string(), *recovery_ms));
                heard.local |= replacements.is_empty();
                route.extend(replacements.clone());
            }
            Frame::PipelineAborted { code, .. } => heard.aborted.push(code.to_string()),
            Frame::TokenDelta { text, .. } => {
                heard.text.push_str(text);
                heard.longest = heard.longest.max(since.elapsed());
                since = Instant::now();
                tokens += 1;
                at(tokens, &route);
            }
            _ => {}
        };
        conversation.answer(&self.text, request, now, &cancel, &mut hear)
    }

    /// Asks as [`Caller::answer`] does. The answer must equal the undisturbed one.
    pub(crate) fn same_answer(
        &self,
        conversation: &mut Conversation,
        request: &ChatRequest,
        undisturbed: &Done,
        what: &str,
        at: impl FnMut(u32, &[String]),
    ) -> (Done, Heard) {
        let mut heard = Heard::default();
        let result = self.answer(conversation, request, &mut heard, at);
        (same(result, &heard, undisturbed, what), heard)
    }
}

/// Asserts that an answer equals the undisturbed one, each token streamed once. Returns it.
pub(crate) fn same(
    result: Result<Done, ChatError>,
    heard: &Heard,
    undisturbed: &Done,
    what: &str,
) -> Done {
    let done = result.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(done.token_ids, undisturbed.token_ids, "{what}");
    assert_eq!(done.text, undisturbed.text, "{what}");
    assert_eq!(heard.text, undisturbed.text, "{what}: what was streamed");
    done
}
