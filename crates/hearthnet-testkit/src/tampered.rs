//! Host engine that computes exactly, and then lets a test change its output.

use std::ops::Range;
use std::sync::Arc;

use hearthnet_engine::{ARITHMETIC, Engine, SeqId};
use hearthnet_files::{ModelFile, WeightsId};
use hearthnet_shard::{
    EngineSource, Footprint, LayerEngine, LoadFault, Served, Span, StartProgress, StreamFault,
};

use crate::one_thread;

/// Rows on their way through a host.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)] // Only made here.
pub struct Passing<'a> {
    /// Sequences of the rows, one after another.
    pub spans: &'a [Span<SeqId>],
    /// Input of the host.
    pub sent: &'a [f32],
    /// Output of the host, which the test may change.
    pub rows: &'a mut [f32],
    /// If set, the streams fail with this error instead.
    pub fault: &'a mut Option<StreamFault>,
}

/// Inspects or changes the rows of a batch.
pub type Tamper = Box<dyn FnMut(Passing<'_>) + Send>;

/// Exact engine whose output a [`Tamper`] may change.
#[allow(missing_debug_implementations)] // A closure has none.
pub struct Tampered {
    engine: Engine,
    tamper: Tamper,
}

/// Layers of a file for a host that tampers.
#[allow(missing_debug_implementations)] // A closure has none.
pub struct TamperedSource {
    file: Arc<ModelFile>,
    layers: Range<u32>,
    /// Moved into the engine by `load`.
    tamper: Option<Tamper>,
}

impl TamperedSource {
    pub fn new(file: &Arc<ModelFile>, layers: Range<u32>, tamper: Tamper) -> Self {
        Self {
            file: Arc::clone(file),
            layers,
            tamper: Some(tamper),
        }
    }

    /// Description that the host advertises: these layers of the model `model_id`, in the exact
    /// arithmetic.
    pub fn served(&self, model_id: &str, weights: WeightsId) -> Served {
        let spec = self.file.spec();
        Served {
            model_id: model_id.to_owned(),
            weights: weights.0,
            lo: self.layers.start,
            hi: self.layers.end - 1,
            total_layers: spec.layers,
            rows: spec.row_shape(),
            boundary: spec.boundary,
            context: spec.context,
            arithmetic: ARITHMETIC.into(),
        }
    }
}

impl EngineSource for TamperedSource {
    type Engine = Tampered;

    fn load(&mut self, _: &mut dyn FnMut(StartProgress)) -> Result<Tampered, LoadFault> {
        let layers = self.layers.clone();
        let engine = Engine::load(&self.file, layers, &one_thread(), &mut |_, _| {})?;
        let tamper = self.tamper.take();
        let tamper = tamper.ok_or_else(|| "loaded once only".to_owned())?;
        Ok(Tampered { engine, tamper })
    }
}

impl LayerEngine for Tampered {
    type Seq = SeqId;

    fn open(&mut self) -> Result<SeqId, StreamFault> {
        LayerEngine::open(&mut self.engine)
    }
    fn fork(&mut self, seq: SeqId, length: u32) -> Result<SeqId, StreamFault> {
        LayerEngine::fork(&mut self.engine, seq, length)
    }
    fn close(&mut self, seq: SeqId) {
        LayerEngine::close(&mut self.engine, seq);
    }
    fn len(&self, seq: SeqId) -> u32 {
        LayerEngine::len(&self.engine, seq)
    }
    fn truncate(&mut self, seq: SeqId, length: u32) -> Result<u32, StreamFault> {
        LayerEngine::truncate(&mut self.engine, seq, length)
    }
    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<SeqId>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        let sent = x.to_vec();
        LayerEngine::forward(&mut self.engine, layers, spans, x)?;
        let mut fault = None;
        (self.tamper)(Passing {
            spans,
            sent: &sent,
            rows: x,
            fault: &mut fault,
        });
        fault.map_or(Ok(()), Err)
    }
    fn weight_bytes(&self) -> u64 {
        LayerEngine::weight_bytes(&self.engine)
    }
    fn footprint(&self) -> Footprint {
        LayerEngine::footprint(&self.engine)
    }
    fn kv_bytes_in_use(&self) -> u64 {
        LayerEngine::kv_bytes_in_use(&self.engine)
    }
}
