//! Promise 2: a dying machine costs time, never words. Real model, real processes, real signals.
//!
//! The caller is this process, so that a host can be stopped at an exact token; the hosts are
//! processes of their own, but for the one that lies. A sample of the positions runs always;
//! all of them with
//!
//! ```text
//! cargo test --release -p hearthnet --test failover -- --ignored --nocapture
//! ```
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a test fails by panicking, and the matrix is printed"
)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeKey;
use hearthnet_model::engine::{Engine, EngineOptions, Head, SeqId};
use hearthnet_model::sampler::SamplerConfig;
use hearthnet_model::{ChatMessage, ChatTemplate, ModelFile, Tokenizer};
use hearthnet_orchestrator::chat::{ChatRequest, Conversation, Done, Frame, Prompt, TextModel};
use hearthnet_orchestrator::fallback::WithFallback;
use hearthnet_orchestrator::hosts::{Choice, ConnectedHosts};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_orchestrator::local::LocalBackend;
use hearthnet_orchestrator::router::GreedyCover;
use hearthnet_orchestrator::sharded::{ModelOnWire, PumpSettings, ShardedBackend};
use hearthnet_orchestrator::{Backend, Cancel, ChatError};
use hearthnet_shard::{
    EngineFault, EngineSource, LayerEngine, LoadPhase, RunningHost, ServeConfig, Served, ShardHost,
    Span,
};
use rustix::process::Signal;
use support::{Home, Host, model, wait_for_end};
use tokio::runtime::Runtime;

const TOKENS: u32 = 48;
const QUESTION: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";
const STALL: Duration = Duration::from_millis(1500);

/// A caller in this process.
struct Caller {
    runtime: Runtime,
    key: NodeKey,
    file: Arc<ModelFile>,
    wire: ModelOnWire,
    text: TextModel,
}

/// What an answer went through.
struct Heard {
    result: Result<Done, ChatError>,
    text: String,
    degraded: Vec<String>,
    recoveries: Vec<f64>,
    aborted: Vec<String>,
    local: bool,
}

fn options() -> EngineOptions {
    EngineOptions {
        threads: 1,
        ..EngineOptions::default()
    }
}

impl Caller {
    fn new() -> Self {
        let file = Arc::new(ModelFile::open(&model()).expect("the real model"));
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        Self {
            runtime: Runtime::new().expect("a runtime"),
            key: NodeKey::generate().expect("a key"),
            wire: ModelOnWire::new("smollm2-135m-instruct", weights, file.spec(), None),
            text: TextModel {
                tokenizer: Tokenizer::from_gguf(file.gguf()).expect("a tokenizer"),
                template: Some(ChatTemplate::from_gguf(file.gguf()).expect("a template")),
                head: Head::load(&file, &options()).expect("a head").into(),
                context: file.spec().context,
            },
            file,
        }
    }

    /// A host process for a range of layers that admits this caller.
    fn host(&self, layers: &str) -> Host {
        let own = Home::new();
        let path = model();
        let path = path.to_str().expect("a UTF-8 path");
        Host::start(&own, path, layers, &self.key.id().to_string(), &[])
    }

    fn request() -> ChatRequest {
        ChatRequest {
            prompt: Prompt::Messages(vec![ChatMessage::user(QUESTION)]),
            sampling: SamplerConfig {
                temperature: 0.8,
                seed: Some(7),
                ..SamplerConfig::default()
            },
            max_tokens: TOKENS,
            stop: Vec::new(),
        }
    }

    fn local(&mut self) -> Done {
        let engine = Engine::load(&self.file, 0..self.wire.layers, &options(), &mut |_, _| {})
            .expect("an engine");
        let backend = LocalBackend::new(engine, &self.wire.model_id).expect("a backend");
        let mut conversation = Conversation::new(Box::new(backend));
        conversation
            .answer(
                &self.text,
                &Self::request(),
                Instant::now(),
                &Cancel::default(),
                &mut |_| {},
            )
            .expect("an answer")
    }

    /// Asks hosts, and calls `at` after each token (0: before the prompt is sent).
    ///
    /// `at` hears who runs the layers now, the first ones first.
    fn ask(
        &mut self,
        hosts: &[String],
        fallback: bool,
        mut at: impl FnMut(u32, &[String]),
    ) -> Heard {
        let mut heard = Heard {
            result: Err(ChatError::Cancelled),
            text: String::new(),
            degraded: Vec::new(),
            recoveries: Vec::new(),
            aborted: Vec::new(),
            local: false,
        };
        let links: Vec<Arc<HostLink>> = hosts
            .iter()
            .map(|host| {
                let addr: HostAddr = host.parse().expect("an address");
                let config = hearthnet_transport::Config::default();
                let link = HostLink::connect(&addr, &self.key, config);
                Arc::new(self.runtime.block_on(link).expect("a session"))
            })
            .collect();
        let source = ConnectedHosts {
            links,
            choice: Choice {
                model: self.wire.clone(),
                policy: Arc::new(GreedyCover),
                max_shards: 16,
                own_id: self.key.id().to_string(),
                allow_self: false,
            },
        };
        let settings = PumpSettings {
            health_timeout: STALL,
            give_up_after: fallback.then_some(2),
            prefill_rows: 16,
            ..PumpSettings::default()
        };
        let sharded = ShardedBackend::open(
            self.runtime.handle().clone(),
            self.wire.clone(),
            Box::new(source),
            settings,
            &Cancel::default(),
        )
        .expect("a route");
        let backend: Box<dyn Backend> = if fallback {
            let (file, layers) = (Arc::clone(&self.file), 0..self.wire.layers);
            let load = move || {
                let engine = Engine::load(&file, layers, &options(), &mut |_, _| {})
                    .map_err(|e| ChatError::Engine(e.to_string()))?;
                Ok(
                    Box::new(LocalBackend::new(engine, "smollm2-135m-instruct")?)
                        as Box<dyn Backend>,
                )
            };
            Box::new(WithFallback::new(sharded, Box::new(load)))
        } else {
            Box::new(sharded)
        };
        let mut conversation = Conversation::new(backend);
        let (mut tokens, mut route) = (0, Vec::new());
        let spans = conversation.route().len();
        heard.result = conversation.answer(
            &self.text,
            &Self::request(),
            Instant::now(),
            &Cancel::default(),
            &mut |frame| match frame {
                Frame::ShardStatus { status, code, .. } if status == "degraded" => {
                    heard.degraded.push(code.clone().unwrap_or_default());
                }
                Frame::ShardStatus { host, .. } => {
                    route.extend(host.clone());
                    if route.len() == spans {
                        at(0, &route);
                    }
                }
                Frame::ShardFailover {
                    recovery_ms,
                    replacements,
                    ..
                } => {
                    heard.recoveries.push(*recovery_ms);
                    heard.local |= replacements.is_empty();
                    route.extend(replacements.clone());
                }
                Frame::PipelineAborted { code, .. } => heard.aborted.push(code.to_string()),
                Frame::TokenDelta { text, .. } => {
                    heard.text.push_str(text);
                    tokens += 1;
                    at(tokens, &route);
                }
                _ => {}
            },
        );
        heard
    }
}

impl Heard {
    /// The same words as `undisturbed`, streamed once each.
    fn says(&self, undisturbed: &Done, what: &str) {
        let done = self
            .result
            .as_ref()
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(done.token_ids, undisturbed.token_ids, "{what}");
        assert_eq!(done.text, undisturbed.text, "{what}");
        assert_eq!(self.text, undisturbed.text, "{what}: what was streamed");
    }
}

/// What happens to a host at one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
}

const RANGES: [&str; 2] = ["0-14", "15-29"];

/// Hosts by their addresses, so that the one in use can be found and struck.
struct Fleet(Vec<Host>);

impl Fleet {
    /// `each` hosts per half of the model.
    fn new(caller: &Caller, each: usize) -> Self {
        let ranges = RANGES.iter().cycle().take(RANGES.len() * each);
        Self(ranges.map(|range| caller.host(range)).collect())
    }

    fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|host| host.address.clone()).collect()
    }

    fn place(&self, node: &str) -> usize {
        let found = self.0.iter().position(|host| host.address.ends_with(node));
        found.expect("a node of this fleet")
    }

    fn strike(&self, node: &str, fault: Fault) {
        let host = &self.0[self.place(node)];
        match fault {
            Fault::Kill => {
                host.signal(Signal::KILL);
                wait_for_end(host.process.child.id());
            }
            Fault::Stop => host.signal(Signal::STOP),
        }
    }

    /// Makes a struck host fit for the next round.
    fn mend(&mut self, caller: &Caller, node: &str, fault: Fault) {
        let place = self.place(node);
        match fault {
            Fault::Kill => self.0[place] = caller.host(RANGES[place % RANGES.len()]),
            Fault::Stop => self.0[place].signal(Signal::CONT),
        }
    }
}

/// Two hosts and a spare for each: every host in use gets the fault at each position in turn.
fn matrix(fault: Fault, positions: &[u32]) -> Vec<f64> {
    let mut caller = Caller::new();
    let undisturbed = caller.local();
    assert_eq!(undisturbed.token_ids.len() as u32, TOKENS);
    let mut fleet = Fleet::new(&caller, 2);
    let mut recoveries = Vec::new();
    for victim in 0..RANGES.len() {
        for &position in positions {
            let what = format!("{fault:?} host {victim} at token {position}");
            let mut struck = String::new();
            let heard = caller.ask(&fleet.addresses(), false, |token, route| {
                if token == position {
                    struck.clone_from(&route[victim]);
                    fleet.strike(&struck, fault);
                }
            });
            heard.says(&undisturbed, &what);
            // A host struck after the last token is missed by nobody; one struck at the token
            // before may have done its last step, which is sent before the token is told.
            let failures = heard.degraded.len();
            match position {
                _ if position + 1 < TOKENS => assert_eq!(failures, 1, "{what}"),
                TOKENS => assert_eq!(failures, 0, "{what}"),
                _ => assert!(failures <= 1, "{what}"),
            }
            assert_eq!(heard.recoveries.len(), failures, "{what}");
            recoveries.extend(&heard.recoveries);
            fleet.mend(&caller, &struck, fault);
        }
    }
    recoveries
}

#[test]
fn a_killed_host_costs_no_word() {
    matrix(Fault::Kill, &[0, 1, 17, TOKENS - 1, TOKENS]);
}

#[test]
fn a_host_that_stalls_costs_no_word() {
    matrix(Fault::Stop, &[0, 1, 30]);
}

#[test]
#[ignore = "takes minutes: every host, every token, every fault"]
fn the_whole_matrix_says_the_same_words() {
    let positions: Vec<u32> = (0..=TOKENS).collect();
    for fault in [Fault::Kill, Fault::Stop] {
        let mut times = matrix(fault, &positions);
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
        println!(
            "{fault:?}: {} positions x {} hosts, all identical; recovery p50 {:.0} ms, p95 {:.0} ms, longest {:.0} ms",
            positions.len(),
            RANGES.len(),
            at(50),
            at(95),
            at(100)
        );
    }
}

#[test]
fn two_failures_in_one_answer_cost_no_word() {
    let mut caller = Caller::new();
    let undisturbed = caller.local();
    let fleet = Fleet::new(&caller, 3);
    let mut struck = Vec::new();
    let heard = caller.ask(&fleet.addresses(), false, |token, route| {
        // The same half twice: its host, and then the one that took over.
        if token == 5 || token == 9 {
            let node = match struck.len() {
                0 => route[0].clone(),
                _ => route[route.len() - 1].clone(),
            };
            fleet.strike(&node, Fault::Kill);
            struck.push(node);
        }
    });
    heard.says(&undisturbed, "two failures");
    assert_ne!(struck[0], struck[1]);
    assert_eq!(heard.recoveries.len(), 2);
    assert!(!heard.local);
}

#[test]
fn without_a_spare_the_answer_goes_on_here() {
    let mut caller = Caller::new();
    let undisturbed = caller.local();
    for position in [0, 1, 20, TOKENS - 1] {
        let fleet = Fleet::new(&caller, 1);
        let heard = caller.ask(&fleet.addresses(), true, |token, route| {
            if token == position {
                fleet.strike(&route[1], Fault::Kill);
            }
        });
        heard.says(&undisturbed, &format!("local fallback at token {position}"));
        assert!(heard.local, "at token {position}");
    }
}

#[test]
fn when_the_spare_dies_as_well_the_answer_goes_on_here() {
    let mut caller = Caller::new();
    let undisturbed = caller.local();
    let fleet = Fleet::new(&caller, 2);
    let heard = caller.ask(&fleet.addresses(), true, |token, route| {
        if token == 8 {
            fleet.strike(&route[0], Fault::Kill);
        }
        if token == 16 {
            fleet.strike(&route[route.len() - 1], Fault::Kill);
        }
    });
    heard.says(&undisturbed, "the spare dies as well");
    assert!(heard.local);
    assert_eq!(heard.degraded.len(), 2);
}

#[test]
fn with_nobody_left_the_answer_ends_with_a_clear_error() {
    let mut caller = Caller::new();
    let undisturbed = caller.local();
    let fleet = Fleet::new(&caller, 1);
    let heard = caller.ask(&fleet.addresses(), false, |token, route| {
        if token == 12 {
            fleet.strike(&route[1], Fault::Kill);
        }
    });
    let error = heard.result.expect_err("nobody can go on");
    assert_eq!(error.code(), "shard_unavailable", "{error}");
    assert_eq!(heard.aborted, ["shard_unavailable"]);
    assert!(!heard.text.is_empty());
    assert!(undisturbed.text.starts_with(&heard.text));
}

/// What a host answers in place of what it computed.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// A value that is not a number.
    Nan,
    /// The rows that it was given, untouched.
    Input,
}

/// The exact engine, but for one step that is answered with a lie.
struct Lies {
    engine: Engine,
    lie: Lie,
    at: u32,
}

impl LayerEngine for Lies {
    type Seq = SeqId;

    fn open(&mut self) -> Result<SeqId, EngineFault> {
        LayerEngine::open(&mut self.engine)
    }
    fn close(&mut self, seq: SeqId) {
        LayerEngine::close(&mut self.engine, seq);
    }
    fn len(&self, seq: SeqId) -> u32 {
        LayerEngine::len(&self.engine, seq)
    }
    fn truncate(&mut self, seq: SeqId, length: u32) -> Result<(), EngineFault> {
        LayerEngine::truncate(&mut self.engine, seq, length)
    }
    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<SeqId>],
        x: &mut [f32],
    ) -> Result<(), EngineFault> {
        let input = x.to_vec();
        LayerEngine::forward(&mut self.engine, layers, spans, x)?;
        if spans.iter().any(|span| span.position == self.at) {
            match self.lie {
                Lie::Nan => x[0] = f32::NAN,
                Lie::Input => x.copy_from_slice(&input),
            }
        }
        Ok(())
    }
    fn kv_page_positions(&self) -> u32 {
        LayerEngine::kv_page_positions(&self.engine)
    }
    fn kv_bytes_per_position(&self) -> u64 {
        LayerEngine::kv_bytes_per_position(&self.engine)
    }
    fn kv_bytes_in_use(&self) -> u64 {
        LayerEngine::kv_bytes_in_use(&self.engine)
    }
    fn weight_bytes(&self) -> u64 {
        LayerEngine::weight_bytes(&self.engine)
    }
}

struct LiesAt(Arc<ModelFile>, Lie, u32);

impl EngineSource for LiesAt {
    type Engine = Lies;

    fn load(&mut self, _: &mut dyn FnMut(LoadPhase, u64, u64)) -> Result<Lies, String> {
        let engine = Engine::load(&self.0, 15..30, &options(), &mut |_, _| {});
        let engine = engine.map_err(|e| e.to_string())?;
        Ok(Lies {
            engine,
            lie: self.1,
            at: self.2,
        })
    }
}

fn liar(caller: &Caller, lie: Lie, at: u32) -> (RunningHost, String) {
    let spec = caller.file.spec();
    let served = Served {
        model_id: caller.wire.model_id.clone(),
        weights: caller.wire.weights.0,
        lo: 15,
        hi: 29,
        total_layers: spec.layers,
        width: spec.width,
        boundary: spec.boundary,
        context: spec.context,
        arithmetic: "canonical-1".into(),
    };
    let mut config = ServeConfig::new("127.0.0.1:0");
    config.admitted = vec![caller.key.id()];
    let key = NodeKey::generate().expect("a key");
    let source = LiesAt(Arc::clone(&caller.file), lie, at);
    let mut progress = |_| {};
    let start = ShardHost::start_on(config, &key, served, source, &mut progress);
    let host = caller.runtime.block_on(start).expect("a host");
    let address = format!("{}#{}", host.local_addr(), key.id());
    (host, address)
}

#[test]
fn a_host_that_lies_once_is_replaced_and_costs_no_word() {
    let mut caller = Caller::new();
    let undisturbed = caller.local();
    let prompt = undisturbed.usage.prompt_tokens;
    let first = caller.host("0-14");
    let spare = caller.host("20-29");
    let bridge = caller.host("15-19");
    for (lie, token, code) in [
        (Lie::Nan, 1, "tensor_nonfinite"),
        (Lie::Nan, 13, "tensor_nonfinite"),
        (Lie::Nan, 40, "tensor_nonfinite"),
        (Lie::Input, 1, "tensor_band"),
        (Lie::Input, 13, "tensor_band"),
    ] {
        let (_host, lies) = liar(&caller, lie, prompt + token - 1);
        // One host reaches the end of the model where two others have to share: it is taken.
        let all = [&first.address, &bridge.address, &spare.address, &lies];
        let all: Vec<String> = all.into_iter().cloned().collect();
        let heard = caller.ask(&all, false, |_, _| {});
        heard.says(&undisturbed, &format!("{lie:?} at token {token}"));
        assert_eq!(heard.degraded, [code]);
        let done = heard.result.expect("an answer");
        assert_eq!(done.route.len(), 3, "two hosts took over for one");
    }
}
