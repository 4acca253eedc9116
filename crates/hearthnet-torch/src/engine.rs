//! Layers of a model on a libtorch device.

use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use hearthnet_engine::{Backend, Batch, EngineError, EngineOn, LoadError, Table};
use hearthnet_files::ModelFile;
use hearthnet_files::spec::{CacheDtype, ModelSpec};
use tch::Tensor;

use crate::error::TorchLoadError;
use crate::forward::{Pass, download, upload};
use crate::kv::{Geometry, KvTensors};
use crate::options::{Target, TorchOptions, probe};
use crate::weights::{Layer, layers};

/// Engine on a libtorch device. It is not `Send`.
pub type TorchEngine = EngineOn<Torch>;

/// Layers on a libtorch device.
pub struct Torch {
    target: Target,
    layers: Vec<Layer>,
}

/// Loads the layers of a half-open range, and no other tensors, onto the device. `progress`
/// receives the bytes of the file read so far, and their total.
///
/// # Errors
/// See [`TorchLoadError`].
pub fn load(
    file: &ModelFile,
    range: Range<u32>,
    options: &TorchOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<TorchEngine, TorchLoadError> {
    let spec = file.spec();
    check(spec)?;
    let target = options.target(spec)?;
    let threads = i32::try_from(options.engine.threads).unwrap_or(i32::MAX);
    tch::set_num_threads(threads.max(1));
    let _no_grad = tch::no_grad_guard();
    let (layers, weight_bytes) = layers(file, range.clone(), target, progress)?;
    let storage = KvTensors::new(Geometry {
        layers: range.end - range.start,
        heads: spec.kv_heads,
        key: spec.head_dim,
        value: spec.attention.latent.map_or(spec.head_dim, |l| l.values),
        dtype: target.dtype,
        device: target.device,
    });
    let backend = Torch { target, layers };
    Ok(EngineOn::new(
        file,
        range,
        &options.engine,
        backend,
        weight_bytes,
        storage,
    )?)
}

/// Refuses features that this engine does not compute.
fn check(spec: &ModelSpec) -> Result<(), LoadError> {
    let shared = spec.experts.is_some_and(|experts| experts.shared.is_some());
    let routed = spec.experts.is_some_and(|experts| {
        experts.sigmoid || experts.groups.is_some() || experts.scale.is_some()
    });
    let latent = spec.attention.latent;
    let latent = latent.is_some_and(|latent| latent.absorbed || latent.queries.is_none());
    let leading = spec
        .experts
        .is_some_and(|experts| experts.leading.is_some());
    let missing = [
        (spec.is_recurrent(), "recurrent layers"),
        (spec.attention.output_gate, "gates of attention"),
        (latent, "this form of latent attention"),
        (shared, "shared experts"),
        (routed, "this way of choosing experts"),
        (leading, "layers without experts before layers with experts"),
        (
            spec.attention.window.is_some_and(|w| w.heads.is_some()),
            "layers with different heads",
        ),
        (
            spec.attention.value_norm || spec.attention.keys_as_values,
            "this form of values",
        ),
        (spec.shared_keys.is_some(), "keys of other layers"),
        (spec.block_scale, "factors of layers"),
        (spec.per_layer.is_some(), "per-layer embeddings"),
        (spec.encoder.is_some(), "vectors of whole texts"),
        (
            spec.attention.cache != CacheDtype::F16,
            "keys and values of 8 bits",
        ),
    ];
    match missing.iter().find(|(present, _)| *present) {
        None => Ok(()),
        Some((_, what)) => Err(LoadError::Unsupported(format!(
            "libtorch does not compute {what}; choose the exact engine"
        ))),
    }
}

impl Torch {
    /// Runs rows whose room is reserved. Returns layer and row of the first output that is not
    /// finite.
    fn compute(
        &self,
        batch: &Batch<'_>,
        table: &mut Table<KvTensors>,
        x: &mut [f32],
    ) -> Result<Option<(u32, usize)>, TorchLoadError> {
        let (_, buffers) = table.batch(batch.spans);
        let buffers = buffers.into_iter().map(Rc::clone);
        let spans = batch.spans.iter().copied().zip(buffers);
        let device = self.target.device;
        let kind = self.target.dtype.kind();
        let pass = Pass::new(batch.spec, kind, device, batch.ropes, spans)?;
        let width = i64::from(batch.spec.width);
        let mut rows = upload(x, &[x.len() as i64 / width, width], device)?;
        // The processor does not wait for the device between blocks.
        let mut finite = Vec::with_capacity(batch.layers.len());
        let layers = self.layers.iter().enumerate().skip(batch.first);
        for (index, layer) in layers.take(batch.layers.len()) {
            rows = pass.block(layer, index, &rows)?;
            finite.push(rows.f_isfinite()?.f_all_dim(1, false)?);
        }
        let here = rows.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
        let values = x.len();
        here.f_copy_data(x, values)?;
        // A value that is not finite stays so to the last block.
        if self.all_finite(x) {
            return Ok(None);
        }
        let finite: Vec<bool> = download(&Tensor::f_stack(&finite, 0)?)?;
        let bad = finite.iter().position(|finite| !finite).unwrap_or(0);
        let count = (x.len() / width as usize).max(1);
        let layer = batch.layers.start + (bad / count) as u32;
        Ok(Some((layer, bad % count)))
    }
}

impl Backend for Torch {
    type Storage = KvTensors;

    fn run(
        &mut self,
        batch: &Batch<'_>,
        table: &mut Table<KvTensors>,
        x: &mut [f32],
    ) -> Result<(), EngineError> {
        if x.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let (dtype, boundary) = (self.target.dtype, batch.spec.boundary);
        match self.compute(batch, table, x)? {
            None => Ok(()),
            Some((layer, row)) => Err(EngineError::OutOfRange {
                layer,
                row,
                formats: format!("{dtype} or of the boundary dtype {boundary}"),
            }),
        }
    }

    /// Whether a trivial probe fails. After a driver reset a GPU stays lost for this process.
    fn is_lost(&self) -> bool {
        probe(self.target.device).is_err()
    }
}

impl fmt::Debug for Torch {
    /// Omits the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Torch")
            .field("arithmetic", &self.target.arithmetic())
            .finish_non_exhaustive()
    }
}
