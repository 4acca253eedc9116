//! Sources that an adoption states in texts.

use std::path::Path;
use std::sync::Arc;

use hearthnet_files::part::Identity;

use super::directory::DirectorySource;
use super::http::{HubSource, check_public};
use super::source::{PieceSource, SourceError};
use super::split::SplitSource;
use crate::pull::PullOptions;
use crate::reference::adopted_source;

/// The source that an adoption states in a text; `None` if the text is unknown here. `parts` is the
/// folder of all parts.
pub fn stated_source(
    text: &str,
    options: &PullOptions,
    identity: &Identity,
    parts: &Path,
) -> Option<Result<Arc<dyn PieceSource>, SourceError>> {
    let source = adopted_source(text)?;
    Some(match source.is_directory() {
        true => check_public(&source).map(|()| -> Arc<dyn PieceSource> {
            Arc::new(DirectorySource::at(&source, options, identity, parts))
        }),
        false if source.is_split() => check_public(&source).map(|()| -> Arc<dyn PieceSource> {
            Arc::new(SplitSource::new(&source, options, identity))
        }),
        false => HubSource::adopted(&source, options, identity.file_bytes)
            .map(|hub| -> Arc<dyn PieceSource> { Arc::new(hub) }),
    })
}
