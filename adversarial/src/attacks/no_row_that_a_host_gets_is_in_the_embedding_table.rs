//! The embedding table is public, and a row of it is a word: a host that runs layer 0 looks up
//! what it is sent, and reads prompt and answer. So a caller runs the first layers itself. Here a
//! host keeps every row that it is sent, and looks all of them up.
//!
//! That no row is found is not that nothing can be read: `README.md` says what else a host can do.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use hearthnet_bus::NodeKey;
use hearthnet_model::engine::{Engine, EngineOptions, Head, SeqId};
use hearthnet_model::gguf::Gguf;
use hearthnet_model::sampler::SamplerConfig;
use hearthnet_model::{ModelFile, Tokenizer};
use hearthnet_orchestrator::Cancel;
use hearthnet_orchestrator::chat::{ChatRequest, Conversation, Prompt, TextModel};
use hearthnet_orchestrator::hosts::{Choice, ConnectedHosts};
use hearthnet_orchestrator::link::{HostAddr, HostLink};
use hearthnet_orchestrator::private::PrivateLayers;
use hearthnet_orchestrator::router::GreedyCover;
use hearthnet_orchestrator::sharded::{ModelOnWire, PumpSettings, ShardedBackend};
use hearthnet_shard::{
    EngineFault, EngineSource, LayerEngine, LoadPhase, ServeConfig, Served, ShardHost, Span,
};
use hearthnet_testkit::TinyLlama;
use tokio::runtime::Handle;

use crate::{Bench, Findings, Trouble, Verdict};

const LAYERS: u32 = 4;
const TOKENS: u32 = 12;
const MODEL: &str = "tiny-private";

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 46;

    async fn run(_: &mut Bench) -> Result<Verdict, Trouble> {
        let mut found = Findings::new();
        // One first layer is enough that none is found; none at all, and all of them are: what
        // this attack finds nothing with does find something.
        for private in [2, 1, 0] {
            let runtime = Handle::current();
            let overheard = tokio::task::spawn_blocking(move || overhear(&runtime, private));
            let (rows, known) = overheard
                .await
                .map_err(|error| Trouble::Attacker(error.to_string()))??;
            let what = format!("{private} private first layers, {rows} rows: rows in the table");
            let expected = if private == 0 { rows } else { 0 };
            found.check(what, expected.to_string(), known, rows > 0 && known == expected);
        }
        Ok(found.verdict())
    }
}

/// What a host was sent, in the bits of its values.
type Overheard = Arc<Mutex<Vec<Vec<u32>>>>;

/// Has a caller with so many private layers answer over a host that keeps what it is sent: how
/// many rows that were, and how many of them are in the embedding table.
fn overhear(runtime: &Handle, private: u32) -> Result<(usize, usize), Trouble> {
    let failed = |error: &dyn std::fmt::Display| Trouble::Attacker(error.to_string());
    let tiny = TinyLlama {
        layers: LAYERS,
        ..TinyLlama::default()
    };
    let gguf = Gguf::from_bytes(tiny.bytes()).map_err(|e| failed(&e))?;
    let file = Arc::new(ModelFile::from_gguf(gguf).map_err(|e| failed(&e))?);
    let (spec, options) = (file.spec().clone(), options());
    let weights = file.manifest(&mut |_, _| {}).weights_id();
    let own = PrivateLayers::load(&file, MODEL, (private, 0), 4, &options);
    let own = own.map_err(|e| failed(&e))?;
    let model = ModelOnWire {
        hosted: own.hosted(),
        ..ModelOnWire::new(MODEL, weights, &spec, None)
    };

    let caller = NodeKey::generate().map_err(|e| failed(&e))?;
    let heard = Overheard::default();
    let served = Served {
        model_id: MODEL.into(),
        weights: weights.0,
        lo: 0,
        hi: LAYERS - 1,
        total_layers: LAYERS,
        width: spec.width,
        boundary: spec.boundary,
        context: spec.context,
        arithmetic: "canonical-1".into(),
    };
    let mut config = ServeConfig::new("127.0.0.1:0");
    config.admitted = vec![caller.id()];
    let key = NodeKey::generate().map_err(|e| failed(&e))?;
    let source = Ear(Arc::clone(&file), Arc::clone(&heard));
    let mut progress = |_| {};
    let start = ShardHost::start_on(config, &key, served, source, &mut progress);
    let host = runtime.block_on(start).map_err(|e| failed(&e))?;

    let addr: HostAddr = format!("{}#{}", host.local_addr(), key.id())
        .parse()
        .map_err(|_| failed(&"its address is none"))?;
    let link = HostLink::connect(&addr, &caller, hearthnet_transport::Config::default());
    let link = runtime.block_on(link).map_err(|e| failed(&e))?;
    let hosts = ConnectedHosts {
        links: vec![Arc::new(link)],
        choice: Choice {
            model: model.clone(),
            policy: Arc::new(GreedyCover),
            max_shards: 4,
            own_id: caller.id().to_string(),
            allow_self: false,
            health: hearthnet_orchestrator::health::SharedHealth::default(),
        },
    };
    let (cancel, pump) = (Cancel::default(), PumpSettings::default());
    let sharded = ShardedBackend::open(runtime.clone(), model, Box::new(hosts), pump, &cancel);
    let sharded = sharded.map_err(|e| failed(&e))?;
    let backend = own.around(Box::new(sharded)).map_err(|e| failed(&e))?;
    let head = Head::load(&file, &options).map_err(|e| failed(&e))?;
    let mut table = Vec::new();
    head.embed(&(0..spec.vocab).collect::<Vec<_>>(), &mut table)
        .map_err(|e| failed(&e))?;
    let text = TextModel {
        tokenizer: Tokenizer::from_gguf(file.gguf()).map_err(|e| failed(&e))?,
        template: None,
        head: head.into(),
        context: spec.context,
    };
    let request = ChatRequest {
        prompt: Prompt::Tokens((3..43).collect()),
        sampling: SamplerConfig {
            temperature: 0.0,
            ..SamplerConfig::default()
        },
        max_tokens: TOKENS,
        stop: Vec::new(),
    };
    Conversation::new(backend)
        .answer(&text, &request, Instant::now(), &cancel, &mut |_| {})
        .map_err(|e| failed(&e))?;

    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let table: BTreeSet<Vec<u32>> = table.chunks_exact(spec.width as usize).map(bits).collect();
    let heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
    let known = heard.iter().filter(|row| table.contains(*row)).count();
    Ok((heard.len(), known))
}

fn options() -> EngineOptions {
    EngineOptions {
        threads: 1,
        ..EngineOptions::default()
    }
}

/// An honest engine that keeps what it is sent.
struct Listening {
    engine: Engine,
    heard: Overheard,
}

struct Ear(Arc<ModelFile>, Overheard);

impl EngineSource for Ear {
    type Engine = Listening;

    fn load(&mut self, _: &mut dyn FnMut(LoadPhase, u64, u64)) -> Result<Listening, String> {
        let engine = Engine::load(&self.0, 0..LAYERS, &options(), &mut |_, _| {});
        Ok(Listening {
            engine: engine.map_err(|error| error.to_string())?,
            heard: Arc::clone(&self.1),
        })
    }
}

impl LayerEngine for Listening {
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
        let width = self.engine.spec().width as usize;
        let rows = x.chunks_exact(width);
        let bits = rows.map(|row| row.iter().map(|v| v.to_bits()).collect());
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.extend(bits);
        drop(heard);
        LayerEngine::forward(&mut self.engine, layers, spans, x)
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
