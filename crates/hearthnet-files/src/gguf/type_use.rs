//! Totals of the tensors of a file by type.

use std::collections::BTreeMap;

use serde::Serialize;

use super::reader::TensorInfo;
use super::tensor_type::TensorType;

/// Number and size of the tensors of one type.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TypeUse {
    pub dtype: TensorType,
    pub tensors: u64,
    pub bytes: u64,
}

/// Types of some tensors, sorted by bytes, largest first.
pub fn type_uses<'a>(tensors: impl Iterator<Item = &'a TensorInfo>) -> Vec<TypeUse> {
    let mut types: BTreeMap<TensorType, TypeUse> = BTreeMap::new();
    for info in tensors {
        let used = types.entry(info.dtype).or_insert(TypeUse {
            dtype: info.dtype,
            tensors: 0,
            bytes: 0,
        });
        used.tensors += 1;
        used.bytes += info.bytes;
    }
    let mut uses: Vec<TypeUse> = types.into_values().collect();
    uses.sort_by_key(|used| std::cmp::Reverse(used.bytes));
    uses
}
