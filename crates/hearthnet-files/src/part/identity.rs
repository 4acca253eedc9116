//! Facts of a model's file in an adoption.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::PartError;
use super::table::{ENTRY_BYTES, Layout, PieceTable};
use super::{MAX_HEAD_BYTES, PIECE_BYTES};
use crate::error::{FileError, ModelError};
use crate::gguf::{Gguf, TensorInfo};
use crate::hugging_face::OpenFile;
use crate::manifest::{Digest, MAX_MANIFEST_BYTES, Manifest, WeightsId, hash_each};
use crate::model_file::ModelFile;

/// Identity of a model's file, as far as nodes exchange it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// SHA-256 of the manifest.
    pub weights: WeightsId,
    /// Length of the whole GGUF file.
    pub file_bytes: u64,
    /// Length of all before the first tensor's data.
    pub head_bytes: u64,
    /// SHA-256 of these bytes.
    pub head: Digest,
    /// Length of the manifest.
    pub manifest_bytes: u64,
    /// SHA-256 of the piece list.
    pub pieces: Digest,
}

impl Identity {
    /// Refuses objects that are longer than any part may have.
    ///
    /// # Errors
    /// [`PartError::Disagrees`] names the object and its limit.
    pub fn check_lengths(&self) -> Result<(), PartError> {
        for (what, bytes, most) in [
            ("head", self.head_bytes, MAX_HEAD_BYTES),
            ("manifest", self.manifest_bytes, MAX_MANIFEST_BYTES as u64),
        ] {
            if bytes > most {
                return Err(PartError::Disagrees(format!(
                    "its {what} has {bytes} bytes, at most {most} are accepted"
                )));
            }
        }
        Ok(())
    }

    /// Checks the three objects and lays out the pieces.
    pub(super) fn table(
        &self,
        head: &[u8],
        manifest: &[u8],
        pieces: &[u8],
    ) -> Result<(PieceTable, Manifest), PartError> {
        self.check_lengths()?;
        for (what, genuine) in [
            (
                "the head",
                head.len() as u64 == self.head_bytes && Digest::of(head) == self.head,
            ),
            (
                "the manifest",
                manifest.len() as u64 == self.manifest_bytes
                    && WeightsId::of(manifest) == self.weights,
            ),
            ("the piece list", Digest::of(pieces) == self.pieces),
        ] {
            if !genuine {
                return Err(PartError::Mismatch(what.to_owned()));
            }
        }
        let manifest = Manifest::decode(manifest)?;
        let gguf = Gguf::from_head(head.to_vec(), self.file_bytes);
        let model = ModelFile::from_gguf(gguf.map_err(ModelError::from)?)?;
        let first = model.gguf().tensors().iter().map(|info| info.offset).min();
        if first != Some(self.head_bytes) {
            return Err(PartError::Disagrees(format!(
                "its head has {} bytes, but the first tensor begins at {}",
                self.head_bytes,
                first.unwrap_or_default()
            )));
        }
        let layout = Layout::new(&manifest, &model)?;
        Ok((PieceTable::new(layout, pieces.to_vec())?, manifest))
    }
}

/// Identity and piece list of a whole model file. Hashes all tensors, unless the list for these
/// weights is stored beside the file. `progress` receives the bytes done and the total.
///
/// # Errors
/// [`PartError::Disagrees`] if `manifest` is not that of the file as stored;
/// [`PartError::Model`] if the file is a part without all tensors.
pub fn identity_of(
    model: &ModelFile,
    manifest: &Manifest,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Identity, Vec<u8>), PartError> {
    let layout = Layout::new(manifest, model)?;
    let encoded = manifest.encode();
    let weights = WeightsId::of(&encoded);
    let bytes = u64::from(layout.count()) * ENTRY_BYTES;
    let list = match model.stored_pieces(&weights, bytes) {
        Some(list) => list,
        None => {
            let list = hashed_list(model, &layout, progress)?;
            model.store_pieces(&weights, &list);
            list
        }
    };
    let head = model.gguf().head();
    let identity = Identity {
        weights,
        file_bytes: model.gguf().file_bytes(),
        head_bytes: head.len() as u64,
        head: Digest::of(head),
        manifest_bytes: encoded.len() as u64,
        pieces: Digest::of(&list),
    };
    Ok((identity, list))
}

fn hashed_list(
    model: &ModelFile,
    layout: &Layout,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<u8>, ModelError> {
    let mut pieces: Vec<&[u8]> = Vec::with_capacity(layout.count() as usize);
    for name in layout.names() {
        pieces.extend(model.tensor(name)?.bytes.chunks(PIECE_BYTES as usize));
    }
    let digests = hash_each(model.gguf(), &pieces, progress);
    Ok(digests.iter().flat_map(|digest| digest.0).collect())
}

/// Encoded manifest and piece list of a whole model file with this head. The file is read and not
/// mapped: if its drive is pulled out, a read fails, but an access to a map ends the process.
///
/// # Errors
/// [`PartError::File`] if the file cannot be read; [`PartError::Model`] if it has no model that can
/// be run.
pub fn objects_of(file: &dyn OpenFile, head: Vec<u8>) -> Result<(Vec<u8>, Vec<u8>), PartError> {
    let failed = |source| FileError::new("read", file.path(), source);
    let gguf = Gguf::from_head(head, file.bytes()).map_err(ModelError::from)?;
    let model = ModelFile::from_gguf(gguf)?;
    let mut tensors: Vec<&TensorInfo> = model.gguf().tensors().iter().collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let (mut hashes, mut list) = (Vec::with_capacity(tensors.len()), Vec::new());
    let mut piece = Vec::new();
    for info in tensors {
        let (mut whole, mut done) = (Sha256::new(), 0);
        while done < info.bytes {
            let len = (info.bytes - done).min(u64::from(PIECE_BYTES));
            // At most the length of a piece.
            piece.resize(len as usize, 0);
            file.read_at(&mut piece, info.offset + done)
                .map_err(failed)?;
            whole.update(&piece);
            list.extend(Digest::of(&piece).0);
            done += len;
        }
        hashes.push((info, Digest(whole.finalize().into())));
    }
    let manifest = Manifest::from_hashes(&model, hashes.into_iter());
    Ok((manifest.encode(), list))
}
