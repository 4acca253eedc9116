//! Weights of a layer range, repacked for the kernels.

use std::ops::Range;

use super::error::LoadError;
use crate::kernels::{ActForm, Arena, LANES, Matrix, PackError, Packed, WeightType, all_finite};
use crate::model_file::{ModelFile, TensorView};
use crate::spec::{Activation, LayerTensor, ModelSpec, Rotation};
use crate::{ModelError, TensorType};

/// One block's weights.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    /// Of what attention reads; where it is latent, the narrow rows.
    pub(super) qkv: Qkv,
    pub(super) latent: Option<Latent>,
    pub(super) qk_norm: Option<QkNorms>,
    pub(super) rotation: Rotation,
    /// Positions that a row attends to; `None` for all.
    pub(super) window: Option<usize>,
    /// For each query head.
    pub(super) sinks: Option<Vec<f32>>,
    pub(super) attn_output: Packed,
    pub(super) attn_output_bias: Option<Vec<f32>>,
    pub(super) attn_post_norm: Option<Vec<f32>>,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) feed: Feed,
    pub(super) ffn_post_norm: Option<Vec<f32>>,
    /// Memory that all of it takes.
    pub(super) bytes: usize,
}

/// Norms of queries and keys.
#[derive(Debug)]
pub(super) struct QkNorms {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
}

/// The feed-forward layer.
#[derive(Debug)]
pub(super) enum Feed {
    /// The same for all rows.
    Dense {
        /// Gate and up.
        ffn: Ffn,
        /// Back to the residual stream.
        down: Packed,
    },
    /// Rows go through some of many.
    Experts {
        /// Scores of the experts.
        router: Router,
        /// All of them; they are of one size.
        experts: Vec<Expert>,
        /// Memory that they take.
        bytes: usize,
    },
}

/// What scores the experts of a layer.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) matrix: Packed,
    pub(super) bias: Option<Vec<f32>>,
}

/// One expert of a layer.
#[derive(Debug)]
pub(super) struct Expert {
    pub(super) ffn: Ffn,
    pub(super) down: Packed,
    pub(super) bias: Option<ExpertBias>,
}

/// What is added to the outputs of an expert's matrices.
#[derive(Debug)]
pub(super) struct ExpertBias {
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    pub(super) down: Vec<f32>,
}

/// Query, key and value matrices: their outputs stand side by side.
#[derive(Debug)]
pub(super) struct Qkv {
    /// One matrix where types and shapes allow it, else three.
    pub(super) parts: Vec<Packed>,
    pub(super) form: ActForm,
    /// What is added to all outputs.
    pub(super) bias: Option<Vec<f32>>,
}

/// What latent attention does to its narrow rows.
#[derive(Debug)]
pub(super) struct Latent {
    pub(super) q_norm: Vec<f32>,
    pub(super) kv_norm: Vec<f32>,
    /// To queries.
    pub(super) q: Packed,
    /// To keys and values.
    pub(super) kv: Packed,
}

/// Gate and up matrices.
#[derive(Debug)]
pub(super) enum Ffn {
    /// Interleaved, so that the gate is applied in the same pass.
    Fused(Packed),
    /// Of different types.
    Split {
        /// The gate.
        gate: Packed,
        /// What it is multiplied with.
        up: Packed,
    },
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

    /// Outputs of all parts, in groups of 16.
    pub(super) fn panels(&self) -> usize {
        self.parts.iter().map(Packed::panels).sum()
    }
}

impl Latent {
    /// Outputs of both matrices, in groups of 16.
    pub(super) fn panels(&self) -> usize {
        self.q.panels() + self.kv.panels()
    }
}

impl Ffn {
    pub(super) fn form(&self) -> ActForm {
        match self {
            Self::Fused(both) => ActForm::of([both]),
            Self::Split { gate, up } => ActForm::of([gate, up]),
        }
    }

    /// Outputs of each of the two, in groups of 16.
    pub(super) fn panels(&self) -> usize {
        self.gate().panels()
    }

    /// The outputs that are in some of these groups.
    pub(super) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        let rows = self.gate().rows();
        panels.start * LANES..rows.min(panels.end * LANES)
    }

    fn gate(&self) -> &Packed {
        match self {
            Self::Fused(both) => both,
            Self::Split { gate, .. } => gate,
        }
    }
}

impl Layer {
    /// Bytes that one row reads, which goes through `used` of the experts.
    pub(super) fn token_bytes(&self, used: usize) -> usize {
        match &self.feed {
            Feed::Dense { .. } => self.bytes,
            Feed::Experts { experts, bytes, .. } => {
                let idle = experts.len().saturating_sub(used);
                self.bytes - bytes / experts.len().max(1) * idle
            }
        }
    }
}

/// Reads tensors of a file into an arena of the right size, and lets the file's pages go.
pub(super) struct Loader<'a> {
    file: &'a ModelFile,
    arena: Arena,
    /// Repacks the panels of a matrix side by side.
    pool: rayon::ThreadPool,
    /// Memory of what was loaded.
    pub(super) bytes: usize,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Loader<'a> {
    /// For matrices that come to `packed` bytes, read from `total` bytes of the file.
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

    /// The layers of a range that lies in the model.
    pub(super) fn layers(
        file: &'a ModelFile,
        threads: usize,
        range: Range<u32>,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Layer>, LoadError> {
        let mut packed = 0usize;
        for layer in range.clone() {
            let tensors = file.family().rules(file.spec());
            for rule in tensors.filter(|rule| rule.is_matrix()) {
                let view = file.layer_tensor(layer, rule.tensor)?;
                for matrix in matrices(file.spec(), &view, rule.tensor) {
                    packed = packed.saturating_add(packed_bytes(&matrix)?);
                }
            }
        }
        let total = range.clone().map(|layer| file.layer_bytes(layer)).sum();
        let mut loader = Self::new(file, threads, packed, total, progress)?;
        range.map(|layer| loader.layer(layer)).collect()
    }

    fn layer(&mut self, layer: u32) -> Result<Layer, LoadError> {
        use LayerTensor as T;
        let (file, spec) = (self.file, self.file.spec());
        let get = |tensor| file.layer_tensor(layer, tensor);
        let before = self.bytes;
        let attn_norm = self.vector(&get(T::AttnNorm)?)?;
        let mut qkv = if file.has(T::AttnQkv) {
            Qkv::of(vec![self.matrix(&get(T::AttnQkv)?)?])
        } else if file.has(T::LatentQ) {
            let (q, kv) = (get(T::LatentQ)?, get(T::LatentKv)?);
            Qkv::of(vec![self.matrix(&q)?, self.matrix(&kv)?])
        } else {
            self.qkv([get(T::AttnQ)?, get(T::AttnK)?, get(T::AttnV)?])?
        };
        let latent = match file.has(T::LatentQ) {
            true => Some(Latent {
                q_norm: self.vector(&get(T::LatentQNorm)?)?,
                kv_norm: self.vector(&get(T::LatentKvNorm)?)?,
                q: self.matrix(&get(T::LatentQUp)?)?,
                kv: self.matrix(&get(T::LatentKvUp)?)?,
            }),
            false => None,
        };
        if file.has(T::AttnQBias) {
            let mut bias = Vec::new();
            for tensor in [T::AttnQBias, T::AttnKBias, T::AttnVBias] {
                bias.append(&mut self.vector(&get(tensor)?)?);
            }
            qkv.bias = Some(bias);
        }
        let qk_norm = match file.has(T::AttnQNorm) {
            true => Some(QkNorms {
                q: self.vector(&get(T::AttnQNorm)?)?,
                k: self.vector(&get(T::AttnKNorm)?)?,
            }),
            false => None,
        };
        Ok(Layer {
            attn_norm,
            qkv,
            latent,
            qk_norm,
            rotation: spec.rotation(layer),
            window: spec.window(layer).map(|positions| positions as usize),
            sinks: self.optional(layer, T::AttnSinks)?,
            attn_output: self.matrix(&get(T::AttnOutput)?)?,
            attn_output_bias: self.optional(layer, T::AttnOutputBias)?,
            attn_post_norm: self.optional(layer, T::AttnPostNorm)?,
            ffn_norm: self.vector(&get(T::FfnNorm)?)?,
            feed: self.feed(layer)?,
            ffn_post_norm: self.optional(layer, T::FfnPostNorm)?,
            bytes: self.bytes - before,
        })
    }

    /// A vector that a model may have.
    fn optional(&mut self, layer: u32, which: LayerTensor) -> Result<Option<Vec<f32>>, LoadError> {
        match self.file.has(which) {
            true => Ok(Some(self.vector(&self.file.layer_tensor(layer, which)?)?)),
            false => Ok(None),
        }
    }

    fn feed(&mut self, layer: u32) -> Result<Feed, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        let get = |tensor| file.layer_tensor(layer, tensor);
        if !file.has(T::Router) {
            let (gate, up) = match file.has(T::FfnGateUp) {
                true => {
                    let both = get(T::FfnGateUp)?;
                    match matrices(file.spec(), &both, T::FfnGateUp)[..] {
                        [gate, up] => (gate, up),
                        _ => return Err(LoadError::Unsupported(format!("{:?}", both.name))),
                    }
                }
                false => (get(T::FfnGate)?, get(T::FfnUp)?),
            };
            return Ok(Feed::Dense {
                ffn: self.ffn(&gate, &up)?,
                down: self.matrix(&get(T::FfnDown)?)?,
            });
        }
        let router = Router {
            matrix: self.matrix(&get(T::Router)?)?,
            bias: self.optional(layer, T::RouterBias)?,
        };
        let split = |tensor| Ok::<_, LoadError>(matrices(file.spec(), &get(tensor)?, tensor));
        let (gates, ups) = (split(T::ExpertGate)?, split(T::ExpertUp)?);
        let downs = split(T::ExpertDown)?;
        let before = self.bytes;
        let mut biases = self.expert_biases(layer)?.into_iter();
        let mut experts = Vec::with_capacity(downs.len());
        for ((gate, up), down) in gates.iter().zip(&ups).zip(&downs) {
            experts.push(Expert {
                ffn: self.ffn(gate, up)?,
                down: self.matrix(down)?,
                bias: biases.next(),
            });
        }
        let bytes = self.bytes - before;
        Ok(Feed::Experts {
            router,
            experts,
            bytes,
        })
    }

    /// The biases of each expert of a layer, or none.
    fn expert_biases(&mut self, layer: u32) -> Result<Vec<ExpertBias>, LoadError> {
        use LayerTensor as T;
        let file = self.file;
        if !file.has(T::ExpertGateBias) {
            return Ok(Vec::new());
        }
        let (width, ffn) = (file.spec().width as usize, file.spec().ffn as usize);
        let mut all = |which| self.vector(&file.layer_tensor(layer, which)?);
        let (gates, ups) = (all(T::ExpertGateBias)?, all(T::ExpertUpBias)?);
        let downs = all(T::ExpertDownBias)?;
        let gates = gates.chunks_exact(ffn).zip(ups.chunks_exact(ffn));
        let biases = gates.zip(downs.chunks_exact(width));
        let biases = biases.map(|((gate, up), down)| ExpertBias {
            gate: gate.to_vec(),
            up: up.to_vec(),
            down: down.to_vec(),
        });
        Ok(biases.collect())
    }

    fn qkv(&mut self, views: [TensorView<'_>; 3]) -> Result<Qkv, LoadError> {
        let [q, k, v] = &views;
        let same = q.dtype == k.dtype && q.dtype == v.dtype;
        let whole = q.rows().is_multiple_of(LANES) && k.rows().is_multiple_of(LANES);
        Ok(Qkv::of(match same && whole {
            true => vec![self.pack(&[q, k, v], Packed::pack_stacked)?],
            false => vec![self.matrix(q)?, self.matrix(k)?, self.matrix(v)?],
        }))
    }

    fn ffn(&mut self, gate: &TensorView<'_>, up: &TensorView<'_>) -> Result<Ffn, LoadError> {
        // The kernel that applies the gate in the same pass knows one activation and no biases.
        let spec = self.file.spec();
        let plain = !spec.experts.is_some_and(|experts| experts.bias);
        let fused = plain && spec.activation == Activation::Silu && gate.dtype == up.dtype;
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

    /// A matrix by itself.
    pub(super) fn matrix(&mut self, view: &TensorView<'_>) -> Result<Packed, LoadError> {
        self.pack(&[view], Packed::pack_stacked)
    }

    /// Some matrices as one.
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

    /// A vector, which is F32 in every model file that was opened.
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

    /// A tensor is done.
    fn step(&mut self, view: &TensorView<'_>) {
        self.file.gguf().release(view.bytes);
        self.done += view.bytes.len() as u64;
        (self.progress)(self.done, self.total);
    }
}

/// The matrices of a tensor: one, those of all experts, or gate and up.
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
        T::FfnGateUp => 2,
        _ => 1,
    })
}

/// Memory that a matrix takes when packed.
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
