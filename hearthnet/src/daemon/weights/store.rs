//! Parts that neighbours may read.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use hearthnet_bus::node::weights::{Held, Object, WeightsStore};
use hearthnet_files::part::Part;
use parking_lot::{Mutex, RwLock};

/// Open parts, by weights id.
#[derive(Default)]
pub(crate) struct Parts {
    open: RwLock<BTreeMap<[u8; 32], Open>>,
    /// Held while room on the disk is made, so that two fetches do not count on the same room.
    pub(super) room: Mutex<()>,
}

/// Open part, and its pieces that are in use. They may not be here yet.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) part: Arc<Part>,
    /// Of the head and the private layers.
    pub(super) for_chats: Vec<Range<u32>>,
    /// Of the layers that are served, or are about to be.
    pub(super) for_others: Vec<Range<u32>>,
}

/// Use of pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// Chats of this node.
    Chats,
    /// Layers for other members. A node serves at most one range of each model.
    Others,
}

impl Parts {
    pub(super) fn add(&self, part: &Arc<Part>) {
        let open = Open {
            part: Arc::clone(part),
            for_chats: Vec::new(),
            for_others: Vec::new(),
        };
        self.open.write().insert(part.identity().weights.0, open);
    }

    pub(super) fn remove(&self, weights: &[u8; 32]) -> Option<Arc<Part>> {
        Some(self.open.write().remove(weights)?.part)
    }

    pub(crate) fn get(&self, weights: &[u8; 32]) -> Option<Arc<Part>> {
        Some(self.open(weights)?.part)
    }

    pub(super) fn open(&self, weights: &[u8; 32]) -> Option<Open> {
        self.open.read().get(weights).cloned()
    }

    /// Sets the pieces of a part that are in use for a purpose. Returns those before.
    pub(super) fn set_use(
        &self,
        weights: &[u8; 32],
        purpose: Purpose,
        pieces: Vec<Range<u32>>,
    ) -> Vec<Range<u32>> {
        let mut all = self.open.write();
        let Some(open) = all.get_mut(weights) else {
            return Vec::new();
        };
        std::mem::replace(
            match purpose {
                Purpose::Chats => &mut open.for_chats,
                Purpose::Others => &mut open.for_others,
            },
            pieces,
        )
    }

    /// No piece of a part is in use.
    pub(super) fn end_use(&self, weights: &[u8; 32]) {
        for purpose in [Purpose::Chats, Purpose::Others] {
            self.set_use(weights, purpose, Vec::new());
        }
    }

    /// No layers of a model are served.
    pub(super) fn end_serving(&self, weights: &[u8; 32]) {
        self.set_use(weights, Purpose::Others, Vec::new());
    }

    /// Bytes of the layers for others of all models but one.
    pub(super) fn served_beside(&self, weights: &[u8; 32]) -> u64 {
        let all = self.open.read();
        let others = all.iter().filter(|(other, _)| *other != weights);
        let each = others.map(|(_, open)| open.part.table().bytes(&open.for_others));
        each.fold(0, u64::saturating_add)
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
