//! Split models on an HTTP server.

use std::ops::Range;
use std::sync::Arc;

use hearthnet_files::hugging_face::OpenFile;
use hearthnet_files::joined::open_joined;
use hearthnet_files::part::{Identity, Piece};
use parking_lot::Mutex;

use super::directory::{RemoteFiles, failed};
use super::source::{
    Object, PieceSource, Rank, SourceError, WHOLE_FILE_RUN, all_pieces, read_head, read_range,
    read_run,
};
use crate::pull::PullOptions;
use crate::source::Source;

/// Files of a split model, on the hub or at an address, as the adopted file that they become when
/// they are joined. Their heads are read with the first use.
pub struct SplitSource {
    name: String,
    files: RemoteFiles,
    /// Name of the first file.
    first: String,
    identity: Identity,
    opened: Mutex<Option<Arc<dyn OpenFile>>>,
}

impl SplitSource {
    /// `source` is the first file.
    pub fn new(source: &Source, options: &PullOptions, identity: &Identity) -> Self {
        Self {
            name: source.to_string(),
            files: RemoteFiles::beside(source, options),
            first: source.file_name().unwrap_or_default().to_owned(),
            identity: *identity,
            opened: Mutex::default(),
        }
    }

    fn opened(&self) -> Result<Arc<dyn OpenFile>, SourceError> {
        let mut opened = self.opened.lock();
        if let Some(opened) = &*opened {
            return Ok(Arc::clone(opened));
        }
        let Identity {
            head_bytes,
            file_bytes,
            ..
        } = self.identity;
        let file = open_joined(&self.files, &self.first, head_bytes).map_err(failed)?;
        let file = file.ok_or_else(|| SourceError::Unusable("there is no such file".to_owned()))?;
        let found = file.bytes();
        if found != file_bytes {
            return Err(SourceError::Unusable(format!(
                "it is another file than the adopted model: joined, it has {found} bytes instead of \
                 {file_bytes}"
            )));
        }
        Ok(Arc::clone(opened.insert(Arc::from(file))))
    }

    fn range(&self, from: u64, len: u64) -> Result<Vec<u8>, SourceError> {
        read_range(&*self.opened()?, &self.identity, from, len)
    }
}

impl PieceSource for SplitSource {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn rank(&self) -> Rank {
        Rank::Hub
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        self.opened()?;
        Ok(all_pieces())
    }

    fn run(&self) -> u32 {
        WHOLE_FILE_RUN
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        read_run(run, |from, len| self.range(from, len))
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        read_head(object, len, |len| self.range(offset, len))
    }
}
