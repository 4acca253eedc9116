//! Parts that neighbours may read.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use hearthnet_bus::node::weights::{Held, Object, WeightsStore};
use hearthnet_files::part::Part;
use parking_lot::RwLock;

/// Open parts, by weights id.
#[derive(Default)]
pub(crate) struct Parts(RwLock<BTreeMap<[u8; 32], Arc<Part>>>);

impl Parts {
    pub(super) fn add(&self, part: &Arc<Part>) {
        let weights = part.identity().weights.0;
        self.0.write().insert(weights, Arc::clone(part));
    }

    pub(super) fn remove(&self, weights: &[u8; 32]) {
        self.0.write().remove(weights);
    }

    fn get(&self, weights: &[u8; 32]) -> Option<Arc<Part>> {
        self.0.read().get(weights).cloned()
    }
}

/// Range of bytes, if it is there.
fn range(bytes: &[u8], offset: u64, len: u32) -> Option<Vec<u8>> {
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(len as usize)?;
    bytes.get(start..end).map(<[u8]>::to_vec)
}

/// Bytes that were read; a failed disk is reported once per read, and the piece counts as missing.
fn logged<T>(read: io::Result<T>) -> Option<T> {
    read.inspect_err(|error| tracing::warn!("a part of a model cannot be read: {error}"))
        .ok()
}

impl WeightsStore for Parts {
    fn held(&self, weights: &[u8; 32]) -> Option<Held> {
        let part = self.get(weights)?;
        Some(Held {
            head_bytes: part.identity().head_bytes,
            manifest_bytes: part.identity().manifest_bytes,
            piece_list_bytes: part.table().list().len() as u64,
            pieces: part.held(),
        })
    }

    fn piece(&self, weights: &[u8; 32], index: u32) -> Option<Vec<u8>> {
        logged(self.get(weights)?.read(index))?
    }

    fn read(&self, weights: &[u8; 32], object: Object, offset: u64, len: u32) -> Option<Vec<u8>> {
        let part = self.get(weights)?;
        match object {
            Object::Head => {
                let bytes = logged(part.head(offset, len))?;
                (bytes.len() == len as usize).then_some(bytes)
            }
            Object::Manifest => range(part.manifest_bytes(), offset, len),
            Object::PieceList => range(part.table().list(), offset, len),
        }
    }
}
