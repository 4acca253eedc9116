//! Weights of a layer range as tensors on the device.

use hearthnet_model::engine::LoadError;
use hearthnet_model::quantize;
use hearthnet_model::spec::Rotation;
use hearthnet_model::{LayerTensor, ModelFile, TensorView};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::TorchLoadError;
use crate::options::{Dtype, Target};

/// Values that are decoded at a time.
const CHUNK: usize = 1 << 20;

/// A matrix, `[outputs, inputs]`, and what is added to its outputs.
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Of rows of the matrix's kind.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_linear(&self.weight, self.bias.as_ref())
    }
}

/// One block's weights. Norms, sinks and routers are fp32, all else is in the engine's format.
pub(crate) struct Layer {
    pub(crate) attn_norm: Tensor,
    /// Queries, keys and values side by side; where attention is latent, the narrow rows.
    pub(crate) qkv: Linear,
    pub(crate) latent: Option<Latent>,
    /// Norms of queries and of keys.
    pub(crate) qk_norm: Option<(Tensor, Tensor)>,
    pub(crate) rotation: Rotation,
    /// Positions that a row attends to; `None` for all.
    pub(crate) window: Option<u32>,
    /// For each query head.
    pub(crate) sinks: Option<Tensor>,
    pub(crate) attn_output: Linear,
    pub(crate) attn_post_norm: Option<Tensor>,
    pub(crate) ffn_norm: Tensor,
    pub(crate) feed: Feed,
    pub(crate) ffn_post_norm: Option<Tensor>,
}

/// What latent attention does to its narrow rows.
pub(crate) struct Latent {
    pub(crate) q_norm: Tensor,
    pub(crate) kv_norm: Tensor,
    /// To queries.
    pub(crate) q: Linear,
    /// To keys and values, head by head.
    pub(crate) kv: Linear,
}

/// The feed-forward layer.
pub(crate) enum Feed {
    Dense(Ffn),
    Experts { router: Linear, experts: Vec<Ffn> },
}

/// Gate, up and down matrices.
pub(crate) struct Ffn {
    /// Gate, then up.
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

/// Reads tensors of a file onto a device.
pub(crate) struct Loader<'a> {
    file: &'a ModelFile,
    device: Device,
    dtype: Dtype,
    /// Bytes of all tensors.
    pub(crate) bytes: u64,
    /// Those of experts.
    expert_bytes: u64,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Loader<'a> {
    /// Reads `total` bytes of the file.
    pub(crate) fn new(
        file: &'a ModelFile,
        target: Target,
        total: u64,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Self {
        progress(0, total);
        let Target { device, dtype } = target;
        Self {
            file,
            device,
            dtype,
            bytes: 0,
            expert_bytes: 0,
            done: 0,
            total,
            progress,
        }
    }

    pub(crate) fn layer(&mut self, layer: u32) -> Result<Layer, TorchLoadError> {
        use LayerTensor as T;
        let (file, spec) = (self.file, self.file.spec());
        let get = |tensor| file.layer_tensor(layer, tensor);
        let attn_norm = self.vector(&get(T::AttnNorm)?)?;
        let parts = if file.has(T::AttnQkv) {
            vec![get(T::AttnQkv)?]
        } else if file.has(T::LatentQ) {
            vec![get(T::LatentQ)?, get(T::LatentKv)?]
        } else {
            vec![get(T::AttnQ)?, get(T::AttnK)?, get(T::AttnV)?]
        };
        let biases = match file.has(T::AttnQBias) {
            true => vec![get(T::AttnQBias)?, get(T::AttnKBias)?, get(T::AttnVBias)?],
            false => Vec::new(),
        };
        let qkv = self.linear(&parts, &biases)?;
        let latent = match file.has(T::LatentQ) {
            true => Some(Latent {
                q_norm: self.vector(&get(T::LatentQNorm)?)?,
                kv_norm: self.vector(&get(T::LatentKvNorm)?)?,
                q: self.linear(&[get(T::LatentQUp)?], &[])?,
                kv: self.linear(&[get(T::LatentKvUp)?], &[])?,
            }),
            false => None,
        };
        let qk_norm = match file.has(T::AttnQNorm) {
            true => Some((
                self.vector(&get(T::AttnQNorm)?)?,
                self.vector(&get(T::AttnKNorm)?)?,
            )),
            false => None,
        };
        let bias = match file.has(T::AttnOutputBias) {
            true => vec![get(T::AttnOutputBias)?],
            false => Vec::new(),
        };
        Ok(Layer {
            attn_norm,
            qkv,
            latent,
            qk_norm,
            rotation: spec.rotation(layer),
            window: spec.window(layer),
            sinks: self.optional(layer, T::AttnSinks)?,
            attn_output: self.linear(&[get(T::AttnOutput)?], &bias)?,
            attn_post_norm: self.optional(layer, T::AttnPostNorm)?,
            ffn_norm: self.vector(&get(T::FfnNorm)?)?,
            feed: self.feed(layer)?,
            ffn_post_norm: self.optional(layer, T::FfnPostNorm)?,
        })
    }

    fn feed(&mut self, layer: u32) -> Result<Feed, TorchLoadError> {
        use LayerTensor as T;
        let (file, spec) = (self.file, self.file.spec());
        let get = |tensor| file.layer_tensor(layer, tensor);
        if !file.has(T::Router) {
            let gate_up = match file.has(T::FfnGateUp) {
                true => vec![get(T::FfnGateUp)?],
                false => vec![get(T::FfnGate)?, get(T::FfnUp)?],
            };
            return Ok(Feed::Dense(Ffn {
                gate_up: self.linear(&gate_up, &[])?,
                down: self.linear(&[get(T::FfnDown)?], &[])?,
            }));
        }
        let count = spec.experts.map_or(1, |experts| experts.count as usize);
        let bias = |which| match file.has(which) {
            true => Ok::<_, TorchLoadError>(get(which)?.parts(count)),
            false => Ok(Vec::new()),
        };
        let router_bias = match file.has(T::RouterBias) {
            true => Some(self.vector(&get(T::RouterBias)?)?),
            false => None,
        };
        let router = Linear {
            weight: self.tensor(&[get(T::Router)?], Dtype::Fp32)?,
            bias: router_bias,
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
        Ok(Feed::Experts { router, experts })
    }

    /// Some matrices, one below the other, and their biases.
    fn linear(
        &mut self,
        matrices: &[TensorView<'_>],
        biases: &[TensorView<'_>],
    ) -> Result<Linear, TorchLoadError> {
        let weight = self.tensor(matrices, self.dtype)?;
        let bias = match biases {
            [] => None,
            _ => {
                // They need not be of one length.
                let one = |bias| Ok(self.tensor(&[bias], self.dtype)?.f_flatten(0, -1)?);
                let biases = biases.iter().copied().map(one);
                let biases = biases.collect::<Result<Vec<_>, TorchLoadError>>()?;
                Some(Tensor::f_cat(&biases, 0)?)
            }
        };
        Ok(Linear { weight, bias })
    }

    /// A vector that a model may have.
    fn optional(
        &mut self,
        layer: u32,
        which: LayerTensor,
    ) -> Result<Option<Tensor>, TorchLoadError> {
        match self.file.has(which) {
            true => Ok(Some(self.vector(&self.file.layer_tensor(layer, which)?)?)),
            false => Ok(None),
        }
    }

    fn vector(&mut self, view: &TensorView<'_>) -> Result<Tensor, TorchLoadError> {
        Ok(self.tensor(&[*view], Dtype::Fp32)?.f_flatten(0, -1)?)
    }

    /// The rows of some tensors of equal width, one below the other.
    fn tensor(&mut self, views: &[TensorView<'_>], dtype: Dtype) -> Result<Tensor, TorchLoadError> {
        let cols = views.first().map_or(0, TensorView::cols).max(1);
        let rows: usize = views.iter().map(TensorView::rows).sum();
        self.bytes += (rows * cols * dtype.bytes()) as u64;
        let size = [rows as i64, cols as i64];
        let out = Tensor::f_empty(size, (dtype.kind(), self.device))?;
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
                // Of the three formats only this one has less range than files have.
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

/// Whether all values are finite.
pub(crate) fn all_finite(x: &Tensor) -> Result<bool, TchError> {
    x.f_isfinite()?.f_all()?.f_is_nonzero()
}

/// What weights take of the device.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    /// All of them.
    pub(crate) weights: u64,
    /// Those that a row is multiplied with: of experts, the ones that it is sent to.
    pub(crate) token: u64,
}

/// The layers of a half-open range, which is checked, and the bytes of their tensors.
pub(crate) fn layers(
    file: &ModelFile,
    range: std::ops::Range<u32>,
    target: Target,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Vec<Layer>, Bytes), TorchLoadError> {
    let spec = file.spec();
    if range.start >= range.end || range.end > spec.layers {
        let layers = spec.layers;
        return Err(LoadError::Layers { range, layers }.into());
    }
    let total = range.clone().map(|layer| file.layer_bytes(layer)).sum();
    let mut loader = Loader::new(file, target, total, progress);
    let layers: Result<Vec<_>, _> = range.map(|layer| loader.layer(layer)).collect();
    let (weights, of_experts) = (loader.bytes, loader.expert_bytes);
    let elsewhere = spec.experts.map_or(0, |experts| {
        let (all, used) = (u64::from(experts.count.max(1)), u64::from(experts.used));
        of_experts / all * all.saturating_sub(used)
    });
    let token = weights - elsewhere;
    Ok((layers?, Bytes { weights, token }))
}
