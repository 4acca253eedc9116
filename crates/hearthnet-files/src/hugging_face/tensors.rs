//! Tensors of an adopted model, made of a directory's tensors range by range.

use std::collections::BTreeMap;
use std::ops::Range;

use super::directory::Files;
use super::error::ImportError;
use super::plan::Plan;
use super::planned::Planned;
use super::shards::Shards;
use crate::gguf::TensorType;
use crate::manifest::Manifest;

/// Tensors of the model file that a directory becomes, without the file.
#[derive(Debug)]
pub struct Tensors {
    shards: Shards,
    by_name: BTreeMap<String, Planned>,
}

impl Tensors {
    /// Reads `config.json` and the headers of the weights. The manifest decides as which types the
    /// tensors are stored.
    ///
    /// # Errors
    /// See [`ImportError`]; [`ImportError::Other`] if names or shapes differ from the manifest, or
    /// if an import never stores a tensor as the manifest's type.
    pub fn open(files: &dyn Files, manifest: &Manifest) -> Result<Self, ImportError> {
        let Plan {
            shards, tensors, ..
        } = Plan::read(files, false)?;
        let other = |what: String| Err(ImportError::Other(what));
        let mut by_name = BTreeMap::new();
        for mut tensor in tensors {
            let name = tensor.name.clone();
            let Some(entry) = manifest.tensor(&name) else {
                return other(format!("the adopted model has no tensor {name:?}"));
            };
            if entry.dims != tensor.dims {
                let (adopted, here) = (&entry.dims, &tensor.dims);
                return other(format!(
                    "tensor {name:?} has shape {here:?} instead of {adopted:?}"
                ));
            }
            let can_become = !tensor.is_kept_exact() && TensorType::WRITABLE.contains(&entry.dtype);
            if entry.dtype != tensor.base && !can_become {
                return other(format!(
                    "tensor {name:?} would be {}, and is {} in the adopted model",
                    tensor.base, entry.dtype
                ));
            }
            tensor.dtype = entry.dtype;
            by_name.insert(name, tensor);
        }
        let mut entries = manifest.tensors().iter();
        if let Some(entry) = entries.find(|entry| !by_name.contains_key(&entry.name)) {
            return other(format!("it has no tensor {:?}", entry.name));
        }
        Ok(Self { shards, by_name })
    }

    /// Bytes of a tensor as the model file stores them. Of the directory, it reads the values of
    /// whole blocks; of stacked experts, whole rows or experts.
    ///
    /// # Errors
    /// The directory cannot be read, a value cannot be stored as the tensor's type, or the tensor
    /// does not have the range.
    pub fn read_range(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, ImportError> {
        let Some(tensor) = self.by_name.get(name) else {
            return Err(ImportError::Other(format!("it has no tensor {name:?}")));
        };
        tensor.read_range(&self.shards, range)
    }
}
