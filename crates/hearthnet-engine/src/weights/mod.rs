//! Loading and repacking of the weights of a layer range.

mod feed_forward;

use std::ops::Range;

use hearthnet_files::blocks::{WeightType, all_finite};
use hearthnet_files::spec::{BlockSpec, DeltaSpec, LayerTensor, Mixer, ModelSpec, Rotation};
use hearthnet_files::{ModelError, ModelFile, TensorType, TensorView};

use crate::error::LoadError;
use crate::kernels::{ActForm, Arena, LANES, Matrix, PackError, Packed};
use crate::kv::{KvPlace, places};
pub(super) use feed_forward::{
    Expert, ExpertBias, ExpertNorms, FeedForward, Ffn, Router, SharedExpert,
};

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    /// Matrices that read the normalised residual stream. With latent attention, their outputs are
    /// the low-rank rows.
    pub(super) qkv: Qkv,
    pub(super) latent: Option<Latent>,
    /// Gated delta rule instead of attention. `qkv` then gives the inputs of the convolution, the
    /// gate of the output, and the scores of each head; `attn_output` is the output projection.
    pub(super) delta: Option<Delta>,
    /// Width of the queries in `qkv`.
    pub(super) q: usize,
    /// Width of the keys in `qkv`, and of the values; 0 for a layer that uses those of another.
    pub(super) kv: usize,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    /// Ones: the norm of the values has no weights.
    pub(super) v_norm: Option<Vec<f32>>,
    /// Whether the values are the keys before norm and RoPE.
    pub(super) keys_as_values: bool,
    pub(super) rotation: Rotation,
    /// Sliding window in positions; `None` for all positions.
    pub(super) window: Option<usize>,
    /// Attention sink of each query head.
    pub(super) sinks: Option<Vec<f32>>,
    pub(super) attn_output: Packed,
    pub(super) attn_output_bias: Option<Vec<f32>>,
    pub(super) attn_post_norm: Option<Vec<f32>>,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) feed_forward: FeedForward,
    pub(super) ffn_post_norm: Option<Vec<f32>>,
    pub(super) per_layer: Option<PerLayer>,
    /// Factor of the layer's output.
    pub(super) scale: Option<f32>,
    /// Bytes of memory of all weights.
    pub(super) bytes: usize,
    /// Keys and values that the layer uses.
    pub(super) place: KvPlace,
    /// First value of the layer in the state of a sequence.
    pub(super) state: usize,
}

/// Use of the per-layer input of a layer.
#[derive(Debug)]
pub(super) struct PerLayer {
    pub(super) gate: Packed,
    pub(super) output: Packed,
    pub(super) norm: Vec<f32>,
}

/// Weights of a gated delta rule, beside its matrices.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) spec: DeltaSpec,
    /// `[positions][channels]`, oldest position first.
    pub(super) convolution: Vec<f32>,
    pub(super) decay: Vec<f32>,
    pub(super) decay_bias: Vec<f32>,
    pub(super) norm: Vec<f32>,
    /// For each value head, the columns of its scores of correction and decay.
    pub(super) scores: Vec<(usize, usize)>,
}

/// Query, key and value matrices. Their outputs form one row.
#[derive(Debug)]
pub(super) struct Qkv {
    /// A fused matrix if types and shapes allow it, otherwise three (latent attention: two).
    pub(super) parts: Vec<Packed>,
    pub(super) form: ActForm,
    pub(super) bias: Option<Vec<f32>>,
}

/// Norms and up-projections of the low-rank rows of latent attention.
#[derive(Debug)]
pub(super) struct Latent {
    pub(super) q_norm: Vec<f32>,
    pub(super) kv_norm: Vec<f32>,
    /// Up-projection to queries.
    pub(super) q: Packed,
    /// Up-projection to keys and values.
    pub(super) kv: Packed,
}

impl Qkv {
    fn of(parts: Vec<Packed>) -> Self {
        let form = ActForm::of(&parts);
        Self {
            parts,
            form,
            bias: None,
        }
    }

    pub(super) fn panels(&self) -> usize {
        self.parts.iter().map(Packed::panels).sum()
    }
}

impl Delta {
    /// Values of a row from `qkv`: inputs of the convolution, gate, scores.
    pub(super) fn row(spec: &DeltaSpec) -> usize {
        (spec.channels() + spec.values() + 2 * spec.value_heads) as usize
    }
}

impl Latent {
    pub(super) fn panels(&self) -> usize {
        self.q.panels() + self.kv.panels()
    }
}

impl Layer {
    /// Bytes of weights that one row reads, if it is routed to `used` experts.
    pub(super) fn token_bytes(&self, used: usize) -> usize {
        match &self.feed_forward {
            FeedForward::Dense { .. } => self.bytes,
            FeedForward::Experts { experts, bytes, .. } => {
                let idle = experts.len().saturating_sub(used);
                self.bytes - bytes / experts.len().max(1) * idle
            }
        }
    }
}

/// Repacks tensors of a file into an arena of the right size, and releases the file's memory pages.
pub(super) struct Loader<'a> {
    file: &'a ModelFile,
    arena: Arena,
    /// Threads that repack the panels of a matrix in parallel.
    pool: rayon::ThreadPool,
    /// Bytes of memory of the weights loaded so far.
    pub(super) bytes: usize,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Loader<'a> {
    /// A loader with memory for `packed` bytes of matrices. It reports progress out of `total`
    /// bytes of the file.
    pub(super) fn new(
        file: &'a ModelFile,
        threads: usize,
        packed: usize,
        total: u64,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let arena = Arena::with_capacity(packed).map_err(|_| LoadError::OutOfMemory(packed))?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.thread_name(|_| "load".to_owned()).build();
        let pool = pool.map_err(|error| LoadError::Threads(std::io::Error::other(error)))?;
        progress(0, total);
        Ok(Self {
            file,
            arena,
            pool,
            bytes: 0,
            done: 0,
            total,
            progress,
        })
    }

    /// Loads the layers of a range, which must lie within the model.
    pub(super) fn layers(
        file: &'a ModelFile,
        threads: usize,
        range: Range<u32>,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Layer>, LoadError> {
        let mut packed = 0usize;
        for layer in range.clone() {
            let tensors = file.family().rules(file.spec().block(layer));
            for rule in tensors.filter(|rule| rule.is_matrix()) {
                let view = file.layer_tensor(layer, rule.tensor)?;
                for matrix in matrices(file.spec(), &view, rule.tensor) {
                    packed = packed.saturating_add(packed_bytes(&matrix)?);
                }
            }
        }
        let total = range.clone().map(|layer| file.layer_bytes(layer)).sum();
        let mut loader = Self::new(file, threads, packed, total, progress)?;
        let mut layers = Vec::with_capacity(range.len());
        let places = places(file.spec(), range.clone());
        let mut state = 0;
        for (layer, place) in range.zip(places) {
            layers.push(Layer {
                place,
                state,
                ..loader.layer(layer)?
            });
            let block = file.spec().block(layer);
            state += block.state().total() as usize;
            file.check_copied(file.layer_tensors(layer))?;
        }
        Ok(layers)
    }

    fn layer(&mut self, layer: u32) -> Result<Layer, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let block = file.spec().block(layer);
        let get = |tensor| file.layer_tensor(layer, tensor);
        let before = self.bytes;
        let attn_norm = self.vector(&get(T::AttnNorm)?)?;
        let delta = match block.mixer {
            Mixer::Delta(spec) => Some(self.delta(layer, spec)?),
            _ => None,
        };
        let mut qkv = if delta.is_some() {
            let mut views = vec![get(T::DeltaQkv)?, get(T::DeltaGate)?];
            for scores in [T::DeltaBetaAlpha, T::DeltaBeta, T::DeltaAlpha] {
                if file.has(layer, scores) {
                    views.push(get(scores)?);
                }
            }
            Qkv::of(self.stacks(&views)?)
        } else if file.has(layer, T::AttnQkv) {
            Qkv::of(vec![self.matrix(&get(T::AttnQkv)?)?])
        } else if file.has(layer, T::LatentQ) {
            let (q, kv) = (get(T::LatentQ)?, get(T::LatentKv)?);
            Qkv::of(vec![self.matrix(&q)?, self.matrix(&kv)?])
        } else {
            let q = matrices(file.spec(), &get(T::AttnQ)?, T::AttnQ);
            // The gates of all heads come last.
            let mut views: Vec<_> = q.iter().step_by(gated(&block)).copied().collect();
            for tensor in [T::AttnK, T::AttnV] {
                if file.has(layer, tensor) {
                    views.push(get(tensor)?);
                }
            }
            views.extend(q.iter().skip(1).step_by(2).filter(|_| q.len() > 1));
            Qkv::of(self.stacks(&views)?)
        };
        let latent = match file.has(layer, T::LatentQ) {
            true => Some(Latent {
                q_norm: self.vector(&get(T::LatentQNorm)?)?,
                kv_norm: self.vector(&get(T::LatentKvNorm)?)?,
                q: self.matrix(&get(T::LatentQUp)?)?,
                kv: self.matrix(&get(T::LatentKvUp)?)?,
            }),
            false => None,
        };
        if file.has(layer, T::AttnQBias) {
            let mut bias = Vec::new();
            for tensor in [T::AttnQBias, T::AttnKBias, T::AttnVBias] {
                bias.append(&mut self.vector(&get(tensor)?)?);
            }
            qkv.bias = Some(bias);
        }
        let kv = match block.has_keys() {
            true => block.kv_width() as usize,
            false => 0,
        };
        let value_norm = block.model.attention.value_norm && kv > 0;
        Ok(Layer {
            attn_norm,
            qkv,
            latent,
            delta,
            q: block.query_width() as usize,
            kv,
            q_norm: self.optional(layer, T::AttnQNorm)?,
            k_norm: self.optional(layer, T::AttnKNorm)?,
            v_norm: value_norm.then(|| vec![1.0; block.head_dim as usize]),
            keys_as_values: block.has_keys() && !block.has_values(),
            rotation: block.rotation,
            window: block.window.map(|positions| positions as usize),
            sinks: self.optional(layer, T::AttnSinks)?,
            attn_output: match file.has(layer, T::DeltaOutput) {
                true => self.matrix(&get(T::DeltaOutput)?)?,
                false => self.matrix(&get(T::AttnOutput)?)?,
            },
            attn_output_bias: self.optional(layer, T::AttnOutputBias)?,
            attn_post_norm: self.optional(layer, T::AttnPostNorm)?,
            ffn_norm: self.vector(&get(T::FfnNorm)?)?,
            feed_forward: self.feed_forward(layer)?,
            ffn_post_norm: self.optional(layer, T::FfnPostNorm)?,
            per_layer: match file.has(layer, T::PerLayerGate) {
                true => Some(PerLayer {
                    gate: self.matrix(&get(T::PerLayerGate)?)?,
                    output: self.matrix(&get(T::PerLayerOutput)?)?,
                    norm: self.vector(&get(T::PerLayerNorm)?)?,
                }),
                false => None,
            },
            scale: self
                .optional(layer, T::BlockScale)?
                .and_then(|scale| scale.first().copied()),
            bytes: self.bytes - before,
            place: KvPlace::default(),
            state: 0,
        })
    }

    fn delta(&mut self, layer: u32, spec: DeltaSpec) -> Result<Delta, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let get = |tensor| file.layer_tensor(layer, tensor);
        let stored = self.vector(&get(T::DeltaConvolution)?)?;
        let (positions, heads) = (spec.convolution as usize, spec.value_heads as usize);
        let convolution = (0..positions).flat_map(|position| {
            let weights = stored.chunks_exact(positions);
            weights.map(move |weights| weights[position])
        });
        let each = heads / spec.key_heads as usize;
        let first = (spec.channels() + spec.values()) as usize;
        let scores = (0..heads).map(|head| match file.has(layer, T::DeltaBetaAlpha) {
            true => {
                let beta = first + head / each * 2 * each + head % each;
                (beta, beta + each)
            }
            false => (first + head, first + heads + head),
        });
        Ok(Delta {
            spec,
            convolution: convolution.collect(),
            decay: self.vector(&get(T::DeltaDecay)?)?,
            decay_bias: self.vector(&get(T::DeltaDecayBias)?)?,
            norm: self.vector(&get(T::DeltaNorm)?)?,
            scores: scores.collect(),
        })
    }

    /// Loads a vector that the model may lack.
    fn optional(&mut self, layer: u32, which: LayerTensor) -> Result<Option<Vec<f32>>, LoadError> {
        match self.file.has(layer, which) {
            true => Ok(Some(self.vector(&self.file.layer_tensor(layer, which)?)?)),
            false => Ok(None),
        }
    }

    /// Loads matrices that read the same input: neighbours as one where types and shapes allow it.
    fn stacks(&mut self, views: &[TensorView<'_>]) -> Result<Vec<Packed>, LoadError> {
        let stacks = |a: &TensorView<'_>, b: &TensorView<'_>| {
            a.dtype == b.dtype && a.rows().is_multiple_of(LANES)
        };
        let stacks = views.chunk_by(stacks);
        stacks
            .map(|views| {
                let views: Vec<_> = views.iter().collect();
                self.pack(&views, Packed::pack_stacked)
            })
            .collect()
    }

    pub(super) fn matrix(&mut self, view: &TensorView<'_>) -> Result<Packed, LoadError> {
        self.pack(&[view], Packed::pack_stacked)
    }

    /// Loads several matrices as one.
    fn pack(
        &mut self,
        views: &[&TensorView<'_>],
        pack: impl FnOnce(&mut Arena, &[Matrix<'_>]) -> Result<Packed, PackError> + Send,
    ) -> Result<Packed, LoadError> {
        let matrices = views.iter().map(|view| matrix(view));
        let matrices = matrices.collect::<Result<Vec<_>, _>>()?;
        let arena = &mut self.arena;
        let packed = self.pool.install(|| pack(arena, &matrices));
        let packed = packed.map_err(|source| pack_error(views[0], source))?;
        if let Some(view) = packed.not_finite().and_then(|part| views.get(part)) {
            return Err(LoadError::NotFinite(view.name.to_owned()));
        }
        self.bytes += packed.bytes();
        views.iter().for_each(|view| self.step(view));
        Ok(packed)
    }

    /// Loads a vector. [`ModelFile`] accepts only F32 vectors.
    pub(super) fn vector(&mut self, view: &TensorView<'_>) -> Result<Vec<f32>, LoadError> {
        if view.dtype != TensorType::F32 {
            return Err(LoadError::Unsupported(format!(
                "{:?} is {}",
                view.name, view.dtype
            )));
        }
        if !all_finite(WeightType::F32, view.bytes) {
            return Err(LoadError::NotFinite(view.name.to_owned()));
        }
        let (values, _) = view.bytes.as_chunks::<4>();
        let values = values.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let values: Vec<f32> = values.collect();
        self.bytes += size_of_val(&values[..]);
        self.step(view);
        Ok(values)
    }

    /// Releases a loaded tensor's file pages and reports progress.
    fn step(&mut self, view: &TensorView<'_>) {
        self.file.gguf().release(view.bytes);
        self.done += view.bytes.len() as u64;
        (self.progress)(self.done, self.total);
    }
}

/// Splits a tensor into its matrices: those of all experts, gate and up, or a single one.
fn matrices<'a>(
    spec: &ModelSpec,
    view: &TensorView<'a>,
    which: LayerTensor,
) -> Vec<TensorView<'a>> {
    use LayerTensor as T;
    view.parts(match which {
        T::ExpertGate | T::ExpertUp | T::ExpertDown => {
            spec.experts.map_or(1, |experts| experts.count as usize)
        }
        T::ExpertGateUp => spec.experts.map_or(1, |experts| 2 * experts.count as usize),
        T::FfnGateUp => 2,
        // The queries of a head, then its gates.
        T::AttnQ if spec.attention.output_gate => 2 * spec.heads as usize,
        _ => 1,
    })
}

/// Step between the query matrices of two heads in a tensor that may also have gates.
fn gated(block: &BlockSpec<'_>) -> usize {
    1 + usize::from(block.model.attention.output_gate)
}

pub(super) fn packed_bytes(view: &TensorView<'_>) -> Result<usize, LoadError> {
    Packed::bytes_for(weight_type(view)?, view.rows(), view.cols())
        .map_err(|source| pack_error(view, source))
}

fn matrix<'a>(view: &TensorView<'a>) -> Result<Matrix<'a>, LoadError> {
    let weight_type = weight_type(view)?;
    Ok(Matrix {
        weight_type,
        rows: view.rows(),
        cols: view.cols(),
        bytes: view.bytes,
    })
}

fn weight_type(view: &TensorView<'_>) -> Result<WeightType, LoadError> {
    WeightType::of(view.dtype).ok_or_else(|| {
        LoadError::Model(ModelError::TensorType {
            name: view.name.to_owned(),
            dtype: view.dtype,
            supported: TensorType::names(TensorType::supported()),
        })
    })
}

fn pack_error(view: &TensorView<'_>, source: PackError) -> LoadError {
    LoadError::Pack {
        tensor: view.name.to_owned(),
        source,
    }
}
