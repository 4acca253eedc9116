//! Conversion of a model to another tensor type.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_platform::whole_file;

use crate::error::{FileError, ModelError};
use crate::families::{EMBEDDING, OUTPUT, POSITION_EMBEDDING, ROUTER, TYPE_EMBEDDING, is_vector};
use crate::gguf::writer::{WriteError, Writer};
use crate::gguf::{TensorInfo, TensorType, Value};
use crate::model_file::ModelFile;
use crate::quantize::{self, QuantizeError};

/// Why a model could not be converted. No file is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The type has no encoder.
    #[error(
        "models can be stored as {known}, not as {0}",
        known = TensorType::names(TensorType::WRITABLE)
    )]
    Target(TensorType),
    /// The target exists.
    #[error("{} exists already: remove it, or choose another name", .0.display())]
    Exists(PathBuf),
    /// The type cannot hold the row length or a value, or a value is not finite.
    #[error("tensor {name:?} cannot be stored as {dtype}: {source}")]
    Tensor {
        name: String,
        /// Target type.
        dtype: TensorType,
        source: QuantizeError,
    },
    #[error(transparent)]
    File(#[from] FileError),
    /// The header of the new file is invalid.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The source is damaged.
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("cancelled")]
    Cancelled,
}

/// Writes `model` to `target` with its matrices stored as `dtype`, one of [`TensorType::WRITABLE`].
///
/// Norms, biases and the routers of experts keep their type. Embedding and output matrix get at
/// least eight bits, because the output matrix decides every token. If rows do not fill blocks of
/// 256, Q8_0 replaces Q6_K, and Q4_1 replaces Q4_K. Tensors that already have their type are
/// copied. Others are decoded and encoded by [`quantize`], so converting a quantised model loses
/// quality twice. All metadata is kept. The file gets its name when it is complete and on disk.
///
/// `progress` receives the source bytes done and the total, every few milliseconds. Setting
/// `cancel` ends the work soon after.
///
/// # Errors
/// See [`ConvertError`]. An existing file is never replaced.
pub fn convert(
    model: &ModelFile,
    dtype: TensorType,
    target: &Path,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ConvertError> {
    if !TensorType::WRITABLE.contains(&dtype) {
        return Err(ConvertError::Target(dtype));
    }
    if target.exists() {
        return Err(ConvertError::Exists(target.to_owned()));
    }
    let gguf = model.gguf();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        match (key, value) {
            ("general.file_type", _) => {}
            ("general.alignment", _) => writer.align(gguf.alignment() as u32)?,
            _ => writer.set(key, value)?,
        }
    }
    writer.set("general.file_type", Value::U32(file_type(dtype)))?;
    for info in gguf.tensors() {
        let new = stored_as(&info.name, &info.dims, info.dtype, dtype);
        writer.tensor(&info.name, &info.dims, new)?;
    }

    let failed = |source| FileError::new("write", target, source);
    let mut file = whole_file::begin(target).map_err(failed)?;
    let total = gguf.tensors().iter().map(|info| info.bytes).sum();
    let mut done = 0;
    let written = writer.write(&mut file, |index, out| {
        let Some(info) = gguf.tensors().get(index) else {
            return Ok(());
        };
        let new = stored_as(&info.name, &info.dims, info.dtype, dtype);
        let failed = |source| ConvertError::Tensor {
            name: info.name.clone(),
            dtype: new,
            source,
        };
        let mut values = Vec::new();
        let mut stored = Vec::new();
        for part in parts(info, model.tensor(&info.name)?.bytes) {
            if cancel.load(Ordering::Relaxed) {
                return Err(ConvertError::Cancelled);
            }
            quantize::check_finite(info.dtype, part).map_err(failed)?;
            if new == info.dtype {
                out.write_all(part).map_err(WriteError::Io)?;
            } else {
                values.clear();
                stored.clear();
                quantize::decode(info.dtype, part, &mut values)
                    .and_then(|()| quantize::encode(new, &values, &mut stored))
                    .map_err(failed)?;
                out.write_all(&stored).map_err(WriteError::Io)?;
            }
            done += part.len() as u64;
            progress(done, total);
        }
        Ok(())
    });
    let finished = written.and_then(|()| {
        whole_file::finish(file, target).map_err(|error| WriteError::Io(error).into())
    });
    finished.map_err(|error| match error {
        ConvertError::Write(WriteError::Io(source)) => failed(source).into(),
        other => other,
    })
}

/// Whole rows of a tensor, about a megabyte of source data at a time.
fn parts<'a>(info: &TensorInfo, data: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let row = info
        .dims
        .first()
        .and_then(|&columns| info.dtype.row_bytes(columns))
        .unwrap_or(1);
    let row = usize::try_from(row).unwrap_or(usize::MAX).max(1);
    data.chunks(row.saturating_mul(((1 << 20) / row).max(1)))
}

/// Type of a tensor of type `old` after conversion of the model to `dtype`.
pub(crate) fn stored_as(
    name: &str,
    dims: &[u64],
    old: TensorType,
    dtype: TensorType,
) -> TensorType {
    use TensorType as T;
    let narrow = matches!(dtype, T::Q6_K | T::Q4_1 | T::Q4_K | T::Q4_0);
    let fits = dims.first().is_some_and(|n| dtype.row_bytes(*n).is_some());
    match (name, dtype) {
        _ if is_kept_exact(name, dims) => old,
        (EMBEDDING | OUTPUT, _) if narrow => T::Q8_0,
        (_, T::Q6_K) if !fits => T::Q8_0,
        (_, T::Q4_K) if !fits => T::Q4_1,
        _ => dtype,
    }
}

/// Whether a conversion keeps a tensor's type: those without matrices ([`is_vector`]), single rows,
/// embeddings of positions and token types, and the expert router, which is small and whose errors
/// send tokens to other experts.
pub(crate) fn is_kept_exact(name: &str, dims: &[u64]) -> bool {
    let kept = [ROUTER, POSITION_EMBEDDING, TYPE_EMBEDDING];
    let is_row = dims.iter().skip(1).all(|rows| *rows == 1);
    is_row || is_vector(name, dims.len()) || kept.iter().any(|end| name.ends_with(end))
}

/// Values of `general.file_type` (`enum llama_ftype` of llama.cpp), with their names in file names.
const FILE_TYPES: &str = "
    0:F32 1:F16 2:Q4_0 3:Q4_1 7:Q8_0 8:Q5_0 9:Q5_1 10:Q2_K 11:Q3_K_S 12:Q3_K_M 13:Q3_K_L
    14:Q4_K_S 15:Q4_K_M 16:Q5_K_S 17:Q5_K_M 18:Q6_K 19:IQ2_XXS 20:IQ2_XS 21:Q2_K_S 22:IQ3_XS
    23:IQ3_XXS 24:IQ1_S 25:IQ4_NL 26:IQ3_S 27:IQ3_M 28:IQ2_S 29:IQ2_M 30:IQ4_XS 31:IQ1_M
    32:BF16 36:TQ1_0 37:TQ2_0 38:MXFP4_MOE 39:NVFP4 40:Q1_0
";
/// `LLAMA_FTYPE_GUESSED`
const GUESSED: u32 = 1024;

/// Value of `general.file_type` for the type of most tensors.
pub(crate) fn file_type(dtype: TensorType) -> u32 {
    let name = match dtype {
        // "Small": one type for all matrices of the blocks.
        TensorType::Q4_K => "Q4_K_S",
        other => other.name(),
    };
    let found = file_types().find(|(_, of)| *of == name);
    found.map_or(GUESSED, |(value, _)| value)
}

/// Name of a `general.file_type` in file names.
pub fn file_type_name(value: u32) -> Option<&'static str> {
    let found = file_types().find(|(of, _)| *of == value);
    found.map(|(_, name)| name)
}

fn file_types() -> impl Iterator<Item = (u32, &'static str)> {
    let pairs = FILE_TYPES.split_whitespace();
    pairs.filter_map(|pair| {
        let (value, name) = pair.split_once(':')?;
        Some((value.parse().ok()?, name))
    })
}
