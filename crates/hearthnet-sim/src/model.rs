//! The tiny model of the simulation, and what a run without faults computes with it.

use std::sync::Arc;

use hearthnet_engine::{Engine, Head, SeqId, Span};
use hearthnet_files::{BoundaryDtype, ModelFile, WeightsId};
use hearthnet_orchestrator::hosts::ModelOnWire;
use hearthnet_testkit::{TinyLlama, one_thread};

use crate::random::Random;

/// Layers of the model.
pub const LAYERS: u32 = 4;
/// Tokens of an answer.
pub const ANSWER: usize = 20;
/// Number of prompts, each of another length.
const PROMPTS: u64 = 4;
const MODEL_ID: &str = "tiny";

/// A prompt, and the answer that a run without faults gives.
#[derive(Debug)]
pub struct Transcript {
    pub prompt: Vec<u32>,
    pub answer: Vec<u32>,
    /// Input rows of each layer and, last, output rows of the last one, by position.
    pub rows: Vec<Vec<Vec<f32>>>,
}

/// The model. Loaded once per process, and used by all runs.
pub struct Model {
    pub file: Arc<ModelFile>,
    /// Contents of the file.
    pub bytes: Vec<u8>,
    pub weights: WeightsId,
    pub on_wire: ModelOnWire,
    pub head: Head,
    pub transcripts: Vec<Transcript>,
}

impl Model {
    /// # Panics
    /// If the tiny model cannot be loaded: the simulation cannot begin.
    #[allow(clippy::expect_used)]
    pub fn load() -> Self {
        let tiny = TinyLlama {
            layers: LAYERS,
            ..TinyLlama::default()
        };
        let (file, bytes) = (Arc::new(tiny.file()), tiny.bytes());
        let weights = file.manifest(&mut |_, _| {}).weights_id();
        let head = Head::load(&file, &one_thread()).expect("a head");
        let transcripts = (0..PROMPTS)
            .map(|number| Transcript::compute(&file, &head, number).expect("finite rows"))
            .collect();
        Self {
            on_wire: ModelOnWire::new(MODEL_ID, weights, file.spec(), None),
            file,
            bytes,
            weights,
            head,
            transcripts,
        }
    }

    pub fn model_id(&self) -> &str {
        MODEL_ID
    }

    pub fn width(&self) -> usize {
        self.file.spec().width as usize
    }

    pub fn boundary(&self) -> BoundaryDtype {
        self.file.spec().boundary
    }

    /// The most probable token behind a row of the last layer.
    pub fn next_token(&self, row: &[f32]) -> Option<u32> {
        let mut logits = Vec::new();
        self.head.logits(row, &mut logits).ok()?;
        best(&logits)
    }

    /// True if some transcript has these rows as inputs of `layer` from `position` on. Other rows are
    /// accepted if `is_lie` says so, which gets the position and the row.
    pub fn knows(
        &self,
        layer: u32,
        position: u32,
        rows: &[f32],
        is_lie: impl Fn(u32, &[f32]) -> bool,
    ) -> bool {
        let width = self.width();
        self.transcripts.iter().any(|one| {
            let known = one.rows.get(layer as usize);
            let known = known.and_then(|rows| rows.get(position as usize..));
            known.is_some_and(|known| {
                known.len() >= rows.len() / width
                    && (position..)
                        .zip(rows.chunks(width).zip(known))
                        .all(|(position, (row, known))| row == known || is_lie(position, row))
            })
        })
    }
}

/// Token with the greatest logit.
fn best(logits: &[f32]) -> Option<u32> {
    let best = (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
    best.map(|(token, _)| token)
}

impl Transcript {
    /// Computes one position after the other, each layer on an engine of its own: nothing of this
    /// depends on batches, chunks or spans.
    fn compute(file: &ModelFile, head: &Head, number: u64) -> Option<Self> {
        let mut random = Random::new(number, 43);
        let length = 12 + 14 * number;
        let prompt: Vec<u32> = (0..length).map(|_| random.below(256) as u32).collect();
        let mut layers: Vec<(Engine, SeqId)> = Vec::new();
        for layer in 0..LAYERS {
            let engine = Engine::load(file, layer..layer + 1, &one_thread(), &mut |_, _| {});
            let mut engine = engine.ok()?;
            let seq = engine.open().ok()?;
            layers.push((engine, seq));
        }
        let mut rows = vec![Vec::new(); layers.len() + 1];
        let mut answer = Vec::new();
        let mut logits = Vec::new();
        for position in 0..prompt.len() + ANSWER {
            let token = match prompt.get(position) {
                Some(token) => *token,
                None => *answer.last()?,
            };
            let mut row = Vec::new();
            head.embed(&[token], &mut row).ok()?;
            for ((engine, seq), inputs) in layers.iter_mut().zip(&mut rows) {
                inputs.push(row.clone());
                let span = Span::new(*seq, position as u32, 1);
                engine.forward(&[span], &mut row).ok()?;
            }
            head.logits(&row, &mut logits).ok()?;
            rows.last_mut()?.push(row);
            if position + 1 >= prompt.len() {
                answer.push(best(&logits)?);
            }
        }
        answer.truncate(ANSWER);
        Some(Self {
            prompt,
            answer,
            rows,
        })
    }
}
