//! Weights of a layer range as tensors on the device.

use hearthnet_engine::{LoadError, WeightBytes};
use hearthnet_files::spec::Rotation;
use hearthnet_files::{LayerTensor, ModelFile, TensorView, quantize};
use tch::{Kind, TchError, Tensor};

use crate::choice::Dtype;
use crate::error::TorchLoadError;
use crate::options::Target;

/// Values decoded at a time.
const CHUNK: usize = 1 << 20;

/// Matrix, `[outputs, inputs]`, and an optional bias.
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// `x` must have the matrix's kind.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_linear(&self.weight, self.bias.as_ref())
    }
}

/// Weights of one block. Norms, sinks and routers are fp32, the rest is in the engine's format.
pub(crate) struct Layer {
    pub(crate) attn_norm: Tensor,
    /// Queries, keys and values side by side; with latent attention, the low-rank projections.
    pub(crate) qkv: Linear,
    pub(crate) latent: Option<Latent>,
    /// Norms of queries and of keys.
    pub(crate) qk_norm: Option<(Tensor, Tensor)>,
    pub(crate) rotation: Rotation,
    /// Sliding window in positions; `None` for full attention.
    pub(crate) window: Option<u32>,
    /// Per query head.
    pub(crate) sinks: Option<Tensor>,
    pub(crate) attn_output: Linear,
    pub(crate) attn_post_norm: Option<Tensor>,
    pub(crate) ffn_norm: Tensor,
    pub(crate) feed: FeedForward,
    pub(crate) ffn_post_norm: Option<Tensor>,
}

/// Norms and up-projections of latent attention.
pub(crate) struct Latent {
    pub(crate) q_norm: Tensor,
    pub(crate) kv_norm: Tensor,
    /// Low-rank activation to queries.
    pub(crate) q: Linear,
    /// Low-rank activation to keys and values, head by head.
    pub(crate) kv: Linear,
}

pub(crate) enum FeedForward {
    Dense(Ffn),
    Experts { router: Linear, experts: Vec<Ffn> },
}

pub(crate) struct Ffn {
    /// Gate above up.
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

/// Loads tensors of a file onto a device.
struct Loader<'a> {
    file: &'a ModelFile,
    target: Target,
    /// Bytes on the device, over all tensors.
    bytes: u64,
    /// Bytes of the experts among them.
    expert_bytes: u64,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Loader<'_> {
    fn layer(&mut self, layer: u32) -> Result<Layer, TorchLoadError> {
        use LayerTensor as T;
        let file = self.file;
        let block = file.spec().block(layer);
        let get = |tensor| file.layer_tensor(layer, tensor);
        let attn_norm = self.vector(&get(T::AttnNorm)?)?;
        let parts = if file.has(layer, T::AttnQkv) {
            vec![get(T::AttnQkv)?]
        } else if file.has(layer, T::LatentQ) {
            vec![get(T::LatentQ)?, get(T::LatentKv)?]
        } else {
            vec![get(T::AttnQ)?, get(T::AttnK)?, get(T::AttnV)?]
        };
        let biases = match file.has(layer, T::AttnQBias) {
            true => vec![get(T::AttnQBias)?, get(T::AttnKBias)?, get(T::AttnVBias)?],
            false => Vec::new(),
        };
        let qkv = self.linear(&parts, &biases)?;
        let latent = match file.has(layer, T::LatentQ) {
            true => Some(Latent {
                q_norm: self.vector(&get(T::LatentQNorm)?)?,
                kv_norm: self.vector(&get(T::LatentKvNorm)?)?,
                q: self.linear(&[get(T::LatentQUp)?], &[])?,
                kv: self.linear(&[get(T::LatentKvUp)?], &[])?,
            }),
            false => None,
        };
        let q_norm = self.optional(layer, T::AttnQNorm)?;
        let k_norm = self.optional(layer, T::AttnKNorm)?;
        let bias = match file.has(layer, T::AttnOutputBias) {
            true => vec![get(T::AttnOutputBias)?],
            false => Vec::new(),
        };
        Ok(Layer {
            attn_norm,
            qkv,
            latent,
            qk_norm: q_norm.zip(k_norm),
            rotation: block.rotation,
            window: block.window,
            sinks: self.optional(layer, T::AttnSinks)?,
            attn_output: self.linear(&[get(T::AttnOutput)?], &bias)?,
            attn_post_norm: self.optional(layer, T::AttnPostNorm)?,
            ffn_norm: self.vector(&get(T::FfnNorm)?)?,
            feed: self.feed(layer)?,
            ffn_post_norm: self.optional(layer, T::FfnPostNorm)?,
        })
    }

    fn feed(&mut self, layer: u32) -> Result<FeedForward, TorchLoadError> {
        use LayerTensor as T;
        let (file, spec) = (self.file, self.file.spec());
        let get = |tensor| file.layer_tensor(layer, tensor);
        if !file.has(layer, T::Router) {
            let gate_up = match file.has(layer, T::FfnGateUp) {
                true => vec![get(T::FfnGateUp)?],
                false => vec![get(T::FfnGate)?, get(T::FfnUp)?],
            };
            return Ok(FeedForward::Dense(Ffn {
                gate_up: self.linear(&gate_up, &[])?,
                down: self.linear(&[get(T::FfnDown)?], &[])?,
            }));
        }
        let count = spec.experts.map_or(1, |experts| experts.count as usize);
        let bias = |which| match file.has(layer, which) {
            true => Ok::<_, TorchLoadError>(get(which)?.parts(count)),
            false => Ok(Vec::new()),
        };
        let router = Linear {
            bias: self.optional(layer, T::RouterBias)?,
            weight: self.tensor(&[get(T::Router)?], Dtype::Fp32)?,
        };
        let [gates, ups, downs] = [T::ExpertGate, T::ExpertUp, T::ExpertDown]
            .map(|which| Ok::<_, TorchLoadError>(get(which)?.parts(count)));
        let (gates, ups, downs) = (gates?, ups?, downs?);
        let gate_biases = bias(T::ExpertGateBias)?;
        let (up_biases, down_biases) = (bias(T::ExpertUpBias)?, bias(T::ExpertDownBias)?);
        let mut experts = Vec::with_capacity(count);
        let before = self.bytes;
        for (i, ((gate, up), down)) in gates.iter().zip(&ups).zip(&downs).enumerate() {
            let biases = gate_biases.get(i).into_iter().chain(up_biases.get(i));
            let biases: Vec<_> = biases.copied().collect();
            let down_bias: Vec<_> = down_biases.get(i).copied().into_iter().collect();
            experts.push(Ffn {
                gate_up: self.linear(&[*gate, *up], &biases)?,
                down: self.linear(&[*down], &down_bias)?,
            });
        }
        self.expert_bytes += self.bytes - before;
        Ok(FeedForward::Experts { router, experts })
    }

    /// Stacks matrices row-wise, with their biases.
    fn linear(
        &mut self,
        matrices: &[TensorView<'_>],
        biases: &[TensorView<'_>],
    ) -> Result<Linear, TorchLoadError> {
        let weight = self.tensor(matrices, self.target.dtype)?;
        let bias = match biases {
            [] => None,
            _ => {
                // Their lengths may differ.
                let one = |bias| Ok(self.tensor(&[bias], self.target.dtype)?.f_flatten(0, -1)?);
                let biases = biases.iter().copied().map(one);
                let biases = biases.collect::<Result<Vec<_>, TorchLoadError>>()?;
                Some(Tensor::f_cat(&biases, 0)?)
            }
        };
        Ok(Linear { weight, bias })
    }

    /// A vector that not every model has.
    fn optional(
        &mut self,
        layer: u32,
        which: LayerTensor,
    ) -> Result<Option<Tensor>, TorchLoadError> {
        match self.file.has(layer, which) {
            true => Ok(Some(self.vector(&self.file.layer_tensor(layer, which)?)?)),
            false => Ok(None),
        }
    }

    fn vector(&mut self, view: &TensorView<'_>) -> Result<Tensor, TorchLoadError> {
        Ok(self.tensor(&[*view], Dtype::Fp32)?.f_flatten(0, -1)?)
    }

    /// Stacks the rows of tensors of equal width.
    fn tensor(&mut self, views: &[TensorView<'_>], dtype: Dtype) -> Result<Tensor, TorchLoadError> {
        let cols = views.first().map_or(0, TensorView::cols).max(1);
        let rows: usize = views.iter().map(TensorView::rows).sum();
        self.bytes += (rows * cols * dtype.bytes()) as u64;
        let size = [rows as i64, cols as i64];
        let out = Tensor::f_empty(size, (dtype.kind(), self.target.device))?;
        let (mut start, mut values) = (0, Vec::new());
        for view in views {
            if !view.is_finite() {
                return Err(LoadError::NotFinite(view.name.to_owned()).into());
            }
            let row_bytes = view.bytes.len() / view.rows().max(1);
            let at_once = (CHUNK / cols).max(1) * row_bytes;
            for bytes in view.bytes.chunks(at_once.max(1)) {
                values.clear();
                quantize::decode(view.dtype, bytes, &mut values).map_err(|source| {
                    TorchLoadError::Tensor {
                        tensor: view.name.to_owned(),
                        source,
                    }
                })?;
                let rows = (values.len() / cols) as i64;
                let part = Tensor::f_from_slice(&values)?.f_view([rows, cols as i64])?;
                let part = part.f_to_kind(dtype.kind())?;
                // Of the three formats, only fp16 has a smaller range than files.
                if part.f_kind()? == Kind::Half && !all_finite(&part)? {
                    return Err(TorchLoadError::Range {
                        tensor: view.name.to_owned(),
                        dtype,
                    });
                }
                out.f_narrow(0, start, rows)?.f_copy_(&part)?;
                start += rows;
            }
            self.file.gguf().release(view.bytes);
            self.done += view.bytes.len() as u64;
            (self.progress)(self.done, self.total);
        }
        Ok(out)
    }
}

fn all_finite(x: &Tensor) -> Result<bool, TchError> {
    x.f_isfinite()?.f_all()?.f_is_nonzero()
}

/// Loads the layers of a half-open, already checked range.
pub(crate) fn layers(
    file: &ModelFile,
    range: std::ops::Range<u32>,
    target: Target,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Vec<Layer>, WeightBytes), TorchLoadError> {
    let spec = file.spec();
    if range.start >= range.end || range.end > spec.layers {
        let layers = spec.layers;
        return Err(LoadError::Layers { range, layers }.into());
    }
    let total = range.clone().map(|layer| file.layer_bytes(layer)).sum();
    progress(0, total);
    let mut loader = Loader {
        file,
        target,
        bytes: 0,
        expert_bytes: 0,
        done: 0,
        total,
        progress,
    };
    let layers: Result<Vec<_>, _> = range.map(|layer| loader.layer(layer)).collect();
    let (all, of_experts) = (loader.bytes, loader.expert_bytes);
    let elsewhere = spec.experts.map_or(0, |experts| {
        let (all, used) = (u64::from(experts.count.max(1)), u64::from(experts.used));
        of_experts / all * all.saturating_sub(used)
    });
    let per_row = all - elsewhere;
    Ok((layers?, WeightBytes { all, per_row }))
}
