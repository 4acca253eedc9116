//! Loading and repacking of the weights of a layer range.

use std::ops::Range;

use hearthnet_files::blocks::{WeightType, all_finite};
use hearthnet_files::spec::{
    Activation, BlockSpec, DeltaSpec, FeedForwardSpec, LayerTensor, MambaSpec, Mixer, ModelSpec,
};
use hearthnet_files::{ModelFile, TensorType, TensorView};

use super::error::LoadError;
use crate::kernels::{Arena, LANES, Matrix, PackError, Packed};
use crate::layer::{
    Delta, Expert, ExpertBias, ExpertNorms, FeedForward, Ffn, Latent, LatentUp, Layer, LayerNorm,
    Mamba, PerLayer, Qkv, Recurrence, Router, RouterVectors, SharedExpert, ShortConvolution,
};
use crate::matrices::{gated, layer_bytes, matrices, matrix, pack_error};
use crate::memory::{KvPlace, places};

/// Checks that layers are a part of a model that can be loaded by itself.
pub(super) fn check_layers(spec: &ModelSpec, range: &Range<u32>) -> Result<(), LoadError> {
    if range.start >= range.end || range.end > spec.layers {
        return Err(LoadError::Layers {
            range: range.clone(),
            layers: spec.layers,
        });
    }
    Ok(spec.check_range(range)?)
}

/// Repacks tensors of a file into an arena of the right size, and releases the file's memory pages.
pub(super) struct Loader<'a> {
    file: &'a ModelFile,
    pub(super) arena: Arena,
    /// Threads that repack the panels of a matrix in parallel.
    pool: rayon::ThreadPool,
    /// Whether the panels of gate and up matrices alternate, as the fused kernel reads them.
    pub(super) pairs: bool,
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
            pairs: true,
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
            packed = packed.saturating_add(layer_bytes(file, layer)?);
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

    pub(super) fn layer(&mut self, layer: u32) -> Result<Layer, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let block = file.spec().block(layer);
        let before = self.bytes;
        let attn_norm = self.optional(layer, T::AttnNorm)?;
        let recurrence = self.recurrence(&block)?;
        let mut qkv = Qkv::of(self.qkv(&block)?);
        let latent = match file.has(layer, T::LatentKv) {
            true => Some(self.latent(layer)?),
            false => None,
        };
        if file.has(layer, T::AttnQBias) {
            let mut bias = Vec::new();
            for tensor in [T::AttnQBias, T::AttnKBias, T::AttnVBias] {
                bias.append(&mut self.layer_vector(layer, tensor)?);
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
            recurrence,
            q: (block.model.heads * block.key_width()) as usize,
            kv,
            q_norm: self.optional(layer, T::AttnQNorm)?,
            k_norm: self.optional(layer, T::AttnKNorm)?,
            v_norm: value_norm.then(|| vec![1.0; block.head_dim as usize]),
            keys_as_values: block.has_keys() && !block.has_values(),
            rotation: block.rotation,
            window: block.window.map(|positions| positions as usize),
            sinks: self.optional(layer, T::AttnSinks)?,
            attn_output: {
                let outputs = [
                    T::AttnOutput,
                    T::DeltaOutput,
                    T::ConvolutionOutput,
                    T::MambaOutput,
                ];
                let mut outputs = outputs.into_iter();
                match outputs.find(|tensor| file.has(layer, *tensor)) {
                    Some(output) => Some(self.layer_matrix(layer, output)?),
                    None => None,
                }
            },
            attn_output_bias: self.optional(layer, T::AttnOutputBias)?,
            attn_post_norm: self.optional(layer, T::AttnPostNorm)?,
            attn_sum_norm: self.layer_norm(layer, T::AttnSumNorm, T::AttnSumNormBias)?,
            ffn_norm: self.optional(layer, T::FfnNorm)?,
            feed_forward: self.feed_forward(layer)?,
            ffn_bias: self.optional(layer, T::FfnDownBias)?,
            ffn_post_norm: self.optional(layer, T::FfnPostNorm)?,
            ffn_sum_norm: self.layer_norm(layer, T::FfnSumNorm, T::FfnSumNormBias)?,
            per_layer: match file.has(layer, T::PerLayerGate) {
                true => Some(PerLayer {
                    gate: self.layer_matrix(layer, T::PerLayerGate)?,
                    output: self.layer_matrix(layer, T::PerLayerOutput)?,
                    norm: self.layer_vector(layer, T::PerLayerNorm)?,
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

    fn recurrence(&mut self, block: &BlockSpec<'_>) -> Result<Option<Recurrence>, LoadError> {
        let layer = block.layer;
        Ok(match block.mixer {
            Mixer::Delta(spec) => Some(Recurrence::Delta(self.delta(layer, spec)?)),
            Mixer::Convolution { positions } => {
                let (which, width) = (LayerTensor::Convolution, block.model.width);
                let convolution = self.convolution(layer, which, positions, width)?;
                Some(Recurrence::Convolution(convolution))
            }
            Mixer::Mamba(spec) => Some(Recurrence::Mamba(self.mamba(layer, spec)?)),
            _ => None,
        })
    }

    /// Loads the matrices that read the input of a layer with attention or a recurrence.
    fn qkv(&mut self, block: &BlockSpec<'_>) -> Result<Vec<Packed>, LoadError> {
        use LayerTensor as T;
        let (file, layer) = (self.file, block.layer);
        let get = |tensor| file.layer_tensor(layer, tensor);
        match block.mixer {
            Mixer::None => Ok(Vec::new()),
            Mixer::Convolution { .. } => Ok(vec![self.layer_matrix(layer, T::ConvolutionInput)?]),
            Mixer::Mamba(_) => Ok(vec![self.layer_matrix(layer, T::MambaInput)?]),
            Mixer::Delta(_) => {
                let mut views = vec![get(T::DeltaQkv)?, get(T::DeltaGate)?];
                for scores in [T::DeltaBetaAlpha, T::DeltaBeta, T::DeltaAlpha] {
                    views.extend(self.find(layer, scores)?);
                }
                self.stacks(&views)
            }
            _ if file.has(layer, T::AttnQkv) => Ok(vec![self.layer_matrix(layer, T::AttnQkv)?]),
            _ if file.has(layer, T::LatentKv) => {
                let q = match file.has(layer, T::LatentQ) {
                    true => T::LatentQ,
                    false => T::AttnQ,
                };
                Ok(vec![
                    self.layer_matrix(layer, q)?,
                    self.layer_matrix(layer, T::LatentKv)?,
                ])
            }
            _ => {
                let q = matrices(file.spec(), &get(T::AttnQ)?, T::AttnQ);
                // The gates of all heads come last.
                let mut views: Vec<_> = q.iter().step_by(gated(block)).copied().collect();
                for tensor in [T::AttnK, T::AttnV] {
                    views.extend(self.find(layer, tensor)?);
                }
                views.extend(q.iter().skip(1).step_by(2).filter(|_| q.len() > 1));
                views.extend(self.find(layer, T::AttnGate)?);
                self.stacks(&views)
            }
        }
    }

    fn latent(&mut self, layer: u32) -> Result<Latent, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let queries = match file.has(layer, T::LatentQ) {
            true => Some((
                self.layer_vector(layer, T::LatentQNorm)?,
                self.layer_matrix(layer, T::LatentQUp)?,
            )),
            false => None,
        };
        let kv_norm = self.layer_vector(layer, T::LatentKvNorm)?;
        let mut heads = |tensor| {
            let views = matrices(file.spec(), &file.layer_tensor(layer, tensor)?, tensor);
            let heads = views.iter().map(|view| self.matrix(view));
            heads.collect::<Result<Vec<_>, LoadError>>()
        };
        let up = match file.has(layer, T::LatentKeyUp) {
            true => LatentUp::Absorbed {
                keys: heads(T::LatentKeyUp)?,
                values: heads(T::LatentValueUp)?,
            },
            false => LatentUp::Expanded(self.layer_matrix(layer, T::LatentKvUp)?),
        };
        Ok(Latent {
            queries,
            kv_norm,
            up,
        })
    }

    fn delta(&mut self, layer: u32, spec: DeltaSpec) -> Result<Delta, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let heads = spec.value_heads as usize;
        let (which, channels) = (T::DeltaConvolution, spec.channels());
        let convolution = self.convolution(layer, which, spec.convolution, channels)?;
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
            convolution,
            decay: self.layer_vector(layer, T::DeltaDecay)?,
            decay_bias: self.layer_vector(layer, T::DeltaDecayBias)?,
            norm: self.layer_vector(layer, T::DeltaNorm)?,
            scores: scores.collect(),
        })
    }

    fn mamba(&mut self, layer: u32, spec: MambaSpec) -> Result<Mamba, LoadError> {
        use LayerTensor as T;
        let (which, channels) = (T::MambaConvolution, spec.channels());
        Ok(Mamba {
            spec,
            convolution: self.convolution(layer, which, spec.convolution, channels)?,
            convolution_bias: self.layer_vector(layer, T::MambaConvolutionBias)?,
            step_bias: self.layer_vector(layer, T::MambaStepBias)?,
            decay: self.layer_vector(layer, T::MambaDecay)?,
            skip: self.layer_vector(layer, T::MambaSkip)?,
            norm: self.layer_vector(layer, T::MambaNorm)?,
        })
    }

    /// Loads the weights of a convolution, position by position.
    fn convolution(
        &mut self,
        layer: u32,
        which: LayerTensor,
        positions: u32,
        width: u32,
    ) -> Result<ShortConvolution, LoadError> {
        let (positions, width) = (positions as usize, width as usize);
        let stored = self.layer_vector(layer, which)?;
        let weights = (0..positions).flat_map(|position| {
            let channels = stored.chunks_exact(positions);
            channels.map(move |weights| weights[position])
        });
        Ok(ShortConvolution {
            positions,
            width,
            weights: weights.collect(),
        })
    }

    /// A tensor that the model may lack.
    fn find(&self, layer: u32, which: LayerTensor) -> Result<Option<TensorView<'a>>, LoadError> {
        let has = self.file.has(layer, which);
        let found = has.then(|| self.file.layer_tensor(layer, which));
        Ok(found.transpose()?)
    }

    /// Loads a vector that the model may lack.
    fn optional(&mut self, layer: u32, which: LayerTensor) -> Result<Option<Vec<f32>>, LoadError> {
        let found = self.find(layer, which)?;
        found.map(|view| self.vector(&view)).transpose()
    }

    fn layer_vector(&mut self, layer: u32, which: LayerTensor) -> Result<Vec<f32>, LoadError> {
        self.vector(&self.file.layer_tensor(layer, which)?)
    }

    fn layer_matrix(&mut self, layer: u32, which: LayerTensor) -> Result<Packed, LoadError> {
        self.matrix(&self.file.layer_tensor(layer, which)?)
    }

    /// Loads a LayerNorm that the model may lack.
    fn layer_norm(
        &mut self,
        layer: u32,
        weight: LayerTensor,
        bias: LayerTensor,
    ) -> Result<Option<LayerNorm>, LoadError> {
        let found = (self.optional(layer, weight)?, self.optional(layer, bias)?);
        Ok(match found {
            (Some(weight), Some(bias)) => Some(LayerNorm { weight, bias }),
            _ => None,
        })
    }

    fn feed_forward(&mut self, layer: u32) -> Result<FeedForward, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let get = |tensor| file.layer_tensor(layer, tensor);
        if file.spec().block(layer).feed == FeedForwardSpec::None {
            return Ok(FeedForward::None);
        }
        if !file.has(layer, T::Router) {
            let (gate, up) = match self.find(layer, T::FfnGateUp)? {
                Some(both) => match matrices(file.spec(), &both, T::FfnGateUp)[..] {
                    [gate, up] => (Some(gate), up),
                    _ => return Err(LoadError::Unsupported(format!("{:?}", both.name))),
                },
                None => (self.find(layer, T::FfnGate)?, get(T::FfnUp)?),
            };
            let ffn = match self.ffn(gate.as_ref(), &up)? {
                Ffn::Ungated { up, .. } => Ffn::Ungated {
                    up,
                    bias: self.optional(layer, T::FfnUpBias)?,
                },
                gated => gated,
            };
            let down = self.layer_matrix(layer, T::FfnDown)?;
            return Ok(FeedForward::Dense { ffn, down });
        }
        let router = Router {
            matrix: self.layer_matrix(layer, T::Router)?,
            vectors: RouterVectors {
                bias: self.optional(layer, T::RouterBias)?,
                correction: self.optional(layer, T::RouterCorrection)?,
                scale: self.optional(layer, T::ExpertScale)?,
            },
        };
        let split = |tensor| Ok::<_, LoadError>(matrices(file.spec(), &get(tensor)?, tensor));
        let (gates, ups) = match file.has(layer, T::ExpertGateUp) {
            true => {
                let both = split(T::ExpertGateUp)?;
                let every_second = |first| both.iter().skip(first).step_by(2).copied();
                (every_second(0).collect(), every_second(1).collect())
            }
            false if !file.has(layer, T::ExpertGate) => (Vec::new(), split(T::ExpertUp)?),
            false => (split(T::ExpertGate)?, split(T::ExpertUp)?),
        };
        let downs = split(T::ExpertDown)?;
        let before = self.bytes;
        let mut biases = self.expert_biases(layer)?.into_iter();
        let mut experts = Vec::with_capacity(downs.len());
        let gates = gates.iter().map(Some).chain(std::iter::repeat(None));
        for ((gate, up), down) in gates.zip(&ups).zip(&downs) {
            experts.push(Expert {
                ffn: self.ffn(gate, up)?,
                down: self.matrix(down)?,
                bias: biases.next(),
            });
        }
        let bytes = self.bytes - before;
        let shared = match file.has(layer, T::SharedUp) {
            true => Some(Box::new(SharedExpert {
                score: match self.find(layer, T::SharedScore)? {
                    Some(score) => Some(self.matrix(&score)?),
                    None => None,
                },
                ffn: {
                    let gate = self.find(layer, T::SharedGate)?;
                    self.ffn(gate.as_ref(), &get(T::SharedUp)?)?
                },
                down: self.layer_matrix(layer, T::SharedDown)?,
            })),
            false => None,
        };
        Ok(FeedForward::Experts {
            router,
            experts,
            bytes,
            shared,
            norms: match file.has(layer, T::RouterNorm) {
                true => Some(Box::new(ExpertNorms {
                    router: self.router_norm(layer)?,
                    input: self.layer_vector(layer, T::ExpertNorm)?,
                    output: self.layer_vector(layer, T::ExpertPostNorm)?,
                    shared_output: self.layer_vector(layer, T::SharedPostNorm)?,
                })),
                false => None,
            },
        })
    }

    /// Weights of the norm before the router: the stored ones over the root of the width.
    fn router_norm(&mut self, layer: u32) -> Result<Vec<f32>, LoadError> {
        let mut weights = self.layer_vector(layer, LayerTensor::RouterNorm)?;
        let root = 1.0 / (self.file.spec().width as f32).sqrt();
        weights.iter_mut().for_each(|weight| *weight *= root);
        Ok(weights)
    }

    /// Loads the biases of each expert of a layer. Empty if there are none.
    fn expert_biases(&mut self, layer: u32) -> Result<Vec<ExpertBias>, LoadError> {
        use LayerTensor as T;
        let Some(gates) = self.optional(layer, T::ExpertGateBias)? else {
            return Ok(Vec::new());
        };
        let spec = self.file.spec();
        let (width, ffn) = (spec.width as usize, spec.ffn as usize);
        let ups = self.layer_vector(layer, T::ExpertUpBias)?;
        let downs = self.layer_vector(layer, T::ExpertDownBias)?;
        let gates = gates.chunks_exact(ffn).zip(ups.chunks_exact(ffn));
        let biases = gates.zip(downs.chunks_exact(width));
        let biases = biases.map(|((gate, up), down)| ExpertBias {
            gate: gate.to_vec(),
            up: up.to_vec(),
            down: down.to_vec(),
        });
        Ok(biases.collect())
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

    fn ffn(
        &mut self,
        gate: Option<&TensorView<'_>>,
        up: &TensorView<'_>,
    ) -> Result<Ffn, LoadError> {
        let Some(gate) = gate else {
            let up = self.matrix(up)?;
            return Ok(Ffn::Ungated { up, bias: None });
        };
        // The fused kernel supports only SiLU, without biases.
        let spec = self.file.spec();
        let plain = !spec.experts.is_some_and(|experts| experts.bias);
        let fused =
            self.pairs && plain && spec.activation == Activation::Silu && gate.dtype == up.dtype;
        Ok(match fused {
            true => Ffn::Fused(self.pack(&[gate, up], |arena, both| match both {
                [gate, up] => Packed::pack_gate_up(arena, gate, up),
                _ => Err(PackError::Mismatch),
            })?),
            false => Ffn::Split {
                gate: self.matrix(gate)?,
                up: self.matrix(up)?,
            },
        })
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
